"""Runs the kernel tests in Triton's interpreter, in a process of its own.

Triton decides at import whether its functions are interpreted, so this cannot share a process with
anything that imported Triton before.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
INTERPRETED = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize(
    "name",
    [
        "test_lora_kernels.py",
        "test_attention_kernels.py",
        "test_fused_kernels.py",
        "test_sample_kernels.py",
        "test_step_start_kernels.py",
    ],
)
def test_kernels_equal_their_references_in_the_interpreter(name: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / name)]
    environment = {**os.environ, **INTERPRETED}
    child = subprocess.run(
        command, cwd=HERE.parents[1], env=environment, capture_output=True, text=True, timeout=600
    )
    assert child.returncode == 0, child.stdout[-4000:] + child.stderr[-2000:]
    assert re.search(r"\d+ passed", child.stdout)
    assert not re.search(r"\d+ skipped", child.stdout)


def test_the_benchmark_of_the_kernels_runs_without_a_gpu_and_finds_them_right(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-m", "benchmarks.ops", "--dry-run", "--results", str(tmp_path)]
    environment = {**os.environ, **INTERPRETED}
    child = subprocess.run(
        command, cwd=HERE.parents[1], env=environment, capture_output=True, text=True, timeout=300
    )
    assert child.returncode == 0, child.stdout[-2000:] + child.stderr[-2000:]
    rows = [json.loads(line) for line in next(tmp_path.glob("*/ops-dry-run.jsonl")).open()]
    kinds = ("in-layer", "pair")
    cells = ("5 tiny, rank mixed", "21 tiny prefill, rank mixed")
    assert [row["case"] for row in rows] == ["copy", *(f"{c}: {k}" for c in cells for k in kinds)]
    assert all(row["floor"] > 0 for row in rows[1:])
