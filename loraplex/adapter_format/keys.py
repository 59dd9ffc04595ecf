"""Names of LoRA tensors: which layer, module and matrix a key means, whoever wrote it."""

from __future__ import annotations

import re
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
_LORA_KEY = re.compile(r"(?P<module>.+)\.lora_(?P<matrix>[AB])(?:\.(?P<adapter>[^.]+))?\.weight")
_LAYER = re.compile(r"(?:(?P<prefix>.+)\.)?layers\.(?P<layer>\d{1,6})\.(?P<rest>[^\d]+)")

#: what a key contains → the option that writes it
_OTHER_KINDS = (
    ("lora_magnitude_vector", "use_dora"),
    ("lora_embedding_", "target_modules (embeddings)"),
    ("modules_to_save", "modules_to_save"),
    ("trainable_tokens", "trainable_token_indices"),
    ("lora_B.bias", "lora_bias"),
    ("base_layer", "a saved base layer"),
)


@dataclass(frozen=True, slots=True)
class TensorKey:
    """`name` is the module's full name in the model that was trained, `prefix` its beginning."""

    prefix: str
    layer: int
    module: str
    matrix: str

    @property
    def name(self) -> str:
        return module_name(self.prefix, self.layer, self.module)


def module_name(prefix: str, layer: int, module: str) -> str:
    part = "self_attn" if module in ATTENTION_MODULES else "mlp"
    start = f"{prefix}." if prefix else ""
    return f"{start}layers.{layer}.{part}.{module}"


def parse_key(key: str) -> TensorKey:
    """What `key` names.

    Raises: AdapterRefused OPTION_UNSUPPORTED for a tensor of another option than plain LoRA,
    TARGET_UNSUPPORTED for a module that is no linear layer of a decoder layer.
    """
    if len(key) > 1000:
        raise _refused("WEIGHTS_INVALID", key, "its name is longer than 1000 characters")
    plain = plain_name(key)
    match = _LORA_KEY.fullmatch(plain)
    if match is None:
        for mark, option in _OTHER_KINDS:
            if mark in plain:
                raise _refused("OPTION_UNSUPPORTED", key, f"{option} is not supported")
        raise _refused("OPTION_UNSUPPORTED", key, "it is neither lora_A nor lora_B of a module")
    module_path = match["module"]
    layer = _LAYER.fullmatch(module_path)
    if layer is not None and (layer["prefix"] or "") in PREFIXES:
        part, _, module = layer["rest"].partition(".")
        expected = "self_attn" if module in ATTENTION_MODULES else "mlp"
        if module in LAYER_MODULES and part == expected:
            return TensorKey(layer["prefix"] or "", int(layer["layer"]), module, match["matrix"])
    raise _refused(
        "TARGET_UNSUPPORTED",
        key,
        f"module {module_path[:200]} takes no LoRA here; supported are "
        f"{', '.join(LAYER_MODULES)} of decoder layers",
    )


def _refused(reason: str, key: str, problem: str) -> AdapterRefused:
    return AdapterRefused(
        f"tensor {key[:200]}: {problem}",
        reason=reason,
        metadata={"field": key[:200], "value": key[:200], "limit": problem},
    )


def plain_name(key: str) -> str:
    """A key without what PEFT and wrappers put before and between the model's own names."""
    parts = [part for part in key.split(".") if part not in _WRAPPERS]
    return ".".join(parts).removeprefix("module.").removeprefix("base_model.model.")
