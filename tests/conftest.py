"""What every test run shares: markers, hypothesis's profile, minutes a folder."""

from __future__ import annotations

import importlib.util
import os
from collections import Counter, defaultdict

import pytest
from hypothesis import HealthCheck, settings

from engine_svc.processes.threads import quiet_threads

_SLOWEST = 10

#: the fixtures that several folders use
pytest_plugins = ["tests.support.postgres", "tests.support.s3", "tests.support.demo_model"]

# before anything loads torch
os.environ.update(quiet_threads(os.environ))

# Equal examples in every run: a failure seen once is seen again.
settings.register_profile(
    "fixed",
    derandomize=True,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("fixed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave slow tests out unless asked for, by --slow, by -m or by name; skip gpu tests without
    a device."""
    asked = config.getoption("--slow") or "slow" in (config.getoption("-m") or "")
    named = any("::" in argument for argument in config.args)
    if not asked and not named:
        slow = [item for item in items if item.get_closest_marker("slow")]
        if slow:
            items[:] = [item for item in items if item not in set(slow)]
            config.hook.pytest_deselected(items=slow)
    if any(item.get_closest_marker("gpu") for item in items) and not _has_cuda():
        mark = pytest.mark.skip(reason="no NVIDIA GPU")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(mark)


def _has_cuda() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return bool(torch.cuda.is_available())


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Minutes a folder, the slowest tests, and how many gpu tests this machine could not run."""
    seconds: dict[str, float] = defaultdict(float)
    by_test: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                folder = "/".join(report.nodeid.partition("::")[0].split("/")[:2])
                seconds[folder] += report.duration
                by_test[report.nodeid] += report.duration
    skipped = terminalreporter.stats.get("skipped", [])
    without_gpu = sum("no NVIDIA GPU" in str(report.longrepr) for report in skipped)
    write = terminalreporter.write_line
    terminalreporter.section("minutes a folder")
    for folder, total in sorted(seconds.items(), key=lambda pair: -pair[1]):
        write(f"{total / 60:6.2f} min  {folder}")
    terminalreporter.section("slowest tests")
    for nodeid, duration in by_test.most_common(_SLOWEST):
        write(f"{duration:6.1f} s    {nodeid}")
    write(f"gpu tests skipped on this machine: {without_gpu}")
