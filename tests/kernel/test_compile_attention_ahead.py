"""The attention kernels compile without a GPU, load wide, use wgmma and do not spill."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
#: of one multiprocessor of an A100 and an H100, in bytes
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}
#: programs of the decode kernel that a multiprocessor holds at once
DECODE_PROGRAMS = 2


@pytest.fixture(scope="module")
def variants(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """One entry a kernel, shape, dtype and architecture (compile_attention_ahead.py)."""
    root = HERE.parents[1]
    environment = {
        **os.environ,
        "PYTHONPATH": str(root),
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")),
    }
    command = [sys.executable, str(HERE / "compile_attention_ahead.py")]
    child = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, timeout=600
    )
    assert child.returncode == 0, child.stderr[-4000:]
    return [json.loads(line) for line in child.stdout.splitlines()]


def half_precision(variants: list[dict[str, Any]], kernel: str) -> list[dict[str, Any]]:
    return [v for v in variants if v["kernel"] == kernel and v["dtype"] != "fp32"]


def test_every_kernel_shape_dtype_and_architecture_compiles(
    variants: list[dict[str, Any]],
) -> None:
    keys = {
        tuple(
            v[name] for name in ("kernel", "heads", "rows", "dim", "dtype", "architecture", "pdl")
        )
        for v in variants
    }
    assert len(keys) == len(variants) == 3 * (3 + 5 + 2 + 1) + 2 * (3 + 5 + 2)


def test_keys_and_values_are_loaded_sixteen_bytes_a_thread(variants: list[dict[str, Any]]) -> None:
    assert [variant for variant in variants if variant["wide_loads"] < 24] == []


def test_prefill_uses_the_tensor_cores_of_a_hopper_gpu(variants: list[dict[str, Any]]) -> None:
    hopper = [v for v in half_precision(variants, "prefill_kernel") if v["architecture"] == 90]
    assert len(hopper) == 2 * (5 + 1)
    assert all(variant["wgmma"] >= 8 for variant in hopper)


def test_half_precision_kernels_do_not_spill(variants: list[dict[str, Any]]) -> None:
    halves = half_precision(variants, "decode_kernel") + half_precision(variants, "prefill_kernel")
    assert [v for v in halves if v["stack_bytes"] > 64 or v["spilled_bytes"]] == []


def test_every_kernel_fits_the_shared_memory_of_its_architecture(
    variants: list[dict[str, Any]],
) -> None:
    assert all(v["shared_bytes"] <= SHARED_BYTES[v["architecture"]] for v in variants)
    decodes = half_precision(variants, "decode_kernel")
    room = [SHARED_BYTES[v["architecture"]] // v["shared_bytes"] for v in decodes]
    assert min(room) >= DECODE_PROGRAMS
