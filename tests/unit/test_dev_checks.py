"""Each thing that a machine may lack ends in one line with the command that mends it."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import dev
from tools.dev import checks, lint, secrets_file
from tools.dev.environment import locked

LOG = Path("setup.log")


@pytest.mark.parametrize(
    ("fail", "mends"),
    [
        (lambda: checks.check_architecture("Darwin", "arm64", any_arch=False), "--any-arch"),
        (lambda: checks.check_venv_module(False), "apt-get install python3-venv"),
        (lambda: checks.check_room("memory", 2**30, 2**31, "free -h"), "free -h"),
        (lambda: checks.check_room("disk below the clone", 0, 2**32, "df -h ."), "df -h ."),
    ],
)
def test_a_missing_thing_is_one_line_with_its_remedy(fail, mends) -> None:
    with pytest.raises(checks.Unfit) as caught:
        fail()
    assert "\n" not in str(caught.value)
    assert mends in str(caught.value)
    assert "run: " in str(caught.value)


@pytest.mark.parametrize(
    ("output", "says"),
    [
        ("WARNING: Retrying … NewConnectionError('…')\nERROR: No matching", "cannot be reached"),
        ("ProxyError('Cannot connect to proxy.')", "pip config list"),
        ("OSError: [Errno 28] No space left on device", "disk is full"),
        ("ERROR: ResolutionImpossible", "setup.log"),
    ],
)
def test_a_failed_installation_is_one_line_by_its_cause(output: str, says: str) -> None:
    message = str(checks.explain_pip_failure(output, LOG))
    assert says in message
    assert "\n" not in message


def test_this_kind_of_machine_passes_and_an_unknown_one_may_be_tried() -> None:
    checks.check_architecture("Linux", "x86_64", any_arch=False)
    checks.check_architecture("Plan9", "mips", any_arch=True)
    checks.check_venv_module(True)
    checks.check_room("memory", 2, 2, "free -h")


@pytest.mark.parametrize("version", [(3, 8), (3, 10), (3, 15)])
def test_another_python_is_told_which_one_fits(version, monkeypatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: name if name == "python3.12" else None)
    monkeypatch.setattr(sys, "argv", ["dev.py", "test"])
    line = dev._wrong_python(version)
    assert line.startswith(f"Python {version[0]}.{version[1]} ")
    assert line.endswith("run: python3.12 dev.py test")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "apt-get install python3.11" in dev._wrong_python(version)


def test_a_target_that_does_not_exist_is_named_with_those_that_do() -> None:
    root = Path(dev.__file__).parent
    done = subprocess.run(
        [sys.executable, "dev.py", "demoo"], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "'demoo'" in done.stderr
    assert "bench-NAME" in done.stderr


def test_a_second_set_up_waits_for_the_first(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from tools.dev.environment import locked\n"
        "with locked(Path(sys.argv[1])): print('in', flush=True)"
    )
    lock = tmp_path / "lock"
    command = [sys.executable, "-c", code, str(lock)]
    with locked(lock):
        second = subprocess.Popen(
            command, cwd=Path(dev.__file__).parent, stdout=subprocess.PIPE, text=True
        )
        assert second.stdout is not None
        assert "waiting" in second.stdout.readline()
    assert second.communicate(timeout=30)[0].strip() == "in"


def test_secrets_are_private_differ_and_are_never_overwritten(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    secrets_file.write(first)
    secrets_file.write(second)
    text = first.read_text()
    assert first.stat().st_mode & 0o777 == 0o600
    lines = (first.read_text() + second.read_text()).splitlines()
    values = {line.partition("=")[2] for line in lines}
    assert len(values) == 2 * len(secrets_file.NAMES)
    secrets_file.write(first)
    assert first.read_text() == text


def test_the_baseline_changes_only_with_a_changelog_entry(tmp_path: Path) -> None:
    baseline = tmp_path / lint.BASELINE
    baseline.parent.mkdir(parents=True)
    baseline.write_bytes(b"new")
    (tmp_path / "CHANGELOG.md").write_text("nothing")
    problem = lint.baseline_without_entry(tmp_path)
    assert "CHANGELOG.md" in problem
    (tmp_path / "CHANGELOG.md").write_text(problem)
    assert lint.baseline_without_entry(tmp_path) == ""


@pytest.mark.parametrize("folder", ["home/someone", "Users/someone", "root/x"])
def test_a_machine_path_in_a_tracked_file_is_found(tmp_path: Path, folder: str) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / "a.md").write_text(f"fine\nsee /{folder}/file\n")
    (tmp_path / "b.md").write_text("https://example.org/home/someone\n")
    subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)
    assert [line.partition(":")[0] for line in lint.machine_paths(tmp_path)] == ["a.md"]
