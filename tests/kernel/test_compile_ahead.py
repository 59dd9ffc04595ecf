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
MAX_SHARED_BYTES = 48 * 1024
MAX_REGISTERS = 128


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


def test_both_kernels_compile_for_both_architectures_and_all_dtypes(
    variants: list[dict[str, Any]],
) -> None:
    keys = {(v["kernel"], v["dtype"], v["architecture"]) for v in variants}
    assert len(keys) == 2 * 3 * 2


def test_weights_are_loaded_sixteen_bytes_a_thread(variants: list[dict[str, Any]]) -> None:
    narrow = [variant for variant in variants if variant["wide_loads"] < 4]
    assert narrow == []


def test_half_precision_kernels_stay_inside_their_registers_and_shared_memory(
    variants: list[dict[str, Any]],
) -> None:
    greedy = [
        variant
        for variant in variants
        if variant["dtype"] != "fp32"
        and (
            variant["registers"] > MAX_REGISTERS
            or variant["shared_bytes"] > MAX_SHARED_BYTES
            or variant["stack_bytes"] > 16
            or variant["spilled_bytes"]
        )
    ]
    assert greedy == []
