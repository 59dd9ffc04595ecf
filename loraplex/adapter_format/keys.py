"""Names of LoRA tensors: which layer, module and matrix a key means, whoever wrote it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from loraplex.base_model import ATTENTION_MODULES, LAYER_MODULES
from loraplex.status import AdapterRefused

#: module-name parts that wrappers insert while training
_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
#: what may stand before `layers.N`: plain language models and the text half of larger ones
PREFIXES = frozenset({
    "", "model", "language_model", "model.language_model", "language_model.model", "text_model",
    "model.text_model",
})  # fmt: skip
#: linear modules of models that were trained → the base's modules whose rows they hold, in order
MODULE_PARTS: Mapping[str, tuple[str, ...]] = {
    **{module: (module,) for module in LAYER_MODULES},
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
#: what a key ends with → the kind of tensor; PEFT leaves the adapter's name out, older tools do not
_KINDS = (
    ("A", re.compile(r"(?P<module>.+)\.lora_A(?:\.[^.]+)?\.weight")),
    ("B", re.compile(r"(?P<module>.+)\.lora_B(?:\.[^.]+)?\.weight")),
    ("lora_bias", re.compile(r"(?P<module>.+)\.lora_B(?:\.[^.]+)?\.bias")),
    ("magnitude", re.compile(r"(?P<module>.+)\.lora_magnitude_vector(?:\.[^.]+)?(?:\.weight)?")),
    ("targeted_bias", re.compile(r"(?P<module>.+)\.base_layer\.bias")),
    ("bias", re.compile(r"(?P<module>.+)\.bias")),
)
_LAYER = re.compile(r"(?:(?P<prefix>.+)\.)?layers\.(?P<layer>\d{1,6})\.(?P<rest>[^\d]+)")

#: what a key contains → the option that writes it
_OTHER_KINDS = (
    ("lora_embedding_", "LoRA on this embedding"),
    ("modules_to_save", "modules_to_save"),
    ("trainable_tokens", "trainable_token_indices"),
    ("base_layer", "a saved base layer"),
)


@dataclass(frozen=True, slots=True)
class TensorKey:
    """`name` is the module's full name in the model that was trained, `prefix` its beginning.

    `kind` is A, B, lora_bias (of B), magnitude (of DoRA), targeted_bias (the base layer's own,
    below a LoRA) or bias (of a module without LoRA).
    """

    prefix: str
    layer: int
    module: str
    kind: str

    @property
    def name(self) -> str:
        return module_name(self.prefix, self.layer, self.module)


def plain_name(key: str) -> str:
    """A key without what PEFT and wrappers put before and between the model's own names."""
    parts = [part for part in key.split(".") if part not in _WRAPPERS]
    return ".".join(parts).removeprefix("module.").removeprefix("base_model.model.")


def module_name(prefix: str, layer: int, module: str) -> str:
    """Args: module, one of MODULE_PARTS."""
    part = _part(module)
    start = f"{prefix}." if prefix else ""
    return f"{start}layers.{layer}.{part}.{module}"


def parse_key(key: str) -> TensorKey:
    """What `key` names.

    Raises: AdapterRefused OPTION_UNSUPPORTED for a tensor of an option that is not supported,
    TARGET_UNSUPPORTED for a module that is no linear layer of a decoder layer.
    """
    if len(key) > 1000:
        raise _refused("WEIGHTS_INVALID", key, "its name is longer than 1000 characters")
    plain = plain_name(key)
    for mark, option in _OTHER_KINDS:
        if mark in plain and not plain.endswith(".base_layer.bias"):
            raise _refused("OPTION_UNSUPPORTED", key, f"{option} is not supported")
    for kind, pattern in _KINDS:
        match = pattern.fullmatch(plain)
        if match is not None:
            return _module_key(key, match["module"], kind)
    raise _refused("OPTION_UNSUPPORTED", key, "it is no tensor of a LoRA")


def _module_key(key: str, path: str, kind: str) -> TensorKey:
    layer = _LAYER.fullmatch(path)
    if layer is not None and (layer["prefix"] or "") in PREFIXES:
        part, _, module = layer["rest"].partition(".")
        if module in MODULE_PARTS and part == _part(module):
            return TensorKey(layer["prefix"] or "", int(layer["layer"]), module, kind)
    raise _refused(
        "TARGET_UNSUPPORTED",
        key,
        f"module {path[:200]} takes no LoRA here; supported are {', '.join(MODULE_PARTS)} of "
        "decoder layers",
    )


def _part(module: str) -> str:
    return "self_attn" if MODULE_PARTS[module][0] in ATTENTION_MODULES else "mlp"


def _refused(reason: str, key: str, problem: str) -> AdapterRefused:
    return AdapterRefused(
        f"tensor {key[:200]}: {problem}",
        reason=reason,
        metadata={"field": key[:200], "value": key[:200], "limit": problem},
    )
