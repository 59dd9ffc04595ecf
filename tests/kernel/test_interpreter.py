"""Runs the kernel tests in Triton's interpreter, in a process of its own.

Triton decides at import whether its functions are interpreted, so this cannot share a process with
anything that imported Triton before.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    "name", ["test_lora_kernels.py", "test_attention_kernels.py", "test_fused_kernels.py"]
)
def test_kernels_equal_their_references_in_the_interpreter(name: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / name)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    child = subprocess.run(
        command, cwd=HERE.parents[1], env=environment, capture_output=True, text=True, timeout=600
    )
    assert child.returncode == 0, child.stdout[-4000:] + child.stderr[-2000:]
    assert re.search(r"\d+ passed", child.stdout)
    assert not re.search(r"\d+ skipped", child.stdout)
