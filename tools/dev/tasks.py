"""The targets of dev.py: each makes sure of its packages, then runs one program of the clone."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.dev import lint, secrets_file, stubs
from tools.dev.checks import Unfit
from tools.dev.environment import Environment
from tools.dev.plan import BENCH, DEMO, TEST, PackageSet

ROOT = Path(__file__).resolve().parents[2]
_EXIT_UNFIT = 2
#: what `clean` removes; .env stays, the compose volumes depend on its secrets
_BUILT = (
    ".venv", ".loraplex", "dist", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis",
    ".import_linter_cache",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Target:
    """`packages` None: runs without the environment."""

    help: str
    packages: PackageSet | None
    action: Callable[[Environment, Sequence[str]], int]


def run(argv: Sequence[str]) -> int:
    """Run one target and return its exit status; 2 when this machine cannot run it."""
    parser = _parser()
    options, rest = parser.parse_known_args(argv)
    target = TARGETS.get(options.target) or benchmark(options.target)
    if target is None:
        parser.error(f"no target {options.target!r}; there are: {', '.join(TARGETS)}, bench-NAME")
    environment = Environment(ROOT)
    try:
        if target.packages is not None:
            environment.ensure(target.packages, any_arch=options.any_arch)
        return target.action(environment, rest)
    except Unfit as unfit:
        print(f"{options.target}: {unfit}", file=sys.stderr)
        return _EXIT_UNFIT
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def run_python(environment: Environment, *args: str) -> int:
    """Run the environment's Python in the clone and wait for it, also through Ctrl-C: the child
    gets the same signal and ends in its own way."""
    sys.stdout.flush()
    process = subprocess.Popen([str(environment.python), *args], cwd=environment.root)
    forward = {
        number: signal.signal(number, lambda received, _: process.send_signal(received))
        for number in (signal.SIGTERM, signal.SIGHUP)
    }
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return _exit_status(process.wait())
    finally:
        signal.signal(signal.SIGINT, before)
        for number, handler in forward.items():
            signal.signal(number, handler)


def _exit_status(returncode: int) -> int:
    return returncode if returncode >= 0 else 128 - returncode


def _demo(environment: Environment, args: Sequence[str]) -> int:
    return run_python(environment, "examples/demo.py", *args)


def _serve(environment: Environment, args: Sequence[str]) -> int:
    return run_python(environment, "examples/serve.py", *args)


def _test(environment: Environment, args: Sequence[str]) -> int:
    return run_python(environment, "-m", "pytest", *args)


def _test_slow(environment: Environment, args: Sequence[str]) -> int:
    return run_python(environment, "-m", "pytest", "--slow", *args)


def _lint(environment: Environment, _: Sequence[str]) -> int:
    return lint.run_all(environment.python, environment.root)


def _stubs(environment: Environment, _: Sequence[str]) -> int:
    return stubs.generate(environment.python, environment.root, environment.root)


def _dist(environment: Environment, args: Sequence[str]) -> int:
    return run_python(environment, "-m", "build", "--no-isolation", "--outdir", "dist", *args)


def _env(environment: Environment, _: Sequence[str]) -> int:
    return secrets_file.write(environment.root / ".env")


def _clean(environment: Environment, _: Sequence[str]) -> int:
    for name in _BUILT:
        shutil.rmtree(environment.root / name, ignore_errors=True)
    for folder, names, _files in os.walk(environment.root):
        names[:] = [name for name in names if name != ".git"]
        if os.path.basename(folder) == "__pycache__":
            shutil.rmtree(folder, ignore_errors=True)
    return 0


def benchmark(name: str) -> Target | None:
    """The target of `bench-NAME`, None where NAME is no benchmark."""
    if not name.startswith("bench-"):
        return None
    bench = name.removeprefix("bench-").replace("-", "_")
    command = ROOT / "benchmarks" / bench
    if not (command.with_suffix(".py").is_file() or (command / "__main__.py").is_file()):
        return None

    def action(environment: Environment, args: Sequence[str]) -> int:
        return run_python(environment, "-m", f"benchmarks.{bench}", *args)

    return Target(f"benchmark {bench}", BENCH, action)


TARGETS = {
    "demo": Target("publish three adapters and stream from all of them", DEMO, _demo),
    "serve": Target("the same stack on the default ports, in the foreground", DEMO, _serve),
    "test": Target("the test suite, with its own PostgreSQL and S3 server", TEST, _test),
    "test-slow": Target("the test suite with the tests marked slow", TEST, _test_slow),
    "lint": Target("formatting, types, import contracts, protos, migrations", TEST, _lint),
    "stubs": Target("write the gRPC stubs anew from protos/", TEST, _stubs),
    "dist": Target("wheel and sdist into dist/", TEST, _dist),
    "env": Target("write .env with random secrets for docker compose", None, _env),
    "clean": Target("remove all that the other targets made, except .env", None, _clean),
}


def _parser() -> argparse.ArgumentParser:
    lines = [f"  {name:<11}{target.help}" for name, target in TARGETS.items()]
    lines.append("  bench-NAME python -m benchmarks.NAME; prints a table and writes its rows")
    parser = argparse.ArgumentParser(
        prog="dev.py",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="targets:\n" + "\n".join(lines),
        epilog="what follows the target goes to the program that it runs",
        allow_abbrev=False,
    )
    parser.add_argument("target")
    parser.add_argument("--any-arch", action="store_true", help="set up on an untested machine")
    return parser
