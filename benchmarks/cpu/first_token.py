"""Seconds from `demo.py`'s start to the first streamed token, in a copy without a model."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.shared.harness import ROOT

#: what an installed clone has and a fresh one has not
LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv", ".loraplex", ".peers", "__pycache__", ".*_cache", "results", "dist"
)
TIMEOUT_S = 300.0
#: the demo's own line; it counts from after its imports
FIRST_TEXT = re.compile(r"^First text ([\d.]+) s after the start", re.MULTILINE)


@contextmanager
def fresh_copy() -> Iterator[Path]:
    """This checkout's files in a temporary folder: no model, no compiled Python of ours."""
    with tempfile.TemporaryDirectory(prefix="loraplex-bench-") as folder:
        copy = Path(folder) / "loraplex"
        shutil.copytree(ROOT, copy, ignore=LEFT_OUT, symlinks=True)
        yield copy


def first_text_s(copy: Path) -> float:
    """Run the demo in `copy` to its end. Raises: RuntimeError when it fails or names no time."""
    began = time.monotonic()
    _demo(copy, "--help")
    imports_s = time.monotonic() - began
    output = _demo(copy, "--max-tokens", "16")
    found = FIRST_TEXT.search(output)
    if found is None:
        raise RuntimeError(f"demo.py does not say when the first text came:\n{output[-2000:]}")
    return imports_s + float(found.group(1))


def _demo(copy: Path, *args: str) -> str:
    process = subprocess.Popen(
        [sys.executable, "examples/demo.py", *args], cwd=copy, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(TIMEOUT_S)
    if process.returncode != 0:
        raise RuntimeError(f"demo.py ended with {process.returncode}:\n{output[-2000:]}")
    return output
