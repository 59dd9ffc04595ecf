"""The LoRA kernels' GPU tests under NVIDIA's compute-sanitizer.

    python -m tests.kernel.sanitize [--tool memcheck ...] [--seconds 120] [--logs DIR]

First the tests run without it: that compiles the kernels into Triton's cache and shows that they
are right. Then a planted overrun must be found, or nothing that follows would mean anything. Every
tensor has an allocation of its own (PYTORCH_NO_CUDA_MEMORY_CACHING), so that memory ends where a
tensor does; what lies inside one arena is guarded by the tests' own NaN and canaries.

Exit status: 0 when the overrun was found and no tool found anything else.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KERNELS, GRAPH = "tests/kernel/test_lora_kernels.py", "tests/kernel/test_lora_graph.py"
#: decode and prefill, ranks alone and mixed, gains and constants (DoRA, biases), both grids
FEW = (
    f"{KERNELS}::test_every_rank_equals_the_reference[16-dtype2]",
    f"{KERNELS}::test_every_popularity_of_adapters_equals_the_reference[zipf-dtype1]",
    f"{KERNELS}::test_long_segments_of_a_prefill_equal_the_reference[ranks0-dtype1]",
    f"{KERNELS}::test_inputs_longer_than_one_partial_sum_equal_the_reference",
)
MANY = (
    *FEW,
    f"{KERNELS}::test_every_rank_equals_the_reference[3-dtype0]",
    f"{KERNELS}::test_every_rank_equals_the_reference[100-dtype1]",
    f"{KERNELS}::test_every_popularity_of_adapters_equals_the_reference[distinct-dtype0]",
    f"{KERNELS}::test_sizes_that_are_not_multiples_of_anything_equal_the_reference",
    f"{KERNELS}::test_rows_with_and_without_tensor_cores_give_the_same[4]",
    f"{KERNELS}::test_single_token_of_one_adapter_equals_the_reference",
    f"{KERNELS}::test_batch_of_base_rows_only_changes_nothing",
    f"{KERNELS}::test_gain_and_constant_apply_where_the_rank_is_zero",
    f"{KERNELS}::test_slices_that_share_one_a_equal_the_reference",
    f"{KERNELS}::test_long_segments_of_a_prefill_equal_the_reference[ranks1-dtype0]",
    f"{KERNELS}::test_one_compiled_launch_serves_a_longer_work_list",
    f"{GRAPH}::test_captured_kernels_follow_a_plan_that_changes_in_place",
)
TESTS: Mapping[str, Sequence[str]] = {
    "memcheck": MANY, "racecheck": FEW, "synccheck": FEW, "initcheck": FEW,
}  # fmt: skip
#: calls of the driver that fail are the libraries' way of asking, and raise where they matter
_ALWAYS = ("--report-api-errors", "no")
_LAST_WORDS_S = 10.0
#: the last line of each tool's report
_SUMMARY = re.compile(r"^=+ *(?:ERROR|RACECHECK) SUMMARY: (\d+) ", re.MULTILINE)
_PASSED = re.compile(r"^=+ .*?(\d+ passed[^=]*?) in ", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a command ended: its exit status, None where its time was up; what the tool counted, None
    where it said nothing."""

    status: int | None
    findings: int | None
    passed: str
    seconds: float

    @property
    def is_clean(self) -> bool:
        return self.status == 0 and self.findings == 0

    def __str__(self) -> str:
        end = "time is up" if self.status is None else f"exit {self.status}"
        found = "" if self.findings is None else f"{self.findings} findings"
        return ", ".join(filter(None, (end, found, self.passed, f"{self.seconds:.0f} s")))


def main(argv: Sequence[str] | None = None) -> int:
    options = _options(argv)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    if shutil.which(options.sanitizer) is None:
        print(f"sanitize: {options.sanitizer} is not installed; it is part of CUDA's toolkit")
        return 2
    options.logs.mkdir(parents=True, exist_ok=True)
    plain = run(test_command(MANY), options.logs / "plain.txt", options.seconds)
    print(f"without the tool: {plain}", flush=True)
    if plain.status != 0:
        print((options.logs / "plain.txt").read_text()[-3000:])
        return 1
    planted = check(options, "memcheck", "planted", [sys.executable, "-c", PLANTED])
    if not planted.findings:
        print("sanitize: the planted overrun was not found: the tool sees nothing here")
        return 1
    clean = True
    for tool in options.tool or TESTS:
        clean &= check(options, tool, tool, test_command(TESTS[tool])).is_clean
    return 0 if clean else 1


def check(options: argparse.Namespace, tool: str, name: str, command: Sequence[str]) -> Outcome:
    """Run the command under the tool, and print how it came out."""
    log = options.logs / f"{name}.txt"
    sanitizer = [options.sanitizer, "--tool", tool, *_ALWAYS]
    outcome = run([*sanitizer, *command], log, options.seconds)
    print(f"{name}: {outcome}; {log}", flush=True)
    return outcome


def test_command(tests: Sequence[str]) -> list[str]:
    """pytest in one process, which needs none of this repository's settings."""
    alone = ["-c", os.devnull, "--rootdir", ".", "--noconftest", "--import-mode=importlib"]
    plugins = ["-p", "no:xdist", "-p", "no:cacheprovider"]
    return [sys.executable, "-m", "pytest", *alone, *plugins, "-v", "-W", "ignore", *tests]


def run(command: Sequence[str], log: Path, limit_s: float) -> Outcome:
    """Output goes to the log. Past the limit the command is interrupted, so that it reports what it
    found until then; what is left of it and of what it started is killed."""
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    began = time.monotonic()
    status = None
    with (
        log.open("wb") as output,
        subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,
        ) as process,
    ):  # fmt: skip
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_LAST_WORDS_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    said = log.read_text(errors="replace")
    counts, passed = _SUMMARY.findall(said), _PASSED.findall(said)
    findings = int(counts[-1]) if counts else None
    return Outcome(status, findings, passed[-1] if passed else "", time.monotonic() - began)


#: one number behind the end of a tensor, by a Triton kernel
PLANTED = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import torch
from tests.kernel.overrun import write_one_too_many
write_one_too_many(torch.zeros(1000, device="cuda"))
torch.cuda.synchronize()
"""


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tool", choices=tuple(TESTS), action="append", help="default: all four")
    parser.add_argument("--seconds", type=float, default=120.0, help="for each run; default 120")
    parser.add_argument("--sanitizer", default="compute-sanitizer", help="command or path")
    parser.add_argument(
        "--logs", type=Path, default=ROOT / ".loraplex" / "sanitize", help="folder of the reports"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
