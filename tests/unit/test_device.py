"""Which device an engine takes, and what it says of a GPU that is too old."""

from __future__ import annotations

import pytest
import torch

from engine_svc.model.device import device_of
from loraplex.status import FieldInvalid


def gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")


@pytest.mark.parametrize(
    ("capability", "found"), [((8, 0), "cuda"), ((9, 0), "cuda"), ((7, 5), "cpu")]
)
def test_auto_takes_a_gpu_that_the_kernels_can_use(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], found: str
) -> None:
    gpu(monkeypatch, capability)
    assert device_of("auto").type == found
    assert device_of("cpu").type == "cpu"


def test_a_gpu_that_is_too_old_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, (7, 5))
    with pytest.raises(
        FieldInvalid, match=r"Tesla T4 has compute capability 7\.5, .* at least 8\.0"
    ):
        device_of("cuda")


def test_a_machine_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_of("auto").type == "cpu"
    with pytest.raises(FieldInvalid, match="torch sees no GPU"):
        device_of("cuda")
    with pytest.raises(FieldInvalid, match="auto, cpu or cuda"):
        device_of("tpu")
