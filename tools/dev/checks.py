"""What must hold before set-up begins; each failure is one line and the command that mends it."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
from pathlib import Path

from tools.dev.plan import PackageSet

TESTED_MACHINES = ("x86_64",)
#: substrings of pip's output, and what they mean
_NETWORK_SIGNS = (
    "NewConnectionError", "Max retries exceeded", "Temporary failure in name resolution",
    "ProxyError", "ConnectTimeoutError", "ReadTimeoutError", "Network is unreachable",
    "Cannot connect to proxy", "Connection refused", "NameResolutionError",
)  # fmt: skip


class Unfit(Exception):
    """This machine cannot run the target; the message is one line and says what mends it."""


def check_machine(packages: PackageSet, root: Path, *, any_arch: bool) -> None:
    """Raises: Unfit, at the first of architecture, venv, disk and memory that is short."""
    check_architecture(platform.system(), platform.machine(), any_arch=any_arch)
    check_venv_module(importlib.util.find_spec("ensurepip") is not None)
    free = shutil.disk_usage(root).free
    check_room("disk below the clone", free, packages.disk_bytes, "df -h . # free some space here")
    available = available_memory_bytes()
    if available is not None:
        check_room("memory", available, packages.memory_bytes, "free -h # stop other programs")


def check_architecture(system: str, machine: str, *, any_arch: bool) -> None:
    if any_arch or (system == "Linux" and machine in TESTED_MACHINES):
        return
    raise Unfit(
        f"{system} on {machine} is not tested (Linux on {', '.join(TESTED_MACHINES)} is);"
        " to try it all the same run: make demo ARGS=--any-arch"
    )


def check_venv_module(present: bool) -> None:
    if not present:
        raise Unfit(
            "this Python cannot make virtual environments; run: apt-get install python3-venv"
        )


def check_room(what: str, have_bytes: int, need_bytes: int, command: str) -> None:
    if have_bytes < need_bytes:
        have, need = have_bytes / 2**30, need_bytes / 2**30
        raise Unfit(f"too little {what}: {have:.1f} GiB, {need:.0f} GiB are needed; run: {command}")


def available_memory_bytes() -> int | None:
    """None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def has_nvidia_gpu() -> bool:
    """True where the driver shows a device; a driver library without a device does not count."""
    if os.path.exists("/dev/nvidia0"):
        return True
    command = shutil.which("nvidia-smi")
    if command is None:
        return False
    listed = subprocess.run([command, "-L"], capture_output=True, text=True, check=False)
    return listed.returncode == 0 and "GPU 0" in listed.stdout


def explain_pip_failure(output: str, log: Path) -> Unfit:
    """The one line for a `pip install` that failed with this output."""
    if "No space left on device" in output:
        return Unfit("the disk is full; run: df -h . # free some space here, then try again")
    if any(sign in output for sign in _NETWORK_SIGNS):
        return Unfit(
            "the package index cannot be reached; check the network and the proxy with:"
            " python3 -m pip config list"
        )
    return Unfit(f"pip could not install everything; run: tail -n 40 '{log}'")
