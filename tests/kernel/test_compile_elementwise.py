"""The elementwise and sampling kernels compile for sm_90 without a GPU, load wide, do not spill."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
MAX_REGISTERS = 128
ELEMENTWISE = ("add_rms_norm_kernel", "silu_mul_delta_kernel", "rope_store_kernel")


@pytest.fixture(scope="module")
def variants(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """One entry a kernel and set of constants (compile_elementwise.py)."""
    root = HERE.parents[1]
    environment = {
        **os.environ,
        "PYTHONPATH": str(root),
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")),
    }
    command = [sys.executable, str(HERE / "compile_elementwise.py")]
    child = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, timeout=300
    )
    assert child.returncode == 0, child.stderr[-4000:]
    return [json.loads(line) for line in child.stdout.splitlines()]


def test_every_kernel_compiles_with_and_without_a_dependent_launch(
    variants: list[dict[str, Any]],
) -> None:
    kinds = {(v["kernel"], v["constants"].get("PDL"), v["waits"]) for v in variants}
    expected = {(name, pdl, int(pdl)) for name in ELEMENTWISE for pdl in (False, True)}
    assert {kind for kind in kinds if kind[0] in ELEMENTWISE} == expected


def test_elementwise_kernels_read_sixteen_bytes_a_thread_and_never_two(
    variants: list[dict[str, Any]],
) -> None:
    narrow = [
        v
        for v in variants
        if v["kernel"] in ELEMENTWISE and (v["wide_loads"] < 4 or v["narrow_loads"])
    ]
    assert narrow == []


def test_no_kernel_spills_or_takes_too_many_registers(variants: list[dict[str, Any]]) -> None:
    greedy = [
        v
        for v in variants
        if v["registers"] > MAX_REGISTERS or v["stack_bytes"] > 16 or v["spilled_bytes"]
    ]
    assert greedy == []
