"""No kernel is compiled while serving: what steps need has been launched before."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize(("seats", "tokens"), [(1, 130), (70, 1024)])
def test_steps_launch_only_variants_of_kernels_that_the_warm_up_has_launched(
    seats: int, tokens: int
) -> None:
    root = HERE.parents[1]
    command = [sys.executable, str(HERE / "served_variants.py"), str(seats), str(tokens)]
    environment = {
        **os.environ, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root),
    }  # fmt: skip
    child = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, timeout=300
    )
    assert child.returncode == 0, child.stderr[-4000:]
    first, *late = [json.loads(line) for line in child.stdout.splitlines()]
    assert first["warmed"] > 20
    assert not late
