"""A row of tests/support/coverage.py as folders: what PEFT reads, and what we are given."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.coverage import CoverageCase
from tests.support.oracle import write_fused_twin, write_peft_adapter


@dataclass(frozen=True, slots=True)
class WrittenRow:
    """`trained_on`: the base that PEFT puts `folder` on; `served`: the same under the row's names
    of tensors."""

    trained_on: Path
    folder: Path
    served: Path


def write_row(
    case: CoverageCase, model_dir: Path, root: Path, seed: int, *, narrow: bool = False
) -> WrittenRow:  # fmt: skip
    """Let PEFT save the row's adapter below `root`; `narrow` rounds its weights to bf16 at last."""
    trained_on = write_fused_twin(model_dir, root / "fused") if case.fused else model_dir
    copies = "auto" if case.copies else False
    folder = write_peft_adapter(trained_on, root / str(seed), seed, copies, **dict(case.config))
    _write_fields(folder, case.written)
    _rewrite_tensors(folder, folder, dtype=case.dtype)
    if narrow:
        _rewrite_tensors(folder, folder, dtype="bfloat16")
    served = root / f"{seed} served"
    shutil.copytree(folder, served)
    _rewrite_tensors(folder, served, keys=case.keys)
    return WrittenRow(trained_on, folder, served)


def _write_fields(folder: Path, fields: dict[str, Any]) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def _rewrite_tensors(
    source: Path, target: Path, *, dtype: str = "", keys: tuple[tuple[str, str], ...] = ()
) -> None:
    tensors = load_file(source / "adapter_model.safetensors")
    found = {}
    for name, tensor in tensors.items():
        renamed = name
        for old, new in keys:
            renamed = renamed.replace(old, new)
        assert not keys or renamed != name
        found[renamed] = tensor.to(getattr(torch, dtype)) if dtype else tensor
    save_file(found, target / "adapter_model.safetensors")
