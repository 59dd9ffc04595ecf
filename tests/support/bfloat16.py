"""The equality rule of bf16, with PEFT in bf16 as its yardstick.

e = logits − logits of PEFT in fp32 on the same bf16-rounded weights, teacher-forced. Ours may be
RMS × PEFT's own in root mean square and PERCENTILE × in the 99.9th percentile; a row counts if its
adapter's effect on the logits is at least EFFECT × our rms e.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel
from safetensors.torch import load_file, save_file

from tests.support.direct_runner import WAY_OPTIONS, WAYS, SeatedSequence

RMS, PERCENTILE, EFFECT = 1.1, 1.25, 10
#: the large tests leave a CPU's own way to make test-slow: a CPU serves fp32 unless asked
LARGE_WAYS = (pytest.param(WAYS[0], marks=pytest.mark.slow), *WAYS[1:])


def round_weights(file: Path) -> None:
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})


def options_of(way: str) -> dict[str, Any]:
    return {**WAY_OPTIONS[way], "dtype": "bfloat16"}


def load_narrow(model_dir: Path, way: str) -> Any:
    """The base in bf16, on the device of one of WAYS."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.bfloat16, attn_implementation="eager"
    )
    return model.eval().to("cuda" if way == "cuda" else "cpu")


def with_adapter(base: Any, adapter: Path) -> Any:
    """PEFT's model over a copy of `base`, the adapter in the base's dtype."""
    model = PeftModel.from_pretrained(
        copy.deepcopy(base), str(adapter), autocast_adapter_dtype=False
    )
    return model.eval()


@torch.no_grad()
def logits(model: Any, sequences: Sequence[SeatedSequence]) -> torch.Tensor:
    """[N, V] fp32 of the positions that these sampled at, one sequence after the other; prompts
    and outputs are of equal lengths."""
    ids = torch.tensor([sequence.tokens[:-1] for sequence in sequences], device=model.device)
    found: torch.Tensor = model(ids).logits[:, len(sequences[0].prompt) - 1 :]
    return found.flatten(0, 1).float().cpu()


@torch.no_grad()
def recorded(sequences: Sequence[SeatedSequence]) -> torch.Tensor:
    """[N, V] fp32 as `logits` has them, of our own run."""
    return torch.cat([torch.stack(sequence.logits) for sequence in sequences]).float().cpu()


def rms(values: torch.Tensor) -> float:
    return float(values.pow(2).mean().sqrt())


def percentile(values: torch.Tensor) -> float:
    return float(values.abs().flatten().quantile(0.999))


def misses(error: torch.Tensor, yardstick: torch.Tensor) -> list[str]:
    """What of the rule an error breaks, beside PEFT's own; none: it holds."""
    parts = {
        "rms": (rms(error) / rms(yardstick), RMS),
        "99.9th percentile": (percentile(error) / percentile(yardstick), PERCENTILE),
    }
    return [
        f"{name}: {ratio:.3f} × PEFT's, at most {most}"
        for name, (ratio, most) in parts.items()
        if not ratio <= most
    ]


def too_small(effect: torch.Tensor, error: torch.Tensor) -> list[str]:
    """Whether an adapter does too little for its row to count."""
    ratio = rms(effect) / rms(error)
    return [] if ratio >= EFFECT else [f"effect: {ratio:.1f} × the error, at least {EFFECT}"]


def report(failed: Mapping[str, Sequence[str]]) -> str:
    """A line for each name of which something is broken; empty: nothing is."""
    return "\n".join(f"{name}: {', '.join(what)}" for name, what in failed.items() if what)
