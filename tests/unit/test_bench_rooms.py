"""The rooms of benchmarks/ and how they are called."""

import re
from pathlib import Path

import pytest

import benchmarks
from tools.dev.tasks import benchmark

FOLDER = Path(benchmarks.__file__).parent
COMMANDS = sorted(
    [path.parent.name for path in FOLDER.glob("*/__main__.py")]
    + [path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__"]
)


def test_the_map_names_every_benchmark_and_nothing_else() -> None:
    named = re.findall(r"(?:^    |; )([a-z_]+)(?=:? )", benchmarks.__doc__ or "", re.MULTILINE)
    assert sorted(named) == COMMANDS


@pytest.mark.parametrize("name", COMMANDS)
def test_every_benchmark_is_a_target(name: str) -> None:
    assert benchmark("bench-" + name.replace("_", "-")) is not None


@pytest.mark.parametrize("name", ["bench-shared", "bench-results", "bench-nothing", "ops"])
def test_what_is_no_benchmark_is_no_target(name: str) -> None:
    assert benchmark(name) is None
