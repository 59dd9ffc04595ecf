"""The installer's arguments, read rather than run."""

import itertools
import re
from pathlib import Path

import pytest

from tools.dev.plan import (
    BENCH,
    CPU_INDEX,
    DEMO,
    TEST,
    PackageSet,
    constraints_text,
    install_steps,
    probe_args,
    stamp,
)

ROOT = Path(__file__).resolve().parents[2]
CONSTRAINTS = ROOT / "constraints-cpu.txt"
CASES = list(itertools.product((DEMO, TEST), (True, False)))


def steps(packages: PackageSet, has_gpu: bool, reachable: bool) -> list[tuple[str, ...]]:
    made = install_steps(
        packages,
        constraints=CONSTRAINTS,
        has_gpu=has_gpu,
        cpu_torch_in_indexes=reachable,
    )
    return [step.args for step in made]


@pytest.mark.parametrize(("packages", "reachable"), CASES)
def test_without_a_gpu_every_torch_that_could_be_installed_is_the_cpu_build(
    packages: PackageSet, reachable: bool
) -> None:
    pinned = [line for line in CONSTRAINTS.read_text().split() if line.startswith("torch==")]
    assert pinned == ["torch==2.13.0+cpu"]
    seen_torch = False
    for args in steps(packages, False, reachable):
        names_torch = [arg for arg in args if re.match(r"torch\b", arg)]
        assert all(arg.endswith("+cpu") for arg in names_torch)
        seen_torch = seen_torch or bool(names_torch)
        if any(".[" in arg for arg in args):
            assert seen_torch, "the extras would pull a torch of their own"
            assert args[args.index("--constraint") + 1] == str(CONSTRAINTS)
    assert seen_torch


@pytest.mark.parametrize("packages", [DEMO, TEST])
def test_only_a_machine_without_gpu_and_without_a_cpu_wheel_asks_pytorchs_index(
    packages: PackageSet,
) -> None:
    asked = {
        (has_gpu, reachable): any(CPU_INDEX in args for args in steps(packages, has_gpu, reachable))
        for has_gpu, reachable in itertools.product((True, False), (True, False))
    }
    assert asked == {
        (True, True): False, (True, False): False, (False, True): False, (False, False): True,
    }  # fmt: skip


def test_pytorchs_index_serves_torch_alone() -> None:
    for args in steps(TEST, False, False):
        if CPU_INDEX in args:
            assert "--no-deps" in args
            assert [arg for arg in args if "==" in arg] == ["torch==2.13.0+cpu"]


def test_a_gpu_gets_the_plain_torch_and_constraints_that_leave_it_free() -> None:
    torch = [args for args in steps(TEST, True, True) if "torch>=2.11,<3" in args]
    assert len(torch) == 1
    freed = constraints_text(CONSTRAINTS.read_text(), has_gpu=True)
    assert not re.search(r"^(torch|triton)==", freed, re.MULTILINE)
    assert "numpy==" in freed


def test_the_probe_changes_nothing() -> None:
    assert "--dry-run" in probe_args()


def test_the_demo_installs_no_test_oracle() -> None:
    named = " ".join(itertools.chain.from_iterable(steps(DEMO, False, True)))
    assert "test" not in DEMO.extras
    assert not re.search("transformers|peft|seaweedfs|test", named.replace(str(ROOT), ""))
    assert TEST.covers(DEMO)
    assert BENCH.covers(TEST)
    assert not DEMO.covers(TEST)


def test_a_stamp_changes_with_each_thing_that_it_covers() -> None:
    base = {
        "pyproject": b"a", "constraints": b"b", "python": "3.11", "root": "/x", "has_gpu": False,
    }  # fmt: skip
    changed = [
        {"pyproject": b"ab"}, {"constraints": b""}, {"python": "3.12"}, {"root": "/y"},
        {"has_gpu": True}, {"pyproject": b"ab", "constraints": b""},
    ]  # fmt: skip
    stamps = {stamp(DEMO, **(base | change)) for change in [{}, *changed]}
    stamps.add(stamp(TEST, **base))
    assert len(stamps) == len(changed) + 2
    assert stamp(DEMO, **base) in stamps
