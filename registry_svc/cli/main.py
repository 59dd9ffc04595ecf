"""`registryctl`: publish, look at and retire adapters."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from loraplex import exit_codes
from loraplex.adapter_format import MAX_SAVED_BYTES
from loraplex.environment import refuse_misspelt
from loraplex.printing import print_json
from loraplex.shares import MAX_WEIGHT, MIN_WEIGHT, is_weight
from loraplex.status import LoraplexError
from registry_svc.cli import adapters, base_models
from registry_svc.cli.client import ADDRESS_VARIABLE
from registry_svc.cli.verify import verify as verify_folder
from registry_svc.messages import MAX_QUEUE_LIMIT
from registry_svc.settings import OPTIONS, SettingInvalid

_ADAPTER, _TENANT = "the adapter's name", "the tenant's name"
_ETAG = "refuse when it changed since"
EPILOG = """exit codes:
  0 done    1 internal error    2 bad argument or setting    3 not found
  4 refused (the adapter or the database is not fit)    5 name taken, or changed meanwhile
  6 registry, database or store not reachable, or no answer in time    7 not allowed
  8 a limit is reached    9 bytes do not have their digest

environment: LORAPLEX_REGISTRY_ADDRESS; migrate and gc read the server's LORAPLEX_REGISTRY_*"""


