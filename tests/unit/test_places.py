"""How many adapters and tokens a step may hold when the settings leave it to the device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine_svc import compose
from engine_svc.compose import load_engine_model, num_places
from engine_svc.settings import load, step_tokens
from loraplex.status import FailedPrecondition


@pytest.mark.parametrize(
    ("flags", "device", "places"),
    [
        ([], "cpu", 4),
        ([], "cuda", 64),
        (["--max-num-seqs", "256", "--max-num-batched-tokens", "1024"], "cuda", 256),
        (["--max-loras", "auto", "--max-cpu-loras", "9"], "cuda", 9),
        (["--max-cpu-loras", "9"], "cpu", 4),
        (["--max-loras", "7"], "cuda", 7),
        (["--max-loras", "7"], "cpu", 7),
    ],
)
def test_places_follow_the_device_unless_they_are_given(
    flags: list[str], device: str, places: int
) -> None:
    assert num_places(load(["--model", "m", *flags], {}), device) == places


@pytest.mark.parametrize(
    ("flags", "device", "tokens"),
    [
        ([], "cpu", 512),
        ([], "cuda", 1024),
        (["--max-num-seqs", "1000"], "cpu", 1016),
        (["--max-num-seqs", "1024"], "cuda", 1040),
        (["--max-num-batched-tokens", "auto"], "cuda", 1024),
        (["--max-num-batched-tokens", "96"], "cuda", 96),
    ],
)
def test_tokens_of_a_step_follow_the_device_unless_they_are_given(
    flags: list[str], device: str, tokens: int
) -> None:
    assert step_tokens(load(["--model", "m", *flags], {}), device) == tokens


def test_a_quantum_below_a_gpus_step_is_refused_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = load(["--model", str(tmp_path / "none"), "--quantum", "600"], {})
    monkeypatch.setattr(compose, "device_of", lambda name: torch.device("cuda"))
    with pytest.raises(FailedPrecondition, match="--quantum is 600; must be auto or at least 1024"):
        load_engine_model(settings, tmp_path / "region")
