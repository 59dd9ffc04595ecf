"""The Triton kernels compile for sm_80 and sm_90 without a GPU, load wide and do not spill."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
#: of four warps; an A100 has 164 KB a multiprocessor, an H100 and its like 228
MAX_SHARED_BYTES = 40 * 1024
MAX_REGISTERS = 128
#: a few registers kept in memory on the older architecture
MAX_STACK_BYTES = 48
KERNELS = 7


@pytest.fixture(scope="module")
def variants(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """One entry a kernel, dtype and architecture (compile_ahead.py)."""
    root = HERE.parents[1]
    environment = {
        **os.environ,
        "PYTHONPATH": str(root),
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")),
    }
    command = [sys.executable, str(HERE / "compile_ahead.py")]
    child = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, timeout=300
    )
    assert child.returncode == 0, child.stderr[-4000:]
    return [json.loads(line) for line in child.stdout.splitlines()]


def test_all_kernels_compile_for_both_architectures_and_all_dtypes(
    variants: list[dict[str, Any]],
) -> None:
    keys = {(v["kernel"], v["in_features"], v["dtype"], v["architecture"]) for v in variants}
    assert len(keys) == KERNELS * 3 * 2


def test_weights_are_loaded_sixteen_bytes_a_thread(variants: list[dict[str, Any]]) -> None:
    narrow = [v for v in variants if v["wide_loads"] < 2 or v["narrow_loads"]]
    assert narrow == []


def test_half_precision_decode_kernels_leave_room_for_sixteen_warps_of_a_multiprocessor(
    variants: list[dict[str, Any]],
) -> None:
    greedy = [
        variant
        for variant in variants
        if variant["dtype"] != "fp32"
        and not variant["kernel"].startswith("prefill")
        and (
            variant["registers"] > MAX_REGISTERS
            or variant["shared_bytes"] > MAX_SHARED_BYTES * variant["warps"] // 4
            or variant["stack_bytes"] > MAX_STACK_BYTES
        )
    ]
    assert greedy == []


def test_nothing_spills_in_half_precision(variants: list[dict[str, Any]]) -> None:
    spilled = [v for v in variants if v["dtype"] != "fp32" and v["spilled_bytes"]]
    assert spilled == []
