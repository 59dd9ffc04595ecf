"""What a Hugging Face `config.json` says of a base model: the one reader that both services share.

Reads the transformers-4 style (`rope_theta`, `rope_scaling`, `torch_dtype`) and the transformers-5
style (`rope_parameters`, `dtype`). Everything that would change the output and is not understood is
refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from loraplex.config_fields import number_field, size_field
from loraplex.rope_config import read_rope, rotary_share
from loraplex.status import BaseModelUnsupported


@dataclass(frozen=True, slots=True)
class Family:
    """What an architecture does that its config does not say."""

    qkv_bias: bool = False
    #: RMSNorm on q and k heads
    qk_norm: bool = False
    #: tie_word_embeddings and rope_theta where the config leaves them out
    tied: bool = False
    rope_theta: float = 10000.0
    #: the checkpoint holds qkv_proj and gate_up_proj
    fused: bool = False
    #: a part of each head may be turned by positions, the rest not
    partial_rotary: bool = False


SUPPORTED_ARCHITECTURES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(),
    "MistralForCausalLM": Family(),
    "Phi3ForCausalLM": Family(fused=True, partial_rotary=True),
    "Qwen2ForCausalLM": Family(qkv_bias=True),
    "Qwen3ForCausalLM": Family(qk_norm=True),
    "SmolLM3ForCausalLM": Family(tied=True, rope_theta=2000000.0),
}

#: Linear modules of one decoder layer, in the order in which sites and slices are laid out.
ATTENTION_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_MODULES = ("gate_proj", "up_proj", "down_proj")
LAYER_MODULES = ATTENTION_MODULES + MLP_MODULES

#: modules outside the decoder layers, and the layer that stands for "outside"
EMBEDDING, HEAD = "embed_tokens", "lm_head"
VOCABULARY_MODULES = (EMBEDDING, HEAD)
NO_LAYER = -1
#: fused linear of a checkpoint → the modules whose rows it stacks, in order
FUSED_MODULES: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}

MAX_LAYERS = 1024


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
    #: numbers of each head that rotary positions turn; 0 = all
    rotary_dim: int = 0
    #: layers that know no positions
    layers_without_rope: tuple[int, ...] = ()
    #: the checkpoint and the model that adapters are trained on hold qkv_proj and gate_up_proj
    fused_modules: bool = False

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def module_shape(self, module: str) -> tuple[int, int]:
        """(in_features, out_features) of a module; an embedding's input is one of vocab_size.

        Raises: KeyError when `module` is of none of LAYER_, FUSED_ and VOCABULARY_MODULES.
        """
        shapes = {
            "q_proj": (self.hidden_size, self.q_size),
            "k_proj": (self.hidden_size, self.kv_size),
            "v_proj": (self.hidden_size, self.kv_size),
            "o_proj": (self.q_size, self.hidden_size),
            "gate_proj": (self.hidden_size, self.intermediate_size),
            "up_proj": (self.hidden_size, self.intermediate_size),
            "down_proj": (self.intermediate_size, self.hidden_size),
            EMBEDDING: (self.vocab_size, self.hidden_size),
            HEAD: (self.hidden_size, self.vocab_size),
        }
        if module in FUSED_MODULES:
            return self.hidden_size, sum(shapes[part][1] for part in FUSED_MODULES[module])
        return shapes[module]

    def stored_modules(self, modules: tuple[str, ...]) -> tuple[str, ...]:
        """How the checkpoint names the linears whose rows make up `modules`."""
        fused = [name for name, parts in FUSED_MODULES.items() if parts == modules]
        return tuple(fused) if fused and self.fused_modules else modules

    def module_bias(self, module: str) -> bool:
        """Whether a linear module has a bias; embeddings and output head never do."""
        if module in VOCABULARY_MODULES:
            return False
        if module in MLP_MODULES:
            return self.mlp_bias
        return self.o_bias if module == "o_proj" else self.qkv_bias


def module_path(layer: int, module: str) -> str:
    """Full name of a linear module as transformers names it, for example
    `model.layers.3.self_attn.q_proj`."""
    part = "self_attn" if module in (*ATTENTION_MODULES, "qkv_proj") else "mlp"
    return f"model.layers.{layer}.{part}.{module}"


def parse_config(config: Mapping[str, Any]) -> BaseModelSpec:
    """Read a `config.json`.

    Raises: BaseModelUnsupported: architecture, activation, rope type, quantisation or a field that
    is missing.
    """
    architecture = _architecture(config)
    family = SUPPORTED_ARCHITECTURES[architecture]
    if config.get("quantization_config") is not None:
        raise BaseModelUnsupported("quantization_config", config["quantization_config"], "none")
    if config.get("hidden_act", "silu") != "silu":
        raise BaseModelUnsupported("hidden_act", config["hidden_act"], "silu")
    hidden, heads = size_field(config, "hidden_size"), size_field(config, "num_attention_heads")
    kv_heads = size_field(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise BaseModelUnsupported("num_key_value_heads", kv_heads, f"a divisor of {heads}")
    head_dim = size_field(config, "head_dim", max(1, hidden // heads))
    if head_dim % 2:
        raise BaseModelUnsupported("head_dim", head_dim, "an even number")
    theta, scaling = read_rope(config, family.rope_theta)
    num_layers = size_field(config, "num_hidden_layers", limit=MAX_LAYERS)
    rotary_dim = _rotary_dim(config, family, head_dim)
    if len(scaling.get("short_factor", ())) not in (0, (rotary_dim or head_dim) // 2):
        limit = f"{(rotary_dim or head_dim) // 2} numbers"
        raise BaseModelUnsupported("short_factor", scaling["short_factor"], limit)
    attention_bias = bool(config.get("attention_bias", False))
    return BaseModelSpec(
        architecture=architecture,
        vocab_size=size_field(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=size_field(config, "intermediate_size"),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        context_tokens=_context_tokens(config, scaling),
        rms_norm_eps=number_field(config, "rms_norm_eps", 1e-6),
        rope_theta=theta,
        tied_embeddings=bool(config.get("tie_word_embeddings", family.tied)),
        qkv_bias=family.qkv_bias or attention_bias,
        o_bias=attention_bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=family.qk_norm,
        sliding_window=_sliding_window(config, architecture),
        eos_token_ids=_eos(config),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        rope_scaling=scaling,
        rotary_dim=rotary_dim,
        layers_without_rope=_layers_without_rope(config, architecture, num_layers),
        fused_modules=family.fused,
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


def _rotary_dim(config: Mapping[str, Any], family: Family, head_dim: int) -> int:
    share = rotary_share(config)
    if share == 1:
        return 0
    if not family.partial_rotary:
        raise BaseModelUnsupported("partial_rotary_factor", share, "1")
    if int(head_dim * share) % 2:
        raise BaseModelUnsupported("partial_rotary_factor", share, "an even number of each head")
    return int(head_dim * share)


def _context_tokens(config: Mapping[str, Any], scaling: Mapping[str, Any]) -> int:
    """Beyond its original context longrope turns all keys anew, the cached ones too."""
    longest = size_field(config, "max_position_embeddings")
    if scaling.get("rope_type") != "longrope":
        return longest
    return min(longest, size_field(scaling, "original_max_position_embeddings"))


def _layers_without_rope(
    config: Mapping[str, Any], architecture: str, num_layers: int
) -> tuple[int, ...]:
    """SmolLM3's no_rope_layers holds a 1 for each layer that has rotary positions."""
    if not architecture.startswith("SmolLM3"):
        return ()
    flags = config.get("no_rope_layers")
    if flags is None:
        interval = size_field(config, "no_rope_layer_interval", 4)
        flags = [int((layer + 1) % interval != 0) for layer in range(num_layers)]
    if not isinstance(flags, list) or len(flags) != num_layers or not set(flags) <= {0, 1}:
        raise BaseModelUnsupported("no_rope_layers", flags, f"a 0 or 1 for each of {num_layers}")
    return tuple(layer for layer, flag in enumerate(flags) if not flag)


def _sliding_window(config: Mapping[str, Any], architecture: str) -> int:
    window = config.get("sliding_window")
    if architecture.startswith(("Qwen", "SmolLM3")) and not config.get("use_sliding_window", False):
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
    return size_field(config, "sliding_window")


def _eos(config: Mapping[str, Any]) -> tuple[int, ...]:
    value = config.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in ids):
        raise BaseModelUnsupported("eos_token_id", value, "a token id, or a list of them")
    return tuple(ids)
