"""`enginectl`: look at a running engine, or run the model in this process without one."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import grpc

from engine_svc.cli import adapter_source, generate_arguments
from loraplex import exit_codes
from loraplex.status import LoraplexError, from_rpc_error, was_answered

DEFAULT_ADDRESS = "127.0.0.1:50052"
ADDRESS_VARIABLE = "LORAPLEX_ENGINE_ADDRESS"
_EPILOG = """exit codes:
  0 done    1 internal error    2 bad argument    3 not found    4 refused
  6 not reachable, or no answer in time    7 not allowed    8 a limit is reached
  9 bytes do not have their digest"""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status by cause (loraplex/exit_codes.py); an error is one line."""
    arguments = _parser().parse_args(argv)
    try:
        arguments.run(arguments)
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.UNAVAILABLE and not was_answered(error):
            print(
                f"enginectl: UNAVAILABLE: no engine answers at {arguments.address}"
                f" ({error.details()}); set --address or {ADDRESS_VARIABLE}",
                file=sys.stderr,
            )
            return exit_codes.exit_code(error.code())
        return _told(from_rpc_error(error))
    except LoraplexError as error:
        return _told(error)
    except KeyboardInterrupt:
        return exit_codes.INTERRUPTED
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
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    generate = commands.add_parser(
        "generate", allow_abbrev=False,
        help="stream an answer from a model folder, without registry or server",
    )  # fmt: skip
    generate_arguments.add(generate)
    generate.set_defaults(run=_generate)

    merged = commands.add_parser(
        "merge",
        allow_abbrev=False,
        help="write a checkpoint of the base with one adapter folded into its weights",
    )
    adapter_source.add_arguments(merged)
    merged.add_argument("--out", required=True, metavar="DIR", help="a new or an empty folder")
    merged.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto",
        help="of the weights; auto: the base's; small changes round away in fewer bits than 32",
    )  # fmt: skip
    merged.set_defaults(run=_merge)

    compared = commands.add_parser(
        "diff-logits",
        allow_abbrev=False,
        help="compare an adapter's logits with PEFT's on a prompt",
    )
    adapter_source.add_arguments(compared)
    compared.add_argument("--prompt", required=True, help="text that both read")
    compared.add_argument("--chat", action="store_true", help="the prompt is a user's chat message")
    compared.add_argument(
        "--tokens", type=int, default=16, help="greedy tokens of PEFT that are compared too"
    )
    compared.add_argument(
        "--dtype", default="auto", help="what is served in: auto, float32, bfloat16 or float16"
    )
    compared.add_argument("--device", default="auto", help="auto, cpu or cuda")
    compared.add_argument(
        "--output", choices=("table", "json"), default="table", help="for people or for programs"
    )
    compared.set_defaults(run=_diff_logits)

    state = commands.add_parser(
        "state", allow_abbrev=False, help="residency, queues and memory of a running engine"
    )
    state.set_defaults(run=_state)
    models = commands.add_parser(
        "models", allow_abbrev=False, help="the base model and the adapters one may use"
    )
    models.add_argument("--tenant", default="", help="whose adapters; default: default")
    models.set_defaults(run=_models)
    for remote in (state, models):
        remote.add_argument(
            "--address",
            default=os.environ.get(ADDRESS_VARIABLE, DEFAULT_ADDRESS),
            help=f"host:port of the engine [{ADDRESS_VARIABLE}]",
        )
        remote.add_argument("--output", choices=("table", "json"), default="table")
        remote.add_argument("--timeout", type=float, default=10.0, help="seconds; default 10")
    return parser


def _generate(arguments: argparse.Namespace) -> None:
    from engine_svc.processes.threads import quiet_threads

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
