"""What `make lint` runs: every check, then the names of those that failed."""

from __future__ import annotations

import hashlib
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from tools.dev.stubs import plugin_path, stale

BASELINE = "protos/baseline/loraplex.binpb"
#: what a path on one person's machine looks like; the pattern must not match itself
_MACHINE_PATH = re.compile(r"(?<![\w.~}])/(?:ho[m]e|Use[r]s|ro[o]t|wo[r]k|mn[t])/[\w.-]+")
_TEXT_SUFFIXES = (
    ".py", ".pyi", ".md", ".toml", ".txt", ".yml", ".yaml", ".proto", ".json", ".sh", ".go", ".ts",
    ".svg",
)  # fmt: skip
#: what the images call their own folders is no path on a machine
_OWN_PATHS = ("deploy/", "docker-compose.yml", "tools/dev/lint.py")


def run_all(python: Path, root: Path) -> int:
    """Run every check, print one line each, and return 1 if any failed."""
    program = str(python)
    bin_folder = python.parent
    imports = "from importlinter.cli import lint_imports; import sys; sys.exit(lint_imports())"
    checks: dict[str, Callable[[], str]] = {
        "ruff check": _command(python, root, program, "-m", "ruff", "check", "."),
        "ruff format": _command(python, root, program, "-m", "ruff", "format", "--check", "."),
        "mypy --strict": _command(python, root, program, "-m", "mypy"),
        "import contracts": _command(python, root, program, "-c", imports),
        "stubs are fresh": lambda: _stale_stubs(python, root),
        "buf lint": _command(python, root, str(bin_folder / "buf"), "lint"),
        "buf breaking": _command(
            python, root, str(bin_folder / "buf"), "breaking", "--against", BASELINE
        ),
        "baseline is in the changelog": lambda: baseline_without_entry(root),
        "no machine paths": lambda: "\n".join(machine_paths(root)),
        "migrations": _command(
            python, root, program, "-m", "pytest", "-q", "-x", "-k", "migration",
            "tests/integration",
        ),
    }  # fmt: skip
    failed = []
    for name, check in checks.items():
        started = time.monotonic()
        problem = check()
        verdict = "failed" if problem else "ok"
        print(f"{name:<30} {verdict:<7} {time.monotonic() - started:5.1f} s", flush=True)
        if problem:
            failed.append(name)
            print(problem.rstrip(), flush=True)
    print(f"lint: {len(checks) - len(failed)} of {len(checks)} checks hold")
    return 1 if failed else 0


def baseline_without_entry(root: Path) -> str:
    """The baseline may change only with an entry in CHANGELOG.md that names its digest."""
    digest = hashlib.sha256((root / BASELINE).read_bytes()).hexdigest()
    if digest in (root / "CHANGELOG.md").read_text():
        return ""
    return f"{BASELINE} has sha256 {digest}; CHANGELOG.md has no entry that names it"


def machine_paths(root: Path) -> list[str]:
    """Lines of tracked text files that name a folder of somebody's machine."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, check=True)
    found = []
    for name in listed.stdout.decode().split("\0"):
        path = root / name
        if not name or name.startswith(_OWN_PATHS) or path.suffix not in _TEXT_SUFFIXES:
            continue
        if not path.is_file():
            continue
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1):
            if _MACHINE_PATH.search(line):
                found.append(f"{name}:{number}: {line.strip()[:120]}")
    return found


def _stale_stubs(python: Path, root: Path) -> str:
    names = stale(python, root)
    return "run: make stubs\n" + "\n".join(names) if names else ""


def _command(python: Path, root: Path, *command: str) -> Callable[[], str]:
    def check() -> str:
        done = subprocess.run(
            command, cwd=root, text=True, errors="replace", check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=plugin_path(python),
        )  # fmt: skip
        return "" if done.returncode == 0 else done.stdout or f"exit status {done.returncode}"

    return check
