"""What an adapter is once it has been checked: targets with tensors, and the report for people."""

from __future__ import annotations

from collections.abc import Mapping
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
    """One LoRA of a module of the base: y += scaling · (x·Aᵀ)·Bᵀ, A [rank, in_features].

    The module's rows are row0 … row0 + num_rows − 1 of `b` [rows, rank], `b_bias` [rows] and
    `magnitude` [rows]: an adapter that was trained on a fused linear has one tensor for several
    modules. `layer` is NO_LAYER for lm_head and for embed_tokens, whose x is one of vocab_size.
    `b_bias` (lora_bias) makes it scaling · ((x·Aᵀ)·Bᵀ + b_bias), `magnitude` is DoRA's.
    """

    layer: int
    module: str
    rank: int
    scaling: float
    a: TensorLocator
    b: TensorLocator
    row0: int
    num_rows: int
    b_bias: TensorLocator | None = None
    magnitude: TensorLocator | None = None

    @property
    def tensors(self) -> tuple[TensorLocator, ...]:
        return tuple(t for t in (self.a, self.b, self.b_bias, self.magnitude) if t is not None)

    @property
    def num_bytes(self) -> int:
        """This module's share of the tensors; a shared A counts with the first rows."""
        of_rows = [tensor for tensor in self.tensors if tensor is not self.a]
        share = sum(t.num_bytes // t.shape[0] * self.num_rows for t in of_rows)
        return share + (0 if self.row0 else self.a.num_bytes)


@dataclass(frozen=True, slots=True)
class BiasSpec:
    """A module's bias that takes the place of the base's: rows row0 … of `values` [rows]."""

    layer: int
    module: str
    values: TensorLocator
    row0: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class SavedModule:
    """Weights [vocab_size, hidden_size] in the place of the base's embed_tokens or lm_head.

    `is_copy`: PEFT saved them beside a LoRA, nobody trained them.
    """

    module: str
    weight: TensorLocator
    is_copy: bool = False


@dataclass(frozen=True, slots=True)
class AdapterParts:
    """What an adapter brings, each ordered by layer and then as LAYER_MODULES orders modules;
    embed_tokens and lm_head last."""

    targets: tuple[TargetSpec, ...]
    biases: tuple[BiasSpec, ...] = ()
    saved: tuple[SavedModule, ...] = ()

    @property
    def tensors(self) -> tuple[TensorLocator, ...]:
        """Every tensor once."""
        found = {t.name: t for target in self.targets for t in target.tensors}
        found.update({bias.values.name: bias.values for bias in self.biases})
        found.update({one.weight.name: one.weight for one in self.saved})
        return tuple(found.values())


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """What the engine needs of a checked adapter."""

    parts: AdapterParts
    max_rank: int
    #: bytes of all tensors as the files hold them
    weights_bytes: int
    parameter_count: int
    #: None: the base's own
    chat_template: str | None = None
    #: None: the base's own
    eos_token_ids: tuple[int, ...] | None = None
    #: special tokens that its chat template names; None: the base's own
    template_tokens: Mapping[str, str] | None = None

    @property
    def targets(self) -> tuple[TargetSpec, ...]:
        return self.parts.targets


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


def coverage(parts: AdapterParts, notes: tuple[str, ...] = ()) -> CoverageReport:
    """One row for each (module, rank, scaling), in the order in which they first occur."""
    groups: dict[tuple[str, int, float], list[TargetSpec]] = {}
    for target in parts.targets:
        groups.setdefault((target.module, target.rank, target.scaling), []).append(target)
    rows = [
        CoverageRow(
            module,
            layer_ranges([target.layer for target in group]),
            len(group),
            rank,
            factor,
            sum(target.num_bytes for target in group),
        )
        for (module, rank, factor), group in groups.items()
    ]
    rows += [CoverageRow(one.module, "-", 1, 0, 1.0, one.weight.num_bytes) for one in parts.saved]
    return CoverageReport(tuple(rows), (*_notes(parts), *notes))


def _notes(parts: AdapterParts) -> tuple[str, ...]:
    """What the rows do not show."""
    dora = sum(target.magnitude is not None for target in parts.targets)
    biased = sum(target.b_bias is not None for target in parts.targets)
    found = (
        (dora, "weight-decomposed (DoRA)"),
        (biased, "with a bias of the LoRA itself"),
        (len(parts.biases), "whose bias replaces the base's"),
    )
    copies = {one.weight.name for one in parts.saved if one.is_copy}
    return (
        *(f"{count} modules {what}" for count, what in found if count),
        *(
            f"{name} is a copy of the base's weights that PEFT saved; it is served as it is and "
            "takes memory: save_pretrained(…, save_embedding_layers=False) leaves it out"
            for name in sorted(copies)
        ),
    )


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
