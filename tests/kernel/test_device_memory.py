"""What only a GPU can show of loading: rates, memory, and shards through pinned buffers."""

from __future__ import annotations

import pytest
import torch

from engine_svc.model.device_rates import COPY_BYTES, measure_rates, runtime_bytes
from engine_svc.model.weight_staging import Staging

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU"),
]


def test_rates_are_those_of_a_gpu_and_leave_no_memory_behind() -> None:
    before = torch.cuda.memory_reserved()
    rates = measure_rates("auto")
    assert rates is not None
    assert 1e11 < rates.bytes_per_s < 2e13
    assert 1e13 < rates.flops_per_s < 1e16
    # what a library keeps for itself, and none of the blocks that were measured
    assert torch.cuda.memory_reserved() - before < COPY_BYTES // 2


def test_runtime_is_what_is_used_beyond_what_is_known() -> None:
    free, total = torch.cuda.mem_get_info()
    assert runtime_bytes("cuda", 0) == pytest.approx(total - free, abs=64 << 20)
    assert runtime_bytes("cuda", total) == 0


@pytest.mark.parametrize("num_numbers", [1, 1000, 3_000_001])
def test_staged_copies_arrive_whole_whatever_the_ring_reuses(num_numbers: int) -> None:
    device = torch.device("cuda")
    staging = Staging(device, chunk_bytes=1 << 20, num_buffers=2)
    for seed in range(3):
        source = torch.randn(num_numbers, generator=torch.Generator().manual_seed(seed))
        target = torch.full((num_numbers,), torch.nan, device=device)
        staging.copy(source, target)
        assert torch.equal(target.cpu(), source)