def main(arguments: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(arguments)
    try:
        refuse_misspelt(os.environ, ADDRESS_VARIABLE, (option.variable for option in OPTIONS))
        args.run(args)
        sys.stdout.flush()
    except LoraplexError as error:
        return _report(args, error)
    except SettingInvalid as error:
        print(f"registryctl: {error}", file=sys.stderr)
        return exit_codes.USAGE
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        return exit_codes.INTERRUPTED
    return exit_codes.DONE


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="registryctl",
        description="Publishes and manages LoRA adapters in a loraplex registry.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_adapter_commands(commands)
    _add_version_commands(commands)
    _add_base_model_commands(commands)
    _add_tenant_commands(commands)
    _add_maintenance_commands(commands)
    return parser


def _add_adapter_commands(commands: Any) -> None:
    register = _command(commands, "register", adapters.register, "publish a version of an adapter")
    register.add_argument("name", help="a new name, or one of this tenant's for its next version")
    register.add_argument("source", help="PEFT folder here, or s3:// or file:// at the server")
    register.add_argument("--base-model", required=True, help="its name or alias")
    register.add_argument(
        "--base-model-confirmed",
        action="store_true",
        help="the adapter was trained on this base model although its config names another",
    )
    register.add_argument(
        "--label", action="append", default=[], metavar="KEY=VALUE", help="repeatable"
    )
    register.add_argument("--description", default="", help="empty: as it was")
    register.add_argument("--public", action="store_true", help="all tenants may use it")
    register.add_argument("--request-id", default="", help="makes a repetition harmless")

    remove = _command(commands, "unregister", adapters.unregister, "drain and delete an adapter")
    remove.add_argument("name", help=_ADAPTER)
    remove.add_argument(
        "--drain-seconds", type=float, default=0.0,
        help="how long its content stays for admitted requests; 0: the server's default",
    )  # fmt: skip
    remove.add_argument("--etag", default="", help=_ETAG)

    found = _command(commands, "list", adapters.list_adapters, "list adapters")
    found.add_argument("--base-model", default="", help="only of this base model")
    found.add_argument("--prefix", default="", help="only names that begin so")
    found.add_argument("--all", action="store_true", help="also draining and deleted ones")

    show = _command(commands, "show", adapters.show, "show an adapter and its current version")
    show.add_argument("name", help=_ADAPTER)

    update = _command(commands, "update", adapters.update, "change an adapter's own fields")
    update.add_argument("name", help=_ADAPTER)
    update.add_argument("--weight", type=_weight, help="share within its tenant")
    update.add_argument("--description", help="replaces it")
    update.add_argument("--label", action="append", metavar="KEY=VALUE", help="replaces all")
    update.add_argument(
        "--public", action=argparse.BooleanOptionalAction, help="whether all tenants may use it"
    )
    update.add_argument("--etag", default="", help=_ETAG)

    watch = _command(commands, "watch", adapters.watch, "print changes as they come")
    watch.add_argument("--from-revision", type=int, default=0, help="only what came after it")
    watch.add_argument("--once", action="store_true", help="end when nothing is missing")


def _add_version_commands(commands: Any) -> None:
    versions = _command(commands, "versions", adapters.versions, "list an adapter's versions")
    versions.add_argument("name", help=_ADAPTER)

    rollback = _command(commands, "rollback", adapters.rollback, "make an older version current")
    rollback.add_argument("name", help=_ADAPTER)
    rollback.add_argument("--version", type=int, default=0, help="default: the one before")
    rollback.add_argument("--etag", default="", help=_ETAG)

    alias = _command(commands, "alias", adapters.alias, "point a movable name at an adapter")
    alias.add_argument("alias", help="the movable name")
    alias.add_argument("adapter", nargs="?", help="what it means from now on")
    alias.add_argument("--version", type=int, default=0, help="default: follow the current one")
    alias.add_argument("--remove", action="store_true", help="forget the alias")

    resolve = _command(commands, "resolve", adapters.resolve, "what a reference means now")
    resolve.add_argument("reference", help="name, alias, name@3 or name@sha256:…")

    verify = _command(commands, "verify", verify_folder, "check a PEFT folder")
    verify.add_argument("folder", help="PEFT folder here")
    verify.add_argument("--base-model", required=True, help="its folder (no server), or its name")
    verify.add_argument("--base-model-name", default="", help="name of the base in that folder")
    verify.add_argument("--alias", action="append", default=[], help="another name of that base")
    verify.add_argument(
        "--base-model-confirmed",
        action="store_true",
        help="the adapter was trained on this base model although its config names another",
    )
    verify.add_argument("--max-lora-rank", type=int, default=256, help="default 256")
    verify.add_argument(
        "--max-saved-bytes", type=int, default=MAX_SAVED_BYTES,
        help="limit of whole embeddings and output heads; default 256 MiB",
    )  # fmt: skip


def _add_base_model_commands(commands: Any) -> None:
    group = commands.add_parser("base-model", help="add, list, show, alias base models")
    inner = group.add_subparsers(required=True, metavar="COMMAND")
    add = _command(inner, "add", base_models.add, "register a base model")
    add.add_argument("name", help="what adapters, engines and clients will call it")
    add.add_argument("--from", dest="source", required=True, help="its Hugging Face folder")
    add.add_argument("--alias", action="append", default=[], help="hub id or path that means it")
    add.add_argument(
        "--dummy-weights", action="store_true",
        help="random weights of its config.json, for benchmarks: only engines with "
        "--load-format dummy serve it",
    )  # fmt: skip
    _command(inner, "list", base_models.list_models, "list base models")
    show = _command(inner, "show", base_models.show, "show a base model")
    show.add_argument("name", help="its name or alias")
    alias = _command(inner, "alias", base_models.alias, "add aliases to a base model")
    alias.add_argument("name", help="its name or alias")
    alias.add_argument("alias", nargs="+", help="hub id or path that means it")


def _add_tenant_commands(commands: Any) -> None:
    group = commands.add_parser("tenant", help="show and update tenants")
    inner = group.add_subparsers(required=True, metavar="COMMAND")
    show = _command(inner, "show", base_models.tenant_show, "show a tenant")
    show.add_argument("name", help=_TENANT)
    update = _command(
        inner,
        "update",
        base_models.tenant_update,
        "change or make a tenant; engines apply its weight and limits at once",
    )
    update.add_argument("name", help=_TENANT)
    update.add_argument("--weight", type=_weight, help="share of the engine")
    update.add_argument("--max-queued-requests", type=_queue_limit, help="0: no limit")
    update.add_argument("--max-queued-tokens", type=_queue_limit, help="0: no limit")
    update.add_argument("--etag", default="", help=_ETAG)


def _weight(text: str) -> float:
    """Where a person writes it 0 is a mistake; in a message it is what nobody wrote."""
    try:
        weight = float(text)
    except ValueError:
        weight = 0.0
    if not is_weight(weight):
        raise argparse.ArgumentTypeError(f"{text!r}; must be {MIN_WEIGHT} to {MAX_WEIGHT:g}")
    return weight


def _queue_limit(text: str) -> int:
    try:
        limit = int(text)
    except ValueError:
        limit = -1
    if not 0 <= limit <= MAX_QUEUE_LIMIT:
        raise argparse.ArgumentTypeError(f"{text!r}; must be 0 (no limit) to {MAX_QUEUE_LIMIT}")
    return limit


def _add_maintenance_commands(commands: Any) -> None:
    migrate = _command(commands, "migrate", _run_migrate, "bring a database up to date")
    collect = _command(commands, "gc", _run_gc, "remove blobs that nothing refers to")
    for parser in (migrate, collect):
        parser.add_argument("--database-url", help="default: the server's")
    collect.add_argument("--blob-store", help="default: the server's")
    collect.add_argument("--s3-endpoint-url", help="default: the server's")


def _run_migrate(args: argparse.Namespace) -> None:
    # only these two need the database's libraries
    from registry_svc.cli.maintenance import run_migrate

    run_migrate(args)


def _run_gc(args: argparse.Namespace) -> None:
    from registry_svc.cli.maintenance import run_gc

    run_gc(args)


def _command(commands: Any, name: str, run: Any, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=text, allow_abbrev=False
    )
    parser.set_defaults(run=run)
    parser.add_argument("--address", help="registry (LORAPLEX_REGISTRY_ADDRESS)")
    parser.add_argument("--tenant", default="", help="act as this tenant")
    parser.add_argument("--output", choices=("table", "json"), default="table")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for each call")
    return parser


def _report(args: argparse.Namespace, error: LoraplexError) -> int:
    if args.output == "json":
        print_json(
            {
                "error": {
                    "code": error.code.name,
                    "reason": error.reason,
                    "message": error.message,
                    "metadata": error.metadata,
                }
            }
        )
    print(f"registryctl: {error.reason}: {error.message}", file=sys.stderr)
    return exit_codes.exit_code(error.code)


if __name__ == "__main__":
    raise SystemExit(main())
