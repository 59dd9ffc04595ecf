"""Joins options and tensors: every tensor lands in a module, every targeted module has tensors."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

from loraplex.adapter_format.keys import MODULE_PARTS
from loraplex.adapter_format.kinds import idle, suffix, wanted
from loraplex.adapter_format.matching import alpha_of, is_target, rank_of
from loraplex.adapter_format.options import LoraOptions
from loraplex.adapter_format.refusals import few, mismatch, refused
from loraplex.adapter_format.scaling import scaling
from loraplex.adapter_format.spec import (
    AdapterParts,
    BaseModelFacts,
    BiasSpec,
    TargetSpec,
    TensorLocator,
)
from loraplex.adapter_format.trained import Tensors, TrainedModules, sort_tensors
from loraplex.base_model import EMBEDDING, HEAD, LAYER_MODULES, VOCABULARY_MODULES
from loraplex.status import AdapterRefused

#: all patterns of one adapter against all modules of one base model
MATCH_BUDGET_S = 10.0


def resolve_parts(
    options: LoraOptions,
    tensors: Iterable[TensorLocator],
    base: BaseModelFacts,
    max_rank: int,
    clock: Callable[[], float] = time.monotonic,
    may_be_none: bool = False,
) -> AdapterParts:
    """What the adapter brings to the decoder layers of `base`.

    Args: may_be_none, it brings something elsewhere.

    Raises: AdapterRefused TARGET_UNSUPPORTED, OPTION_UNSUPPORTED, RANK_UNSUPPORTED,
    BASE_MODEL_MISMATCH, WEIGHTS_INVALID or CONFIG_INVALID, naming module or tensor.
    """
    deadline = clock() + MATCH_BUDGET_S
    _refuse_other_modules(options, "model")
    trained = sort_tensors(tensors, base)
    _refuse_other_modules(options, trained.prefix)
    _refuse_idle_names(options, base, trained)
    targeted: set[tuple[int, str]] = set()
    for layer, module in _places(base, trained):
        if clock() > deadline:
            raise refused("CONFIG_INVALID", "target_modules", "patterns take too long")
        if is_target(options, trained.name(layer, module)):
            targeted.add((layer, module))
    _check_complete(options, base, trained, targeted)
    if not targeted and not may_be_none:
        raise refused("TARGET_UNSUPPORTED", "target_modules", "no module of the base model fits")
    targets: list[TargetSpec] = []
    biases: list[BiasSpec] = []
    for layer, module in _places(base, trained):
        found = trained.tensors.get((layer, module), {})
        if (layer, module) in targeted:
            targets += _targets(options, base, trained, layer, module, max_rank)
        values = found.get("targeted_bias") or found.get("bias")
        if values is not None:
            _check_rows(base, module, values)
            for part, row0, num_rows in _rows(base, module):
                biases.append(BiasSpec(layer, part, values, row0, num_rows))
    return AdapterParts(tuple(targets), tuple(biases))


def _places(base: BaseModelFacts, trained: TrainedModules) -> Iterator[tuple[int, str]]:
    for layer in range(base.spec.num_layers):
        for module in trained.modules:
            yield layer, module


def _check_complete(
    options: LoraOptions,
    base: BaseModelFacts,
    trained: TrainedModules,
    targeted: set[tuple[int, str]],
) -> None:
    """Refuse tensors that nothing reads, and modules without the tensors that they need."""
    missing: list[str] = []
    untargeted: list[str] = []
    for place in _places(base, trained):
        found, is_targeted = trained.tensors.get(place, {}), place in targeted
        needed = wanted(options, base, place[1], targeted=is_targeted)
        for kind in sorted(found.keys() - needed):
            if is_targeted or kind == "bias":
                raise idle(options, base, found[kind].name, kind, targeted=is_targeted)
            untargeted.append(found[kind].name)
        missing += [f"{trained.name(*place)}.{suffix(kind)}" for kind in needed - found.keys()]
    if untargeted:
        raise refused(
            "TARGET_UNSUPPORTED", few(sorted(untargeted)), "the module is not in target_modules"
        )
    if missing:
        raise refused(
            "WEIGHTS_INVALID",
            few(sorted(missing)),
            "adapter_config.json targets it, but the weights hold no such tensor",
        )


def _targets(
    options: LoraOptions,
    base: BaseModelFacts,
    trained: TrainedModules,
    layer: int,
    module: str,
    max_rank: int,
) -> Iterator[TargetSpec]:
    """The LoRA of one module that was trained, a target for each module of the base inside it."""
    name, found = trained.name(layer, module), trained.tensors[layer, module]
    rank = rank_of(options, name)
    _check_matrices(base, module, found, rank)
    if rank > max_rank:
        raise AdapterRefused(
            f"rank of {name} is {rank}; at most {max_rank}",
            reason="RANK_UNSUPPORTED",
            metadata={"field": f"rank of {name}", "value": str(rank), "limit": str(max_rank)},
        )
    factor = scaling(alpha_of(options, name), rank, rslora=options.use_rslora)
    b_bias, magnitude = found.get("lora_bias"), found.get("magnitude")
    for vector in (b_bias, magnitude):
        if vector is not None:
            _check_rows(base, module, vector)
    for part, row0, num_rows in _rows(base, module):
        yield TargetSpec(
            layer, part, rank, factor, found["A"], found["B"], row0, num_rows, b_bias, magnitude
        )


def _check_matrices(base: BaseModelFacts, module: str, found: Tensors, rank: int) -> None:
    in_features = base.spec.module_shape(MODULE_PARTS[module][0])[0]
    sizes = (found["A"], 1, in_features), (found["B"], 0, _num_rows(base, module))
    for tensor, side, size in sizes:
        if len(tensor.shape) != 2:
            raise refused("WEIGHTS_INVALID", tensor.name, f"shape {tensor.shape}; must be 2-D")
        if tensor.shape[side] != size:
            what = f"{'rows' if side == 0 else 'columns'} of {tensor.name}"
            raise mismatch(base, what, tensor.shape[side], size)
        if tensor.shape[1 - side] != rank:
            raise refused(
                "RANK_UNSUPPORTED",
                tensor.name,
                f"adapter_config.json gives rank {rank}, its shape is {tensor.shape}",
            )


def _check_rows(base: BaseModelFacts, module: str, vector: TensorLocator) -> None:
    if len(vector.shape) != 1:
        raise refused("WEIGHTS_INVALID", vector.name, f"shape {vector.shape}; must be 1-D")
    if vector.shape[0] != _num_rows(base, module):
        what = f"numbers of {vector.name}"
        raise mismatch(base, what, vector.shape[0], _num_rows(base, module))


def _rows(base: BaseModelFacts, module: str) -> Iterator[tuple[str, int, int]]:
    """(module of the base, its first row, its rows) inside a module that was trained."""
    row0 = 0
    for part in MODULE_PARTS[module]:
        num_rows = base.spec.module_shape(part)[1]
        yield part, row0, num_rows
        row0 += num_rows


def _num_rows(base: BaseModelFacts, module: str) -> int:
    return sum(num_rows for _, _, num_rows in _rows(base, module))


def _refuse_other_modules(options: LoraOptions, prefix: str) -> None:
    """PEFT would put a LoRA there too."""
    start = f"{prefix}." if prefix else ""
    # not a linear layer, so `all-linear` does not mean it
    if is_target(options, f"{start}norm", is_output_head=True):
        raise refused("TARGET_UNSUPPORTED", f"{start}norm", "this module takes no LoRA")


def _refuse_idle_names(options: LoraOptions, base: BaseModelFacts, trained: TrainedModules) -> None:
    """A listed module that the base lacks was trained on another model, or is misspelt."""
    if isinstance(options.target_modules, str):
        return
    names = [trained.name(*place) for place in _places(base, trained)]
    names += [f"{trained.prefix}.{EMBEDDING}" if trained.prefix else EMBEDDING, HEAD]
    endings = {name[start:] for name in names for start in _starts(name)}
    unknown = [module for module in options.target_modules if module not in endings]
    if unknown:
        raise refused(
            "TARGET_UNSUPPORTED",
            few(unknown),
            f"target_modules names it; {base.name} takes LoRA on "
            f"{', '.join((*LAYER_MODULES, *VOCABULARY_MODULES))}",
        )


def _starts(name: str) -> list[int]:
    return [0] + [index + 1 for index, char in enumerate(name) if char == "."]
