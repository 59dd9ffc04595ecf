"""How many adapters a step may hold when the setting leaves it to the device."""

from __future__ import annotations

import pytest

from engine_svc.compose import num_places
from engine_svc.settings import load


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
