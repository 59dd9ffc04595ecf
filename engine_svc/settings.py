"""What an operator can set: one frozen table, read as flag > LORAPLEX_ENGINE_* > default.

`EngineSettings` is the table: each field carries its help, range and whether it is secret. `load`
reads it; `SETTINGS` lists it as data for the documentation and its test.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

import loraplex.address
from engine_svc.core.limits import quantum_floor

ENV_PREFIX = "LORAPLEX_ENGINE_"
#: Kubernetes injects …_PORT, …_PORT_50052_TCP_ADDR, …_SERVICE_HOST for a service of our name; no
#: setting is called so.
_INJECTED = re.compile(r"_PORT(_|$)|_HOST$")
#: Where clients find the engine; not ours to read.
_CLIENT_VARIABLE = "LORAPLEX_ENGINE_ADDRESS"
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
#: A number that the engine works out by itself.
AUTO = 0
_AUTO_TEXT = "auto"
_UNITS = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
#: Smallest number of prompt tokens that a step gives a new sequence (EngineLimits.min_chunk).
MIN_CHUNK = 16
#: max_num_batched_tokens "auto", by device
STEP_TOKENS_CPU, STEP_TOKENS_GPU = 512, 1024


class SettingInvalid(ValueError):
    """A setting that stops the start; the message names key, value and range."""


def _setting(default: Any, help_text: str, **limits: Any) -> Any:
    return field(default=default, metadata={"help": help_text, **limits})


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """All settings of one engine. Sizes in bytes (512MiB and 2GiB are read too), times in s."""

    model: str = _setting(
        "", "folder of the base model, or a hub id in the local Hugging Face cache", required=True
    )
    served_model_name: str = _setting(
        "", "the base model's name at the registry and for clients; empty: the folder's name"
    )
    registry_address: str = _setting("127.0.0.1:50051", "host:port of the registry")
    max_registry_staleness: float = _setting(
        3600.0, "seconds for which adapters are served while no registry answers; 0: no limit",
        low=0.0, high=2**31,
    )  # fmt: skip
    blob_store: str = _setting(
        "", "file:///dir or s3://bucket/prefix; empty: that of a registry started in this folder"
    )
    s3_endpoint_url: str = _setting("", "S3 server that is not Amazon's; empty: Amazon's")
    listen: str = _setting("127.0.0.1:50052", "host:port for gRPC; port 0: a free one")
    metrics_listen: str = _setting("127.0.0.1:9400", "host:port for /metrics; port 0: a free one")
    frontends: int = _setting(1, "frontend processes that share the port", low=1, high=64)
    max_loras: int = _setting(
        AUTO, "distinct adapters in one step; auto: max_num_seqs on a GPU, where unused places cost"
        " nothing, but at most max_cpu_loras; 4 on a CPU",
        low=1, high=4096, auto=True,
    )  # fmt: skip
    max_lora_rank: int = _setting(256, "largest adapter rank; reserves nothing", low=1, high=256)
    max_num_seqs: int = _setting(64, "sequences in one step", low=1, high=4096)
    max_num_batched_tokens: int = _setting(
        AUTO, f"tokens in one step; auto: {STEP_TOKENS_GPU} on a GPU, where larger steps are not"
        f" replayed from a CUDA graph, {STEP_TOKENS_CPU} on a CPU; at least max_num_seqs +"
        f" {MIN_CHUNK}",
        low=17, high=1048576, auto=True,
    )  # fmt: skip
    max_model_len: int = _setting(0, "context limit in tokens; 0: the model's", low=0, high=2**24)
    arena_bytes: int = _setting(
        0, "bytes for KV pages and adapters; 0: sized by the device", size=True, low=0, high=2**44
    )
    gpu_memory_utilization: float = _setting(
        0.9, "share of GPU memory to use when arena_bytes is 0", low=0.05, high=1.0
    )
    host_cache_bytes: int = _setting(
        AUTO, "packed adapters kept in host memory, taken (and page-locked) at the start on a GPU,"
        " on use on a CPU; auto: an eighth of the machine's or container's memory, at most 8GiB",
        size=True, low=2**20, high=2**44, auto=True,
    )  # fmt: skip
    max_cpu_loras: int = _setting(0, "adapters kept in host memory; 0: by bytes", low=0, high=2**20)
    disk_cache_dir: str = _setting(
        ".loraplex/engine/disk_cache", "folder of the disk cache of adapters", not_empty=True
    )
    disk_cache_bytes: int = _setting(
        4 * 2**30, "size of the disk cache", size=True, low=2**20, high=2**50
    )
    dtype: str = _setting(
        "auto", "compute type; auto: float32 on a CPU, bfloat16 on a GPU",
        choices=("auto", "float32", "bfloat16", "float16"),
    )  # fmt: skip
    load_format: str = _setting(
        "auto", "auto: the folder's safetensors; dummy: random weights of config.json's shapes, for"
        " benchmarks (the registry must have the model added with --dummy-weights)",
        choices=("auto", "dummy"),
    )  # fmt: skip
    device: str = _setting("auto", "where the model runs", choices=("auto", "cpu", "cuda"))
    enforce_eager: bool = _setting(
        False,
        "on a GPU, launch each step's kernels instead of replaying CUDA graphs; for debugging",
    )
    page_size: int = _setting(0, "positions a page; 0: the smallest that fits", low=0, high=4096)
    quantum: int = _setting(
        AUTO, "service (tokens × their price) that ends a turn while others wait; auto: so much"
        " that swaps cost at most 5 % of the steps",
        low=1, high=2**24, auto=True,
    )  # fmt: skip
    policy: str = _setting(
        "fair", "who gets places; resident-first lets an adapter keep its place while it has work,"
        " as a baseline to compare with: others may starve",
        choices=("fair", "resident-first"),
    )  # fmt: skip
    turn_steps: int = _setting(
        64, "steps that end a turn while others wait and an eighth of the pages is to spare, more"
        " or fewer by weights up to turn_max_steps: less means shorter waits and more pauses inside"
        " a stream",
        low=1, high=2**20,
    )  # fmt: skip
    turn_max_steps: int = _setting(
        512, "steps that end a turn while others wait, however few pages are to spare",
        low=1, high=2**20,
    )  # fmt: skip
    closing_steps: int = _setting(
        16, "steps that a turn's sequences get to end before they are paused", low=0, high=2**20
    )
    prefill_price: float = _setting(1.0, "service of a prompt token", low=0.001, high=1000.0)
    decode_price: float = _setting(2.0, "service of a decoded token", low=0.001, high=1000.0)
    batch_grant_every: int = _setting(
        4, "of so many places given, one goes to class BATCH while it waits", low=2, high=1000
    )
    max_queued_requests: int = _setting(
        4096, "waiting requests before QUEUE_FULL", low=1, high=2**20
    )
    max_queued_tokens: int = _setting(
        2**22, "prompt tokens of waiting requests before QUEUE_FULL", low=1, high=2**40
    )
    tenant_max_queued_requests: int = _setting(
        0, "the same of one tenant before TENANT_QUOTA, where the registry has no limit for it; "
        "0: none",
        low=0, high=2**20,
    )  # fmt: skip
    tenant_max_queued_tokens: int = _setting(
        0, "the same in prompt tokens; 0: none", low=0, high=2**40
    )
    max_queue_wait: float = _setting(
        30.0, "seconds: a request whose worst wait is longer is refused at once", low=0.1,
        high=86400.0,
    )  # fmt: skip
    enable_prefix_caching: bool = _setting(True, "reuse keys and values of equal prompt beginnings")
    run_dir: str = _setting(
        ".loraplex/engine/run", "folder for the metric files of this start",
        not_empty=True,
    )  # fmt: skip
    engine_id: str = _setting("", "this engine's name at the registry; empty: host name and port")
    auth: str = _setting(
        "none", "who may call; none: everybody, on loopback only", choices=("none",)
    )
    drain_seconds: float = _setting(
        30.0, "time that open requests get after SIGTERM", low=0.0, high=86400.0
    )
    max_adapter_series: int = _setting(
        200, "adapters with metric series of their own; the rest is `other`", low=0, high=100000
    )
    log_level: str = _setting(
        "info", "least severe log line", choices=("debug", "info", "warning", "error")
    )

    @property
    def blob_store_url(self) -> str:
        return self.blob_store or Path(".loraplex/registry/blobs").absolute().as_uri()

    @property
    def base_model_name(self) -> str:
        return self.served_model_name or Path(self.model).resolve().name


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table, as documentation reads it."""

    name: str
    kind: type
    default: Any
    help: str
    limits: Mapping[str, Any]

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        return ENV_PREFIX + self.name.upper()

    @property
    def shown_default(self) -> str:
        """The default as a user would write it."""
        if self.limits.get("auto") and self.default == AUTO:
            return _AUTO_TEXT
        return str(self.default).lower() if self.kind is bool else str(self.default)

    @property
    def range(self) -> str:
        """What a value may be, in words."""
        if "choices" in self.limits:
            return "one of " + ", ".join(self.limits["choices"])
        if "low" in self.limits:
            kind = "a number" if self.kind is float else "a whole number"
            auto = f"{_AUTO_TEXT}, or " if self.limits.get("auto") else ""
            return f"{auto}{kind} from {self.limits['low']} to {self.limits['high']}"
        if self.kind is bool:
            return "true or false"
        return "not empty" if self._must_not_be_empty else "text"

    @property
    def _must_not_be_empty(self) -> bool:
        return bool(self.limits.get("not_empty") or self.limits.get("required"))

    def parse(self, text: str, key: str) -> Any:
        """The value of `text`. Raises: SettingInvalid naming `key`, value and range."""
        if self.limits.get("auto") and text.strip() == _AUTO_TEXT:
            return AUTO
        try:
            value = _converted(text.strip(), self.kind, bool(self.limits.get("size")))
        except ValueError:
            self._refuse(text, key)
        limits = self.limits
        if "choices" in limits and value not in limits["choices"]:
            self._refuse(text, key)
        if "low" in limits and not limits["low"] <= value <= limits["high"]:
            self._refuse(text, key)
        if value == "" and self._must_not_be_empty:
            self._refuse(text, key)
        return value

    def _refuse(self, text: str, key: str) -> NoReturn:
        shown = "(secret)" if self.limits.get("secret") else repr(text)
        raise SettingInvalid(f"{key} is {shown}; must be {self.range}") from None


