"""Joins options and tensors: every tensor lands in a module, every targeted module has tensors."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from loraplex.adapter_format.keys import TensorKey, module_name, parse_key
from loraplex.adapter_format.matching import alpha_of, is_target, rank_of
from loraplex.adapter_format.options import LoraOptions
from loraplex.adapter_format.scaling import scaling
from loraplex.adapter_format.spec import DTYPES, BaseModelFacts, TargetSpec, TensorLocator
from loraplex.base_model import EMBEDDING, HEAD, LAYER_MODULES, VOCABULARY_MODULES
from loraplex.status import AdapterRefused

#: all patterns of one adapter against all modules of one base model
MATCH_BUDGET_S = 10.0
_SHOWN = 3

Found = dict[tuple[int, str], dict[str, TensorLocator]]


def resolve_targets(
    options: LoraOptions,
    tensors: Iterable[TensorLocator],
    base: BaseModelFacts,
    max_rank: int,
    clock: Callable[[], float] = time.monotonic,
    may_be_none: bool = False,
) -> tuple[TargetSpec, ...]:
    """The adapter's targets on `base`, ordered by layer and module.

    Raises: AdapterRefused TARGET_UNSUPPORTED, OPTION_UNSUPPORTED, RANK_UNSUPPORTED,
    BASE_MODEL_MISMATCH, WEIGHTS_INVALID or CONFIG_INVALID, naming module or tensor.
    """
    deadline = clock() + MATCH_BUDGET_S
    _refuse_other_modules(options, "model")
    found, prefix = _sort_tensors(tensors, base)
    _refuse_other_modules(options, prefix)
    _refuse_idle_names(options, base, prefix)
    targets: list[TargetSpec] = []
    missing: list[str] = []
    untargeted: list[str] = []
    for layer in range(base.spec.num_layers):
        for module in LAYER_MODULES:
            if clock() > deadline:
                raise _refused("CONFIG_INVALID", "target_modules", "patterns take too long")
            name = module_name(prefix, layer, module)
            pair = found.get((layer, module), {})
            if not is_target(options, name):
                untargeted += [tensor.name for tensor in pair.values()]
            elif len(pair) < 2:
                missing += [f"{name}.lora_{matrix}" for matrix in "AB" if matrix not in pair]
            else:
                targets.append(_target(options, base, name, layer, module, pair, max_rank))
    if untargeted:
        raise _refused(
            "TARGET_UNSUPPORTED", _few(untargeted), "the module is not in target_modules"
        )
    if missing:
        raise _refused(
            "WEIGHTS_INVALID",
            _few(missing),
            "adapter_config.json targets it, but the weights hold no such tensor",
        )
    if not targets and not may_be_none:
        raise _refused("TARGET_UNSUPPORTED", "target_modules", "no module of the base model fits")
    return tuple(targets)


def _sort_tensors(tensors: Iterable[TensorLocator], base: BaseModelFacts) -> tuple[Found, str]:
    found: Found = {}
    prefixes: dict[str, TensorKey] = {}
    for tensor in tensors:
        key = parse_key(tensor.name)
        if key.layer >= base.spec.num_layers:
            raise _mismatch(base, f"layer of {tensor.name}", key.layer, base.spec.num_layers - 1)
        if tensor.dtype not in DTYPES:
            raise _refused("WEIGHTS_INVALID", tensor.name, f"dtype {tensor.dtype} is no LoRA dtype")
        pair = found.setdefault((key.layer, key.module), {})
        if key.matrix in pair:
            raise _refused(
                "WEIGHTS_INVALID", tensor.name, f"same matrix as {pair[key.matrix].name}"
            )
        pair[key.matrix] = tensor
        prefixes.setdefault(key.prefix, key)
    if len(prefixes) > 1:
        raise _refused(
            "WEIGHTS_INVALID",
            _few([key.name for key in prefixes.values()]),
            "module names begin in different ways",
        )
    return found, next(iter(prefixes), "model")


def _target(
    options: LoraOptions,
    base: BaseModelFacts,
    name: str,
    layer: int,
    module: str,
    pair: dict[str, TensorLocator],
    max_rank: int,
) -> TargetSpec:
    a, b = pair["A"], pair["B"]
    in_features, out_features = base.spec.module_shape(module)
    rank = rank_of(options, name)
    for tensor, side, size in ((a, 1, in_features), (b, 0, out_features)):
        if len(tensor.shape) != 2:
            raise _refused("WEIGHTS_INVALID", tensor.name, f"shape {tensor.shape}; must be 2-D")
        if tensor.shape[side] != size:
            raise _mismatch(base, f"{'rows' if side == 0 else 'columns'} of {tensor.name}",
                            tensor.shape[side], size)  # fmt: skip
        if tensor.shape[1 - side] != rank:
            raise _refused(
                "RANK_UNSUPPORTED",
                tensor.name,
                f"adapter_config.json gives rank {rank}, its shape is {tensor.shape}",
            )
    if rank > max_rank:
        raise AdapterRefused(
            f"rank of {name} is {rank}; at most {max_rank}",
            reason="RANK_UNSUPPORTED",
            metadata={"field": f"rank of {name}", "value": str(rank), "limit": str(max_rank)},
        )
    factor = scaling(alpha_of(options, name), rank, rslora=options.use_rslora)
    return TargetSpec(layer, module, rank, factor, a, b)


def _refuse_other_modules(options: LoraOptions, prefix: str) -> None:
    """PEFT would put a LoRA there too."""
    start = f"{prefix}." if prefix else ""
    # not a linear layer, so `all-linear` does not mean it
    if is_target(options, f"{start}norm", is_output_head=True):
        raise _refused("TARGET_UNSUPPORTED", f"{start}norm", "this module takes no LoRA")


def _refuse_idle_names(options: LoraOptions, base: BaseModelFacts, prefix: str) -> None:
    """A listed module that the base lacks was trained on another model, or is misspelt."""
    if isinstance(options.target_modules, str):
        return
    names = [
        module_name(prefix, layer, module)
        for layer in range(base.spec.num_layers)
        for module in LAYER_MODULES
    ]
    names += [f"{prefix}.{EMBEDDING}" if prefix else EMBEDDING, HEAD]
    endings = {name[start:] for name in names for start in _starts(name)}
    idle = [module for module in options.target_modules if module not in endings]
    if idle:
        raise _refused(
            "TARGET_UNSUPPORTED",
            _few(idle),
            f"target_modules names it; {base.name} takes LoRA on "
            f"{', '.join((*LAYER_MODULES, *VOCABULARY_MODULES))}",
        )


def _starts(name: str) -> list[int]:
    return [0] + [index + 1 for index, char in enumerate(name) if char == "."]


def _few(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN])[:600] + (f" and {more} more" if more > 0 else "")


def _mismatch(base: BaseModelFacts, what: str, value: int, limit: int) -> AdapterRefused:
    return AdapterRefused(
        f"{what} is {value}, {base.name} has {limit}: trained on another base model",
        reason="BASE_MODEL_MISMATCH",
        metadata={"field": what, "value": str(value), "limit": str(limit)},
    )


def _refused(reason: str, what: str, problem: str) -> AdapterRefused:
    return AdapterRefused(
        f"{what}: {problem}",
        reason=reason,
        metadata={"field": what, "value": what, "limit": problem},
    )
