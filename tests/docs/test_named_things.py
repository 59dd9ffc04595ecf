"""Paths and metrics that pages, docstrings and comments name are there."""

import re
import subprocess
from pathlib import Path

from engine_svc.metrics import METRICS
from tools import reference

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (
    "benchmarks", "deploy", "docs", "engine_svc", "examples", "kernels", "loraplex", "migrations",
    "protos", "registry_svc", "tests", "tools",
)  # fmt: skip
#: a path with a folder of ours in front; placeholders are in capitals
PATH = re.compile(rf"(?<![\w/.-])(?:{'|'.join(FOLDERS)})/[\w./-]*[\w/](?![\w*<{{(])")
PLACEHOLDER = re.compile(r"NAME|HARDWARE")
METRIC = re.compile(r"\bloraplex_(?:request|adapter|tokens|requests|step|flow|gpu)_?[a-z_]*")


def tracked(*patterns: str) -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", *patterns], cwd=ROOT, capture_output=True, check=True
    )
    return [ROOT / name for name in listed.stdout.decode().split("\0") if name]


def test_every_path_of_ours_that_a_page_or_a_module_names_exists() -> None:
    named = 0
    missing = []
    for file in tracked("*.md", "*.py", "*.proto", "Makefile", ":!deploy/jobs"):
        if "_pb2" in file.name or not file.exists():
            continue
        for match in PATH.finditer(file.read_text()):
            path = match[0]
            named += 1
            there = any((ROOT / name).exists() for name in (path, f"{path}.py", f"protos/{path}"))
            if not there and PLACEHOLDER.search(path) is None:
                missing.append(f"{file.relative_to(ROOT)}: {path}")
    assert named > 100
    assert missing == []


def test_every_metric_that_a_page_names_is_exported() -> None:
    known = {metric.name for metric in METRICS}
    pages = [page for page in tracked("*.md") if page.parent != reference.FOLDER]
    named = {name for page in pages for name in METRIC.findall(page.read_text())}
    assert named
    assert named <= known