def _table() -> tuple[Setting, ...]:
    kinds = get_type_hints(EngineSettings)
    return tuple(
        Setting(f.name, kinds[f.name], f.default, f.metadata["help"],
                {k: v for k, v in f.metadata.items() if k != "help"})
        for f in fields(EngineSettings)
    )  # fmt: skip


SETTINGS = _table()


def load(argv: Sequence[str], environ: Mapping[str, str]) -> EngineSettings:
    """Read flags and environment.

    Raises: SettingInvalid: unknown variable, bad value, missing setting or contradiction.
    SystemExit: an unknown flag, or --help.
    """
    flags = vars(_parser().parse_args(argv))
    by_env = {setting.env: setting for setting in SETTINGS}
    for name in sorted(environ):
        if not name.startswith(ENV_PREFIX) or name in by_env or name == _CLIENT_VARIABLE:
            continue
        if not _is_injected(name):
            raise SettingInvalid(f"{name} is not a setting; see loraplex-engine --help")
    values: dict[str, Any] = {}
    for setting in SETTINGS:
        if flags[setting.name] is not None:
            values[setting.name] = setting.parse(flags[setting.name], setting.flag)
        elif setting.env in environ:
            values[setting.name] = setting.parse(environ[setting.env], setting.env)
        elif setting.limits.get("required"):
            raise SettingInvalid(f"{setting.flag} (or {setting.env}) is missing: {setting.help}")
    settings = EngineSettings(**values)
    _check(settings)
    return settings


