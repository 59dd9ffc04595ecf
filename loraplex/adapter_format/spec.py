"""What an adapter is once it has been checked: targets with tensors, and the report for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from loraplex.base_model import NO_LAYER, BaseModelSpec

#: safetensors dtype → numpy's name for the bits (bfloat16 has none: its bits as uint16) and bytes
DTYPES = {"F32": ("<u4", 4), "F16": ("<u2", 2), "BF16": ("<u2", 2)}


@dataclass(frozen=True, slots=True)
class BaseModelFacts:
    """A registered base model, as far as an adapter is held against it.

    An empty `vocabulary_digest` is unknown (vocabularies are not compared); an empty
    `chat_template_digest` means that the base has no template.
    """

    name: str
    aliases: tuple[str, ...]
    spec: BaseModelSpec
    vocabulary_digest: str = ""
    chat_template_digest: str = ""
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TensorLocator:
    """One tensor inside a weight file; `offset` counts bytes from the file's start."""

    file: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class TargetSpec:
    """One LoRA: y += scaling · (x·Aᵀ)·Bᵀ, A [rank, in_features], B [out_features, rank].

    `layer` is NO_LAYER for embed_tokens (x is one of vocab_size) and lm_head.
    """

    layer: int
    module: str
    rank: int
    scaling: float
    a: TensorLocator
    b: TensorLocator


@dataclass(frozen=True, slots=True)
class SavedModule:
    """Weights [vocab_size, hidden_size] in the place of the base's embed_tokens or lm_head.

    `is_copy`: PEFT saved them beside a LoRA, nobody trained them.
    """

    module: str
    weight: TensorLocator
    is_copy: bool = False


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """All targets, by layer and then as LAYER_MODULES orders modules; embed_tokens and lm_head
    last."""

    targets: tuple[TargetSpec, ...]
    max_rank: int
    #: bytes of all matrices as the files hold them
    weights_bytes: int
    parameter_count: int
    #: None: the base's own
    chat_template: str | None = None
    #: None: the base's own
    eos_token_ids: tuple[int, ...] | None = None
    saved: tuple[SavedModule, ...] = ()
    #: special tokens that its chat template names; None: the base's own
    template_tokens: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class CoverageRow:
    """Targets of one module that share rank and scaling; rank 0: a whole saved module."""

    module: str
    layers: str
    num_layers: int
    rank: int
    scaling: float
    num_bytes: int


@dataclass(frozen=True, slots=True)
class CoverageReport:
    """Where every byte of the adapter lands; `notes` say what was checked without effect."""

    rows: tuple[CoverageRow, ...]
    notes: tuple[str, ...] = ()


def coverage(
    targets: Iterable[TargetSpec],
    notes: tuple[str, ...] = (),
    saved: Iterable[SavedModule] = (),
) -> CoverageReport:
    """One row for each (module, rank, scaling), in the order in which they first occur."""
    groups: dict[tuple[str, int, float], list[TargetSpec]] = {}
    for target in targets:
        groups.setdefault((target.module, target.rank, target.scaling), []).append(target)
    rows = [
        CoverageRow(
            module,
            layer_ranges([target.layer for target in group]),
            len(group),
            rank,
            factor,
            sum(target.a.num_bytes + target.b.num_bytes for target in group),
        )
        for (module, rank, factor), group in groups.items()
    ]
    rows += [CoverageRow(one.module, "-", 1, 0, 1.0, one.weight.num_bytes) for one in saved]
    notes += tuple(
        f"{one.weight.name} is a copy of the base's weights that PEFT saved; it is served as it "
        "is and takes memory: save_pretrained(…, save_embedding_layers=False) leaves it out"
        for one in saved
        if one.is_copy
    )
    return CoverageReport(tuple(rows), notes)


def layer_ranges(layers: list[int]) -> str:
    """`0-3, 7` for [0, 1, 2, 3, 7]; `-` for what is in no layer."""
    if set(layers) == {NO_LAYER}:
        return "-"
    parts: list[list[int]] = []
    for layer in sorted(layers):
        if parts and parts[-1][1] == layer - 1:
            parts[-1][1] = layer
        else:
            parts.append([layer, layer])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
