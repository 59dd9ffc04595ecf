"""The demo itself: what it prints, how it ends, and that nothing of it is left."""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from examples.demo_stack import ADAPTERS, MODEL_NAME
from tests.support.demo_model import ROOT
from tests.support.waiting import eventually

DEMO = [sys.executable, "examples/demo.py", "--max-tokens", "4"]
MARK = "LPX_TEST_RUN"


@pytest.fixture
def marked() -> Iterator[dict[str, str]]:
    """An environment by which every process of one run can be found again."""
    env = {**os.environ, MARK: secrets.token_hex(8), "OMP_NUM_THREADS": "2"}
    yield env
    for process in left_of(env):
        process.kill()


def left_of(env: dict[str, str]) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(MARK) == env[MARK]:
                found.append(process)
        except psutil.Error:
            continue
    return found


def demo_folders() -> set[Path]:
    return set((ROOT / ".loraplex").glob("demo-*"))


def test_the_demo_streams_from_all_then_shows_not_found_and_leaves_nothing(
    marked: dict[str, str], demo_model_dir: Path
) -> None:
    before = demo_folders()
    done = subprocess.run(
        DEMO, cwd=ROOT, env={**marked, "http_proxy": "http://127.0.0.1:9"}, timeout=300,
        capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ADAPTERS:
        assert re.search(rf"^{name} +│ \S", done.stdout, re.MULTILINE), name
        assert re.search(rf"^{name} +v1 +sha256:[0-9a-f]{{10}} +2 ", done.stdout, re.MULTILINE)
    assert re.search(rf"^{MODEL_NAME} +base +– +1 ", done.stdout, re.MULTILINE)
    assert done.stdout.splitlines()[-1].startswith(f"{ADAPTERS[-1]} now answers NOT_FOUND: ")
    assert left_of(marked) == []
    assert demo_folders() <= before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
def test_an_interrupted_demo_leaves_no_process_and_no_folder(
    marked: dict[str, str], demo_model_dir: Path, number: signal.Signals
) -> None:
    before = demo_folders()
    with subprocess.Popen(
        DEMO, cwd=ROOT, env=marked, text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as demo:  # fmt: skip
        assert demo.stdout is not None
        assert any("registryctl register" in line for line in demo.stdout)
        assert len(left_of(marked)) >= 3
        demo.send_signal(number)
        _, said = demo.communicate(timeout=60)
    assert demo.returncode == 130
    assert "interrupted" in said
    assert eventually(lambda: not left_of(marked))
    assert demo_folders() <= before


def test_a_demo_whose_service_fails_says_what_it_said_and_leaves_nothing(
    marked: dict[str, str], demo_model_dir: Path
) -> None:
    code = (
        "import sys; sys.argv = ['demo.py']; sys.path.insert(0, '.');"
        "from examples import demo; demo.REGISTRY_ARGS = ('--workers', 'many');"
        "sys.exit(demo.main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=marked, timeout=120,
        capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 1
    assert "--workers is 'many'" in done.stderr
    kept = Path(done.stderr.strip().rpartition("logs are kept in ")[2])
    assert (kept / "registry.log").exists()
    for path in kept.iterdir():
        path.unlink()
    kept.rmdir()
    assert left_of(marked) == []
