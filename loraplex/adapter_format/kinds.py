"""Which kinds of tensors a module must have, by the options, and why another is refused."""

from __future__ import annotations

from loraplex.adapter_format.keys import MODULE_PARTS
from loraplex.adapter_format.options import LoraOptions
from loraplex.adapter_format.refusals import refused
from loraplex.adapter_format.spec import BaseModelFacts
from loraplex.status import AdapterRefused

#: kind → how PEFT writes it after the module's name
_SUFFIXES = {
    "A": "lora_A",
    "B": "lora_B",
    "lora_bias": "lora_B.bias",
    "magnitude": "lora_magnitude_vector",
    "targeted_bias": "base_layer.bias",
    "bias": "bias",
}


def suffix(kind: str) -> str:
    return _SUFFIXES[kind]


def wanted(
    options: LoraOptions, base: BaseModelFacts, module: str, *, targeted: bool
) -> frozenset[str]:
    """The kinds of tensors that PEFT saves for a module."""
    has_bias = _has_bias(base, module)
    if not targeted:
        return frozenset({"bias"} if options.bias == "all" and has_bias else ())
    kinds = {"A", "B"}
    if options.use_dora:
        kinds.add("magnitude")
    if options.lora_bias:
        kinds.add("lora_bias")
    if options.bias != "none" and has_bias:
        kinds.add("targeted_bias")
    return frozenset(kinds)


def idle(
    options: LoraOptions, base: BaseModelFacts, name: str, kind: str, *, targeted: bool
) -> AdapterRefused:
    """Why nothing would read the tensor `name`, whose kind `wanted` does not contain.

    Of a module without LoRA that is a bias only.
    """
    if kind in ("magnitude", "lora_bias") and targeted:
        option = "use_dora" if kind == "magnitude" else "lora_bias"
        return refused("OPTION_UNSUPPORTED", name, f"adapter_config.json has {option} false")
    if kind == "bias" and targeted:
        return refused(
            "WEIGHTS_INVALID", name, "PEFT ignores it: a module with LoRA has base_layer.bias"
        )
    if options.bias == "none" or (options.bias == "lora_only" and not targeted):
        return refused("OPTION_UNSUPPORTED", name, f"adapter_config.json has bias {options.bias}")
    return refused("TARGET_UNSUPPORTED", name, f"{base.name} has no bias there")


def _has_bias(base: BaseModelFacts, module: str) -> bool:
    return base.spec.module_bias(MODULE_PARTS[module][0])
