"""No kernel is compiled while serving: what steps need has been launched before. And a step neither
allocates nor waits, as far as torch's operations tell it on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
#: views, and what writes where it is told to
HARMLESS = {
    "aten.slice.Tensor", "aten.select.int", "aten.view.default", "aten.view.dtype",
    "aten.detach.default", "aten.mm.out", "aten.addmm.out", "aten.index_select.out",
    "aten.copy_.default",
}  # fmt: skip


@pytest.mark.parametrize(("seats", "tokens"), [(1, 130), (70, 1024)])
def test_steps_launch_what_the_warm_up_has_launched_and_ask_torch_for_little_else(
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
    assert "aten.mm.out" in first["operations"]
    assert set(first["operations"]) <= HARMLESS
