"""A base model with one adapter folded into its weights: the tensors of a plain checkpoint.

Per stored tensor, in fp32, rounded once to the checkpoint's dtype:

    W ← W₀ + s·B·A        DoRA: W ← m / ‖W₀ + s·B·A‖ ⊙ (W₀ + s·B·A)
    b ← b_base, or the adapter's, + s·b_B
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from engine_svc.layout import SITES
from engine_svc.model.checkpoint import Checkpoint
from loraplex.adapter_format import AdapterParts, TargetSpec, TensorLocator
from loraplex.base_model import (
    ATTENTION_MODULES,
    EMBEDDING,
    HEAD,
    MLP_MODULES,
    NO_LAYER,
    BaseModelSpec,
    module_path,
)
from loraplex.status import FailedPrecondition


@dataclass(frozen=True, slots=True)
class _BiasPart:
    """factor · values[row0 …] for rows row … of a stored bias, added to it or in its place."""

    values: TensorLocator
    factor: float
    row0: int
    num_rows: int
    row: int
    replaces: bool


_EMBEDDING_WEIGHT, _HEAD_WEIGHT = f"model.{EMBEDDING}.weight", f"{HEAD}.weight"
#: modules that get biases together where a base has none, and the option of its config for them
_BIAS_OPTIONS = {"attention_bias": ATTENTION_MODULES, "mlp_bias": MLP_MODULES}


class MergedWeights:
    """Reads a base checkpoint and an adapter's tensors; merges one tensor at a time.

    `config_changes` are what the merged model's config.json says otherwise than the base's.

    Raises: FailedPrecondition OPTION_UNSUPPORTED when the architecture has no place for a bias.
    """

    def __init__(
        self, folder: Path, base: BaseModelSpec, weights: Path, parts: AdapterParts
    ) -> None:
        self._base, self._parts = base, parts
        self._checkpoint = Checkpoint(folder, base)
        self._adapter: Any = safe_open(str(weights), framework="pt")
        #: stored tensor → (target, first row of its module in the stored tensor)
        self._targets: dict[str, list[tuple[TargetSpec, int]]] = defaultdict(list)
        for target in parts.targets:
            name, row = self._stored(target.layer, target.module)
            self._targets[f"{name}.weight"].append((target, row))
        self._saved = {
            _EMBEDDING_WEIGHT if one.module == EMBEDDING else _HEAD_WEIGHT: one.weight
            for one in parts.saved
        }
        self.config_changes: dict[str, bool] = {}
        self._biases = self._plan_biases()
        sides = {_EMBEDDING_WEIGHT, _HEAD_WEIGHT} & {*self._targets, *self._saved}
        if base.tied_embeddings and sides:
            self.config_changes["tie_word_embeddings"] = False

    @property
    def names(self) -> tuple[str, ...]:
        """Every tensor of the merged checkpoint."""
        names = list(self._checkpoint.names)
        if "tie_word_embeddings" in self.config_changes:
            names.append(_HEAD_WEIGHT)
        return tuple(dict.fromkeys([*names, *self._biases]))

    def file_of(self, name: str) -> str:
        """The file of the base's checkpoint that holds the tensor, or the one beside it."""
        if name in self._checkpoint.names:
            return self._checkpoint.file_of(name)
        beside = _EMBEDDING_WEIGHT if name == _HEAD_WEIGHT else name[: -len("bias")] + "weight"
        return self._checkpoint.file_of(beside)

    @torch.no_grad()
    def tensor(self, name: str, dtype: torch.dtype | None) -> torch.Tensor:
        """One merged tensor; dtype None: the base's of that tensor."""
        if name.endswith(".bias") and name in self._biases:
            return self._bias(name, dtype)
        tied = name == _HEAD_WEIGHT and self._base.tied_embeddings
        base = self._checkpoint.tensor(_EMBEDDING_WEIGHT if tied else name)
        target_dtype = dtype or base.dtype
        if name in self._saved:
            base = self._read(self._saved[name])
        if name in self._targets:
            base = base.float().clone()
            for target, row in self._targets[name]:
                self._add(base, target, row)
        # a tied head must not share memory with the embeddings when both are written
        return base.to(target_dtype, copy=tied).contiguous()

    def _add(self, weight: torch.Tensor, target: TargetSpec, row: int) -> None:
        own = slice(target.row0, target.row0 + target.num_rows)
        delta = target.scaling * (self._read(target.b)[own].float() @ self._read(target.a).float())
        # an embedding is stored the other way round: its outputs are columns
        rows = weight.T if target.module == EMBEDDING else weight
        here = slice(row, row + target.num_rows)
        total = rows[here] + delta
        if target.magnitude is not None:
            magnitude = self._read(target.magnitude)[own].float()
            gain = magnitude / torch.linalg.vector_norm(total, dim=1)
            total = gain.unsqueeze(1) * total
        rows[here] = total

    def _plan_biases(self) -> dict[str, list[_BiasPart]]:
        wanted = [
            (bias.layer, bias.module, bias.values, 1.0, bias.row0, bias.num_rows, True)
            for bias in self._parts.biases
        ] + [
            (t.layer, t.module, t.b_bias, t.scaling, t.row0, t.num_rows, False)
            for t in self._parts.targets
            if t.b_bias is not None
        ]
        biases: dict[str, list[_BiasPart]] = {}
        for layer, module, values, factor, row0, count, replaces in wanted:
            if not self._base.module_bias(module):
                self._add_biases(module, biases)
            name, row = self._stored(layer, module)
            found = biases.setdefault(f"{name}.bias", [])
            found.append(_BiasPart(values, factor, row0, count, row, replaces))
        return biases

    def _add_biases(self, module: str, biases: dict[str, list[_BiasPart]]) -> None:
        """Llama's config can give all linears of a kind a bias: zero where the adapter has none."""
        options = [name for name, modules in _BIAS_OPTIONS.items() if module in modules]
        if self._base.architecture != "LlamaForCausalLM" or not options:
            raise FailedPrecondition(
                f"the adapter brings a bias of {module}, which {self._base.architecture} has no "
                "place for; serve it as an adapter",
                reason="OPTION_UNSUPPORTED",
                metadata={"field": module, "value": "bias", "limit": "a linear of Llama's layers"},
            )
        option = options[0]
        self.config_changes[option] = True
        for layer in range(self._base.num_layers):
            for other in _BIAS_OPTIONS[option]:
                biases.setdefault(f"{module_path(layer, other)}.bias", [])

    def _bias(self, name: str, dtype: torch.dtype | None) -> torch.Tensor:
        weight = self._checkpoint.tensor(name.removesuffix("bias") + "weight")
        has_own = name in self._checkpoint.names
        total = (
            self._checkpoint.tensor(name).float().clone()
            if has_own
            else torch.zeros(weight.shape[0])
        )
        for part in sorted(self._biases[name], key=lambda part: not part.replaces):
            own = slice(part.row0, part.row0 + part.num_rows)
            numbers = part.factor * self._read(part.values)[own].float()
            here = slice(part.row, part.row + part.num_rows)
            total[here] = numbers if part.replaces else total[here] + numbers
        return total.to(dtype or weight.dtype)

    def _stored(self, layer: int, module: str) -> tuple[str, int]:
        """The module's name in the checkpoint, and its first row there."""
        if layer == NO_LAYER:
            return (HEAD if module == HEAD else f"model.{EMBEDDING}"), 0
        modules = next(modules for modules in SITES.values() if module in modules)
        stored = self._base.stored_modules(modules)
        if module in stored:
            return module_path(layer, module), 0
        before = modules[: modules.index(module)]
        row = sum(self._base.module_shape(other)[1] for other in before)
        return module_path(layer, stored[0]), row

    def _read(self, locator: TensorLocator) -> torch.Tensor:
        tensor: torch.Tensor = self._adapter.get_tensor(locator.name)
        return tensor