def shown(settings: EngineSettings) -> dict[str, Any]:
    """Settings for a log line; secrets are replaced."""
    return {
        s.name: "(secret)" if s.limits.get("secret") else getattr(settings, s.name)
        for s in SETTINGS
    }


def step_tokens(settings: EngineSettings, device: str) -> int:
    """max_num_batched_tokens in effect. Args: device, the one in use: cpu or cuda."""
    if settings.max_num_batched_tokens != AUTO:
        return settings.max_num_batched_tokens
    usual = STEP_TOKENS_CPU if device == "cpu" else STEP_TOKENS_GPU
    return max(usual, settings.max_num_seqs + MIN_CHUNK)


def check_quantum(settings: EngineSettings, device: str) -> None:
    """Args: device, the one in use: cpu or cuda. Raises: SettingInvalid."""
    step = replace(settings, max_num_batched_tokens=step_tokens(settings, device))
    least = quantum_floor(step)
    if settings.quantum != AUTO and settings.quantum < least:
        raise SettingInvalid(
            f"--quantum is {settings.quantum}; must be auto or at least {least}, the service of a "
            "step that one adapter fills (--max-num-batched-tokens, --max-num-seqs and the prices)"
        )


def split_address(key: str, address: str) -> tuple[str, int]:
    """host and port of `host:port`. Raises: SettingInvalid."""
    try:
        return loraplex.address.split_address(address)
    except ValueError as error:
        raise SettingInvalid(f"{key} is {address!r}; must be {error}") from None


