"""The committed gRPC stubs: written from protos/, and compared with what would be written."""

from __future__ import annotations

import filecmp
import os
import subprocess
import tempfile
from pathlib import Path

SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")


def generate(python: Path, root: Path, target: Path) -> int:
    """Write the stubs of every proto file below `target`; returns protoc's exit status."""
    protos = sorted(path.relative_to(root / "protos") for path in root.glob("protos/**/*.proto"))
    outputs = ("python", "grpc_python", "mypy", "mypy_grpc")
    command = [
        str(python), "-m", "grpc_tools.protoc", "-Iprotos",
        *(f"--{kind}_out={target}" for kind in outputs), *map(str, protos),
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=root, check=False, env=plugin_path(python), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    if done.returncode != 0:
        print(done.stdout)
    return done.returncode


def plugin_path(python: Path) -> dict[str, str]:
    """The environment in which protoc finds mypy-protobuf's plugins beside the Python."""

    return {**os.environ, "PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}"}


def stale(python: Path, root: Path) -> list[str]:
    """Committed stubs that differ from fresh ones, or have no proto any more."""
    with tempfile.TemporaryDirectory() as folder:
        if generate(python, root, Path(folder)) != 0:
            return ["protoc failed"]
        fresh = {str(path.relative_to(folder)) for path in Path(folder).rglob("*_pb2*.py*")}
        committed = {
            str(path.relative_to(root))
            for path in (root / "loraplex").rglob("*_pb2*.py*")
            if path.name.endswith(SUFFIXES)
        }
        changed = {
            name
            for name in fresh & committed
            if not filecmp.cmp(Path(folder, name), root / name, shallow=False)
        }
        return sorted(changed | (fresh ^ committed))
