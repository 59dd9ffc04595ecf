"""`adapter_config.json`, read fail-closed: every field that PEFT writes is in one of three sets.

    supported   changes the output, and LoraOptions carries it
    refused     changes the output, not supported: only its neutral value passes
    neutral     changes training, storage or book-keeping alone

A field in none of them passes only with an empty value, since nobody can say what it does.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from loraplex.adapter_format.jsontext import parse_object
from loraplex.adapter_format.regexes import checked_pattern
from loraplex.status import AdapterRefused

T = TypeVar("T", int, float)

MAX_CONFIG_BYTES = 1 << 20
#: entries of rank_pattern or alpha_pattern; a 70B model with one a module has 560
MAX_PATTERNS = 2048
#: the engine's scaling is fp32, and never larger than alpha
_LARGEST_FP32 = (2 - 2**-23) * 2.0**127

_SUPPORTED = frozenset({
    "peft_type", "task_type", "base_model_name_or_path", "init_lora_weights", "r", "lora_alpha",
    "use_rslora", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern",
    "rank_pattern", "alpha_pattern", "bias", "lora_bias", "use_dora",
    "modules_to_save", "ensure_weight_tying",
})  # fmt: skip

#: field → its value when the option is off; other empty values mean the same
REFUSED: Mapping[str, Any] = {
    "trainable_token_indices": None,
    "layer_replication": None,
    "target_parameters": None,
    "alora_invocation_tokens": None,
    "use_qalora": False,
    "use_bdlora": None,
    "arrow_config": None,
    "kasa_config": None,
    "monteclora_config": None,
    "velora_config": None,
    "megatron_config": None,
}

_NEUTRAL = frozenset({
    "auto_mapping", "peft_version", "revision", "inference_mode", "lora_dropout", "megatron_core",
    "loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size",
    "runtime_config",
    # PEFT itself sets it to false for linear layers, the only ones that are served
    "fan_in_fan_out",
})  # fmt: skip

#: ways to initialise that leave the base model's weights as they are
PLAIN_INITS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
#: what PEFT targets when a Llama-like adapter names nothing
_DEFAULT_TARGETS = ("q_proj", "v_proj")


@dataclass(frozen=True, slots=True)
class LoraOptions:
    """The PEFT options that change the output.

    A string in `target_modules` or `exclude_modules` is a regular expression (or `all-linear`).
    The order of patterns matters: the first that matches wins.
    """

    r: int
    lora_alpha: float
    use_rslora: bool
    target_modules: tuple[str, ...] | str
    exclude_modules: tuple[str, ...] | str
    layers_to_transform: tuple[int, ...] | None
    layers_pattern: tuple[str, ...]
    rank_pattern: tuple[tuple[str, int], ...]
    alpha_pattern: tuple[tuple[str, float], ...]
    #: whose biases the adapter replaces: none, all, or lora_only (of the modules with LoRA)
    bias: str = "none"
    lora_bias: bool = False
    use_dora: bool = False
    modules_to_save: tuple[str, ...] = ()
    #: refused where it would have an effect, so no manifest holds it
    ensure_weight_tying: bool = False


def parse_adapter_config(data: bytes) -> tuple[LoraOptions, str]:
    """Options and `base_model_name_or_path` ("" when it is absent) of an `adapter_config.json`.

    Raises: AdapterRefused CONFIG_INVALID, OPTION_UNSUPPORTED or RANK_UNSUPPORTED.
    """
    if len(data) > MAX_CONFIG_BYTES:
        raise _bad("adapter_config.json", f"{len(data)} bytes", f"at most {MAX_CONFIG_BYTES}")
    config = parse_object(data, "adapter_config.json", "CONFIG_INVALID")
    _refuse_unsupported(config)
    layers = config.get("layers_to_transform")
    options = LoraOptions(
        r=_rank("r", config.get("r", 8)),
        lora_alpha=_number("lora_alpha", config.get("lora_alpha", 8)),
        use_rslora=_flag(config, "use_rslora"),
        target_modules=_modules(config, "target_modules", _DEFAULT_TARGETS),
        exclude_modules=_modules(config, "exclude_modules", ()),
        layers_to_transform=_layers(layers),
        layers_pattern=_layers_pattern(config),
        rank_pattern=_pattern_table(config, "rank_pattern", _rank),
        alpha_pattern=_pattern_table(config, "alpha_pattern", _number),
        bias=_bias(config.get("bias")),
        lora_bias=_flag(config, "lora_bias"),
        use_dora=_flag(config, "use_dora"),
        modules_to_save=_names(config, "modules_to_save"),
        ensure_weight_tying=_flag(config, "ensure_weight_tying"),
    )
    _refuse_contradictions(options, config)
    base = config.get("base_model_name_or_path")
    if base is not None and not isinstance(base, str):
        raise _bad("base_model_name_or_path", base, "a string")
    return options, base or ""


def options_to_json(options: LoraOptions) -> dict[str, Any]:
    """The manifest's `config`: all output-changing options under PEFT's names."""
    layers = options.layers_to_transform
    return {
        "peft_type": "LORA",
        "r": options.r,
        "lora_alpha": options.lora_alpha,
        "use_rslora": options.use_rslora,
        "target_modules": _plain(options.target_modules),
        "exclude_modules": _plain(options.exclude_modules),
        "layers_to_transform": None if layers is None else list(layers),
        "layers_pattern": list(options.layers_pattern),
        "rank_pattern": [list(pair) for pair in options.rank_pattern],
        "alpha_pattern": [list(pair) for pair in options.alpha_pattern],
        "bias": options.bias,
        "lora_bias": options.lora_bias,
        "use_dora": options.use_dora,
        "modules_to_save": list(options.modules_to_save) or None,
        **_RECORDED,
    }


def options_from_json(config: Mapping[str, Any]) -> LoraOptions:
    """The inverse of `options_to_json`; unknown keys are ignored.

    Raises: KeyError, TypeError or ValueError when it was not written by it.
    """
    layers = config["layers_to_transform"]
    return LoraOptions(
        r=int(config["r"]),
        lora_alpha=float(config["lora_alpha"]),
        use_rslora=bool(config["use_rslora"]),
        target_modules=_frozen(config["target_modules"]),
        exclude_modules=_frozen(config["exclude_modules"]),
        layers_to_transform=None if layers is None else tuple(int(layer) for layer in layers),
        layers_pattern=tuple(config["layers_pattern"]),
        rank_pattern=tuple((str(key), int(value)) for key, value in config["rank_pattern"]),
        alpha_pattern=tuple((str(key), float(value)) for key, value in config["alpha_pattern"]),
        bias=_bias(config["bias"]),
        lora_bias=bool(config["lora_bias"]),
        use_dora=bool(config["use_dora"]),
        modules_to_save=tuple(config["modules_to_save"] or ()),
    )


#: what every manifest states besides: off, because a later release may support it
_RECORDED = {"fan_in_fan_out": False}


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        kind = config.get("peft_type")
        if kind is None:
            raise _bad("peft_type", None, "LORA; the file is no PEFT adapter configuration")
        raise _unsupported("peft_type", kind, "LORA")
    if config.get("task_type") not in (None, "CAUSAL_LM"):
        raise _unsupported("task_type", config["task_type"], "CAUSAL_LM")
    init = config.get("init_lora_weights")
    if init not in PLAIN_INITS:
        raise _unsupported(
            "init_lora_weights",
            init,
            "true, false, gaussian, eva, orthogonal, mica; others change the base weights: save "
            "the adapter with path_initial_model_for_weight_conversion",
        )
    for field, value in config.items():
        if field in _SUPPORTED or field in _NEUTRAL:
            continue
        if field in REFUSED:
            if value and value != REFUSED[field]:
                raise _unsupported(field, value, f"only {json.dumps(REFUSED[field])}")
        elif value:
            raise _unsupported(field, value, "absent; this option is not known")


def _refuse_contradictions(options: LoraOptions, config: Mapping[str, Any]) -> None:
    """Combinations that PEFT itself refuses to read."""
    if isinstance(options.target_modules, str):
        for field in ("layers_to_transform", "layers_pattern"):
            if config.get(field) not in (None, [], ""):
                raise _bad(field, config[field], "absent when target_modules is one string")
    if options.layers_pattern and options.layers_to_transform is None:
        raise _bad("layers_pattern", config["layers_pattern"], "absent without layers_to_transform")
    if options.lora_bias and options.use_dora:
        raise _unsupported("lora_bias", True, "false together with use_dora, as in PEFT")
    init = config.get("init_lora_weights", True)
    if options.lora_bias and not isinstance(init, bool):
        raise _unsupported("lora_bias", True, f"false with init_lora_weights {init!r}, as in PEFT")


def _rank(field: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise AdapterRefused(
            f"adapter_config.json: {field} is {str(value)[:100]}; must be a whole number ≥ 1",
            reason="RANK_UNSUPPORTED",
            metadata={"field": field, "value": str(value)[:100], "limit": "a whole number >= 1"},
        )
    return value


def _number(field: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise _bad(field, value, "a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not abs(number) <= _LARGEST_FP32:
        raise _bad(field, value, "a number that is finite in fp32")
    return number


def _bias(value: Any) -> str:
    if value is None:
        return "none"
    if value not in ("none", "all", "lora_only"):
        raise _unsupported("bias", value, "none, all, lora_only")
    return str(value)


def _flag(config: Mapping[str, Any], field: str) -> bool:
    value = config.get(field)
    if value is not None and not isinstance(value, bool):
        raise _bad(field, value, "true or false")
    return bool(value)


def _modules(
    config: Mapping[str, Any], field: str, default: tuple[str, ...]
) -> tuple[str, ...] | str:
    value = config.get(field)
    if value is None:
        return default
    if isinstance(value, str):
        return value if value.lower() == "all-linear" else checked_pattern(field, value)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise _bad(field, value, "a list of module names, or one regular expression")
    return tuple(sorted(set(value)))


def _names(config: Mapping[str, Any], field: str) -> tuple[str, ...]:
    value = config.get(field) or []
    if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
        raise _bad(field, value, "a list of module names")
    return tuple(sorted(set(value)))


def _layers(value: Any) -> tuple[int, ...] | None:
    if value is None or value == []:
        return None
    layers = value if isinstance(value, list) else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in layers):
        raise _bad("layers_to_transform", value, "a layer index or a list of them")
    return tuple(sorted(set(layers)))


def _layers_pattern(config: Mapping[str, Any]) -> tuple[str, ...]:
    value = config.get("layers_pattern") or []
    patterns = [value] if isinstance(value, str) else value
    if not isinstance(patterns, list) or not all(isinstance(item, str) for item in patterns):
        raise _bad("layers_pattern", value, "a name or a list of them")
    return tuple(checked_pattern("layers_pattern", item) for item in patterns)


def _pattern_table(
    config: Mapping[str, Any], field: str, read: Callable[[str, Any], T]
) -> tuple[tuple[str, T], ...]:
    table = config.get(field) or {}
    if not isinstance(table, dict):
        raise _bad(field, table, "an object of pattern: value")
    if len(table) > MAX_PATTERNS:
        raise _bad(field, f"{len(table)} patterns", f"at most {MAX_PATTERNS}")
    return tuple(
        (checked_pattern(field, key), read(f"{field}[{key[:100]!r}]", value))
        for key, value in table.items()
    )


def _plain(modules: tuple[str, ...] | str) -> list[str] | str:
    return modules if isinstance(modules, str) else list(modules)


def _frozen(modules: Any) -> tuple[str, ...] | str:
    return modules if isinstance(modules, str) else tuple(str(item) for item in modules)


def _bad(field: str, value: Any, limit: str) -> AdapterRefused:
    return _refusal("CONFIG_INVALID", field, value, f"must be {limit}")


def _unsupported(field: str, value: Any, limit: str) -> AdapterRefused:
    return _refusal("OPTION_UNSUPPORTED", field, value, f"supported: {limit}")


def _refusal(reason: str, field: str, value: Any, limit: str) -> AdapterRefused:
    shown = repr(value)[:200]
    return AdapterRefused(
        f"adapter_config.json: {field} is {shown}; {limit}",
        reason=reason,
        metadata={"field": field, "value": shown, "limit": limit},
    )