def _check(settings: EngineSettings) -> None:
    floor = settings.max_num_seqs + MIN_CHUNK
    if settings.max_num_batched_tokens != AUTO and settings.max_num_batched_tokens < floor:
        raise SettingInvalid(
            f"--max-num-batched-tokens is {settings.max_num_batched_tokens}; must be at least "
            f"{floor}: --max-num-seqs ({settings.max_num_seqs}) + one chunk of {MIN_CHUNK}"
        )
    # an engine that finds a GPU may ask for more when it starts
    check_quantum(settings, "cuda" if settings.device == "cuda" else "cpu")
    if 0 < settings.max_cpu_loras < settings.max_loras:
        raise SettingInvalid(
            f"--max-cpu-loras is {settings.max_cpu_loras}; must be 0 or at least "
            f"--max-loras ({settings.max_loras})"
        )
    for key, address in (
        ("--listen", settings.listen),
        ("--metrics-listen", settings.metrics_listen),
    ):
        split_address(key, address)
        if settings.auth == "none" and not loraplex.address.is_loopback(address):
            raise SettingInvalid(
                f"{key} is {address!r}; must be a loopback address while --auth is none"
            )
    if settings.listen == settings.metrics_listen and split_address("", settings.listen)[1]:
        raise SettingInvalid(
            f"--metrics-listen is {settings.metrics_listen!r}; must differ from --listen"
        )
    split_address("--registry-address", settings.registry_address)
    if settings.blob_store and not settings.blob_store.startswith(("file://", "s3://")):
        raise SettingInvalid(
            f"--blob-store is {settings.blob_store!r}; must be file:///dir or s3://bucket/prefix"
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "loraplex-engine", description="Serve LoRA adapters on one base model.", allow_abbrev=False
    )
    for setting in SETTINGS:
        shown_default = f"; default {setting.shown_default}" if setting.shown_default else ""
        text = f"{setting.help} ({setting.range}{shown_default}) [{setting.env}]"
        optional = {"nargs": "?", "const": "true"} if setting.kind is bool else {}
        parser.add_argument(
            setting.flag, dest=setting.name, metavar="VALUE", help=text.replace("%", "%%"),
            **optional,  # type: ignore[arg-type]
        )  # fmt: skip
    return parser


def _converted(text: str, kind: type, is_size: bool) -> Any:
    if kind is bool:
        if text.lower() not in _BOOLEANS:
            raise ValueError(text)
        return _BOOLEANS[text.lower()]
    if is_size and text[-3:].upper() in _UNITS:
        return int(float(text[:-3]) * _UNITS[text[-3:].upper()])
    return kind(text)


def _is_injected(name: str) -> bool:
    return _INJECTED.search(name) is not None
