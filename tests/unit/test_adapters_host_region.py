"""The host region: spans never overlap, and a reader sees what the creator wrote."""

from __future__ import annotations

import errno
import itertools
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_svc.adapters.host_region import SPAN_ALIGN, HostRegion
from engine_svc.adapters.spans import SpanAllocator
from loraplex.status import ResourceExhausted


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5000)), max_size=60))
def test_spans_never_overlap_and_come_back_whole(actions):
    spans, taken = SpanAllocator(16 * 1024, 64), {}
    for take, size in actions:
        if take:
            offset = spans.try_take(size)
            if offset is not None:
                taken[offset] = size
        elif taken:
            offset = sorted(taken)[size % len(taken)]
            del taken[offset]
            spans.give_back(offset)
        spans.check_integrity()
        ranges = sorted((offset, offset + size) for offset, size in taken.items())
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ranges))
    for offset in taken:
        spans.give_back(offset)
    spans.check_integrity()
    assert spans.try_take(16 * 1024) == 0


def test_reader_sees_what_the_creator_writes(tmp_path):
    region = HostRegion.create(tmp_path / "host", 10 * SPAN_ALIGN)
    reader = HostRegion.attach(tmp_path / "host")
    span = region.try_take(5000)
    region.view(span)[:4] = b"abcd"
    assert bytes(reader.view(span)[:4]) == b"abcd"
    assert span.offset % SPAN_ALIGN == 0
    with pytest.raises(TypeError):
        reader.view(span)[:1] = b"x"
    region.close()
    reader.close()


def test_region_is_sparse_until_taken(tmp_path):
    region = HostRegion.create(tmp_path / "host", 64 << 20)
    assert os.stat(region.path).st_blocks * 512 < 1 << 20
    region.try_take(2 << 20)
    assert os.stat(region.path).st_blocks * 512 >= 2 << 20
    region.close()


def test_new_creator_keeps_the_mappings_of_readers(tmp_path):
    first = HostRegion.create(tmp_path / "host", SPAN_ALIGN)
    reader = HostRegion.attach(tmp_path / "host")
    first.close()
    second = HostRegion.create(tmp_path / "host", SPAN_ALIGN)
    span = second.try_take(10)
    second.view(span)[:2] = b"ok"
    assert bytes(reader.view(span)[:2]) == b"ok"
    second.close()
    reader.close()


def test_full_region_says_no_and_full_file_system_says_why(tmp_path, monkeypatch):
    region = HostRegion.create(tmp_path / "host", 2 * SPAN_ALIGN)
    assert region.try_take(3 * SPAN_ALIGN) is None

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ResourceExhausted, match="host-cache-bytes"):
        region.try_take(SPAN_ALIGN)
    monkeypatch.undo()
    assert region.try_take(2 * SPAN_ALIGN) is not None
    region.check_integrity()
    region.close()
