"""Seconds from `demo.py`'s start to the first text on the terminal, in a copy without a model."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.harness import ROOT

#: what an installed clone has and a fresh one has not
LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv", ".loraplex", ".peers", "__pycache__", ".*_cache", "results", "dist"
)
TIMEOUT_S = 300.0
STREAMED = "│"
PROMPT = "▶"


@contextmanager
def fresh_copy() -> Iterator[Path]:
    """This checkout's files in a temporary folder: no model, no compiled Python of ours."""
    with tempfile.TemporaryDirectory(prefix="loraplex-bench-") as folder:
        copy = Path(folder) / "loraplex"
        shutil.copytree(ROOT, copy, ignore=LEFT_OUT, symlinks=True)
        yield copy


def first_text_s(copy: Path) -> float:
    """Run the demo in `copy` to its end. Raises: RuntimeError when it fails or prints no text."""
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-u", "examples/demo.py", "--max-tokens", "16"], cwd=copy,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    first, lines = 0.0, []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if not first and STREAMED in line and PROMPT not in line:
                first = time.monotonic() - began
        status = process.wait(TIMEOUT_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(TIMEOUT_S)
    if status != 0 or not first:
        raise RuntimeError(f"demo.py ended with {status}:\n{''.join(lines[-20:])}")
    return first
