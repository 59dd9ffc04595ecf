"""`enginectl`: look at a running engine, or run the model in this process without one."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import grpc

from engine_svc.cli import adapter_source, exit_codes, generate_arguments
from loraplex.status import LoraplexError, from_rpc_error

DEFAULT_ADDRESS = "127.0.0.1:50052"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status by cause (engine_svc/cli/exit_codes.py); an error is one line."""
    arguments = _parser().parse_args(argv)
    try:
        arguments.run(arguments)
    except grpc.RpcError as error:
        return _told(from_rpc_error(error))
    except LoraplexError as error:
        return _told(error)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return exit_codes.DONE


def _told(error: LoraplexError) -> int:
    message = " ".join(error.message.split())
    print(f"enginectl: {error.code.name} {error.reason}: {message}", file=sys.stderr)
    return exit_codes.exit_code(error.code)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "enginectl",
        description="Looks at a running engine, or runs a model in this process without one.",
        epilog=exit_codes.EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    generate = commands.add_parser(
        "generate", help="stream an answer from a model folder, without registry or server"
    )
    generate_arguments.add(generate)
    generate.set_defaults(run=_generate)

    merged = commands.add_parser(
        "merge", help="write a checkpoint of the base with one adapter folded into its weights"
    )
    adapter_source.add_arguments(merged)
    merged.add_argument("--out", required=True, metavar="DIR", help="a new or an empty folder")
    merged.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto",
        help="of the weights; auto: the base's; small changes round away in fewer bits than 32",
    )  # fmt: skip
    merged.set_defaults(run=_merge)

    compared = commands.add_parser(
        "diff-logits", help="compare an adapter's logits with PEFT's on a prompt"
    )
    adapter_source.add_arguments(compared)
    compared.add_argument("--prompt", required=True)
    compared.add_argument("--chat", action="store_true", help="the prompt is a user's chat message")
    compared.add_argument(
        "--tokens", type=int, default=16, help="greedy tokens of PEFT that are compared too"
    )
    compared.add_argument("--dtype", default="auto", help="what is served in")
    compared.add_argument("--device", default="auto")
    compared.add_argument("--output", choices=("table", "json"), default="table")
    compared.set_defaults(run=_diff_logits)

    state = commands.add_parser("state", help="residency, queues and memory of a running engine")
    state.set_defaults(run=_state)
    models = commands.add_parser("models", help="the base model and the adapters one may use")
    models.add_argument("--tenant", default="", help="whose adapters; default: default")
    models.set_defaults(run=_models)
    for remote in (state, models):
        remote.add_argument(
            "--address",
            default=os.environ.get("LORAPLEX_ENGINE_ADDRESS", DEFAULT_ADDRESS),
            help="host:port of the engine [LORAPLEX_ENGINE_ADDRESS]",
        )
        remote.add_argument("--output", choices=("table", "json"), default="table")
        remote.add_argument("--timeout", type=float, default=10.0, help="seconds; default 10")
    return parser


def _generate(arguments: argparse.Namespace) -> None:
    from engine_svc.processes.supervised import quiet_threads

    os.environ.update(quiet_threads(os.environ))
    from engine_svc.cli.generate import generate  # loads torch

    generate(arguments)


def _diff_logits(arguments: argparse.Namespace) -> None:
    from engine_svc.cli.diff_logits import diff_logits  # loads torch

    diff_logits(arguments)


def _merge(arguments: argparse.Namespace) -> None:
    from engine_svc.cli.merge import merge  # loads torch

    merge(arguments)


def _state(arguments: argparse.Namespace) -> None:
    from engine_svc.cli.remote import show_state

    show_state(arguments)


def _models(arguments: argparse.Namespace) -> None:
    from engine_svc.cli.remote import show_models

    show_models(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
