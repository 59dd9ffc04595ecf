"""What a Hugging Face `config.json` says of a base model: the one reader that both services share.

Reads the transformers-4 style (`rope_theta`, `rope_scaling`, `torch_dtype`) and the transformers-5
style (`rope_parameters`, `dtype`). Everything that would change the output and is not understood is
refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from loraplex.status import BaseModelUnsupported

#: architecture → (bias on q, k and v; RMSNorm on q and k heads)
SUPPORTED_ARCHITECTURES: Mapping[str, tuple[bool, bool]] = {
    "LlamaForCausalLM": (False, False),
    "MistralForCausalLM": (False, False),
    "Qwen2ForCausalLM": (True, False),
    "Qwen3ForCausalLM": (False, True),
}

#: Linear modules of one decoder layer, in the order in which sites and slices are laid out.
ATTENTION_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_MODULES = ("gate_proj", "up_proj", "down_proj")
LAYER_MODULES = ATTENTION_MODULES + MLP_MODULES

MAX_LAYERS = 1024
MAX_SIZE = 1 << 24

#: rope type → the numbers that its table must hold
_ROPE_NUMBERS: Mapping[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}


@dataclass(frozen=True, slots=True)
class BaseModelSpec:
    """Shapes and options of a base model; sizes in elements."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_tokens: int
    rms_norm_eps: float
    rope_theta: float
    tied_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    #: positions a token sees behind itself; 0 = all
    sliding_window: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    #: the rope scaling table as written, {} when there is none
    rope_scaling: Mapping[str, Any] = field(default_factory=dict)

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def module_shape(self, module: str) -> tuple[int, int]:
        """(in_features, out_features) of a linear module of a decoder layer.

        Raises: KeyError when `module` is none of LAYER_MODULES.
        """
        shapes = {
            "q_proj": (self.hidden_size, self.q_size),
            "k_proj": (self.hidden_size, self.kv_size),
            "v_proj": (self.hidden_size, self.kv_size),
            "o_proj": (self.q_size, self.hidden_size),
            "gate_proj": (self.hidden_size, self.intermediate_size),
            "up_proj": (self.hidden_size, self.intermediate_size),
            "down_proj": (self.intermediate_size, self.hidden_size),
        }
        return shapes[module]

    def module_bias(self, module: str) -> bool:
        """Whether a linear module of a decoder layer has a bias."""
        if module in MLP_MODULES:
            return self.mlp_bias
        return self.o_bias if module == "o_proj" else self.qkv_bias


def module_path(layer: int, module: str) -> str:
    """Full name of a linear module as transformers names it, for example
    `model.layers.3.self_attn.q_proj`."""
    part = "self_attn" if module in ATTENTION_MODULES else "mlp"
    return f"model.layers.{layer}.{part}.{module}"


def parse_config(config: Mapping[str, Any]) -> BaseModelSpec:
    """Read a `config.json`.

    Raises: BaseModelUnsupported: architecture, activation, rope type, quantisation or a field that
    is missing.
    """
    architecture = _architecture(config)
    qkv_bias, qk_norm = SUPPORTED_ARCHITECTURES[architecture]
    if config.get("quantization_config") is not None:
        raise BaseModelUnsupported("quantization_config", config["quantization_config"], "none")
    if config.get("hidden_act", "silu") != "silu":
        raise BaseModelUnsupported("hidden_act", config["hidden_act"], "silu")
    hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    kv_heads = _size(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise BaseModelUnsupported("num_key_value_heads", kv_heads, f"a divisor of {heads}")
    head_dim = _size(config, "head_dim", max(1, hidden // heads))
    if head_dim % 2:
        raise BaseModelUnsupported("head_dim", head_dim, "an even number")
    theta, scaling = _rope(config)
    attention_bias = bool(config.get("attention_bias", False))
    return BaseModelSpec(
        architecture=architecture,
        vocab_size=_size(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_size(config, "intermediate_size"),
        num_layers=_size(config, "num_hidden_layers", limit=MAX_LAYERS),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        context_tokens=_size(config, "max_position_embeddings"),
        rms_norm_eps=_number(config, "rms_norm_eps", 1e-6),
        rope_theta=theta,
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=qkv_bias or attention_bias,
        o_bias=attention_bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=qk_norm,
        sliding_window=_sliding_window(config, architecture),
        eos_token_ids=_eos(config),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        rope_scaling=scaling,
    )


def parse_config_json(text: str | bytes) -> BaseModelSpec:
    """`parse_config` of a JSON text. Raises: BaseModelUnsupported, also when it is not a JSON
    object."""
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BaseModelUnsupported("config.json", str(error), "a JSON object") from error
    if not isinstance(config, dict):
        raise BaseModelUnsupported("config.json", type(config).__name__, "a JSON object")
    return parse_config(config)


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else names
    if not isinstance(name, str) or name not in SUPPORTED_ARCHITECTURES:
        raise BaseModelUnsupported("architectures", name, ", ".join(SUPPORTED_ARCHITECTURES))
    return name


def _size(
    config: Mapping[str, Any], key: str, default: int | None = None, *, limit: int = MAX_SIZE
) -> int:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= limit:
        raise BaseModelUnsupported(key, value, f"a whole number in 1 … {limit}")
    return value


def _number(table: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = table.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise BaseModelUnsupported(key, value, "a number")
    return float(value)


def _rope(config: Mapping[str, Any]) -> tuple[float, Mapping[str, Any]]:
    """Base frequency, and the scaling table, {} for plain rotary positions."""
    table = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(table, dict) or any(isinstance(value, dict) for value in table.values()):
        raise BaseModelUnsupported("rope_parameters", table, "one table for all layers")
    for place in (config, table):
        if place.get("partial_rotary_factor") not in (None, 1, 1.0):
            factor = place["partial_rotary_factor"]
            raise BaseModelUnsupported("partial_rotary_factor", factor, "1")
    theta = _number(table if table.get("rope_theta") else config, "rope_theta", 10000.0)
    scaling = {key: value for key, value in table.items() if key != "rope_theta"}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return theta, {}
    if not isinstance(kind, str) or kind not in _ROPE_NUMBERS:
        raise BaseModelUnsupported("rope_type", kind, ", ".join(["default", *_ROPE_NUMBERS]))
    for key in _ROPE_NUMBERS[kind]:
        if _number(scaling, key) <= 0:
            raise BaseModelUnsupported(key, scaling[key], "a number above 0")
    return theta, scaling


def _sliding_window(config: Mapping[str, Any], architecture: str) -> int:
    window = config.get("sliding_window")
    if architecture.startswith("Qwen") and not config.get("use_sliding_window", False):
        return 0
    if architecture.startswith("Llama") or window is None:
        return 0
    layer_types = config.get("layer_types") or ["sliding_attention"]
    if not isinstance(layer_types, list):
        raise BaseModelUnsupported("layer_types", layer_types, "a list")
    kinds = {str(kind) for kind in layer_types}
    if kinds == {"full_attention"}:
        return 0
    if kinds != {"sliding_attention"} or config.get("max_window_layers"):
        raise BaseModelUnsupported("layer_types", sorted(kinds), "one kind for all layers")
    return _size(config, "sliding_window")


def _eos(config: Mapping[str, Any]) -> tuple[int, ...]:
    value = config.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in ids):
        raise BaseModelUnsupported("eos_token_id", value, "a token id, or a list of them")
    return tuple(ids)
