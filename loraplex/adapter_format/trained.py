"""The tensors of an adapter, sorted by the modules of the model that was trained."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from loraplex.adapter_format.keys import MODULE_PARTS, TensorKey, module_name, parse_key
from loraplex.adapter_format.refusals import few, mismatch, refused
from loraplex.adapter_format.spec import DTYPES, BaseModelFacts, TensorLocator
from loraplex.base_model import LAYER_MODULES

#: kind → tensor
Tensors = Mapping[str, TensorLocator]


@dataclass(frozen=True, slots=True)
class TrainedModules:
    """`tensors[layer, module][kind]`, kinds as in TensorKey; names begin with `prefix`.

    `modules` are the linear modules of one decoder layer under the names that they had in training:
    a fused name where a tensor uses it, the base's own names elsewhere. A model that fuses one of
    its linears is taken to fuse all, but where a tensor says otherwise.
    """

    prefix: str
    modules: tuple[str, ...]
    tensors: Mapping[tuple[int, str], Tensors]

    def name(self, layer: int, module: str) -> str:
        return module_name(self.prefix, layer, module)


def sort_tensors(tensors: Iterable[TensorLocator], base: BaseModelFacts) -> TrainedModules:
    """Raises: AdapterRefused for a key that names no linear module, a layer beyond the base's, two
    tensors of one place, or names that contradict each other."""
    found: dict[tuple[int, str], dict[str, TensorLocator]] = {}
    prefixes: dict[str, TensorKey] = {}
    for tensor in tensors:
        key = parse_key(tensor.name)
        if key.layer >= base.spec.num_layers:
            layers = f"0 … {base.spec.num_layers - 1}"
            raise mismatch(base, f"layer of {tensor.name}", key.layer, layers)
        if tensor.dtype not in DTYPES:
            raise refused("WEIGHTS_INVALID", tensor.name, f"dtype {tensor.dtype} is no LoRA dtype")
        of_module = found.setdefault((key.layer, key.module), {})
        if key.kind in of_module:
            raise refused(
                "WEIGHTS_INVALID", tensor.name, f"same matrix as {of_module[key.kind].name}"
            )
        of_module[key.kind] = tensor
        prefixes.setdefault(key.prefix, key)
    if len(prefixes) > 1:
        raise refused(
            "WEIGHTS_INVALID",
            few([key.name for key in prefixes.values()]),
            "module names begin in different ways",
        )
    prefix = next(iter(prefixes), "model")
    return TrainedModules(prefix, _modules({module for _, module in found}), found)


def _modules(used: set[str]) -> tuple[str, ...]:
    """Names of one layer's modules, in the order of the base's."""
    fusable = {name: parts for name, parts in MODULE_PARTS.items() if len(parts) > 1}
    if not used & fusable.keys():
        return LAYER_MODULES
    hidden: dict[str, str] = {}
    for name, parts in fusable.items():
        split = [part for part in parts if part in used]
        if split and name in used:
            raise refused(
                "WEIGHTS_INVALID",
                f"{name}, {split[0]}",
                "tensors name both, the rows would overlap",
            )
        if not split:
            hidden.update(dict.fromkeys(parts, name))
    return tuple(dict.fromkeys(hidden.get(module, module) for module in LAYER_MODULES))
