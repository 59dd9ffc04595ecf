"""Weight files that were cut, bent or written by an enemy: refused, in bounded time and memory."""

from __future__ import annotations

import json
import struct
import time
import tracemalloc
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.adapter_format.tensors import MAX_HEADER_BYTES, check_finite, read_header
from loraplex.status import AdapterRefused
from tests.support.tiny_adapters import adapter_tensors, safetensors_bytes, tiny_base

TENSORS = adapter_tensors(tiny_base().spec)
GOOD = safetensors_bytes(TENSORS)
HEADER_BYTES = int.from_bytes(GOOD[:8], "little")


def read(path: Path, content: bytes):
    path.write_bytes(content)
    tensors = read_header(path, "w.safetensors")
    check_finite(path, tensors)
    return tensors


def refused(path: Path, content: bytes) -> str:
    with pytest.raises(AdapterRefused) as raised:
        read(path, content)
    assert raised.value.reason == "WEIGHTS_INVALID"
    return raised.value.message


def with_header(table: object, body: bytes = b"") -> bytes:
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    return struct.pack("<Q", len(text)) + text + body


def test_good_file_lists_its_tensors_in_order(tmp_path):
    tensors = read(tmp_path / "w", GOOD)
    assert [tensor.name for tensor in tensors] == list(TENSORS)
    assert [tensor.shape for tensor in tensors] == [value.shape for value in TENSORS.values()]
    first = tensors[0]
    start = first.offset
    assert GOOD[start : start + first.num_bytes] == next(iter(TENSORS.values())).tobytes()


def test_safetensors_reads_what_our_writer_writes():
    numpy = pytest.importorskip("safetensors.numpy")
    loaded = numpy.load(GOOD)
    assert loaded.keys() == TENSORS.keys()
    assert all((loaded[name] == value).all() for name, value in TENSORS.items())


@settings(deadline=None, max_examples=150)
@given(st.integers(0, len(GOOD) - 1))
def test_every_truncation_is_refused(length):
    with TemporaryDirectory() as folder:
        refused(Path(folder) / "w", GOOD[:length])


@settings(deadline=None, max_examples=300)
@given(st.integers(0, 8 + HEADER_BYTES - 1), st.integers(0, 255))
def test_any_byte_of_the_header_may_change_without_a_crash(position, value):
    mangled = bytearray(GOOD)
    mangled[position] = value
    with TemporaryDirectory() as folder:
        try:
            tensors = read(Path(folder) / "w", bytes(mangled))
        except AdapterRefused as error:
            assert error.reason in ("WEIGHTS_INVALID", "WEIGHTS_NOT_FINITE")  # noqa: PT017
        else:
            assert sum(tensor.num_bytes for tensor in tensors) == len(GOOD) - 8 - HEADER_BYTES


def entry(start, end, dtype="F32", shape=None):
    return {
        "dtype": dtype,
        "shape": [(end - start) // 4] if shape is None else shape,
        "data_offsets": [start, end],
    }


CASES = {
    "overlap": ({"a": entry(0, 8), "b": entry(4, 12)}, 12, "overlaps"),
    "same range": ({"a": entry(0, 8), "b": entry(0, 8)}, 8, "overlaps"),
    "gap": ({"a": entry(0, 4), "b": entry(8, 12)}, 12, "gap"),
    "beyond the end": ({"a": entry(0, 400)}, 8, "truncated"),
    "bytes of nobody": ({"a": entry(0, 4)}, 8, "no tensor owns"),
    "backwards": ({"a": {**entry(0, 4), "data_offsets": [4, 0]}}, 4, "data_offsets"),
    "negative": ({"a": {**entry(0, 4), "data_offsets": [-4, 0]}}, 4, "data_offsets"),
    "offsets text": ({"a": {**entry(0, 4), "data_offsets": "04"}}, 4, "data_offsets"),
    "three offsets": ({"a": {**entry(0, 4), "data_offsets": [0, 4, 4]}}, 4, "data_offsets"),
    "offset truth": ({"a": {**entry(0, 4), "data_offsets": [False, 4]}}, 4, "data_offsets"),
    "huge shape": ({"a": entry(0, 4, shape=[2**47] * 8)}, 4, "does not take"),
    "negative shape": ({"a": entry(0, 4, shape=[-1])}, 4, "shape"),
    "many dimensions": ({"a": entry(0, 4, shape=[1] * 9)}, 4, "shape"),
    "float shape": ({"a": entry(0, 4, shape=[1.0])}, 4, "shape"),
    "no shape": ({"a": {"dtype": "F32", "data_offsets": [0, 4]}}, 4, "shape"),
    "unknown dtype": ({"a": entry(0, 4, dtype="F31")}, 4, "F31"),
    "dtype list": ({"a": {**entry(0, 4), "dtype": ["F32"]}}, 4, "dtype"),
    "entry is text": ({"a": "F32"}, 4, "no object"),
    "entry is null": ({"a": None}, 4, "no object"),
    "header list": ([1], 0, "no JSON object"),
    "key twice": (b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{}}', 4, "twice"),
    "not utf-8": (b'{"\xff": 1}', 0, "utf-8"),
    "nan": (b'{"a": NaN}', 0, "NaN"),
}


@pytest.mark.parametrize("case", CASES)
def test_header_that_lies_is_refused(tmp_path, case):
    table, body_bytes, shown = CASES[case]
    assert shown in refused(tmp_path / "w", with_header(table, bytes(body_bytes)))


@pytest.mark.parametrize("length", [0, 1, 7])
def test_file_shorter_than_its_length_field_is_refused(tmp_path, length):
    assert "too few" in refused(tmp_path / "w", bytes(length))


@pytest.mark.parametrize(
    "content",
    [
        struct.pack("<Q", 2**63) + b"x" * 100,
        struct.pack("<Q", MAX_HEADER_BYTES + 1) + b" " * (MAX_HEADER_BYTES + 1),
        with_header(b'{"a":' * (MAX_HEADER_BYTES // 5 - 1)),
        with_header(b"[" * MAX_HEADER_BYTES),
        with_header(b'{"a":[' + b"[]," * (MAX_HEADER_BYTES // 3 - 10) + b"[]]}"),
        with_header(b'{"a":' + b"9" * 4_000_000 + b"}"),
        with_header(("{" + ",".join(f'"{i}":{{}}' for i in range(350_000)) + "}").encode()),
    ],
    ids=["length", "over the limit", "objects", "lists", "many lists", "digits", "many names"],
)
def test_hostile_headers_cost_bounded_time_and_memory(tmp_path, content):
    path = tmp_path / "w"
    path.write_bytes(content)
    tracemalloc.start()
    started = time.perf_counter()
    with pytest.raises(AdapterRefused):
        read_header(path, "w")
    seconds, (_, peak) = time.perf_counter() - started, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert seconds < 20
    assert peak < 300 << 20


def test_file_that_shrinks_between_header_and_values_is_refused(tmp_path):
    path = tmp_path / "w"
    path.write_bytes(GOOD)
    tensors = read_header(path, "w")
    path.write_bytes(GOOD[:-1000])
    with pytest.raises(AdapterRefused, match="ends inside"):
        check_finite(path, tensors)
