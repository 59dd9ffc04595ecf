"""A GPU with too little memory stops the start with the settings to change; on a CPU, with what
torch says of a GPU in its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine_svc.model import build, device_rates
from engine_svc.model.build import ModelOptions, load_model
from engine_svc.model.device_memory import CPU_ARENA_BYTES, arena_bytes_of
from loraplex.status import FailedPrecondition, FieldInvalid
from tests.support.tiny_model import write_tiny_model

GPU = torch.device("cuda")
TOTAL, PAGE = 1000, 100
#: as torch says it
FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nGPU 0 has …")


def of_gpu(
    monkeypatch: pytest.MonkeyPatch, free: int, asked: int = 0, utilization: float = 0.9
) -> int:
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, TOTAL))
    return arena_bytes_of(GPU, asked, utilization, PAGE)


def test_an_arena_takes_its_share_of_the_gpu_beside_what_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert of_gpu(monkeypatch, free=700) == 600
    assert of_gpu(monkeypatch, free=700, utilization=1.0) == 700
    assert of_gpu(monkeypatch, free=700, asked=650, utilization=0.1) == 650
    assert arena_bytes_of(torch.device("cpu"), 0, 0.9, PAGE) == CPU_ARENA_BYTES
    assert arena_bytes_of(torch.device("cpu"), 5, 0.9, PAGE) == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"free": 700, "utilization": 0.3}, "gpu_memory_utilization is 0.3; must be at least 0.40"),
        (
            {"free": 700, "utilization": 0.399},
            "at least 0.40: weights, buffers of a step and other",
        ),
        ({"free": 100}, "gpu_memory_utilization is 0.9; must be at least 1.00"),
        ({"free": 700, "asked": 701}, "arena_bytes is 701; must be at most 700: weights"),
        ({"free": 99}, "take 901 of the GPU's 1000 bytes, and no page of 100 fits"),
        ({"free": 99, "asked": 90}, "no page of 100 fits"),
    ],
)
def test_a_gpu_without_room_for_the_arena_names_the_setting_and_its_limit(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    with pytest.raises((FieldInvalid, FailedPrecondition)) as refused:
        of_gpu(monkeypatch, **options)
    assert message in str(refused.value)
    assert refused.value.reason == "CONFIG_INVALID"


@pytest.mark.parametrize("said", [FULL, RuntimeError("Triton Error [CUDA]: out of memory")])
@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("load_weights", "for the weights; use a GPU with more memory"),
        (
            "GpuWorkspace",
            "for the buffers of a step; lower --max-num-seqs (7) or --max-num-batched-tokens (70)",
        ),
        (
            "build_gpu_runner",
            "for the arena and what stands beside it; lower --arena-bytes (4194304), or lower"
            " --max-num-seqs (7)",
        ),
    ],
)
def test_memory_that_ends_at_the_start_names_the_settings_to_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, message: str, said: RuntimeError
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise said

    monkeypatch.setattr(build, part, fails)
    options = ModelOptions(
        str(tmp_path / "region"), device="cpu", static_buffers=True, arena_bytes=1 << 22,
        max_num_seqs=7, max_num_batched_tokens=70,
    )  # fmt: skip
    with pytest.raises(FailedPrecondition) as refused:
        load_model(write_tiny_model(tmp_path / "model"), options)
    assert message in str(refused.value)
    assert "out of memory" in str(refused.value)
    assert "GPU 0 has" not in str(refused.value)


def test_an_error_that_is_not_of_memory_stays_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("size mismatch")

    monkeypatch.setattr(build, "load_weights", fails)
    with pytest.raises(RuntimeError, match="size mismatch"):
        load_model(write_tiny_model(tmp_path / "model"), ModelOptions(str(tmp_path), device="cpu"))


def test_a_gpu_that_is_full_is_not_measured_but_the_start_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given_back: list[bool] = []

    def fails() -> float:
        raise FULL

    monkeypatch.setattr(device_rates, "device_of", lambda name: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given_back.append(True))
    monkeypatch.setattr(device_rates, "_copy_s", fails)
    assert device_rates.measure_rates("auto") is None
    assert given_back
