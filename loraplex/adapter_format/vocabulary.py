"""The two modules outside the decoder layers: input embeddings and output head.

LoRA on them, weights that replace the base's (`modules_to_save`), and the copies of the base's own
weights that PEFT saves beside a LoRA on them (`save_embedding_layers`). A copy is served as it is:
what PEFT loads it into is the base's parameter, which a tied base uses on both sides.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from loraplex.adapter_format.keys import PREFIXES, plain_name
from loraplex.adapter_format.matching import alpha_of, is_target, rank_of
from loraplex.adapter_format.options import LoraOptions
from loraplex.adapter_format.scaling import scaling
from loraplex.adapter_format.spec import (
    DTYPES,
    BaseModelFacts,
    SavedModule,
    TargetSpec,
    TensorLocator,
)
from loraplex.base_model import EMBEDDING, HEAD, NO_LAYER, VOCABULARY_MODULES
from loraplex.status import AdapterRefused

MAX_SAVED_BYTES = 256 << 20
_KEY = re.compile(rf"(?:(?P<prefix>.+)\.)?(?P<module>{HEAD}|{EMBEDDING})\.(?P<rest>.+)")
_MAGNITUDE = ("magnitude", re.compile(r"lora_magnitude_vector(\.[^.]+)?(\.weight)?"))
_KINDS: Mapping[str, tuple[tuple[str, re.Pattern[str]], ...]] = {
    HEAD: (
        ("A", re.compile(r"lora_A(\.[^.]+)?\.weight")),
        ("B", re.compile(r"lora_B(\.[^.]+)?\.weight")),
        ("lora_bias", re.compile(r"lora_B(\.[^.]+)?\.bias")),
        _MAGNITUDE,
    ),
    EMBEDDING: (
        ("A", re.compile(r"lora_embedding_A(\.[^.]+)?")),
        ("B", re.compile(r"lora_embedding_B(\.[^.]+)?")),
        _MAGNITUDE,
    ),
}
_SUFFIXES = {"A": "lora_A", "B": "lora_B", "lora_bias": "lora_B.bias",
             "magnitude": "lora_magnitude_vector"}  # fmt: skip
_WEIGHTS = (
    ("weight", re.compile(r"(modules_to_save(\.[^.]+)?\.)?weight")),
    ("copy", re.compile(r"base_layer\.weight")),
)


@dataclass(frozen=True, slots=True)
class VocabularyTensors:
    """By module: its full name in the trained model, and its tensors by kind."""

    names: dict[str, str] = field(default_factory=dict)
    tensors: dict[str, dict[str, TensorLocator]] = field(default_factory=dict)


def split_vocabulary(
    tensors: Iterable[TensorLocator],
) -> tuple[tuple[TensorLocator, ...], VocabularyTensors]:
    """Tensors of the decoder layers, or of nothing that is known; and those of this file.

    Raises: AdapterRefused WEIGHTS_INVALID for two tensors of one meaning.
    """
    rest: list[TensorLocator] = []
    found = VocabularyTensors()
    for tensor in tensors:
        match = _KEY.fullmatch(plain_name(tensor.name))
        kind = None if match is None else _kind(match)
        if match is None or kind is None:
            rest.append(tensor)
            continue
        module = match["module"]
        name = f"{match['prefix']}.{module}" if match["prefix"] else module
        known = found.tensors.setdefault(module, {})
        if kind in known or found.names.setdefault(module, name) != name:
            other = next(iter(known.values())).name
            raise _refused("WEIGHTS_INVALID", tensor.name, f"same module and kind as {other}")
        known[kind] = tensor
    return tuple(rest), found


def vocabulary_targets(
    options: LoraOptions, found: VocabularyTensors, base: BaseModelFacts, max_rank: int
) -> tuple[TargetSpec, ...]:
    """LoRA on embeddings and head. Raises: AdapterRefused naming module or tensor."""
    _refuse_other_modules(options)
    targets: list[TargetSpec] = []
    for module in VOCABULARY_MODULES:
        name, tensors = _of(found, module)
        found_here = {kind: t for kind, t in tensors.items() if kind not in ("weight", "copy")}
        # neither is what `all-linear` means
        targeted = is_target(options, name, is_output_head=True)
        if found_here and not targeted:
            tensor = next(iter(found_here.values()))
            raise _refused("TARGET_UNSUPPORTED", tensor.name, "the module is not in target_modules")
        if not targeted:
            continue
        _check_kinds(options, name, module, found_here)
        if _is_saved(options, name):
            problem = "it is in target_modules and in modules_to_save; one of them at a time"
            raise _refused("OPTION_UNSUPPORTED", name, problem)
        _refuse_shared(options, name, base)
        targets.append(_target(options, base, name, module, found_here, max_rank))
    return tuple(targets)


def saved_modules(
    options: LoraOptions, found: VocabularyTensors, base: BaseModelFacts, max_saved_bytes: int
) -> tuple[SavedModule, ...]:
    """Weights that take the place of the base's, at most one a module.

    Raises: AdapterRefused VOCABULARY_MISMATCH for added tokens, ADAPTER_TOO_LARGE, WEIGHTS_INVALID,
    TARGET_UNSUPPORTED.
    """
    saved: dict[str, SavedModule] = {}
    for module in VOCABULARY_MODULES:
        name, tensors = _of(found, module)
        wanted = _is_saved(options, name)
        if wanted:
            _refuse_shared(options, name, base)
            if "weight" not in tensors:
                problem = "modules_to_save names it, but the weights do not hold it"
                raise _refused("WEIGHTS_INVALID", f"{name}.weight", problem)
        weight = tensors.get("weight") or tensors.get("copy")
        if weight is not None:
            if not wanted and ".modules_to_save." in weight.name:
                problem = "modules_to_save of adapter_config.json does not name it"
                raise _refused("TARGET_UNSUPPORTED", weight.name, problem)
            _check_weight(weight, base)
            saved[module] = SavedModule(module, weight, is_copy=not wanted)
    if base.spec.tied_embeddings:
        copy = next((one for one in saved.values() if one.is_copy), None)
        for module in VOCABULARY_MODULES if copy is not None else ():
            if copy is not None and (module not in saved or saved[module].is_copy):
                saved[module] = SavedModule(module, copy.weight, is_copy=True)
    _check_size(tuple(saved.values()), max_saved_bytes)
    return tuple(saved[module] for module in VOCABULARY_MODULES if module in saved)


def _kind(match: re.Match[str]) -> str | None:
    if (match["prefix"] or "") not in PREFIXES:
        return None
    kinds = (*_KINDS[match["module"]], *_WEIGHTS)
    return next((kind for kind, pattern in kinds if pattern.fullmatch(match["rest"])), None)


def _of(found: VocabularyTensors, module: str) -> tuple[str, Mapping[str, TensorLocator]]:
    usual = HEAD if module == HEAD else f"model.{EMBEDDING}"
    return found.names.get(module, usual), found.tensors.get(module, {})


def _is_saved(options: LoraOptions, name: str) -> bool:
    return any(name.endswith(module) for module in options.modules_to_save)


def _refuse_other_modules(options: LoraOptions) -> None:
    for module in options.modules_to_save:
        if module.rpartition(".")[2] not in VOCABULARY_MODULES:
            problem = f"modules_to_save is served for {' and '.join(VOCABULARY_MODULES)} only"
            raise _refused("OPTION_UNSUPPORTED", f"modules_to_save: {module[:200]}", problem)


def _refuse_shared(options: LoraOptions, name: str, base: BaseModelFacts) -> None:
    if options.ensure_weight_tying and base.spec.tied_embeddings:
        problem = f"it ties {name} to the other side of the vocabulary; train with false"
        raise _refused("OPTION_UNSUPPORTED", "ensure_weight_tying", problem)


def _check_kinds(
    options: LoraOptions, name: str, module: str, found: Mapping[str, TensorLocator]
) -> None:
    """A LoRA has all tensors that its options ask for, and no others."""
    if options.lora_bias and module == EMBEDDING:
        problem = f"PEFT has no bias of a LoRA on {name}"
        raise _refused("OPTION_UNSUPPORTED", "lora_bias", problem)
    asked = {"magnitude": ("use_dora", options.use_dora)}
    asked["lora_bias"] = ("lora_bias", options.lora_bias)
    for kind in ("A", "B", *asked):
        option, wanted = asked.get(kind, ("target_modules", True))
        if wanted and kind not in found:
            problem = f"{option} of adapter_config.json asks for it, the weights do not hold it"
            raise _refused("WEIGHTS_INVALID", f"{_SUFFIXES[kind]} of {name}", problem)
        if not wanted and kind in found:
            problem = f"adapter_config.json has {option} false"
            raise _refused("OPTION_UNSUPPORTED", found[kind].name, problem)


def _target(
    options: LoraOptions,
    base: BaseModelFacts,
    name: str,
    module: str,
    pair: Mapping[str, TensorLocator],
    max_rank: int,
) -> TargetSpec:
    in_features, out_features = base.spec.module_shape(module)
    rank = rank_of(options, name)
    for kind, shape in (("A", (rank, in_features)), ("B", (out_features, rank))):
        tensor = pair[kind]
        _check_dtype(tensor)
        if len(tensor.shape) != 2:
            raise _refused("WEIGHTS_INVALID", tensor.name, f"shape {tensor.shape}; must be 2-D")
        wide = 1 if kind == "A" else 0
        if tensor.shape[wide] != shape[wide]:
            raise _other_size(base, tensor, tensor.shape[wide], shape[wide])
        if tensor.shape[1 - wide] != rank:
            problem = f"adapter_config.json gives rank {rank}, its shape is {tensor.shape}"
            raise _refused("RANK_UNSUPPORTED", tensor.name, problem)
    if rank > max_rank:
        raise _refused("RANK_UNSUPPORTED", f"rank of {name}", f"{rank}; at most {max_rank}")
    vectors = pair.get("lora_bias"), pair.get("magnitude")
    for vector in vectors:
        if vector is not None:
            _check_dtype(vector)
            if len(vector.shape) != 1:
                raise _refused("WEIGHTS_INVALID", vector.name, f"shape {vector.shape}; must be 1-D")
            if vector.shape[0] != out_features:
                raise _other_size(base, vector, vector.shape[0], out_features)
    factor = scaling(alpha_of(options, name), rank, rslora=options.use_rslora)
    return TargetSpec(
        NO_LAYER, module, rank, factor, pair["A"], pair["B"], 0, out_features, *vectors
    )


def _check_weight(weight: TensorLocator, base: BaseModelFacts) -> None:
    _check_dtype(weight)
    expected = (base.spec.vocab_size, base.spec.hidden_size)
    if len(weight.shape) != 2 or weight.shape[1] != expected[1]:
        raise _refused("WEIGHTS_INVALID", weight.name, f"shape {weight.shape}, must be {expected}")
    if weight.shape[0] != expected[0]:
        raise _other_size(base, weight, weight.shape[0], expected[0])


def _check_dtype(tensor: TensorLocator) -> None:
    if tensor.dtype not in DTYPES:
        raise _refused("WEIGHTS_INVALID", tensor.name, f"dtype {tensor.dtype} is not served")


def _check_size(saved: tuple[SavedModule, ...], limit: int) -> None:
    distinct = {one.weight for one in saved}
    size = sum(weight.num_bytes for weight in distinct)
    if size <= limit:
        return
    names = ", ".join(sorted(weight.name for weight in distinct))
    advice = (
        "; it is a copy that PEFT saved of the base's own weights: save the adapter with "
        "save_pretrained(…, save_embedding_layers=False)"
        if any(one.is_copy for one in saved)
        else ""
    )
    raise AdapterRefused(
        f"{names}: {size} bytes of whole modules, at most {limit} (--max-saved-bytes){advice}",
        reason="ADAPTER_TOO_LARGE",
        metadata={"field": "max_saved_bytes", "value": str(size), "limit": str(limit)},
    )


def _other_size(
    base: BaseModelFacts, tensor: TensorLocator, value: int, limit: int
) -> AdapterRefused:
    vocabulary = limit == base.spec.vocab_size
    what = "tokens" if vocabulary else "features"
    problem = f"{value} {what}, {base.name} has {limit}"
    if vocabulary and value > limit:
        problem += ": tokens that were added while training cannot be served"
    return AdapterRefused(
        f"tensor {tensor.name[:200]}: {problem}",
        reason="VOCABULARY_MISMATCH" if vocabulary else "BASE_MODEL_MISMATCH",
        metadata={"field": tensor.name[:200], "value": str(value), "limit": str(limit)},
    )


def _refused(reason: str, what: str, problem: str) -> AdapterRefused:
    return AdapterRefused(
        f"{what[:200]}: {problem}",
        reason=reason,
        metadata={"field": what[:200], "value": what[:200], "limit": problem},
    )
