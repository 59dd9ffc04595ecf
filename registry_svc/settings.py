"""The registry's settings: flag over environment over default.

Every `--some-flag` is also LORAPLEX_REGISTRY_SOME_FLAG; an unknown variable of that prefix, a bad
value or a contradiction stops the start with key, value and range.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loraplex.address import is_loopback, split_address
from loraplex.blobs import open_blob_store
from loraplex.status import FieldInvalid, LoraplexError
from registry_svc.sources import parse_location

PREFIX = "LORAPLEX_REGISTRY_"
#: The client's variable of that prefix; and what Kubernetes injects for a service of our name.
_OTHERS = frozenset({PREFIX + "ADDRESS"})
_INJECTED = re.compile(
    r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT|PORT_\d+_(TCP|UDP)(_(PROTO|PORT|ADDR))?)$"
)
_HOME = Path(".loraplex") / "registry"


class SettingInvalid(ValueError):
    """Names the key, the value and what it must be."""

    def __init__(self, key: str, value: str, limit: str) -> None:
        super().__init__(f"{key} is {value!r}; must be {limit}")


@dataclass(frozen=True, slots=True)
class Settings:
    listen: str
    metrics_listen: str
    database_url: str
    blob_store: str
    s3_endpoint_url: str | None
    source_prefix: tuple[str, ...]
    auth: str
    migrate: bool
    scratch_dir: str
    workers: int
    max_watchers: int
    max_adapter_bytes: int
    max_lora_rank: int
    max_saved_bytes: int
    upload_ttl_seconds: float
    adapter_drain_seconds: float
    gc_interval_seconds: float
    drain_seconds: float

    def __repr__(self) -> str:
        """Without values: a database URL may hold a password."""
        return "Settings(…)"


@dataclass(frozen=True, slots=True)
class Option:
    name: str
    default: str
    help: str
    parse: Callable[[str], Any]

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()


def _address(text: str) -> str:
    split_address(text)
    return text


def _optional_address(text: str) -> str:
    return _address(text) if text else ""


def _whole(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or not low <= int(text) <= high:
            raise ValueError(f"a whole number, {low} to {high}")
        return int(text)

    return parse


def _seconds(low: float, high: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        limit = f"seconds, {low:g} to {high:g}"
        try:
            value = float(text)
        except ValueError as error:
            raise ValueError(limit) from error
        if not low <= value <= high:
            raise ValueError(limit)
        return value

    return parse


def _flag(text: str) -> bool:
    if text not in ("0", "1", "false", "true"):
        raise ValueError("true or false")
    return text in ("1", "true")


def _auth(text: str) -> str:
    if text != "none":
        raise ValueError("none")
    return text


def _prefixes(text: str) -> tuple[str, ...]:
    found = tuple(part for part in text.split(",") if part)
    for prefix in found:
        parse_location("source_prefix", prefix)
    return found


def _store(text: str) -> str:
    open_blob_store(text)
    return text


OPTIONS = (
    Option("listen", "127.0.0.1:50051", "address of the gRPC server", _address),
    Option("metrics_listen", "127.0.0.1:9401", "address of /metrics; empty: none",
           _optional_address),
    Option("database_url", "", "sqlite:////absolute/file or postgresql://…; empty: a SQLite file"
           " in .loraplex/registry", str),
    Option("blob_store", "", "file:///absolute/folder or s3://bucket/prefix; empty: a folder in"
           " .loraplex/registry", lambda text: _store(text) if text else ""),
    Option("s3_endpoint_url", "", "URL of an S3 server other than Amazon's", lambda text: text
           or None),
    Option("source_prefix", "", "s3:// or file:// prefix that adapters may be copied from;"
           " repeat the flag, or separate by commas", _prefixes),
    Option("auth", "none", "who may call: none (loopback only)", _auth),
    Option("migrate", "false", "bring the database to this build's migration at start", _flag),
    Option("scratch_dir", "", "folder for adapters while they are checked; empty: the system's"
           " temporary folder", str),
    Option("workers", "16", "calls at the same time, watchers not counted", _whole(1, 1024)),
    Option("max_watchers", "64", "WatchAdapters streams at the same time", _whole(1, 4096)),
    Option("max_adapter_bytes", str(4 << 30), "largest adapter, all files together",
           _whole(1, 1 << 50)),
    Option("max_lora_rank", "256", "largest rank that is published", _whole(1, 256)),
    Option("max_saved_bytes", str(256 << 20), "whole embeddings and output heads of an adapter,"
           " in bytes", _whole(0, 1 << 50)),
    Option("upload_ttl_seconds", "3600", "life of an upload after its last blob",
           _seconds(1, 7 * 86400)),
    Option("adapter_drain_seconds", "30", "drain of an unregistered adapter where the call names"
           " none", _seconds(0.001, 86400)),
    Option("gc_interval_seconds", "3600", "time between garbage collections; 0: only by"
           " `registryctl gc`", _seconds(0, 30 * 86400)),
    Option("drain_seconds", "10", "time that calls get to finish at SIGTERM", _seconds(0, 3600)),
)  # fmt: skip


def read_settings(arguments: Sequence[str], environment: Mapping[str, str]) -> Settings:
    """Raises: SettingInvalid; SystemExit for --help and unknown flags."""
    given = vars(build_parser().parse_args(arguments))
    check_environment(environment)
    values = {option.name: _value(option, given, environment) for option in OPTIONS}
    values["database_url"] = values["database_url"] or _default_database()
    values["blob_store"] = values["blob_store"] or (_HOME.absolute() / "blobs").as_uri()
    values["scratch_dir"] = values["scratch_dir"] or tempfile.gettempdir()
    settings = Settings(**values)
    limit = "a loopback address with --auth none, which lets everybody in"
    if not is_loopback(settings.listen):
        raise SettingInvalid("--listen", settings.listen, limit)
    if settings.metrics_listen and not is_loopback(settings.metrics_listen):
        raise SettingInvalid("--metrics-listen", settings.metrics_listen, limit)
    if settings.s3_endpoint_url and "s3://" not in (
        settings.blob_store + ",".join(settings.source_prefix)
    ):
        limit = "unset, since neither --blob-store nor --source-prefix is s3://"
        raise SettingInvalid("--s3-endpoint-url", settings.s3_endpoint_url, limit)
    return settings


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="loraplex-registry",
        description="Serves the adapter registry over gRPC.",
        allow_abbrev=False,
        epilog=f"Every flag is also an environment variable: {PREFIX}LISTEN and so on.",
    )
    for option in OPTIONS:
        text = f"{option.help} (default: {option.default or 'empty'}; {option.variable})"
        if option.parse is _flag:
            parser.add_argument(option.flag, action="store_const", const="true", help=text)
        elif option.parse is _prefixes:
            parser.add_argument(option.flag, action="append", help=text, metavar="URI")
        else:
            parser.add_argument(option.flag, help=text, metavar="VALUE")
    return parser


def check_environment(environment: Mapping[str, str]) -> None:
    """Raises: SettingInvalid: a variable with our prefix that means nothing."""
    known = {option.variable for option in OPTIONS} | _OTHERS
    for name in environment:
        if name.startswith(PREFIX) and name not in known and not _INJECTED.search(name):
            raise SettingInvalid(name, "set", "unset: there is no such setting")


def _value(option: Option, given: Mapping[str, Any], environment: Mapping[str, str]) -> Any:
    raw, key = given[option.name], option.flag
    if isinstance(raw, list):
        raw = ",".join(raw)
    if raw is None:
        raw, key = environment.get(option.variable), option.variable
    if raw is None:
        raw = option.default
    try:
        return option.parse(raw)
    except FieldInvalid as error:
        raise SettingInvalid(key, raw, error.metadata["limit"]) from error
    except LoraplexError as error:
        raise SettingInvalid(key, raw, error.message) from error
    except ValueError as error:
        raise SettingInvalid(key, raw, str(error)) from error


def _default_database() -> str:
    return f"sqlite:///{_HOME.absolute() / 'registry.db'}"
