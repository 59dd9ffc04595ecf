"""The check of one adapter in a process of its own: seconds, and the memory that it took.

python -m benchmarks.registry.verification FOLDER     prints one JSON object
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.shared.harness import ROOT
from benchmarks.shared.made_adapters import BASE_8B
from loraplex.adapter_format import check_adapter, read_folder

_RESET_PEAK = "5"


@dataclass(frozen=True, slots=True)
class Verification:
    """`memory_bytes`: the most that was resident, less what the process held before."""

    wall_s: float
    cpu_s: float
    memory_bytes: int
    size_bytes: int


def verify_apart(folder: Path) -> Verification:
    """Raises: subprocess.CalledProcessError when the adapter is refused."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.registry.verification", str(folder)],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return Verification(**json.loads(done.stdout))


def _verify(folder: Path) -> Verification:
    """What `registryctl verify` does after its imports, and the registry at each publish."""
    Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
    before = _status_bytes("VmRSS")
    began, began_cpu = time.monotonic(), time.process_time()
    files = read_folder(folder).files
    check_adapter(files, BASE_8B)
    wall_s, cpu_s = time.monotonic() - began, time.process_time() - began_cpu
    size = sum(path.stat().st_size for path in files.values())
    return Verification(wall_s, cpu_s, _status_bytes("VmHWM") - before, size)


def _status_bytes(name: str) -> int:
    text = Path("/proc/self/status").read_text()
    found = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
    if found is None:
        raise OSError(f"/proc/self/status has no {name}")
    return int(found.group(1)) * 1024


if __name__ == "__main__":
    print(json.dumps(asdict(_verify(Path(sys.argv[1])))))
