"""The reference pages are what the code says, every link leads somewhere, every command exists."""

import argparse
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from engine_svc import metrics as engine_metrics
from engine_svc import settings as engine_settings
from engine_svc.cli import main as enginectl
from registry_svc import settings as registry_settings
from registry_svc.cli import main as registryctl
from tests.docs.fake_engine import serving
from tests.support import coverage
from tools import reference
from tools.dev.tasks import TARGETS

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    path
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")]
    if "node_modules" not in path.parts
)
FENCE = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", ["configuration.md", "metrics.md", "commands.md"])
def test_a_reference_page_is_what_the_code_says(name: str) -> None:
    written = (reference.FOLDER / name).read_text()
    assert written == reference.pages()[name], "run: python -m tools.reference"


def test_the_page_on_adapters_holds_the_table_that_the_fidelity_tests_run() -> None:
    written = coverage.PAGE.read_text()
    assert written == coverage.page(written), "run: python -m tests.support.coverage"
    assert all(f"| `{case.option}` | {case.what} |" in written for case in coverage.COVERAGE)


def test_the_reference_names_every_setting_metric_and_flag() -> None:
    text = "".join(page.read_text() for page in reference.FOLDER.glob("*.md"))
    names = [setting.env for setting in engine_settings.SETTINGS]
    names += [option.variable for option in registry_settings.OPTIONS]
    names += [metric.name for metric in engine_metrics.METRICS]
    assert len(names) > 50
    assert [name for name in names if f"`{name}`" not in text] == []


def test_every_argument_of_a_command_has_a_meaning() -> None:
    lines = (reference.FOLDER / "commands.md").read_text().splitlines()
    assert [line for line in lines if line.endswith("|  |")] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_relative_link_leads_to_a_file(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), f"{page.name} → {target}"


def shell_commands() -> list[tuple[str, list[str]]]:
    """(page, words) of every command in the pages' shell blocks."""
    found = []
    for page in PAGES:
        for block in FENCE.findall(page.read_text()):
            for line in block.replace("\\\n", " ").splitlines():
                for command in line.split(" && "):
                    words = shlex.split(command, comments=True)
                    if words:
                        found.append((page.name, words))
    return found


def test_every_command_in_the_documents_is_accepted_by_its_program() -> None:
    checked = {"make": 0, "registryctl": 0, "enginectl": 0, "dev.py": 0}
    for page, words in shell_commands():
        if words[0] == "make":
            assert words[1] in TARGETS or words[1].startswith("bench-"), (page, words)
        elif words[0] == "registryctl":
            parses(registryctl.build_parser(), words[1:], page)
        elif words[0] == "enginectl":
            parses(enginectl._parser(), words[1:], page)
        elif "dev.py" in words:
            assert words[words.index("dev.py") + 1] in {*TARGETS, "--help"}, (page, words)
        name = "dev.py" if "dev.py" in words else words[0]
        if name in checked:
            checked[name] += 1
    assert all(checked.values()), checked


def parses(parser: argparse.ArgumentParser, words: list[str], page: str) -> None:
    try:
        parser.parse_args(words)
    except SystemExit as error:
        raise AssertionError(f"{page}: {' '.join(words)}") from error


def test_the_readme_is_short_and_runs_within_fifteen_lines() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 150
    clone = next(number for number, line in enumerate(lines) if line.startswith("git clone"))
    demo = next(number for number, line in enumerate(lines) if line == "make demo")
    assert demo - clone <= 15


def test_the_makefile_has_every_target_of_the_front_door() -> None:
    makefile = (ROOT / "Makefile").read_text()
    declared = set(makefile.partition(".PHONY:")[2].partition("\n")[0].split()) - {"help"}
    assert declared == set(TARGETS)
    assert "bench-%:" in makefile


def test_the_readmes_python_client_runs_as_it_stands(tmp_path: Path) -> None:
    block = re.search(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    assert block is not None
    assert len(block[1].strip().splitlines()) <= 10
    with serving() as address:
        script = tmp_path / "client.py"
        script.write_text(block[1].replace("127.0.0.1:50052", address))
        done = subprocess.run(
            [sys.executable, str(script)],
            cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "SELECT * -- Table t(a, b). Show all rows."


def test_the_readmes_call_by_reflection_runs_as_it_stands() -> None:
    line = next(words for page, words in shell_commands() if words[:2] == ["buf", "curl"])
    with serving() as address:
        command = [word.replace("127.0.0.1:50052", address) for word in line]
        command[0] = str(Path(sys.executable).parent / "buf")
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert '"completionTokens": 16' in done.stdout


def test_every_decision_has_a_page_with_the_same_parts() -> None:
    pages = sorted((ROOT / "docs" / "adr").glob("0*.md"))
    assert [page.name[:4] for page in pages] == [f"{n:04}" for n in range(1, len(pages) + 1)]
    index = (ROOT / "docs" / "adr" / "README.md").read_text()
    for page in pages:
        text = page.read_text()
        assert all(f"## {part}" in text for part in ("Context", "Decision", "Consequences"))
        assert page.name in index
        assert len(text.splitlines()) <= 60
