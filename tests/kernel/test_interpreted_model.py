"""Whole models through every Triton kernel of a step, in Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TOLERANCE = 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM"]
)
def test_the_kernels_together_equal_transformers_and_peft(architecture: str) -> None:
    root = HERE.parents[1]
    command = [sys.executable, str(HERE / "interpreted_model.py"), architecture]
    environment = {
        **os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root),
    }  # fmt: skip
    child = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, timeout=900
    )
    assert child.returncode == 0, child.stderr[-4000:]
    found = [json.loads(line) for line in child.stdout.splitlines() if line.startswith("{")]
    assert [one["slot"] for one in found] == [0, 1, 2, -1, 1]
    assert all(one["difference"] <= TOLERANCE for one in found), found
