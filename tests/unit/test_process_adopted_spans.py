"""A loader that starts again keeps what the core still holds from the one before it."""

from __future__ import annotations

from pathlib import Path

from engine_svc.adapters.host_region import HostRegion
from engine_svc.adapters.spans import SpanAllocator
from engine_svc.types import HostSpan


def test_a_range_in_the_middle_is_taken_once_and_joins_again() -> None:
    spans = SpanAllocator(16 * 4096, 4096)
    assert spans.try_take_at(2 * 4096, 5000)
    spans.check_integrity()
    assert not spans.try_take_at(3 * 4096, 1)
    assert not spans.try_take_at(15 * 4096, 2 * 4096)
    assert spans.try_take(3 * 4096) == 4 * 4096
    assert spans.try_take_at(0, 2 * 4096)
    spans.check_integrity()
    for offset in (0, 2 * 4096, 4 * 4096):
        spans.give_back(offset)
    spans.check_integrity()
    assert spans.free_bytes == 16 * 4096


def test_a_span_taken_over_keeps_its_bytes(tmp_path: Path) -> None:
    first = HostRegion.create(tmp_path / "region", 8 * 4096)
    first.try_take(4096)
    span = first.try_take(4096)
    assert span is not None
    first.view(span)[:4] = b"held"
    second = HostRegion.create(tmp_path / "region", 8 * 4096)
    assert second.try_take_at(span)
    other = second.try_take(2 * 4096)
    assert other is not None
    second.view(other)[:] = b"x" * other.num_bytes
    assert bytes(second.view(span)[:4]) == b"held"
    assert not second.try_take_at(HostSpan(span.offset, 1))
