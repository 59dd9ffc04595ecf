"""Write docs/reference/ from the code: settings, metrics, commands.

    python -m tools.reference

A test holds the pages against the same tables (tests/docs/test_reference.py).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from engine_svc import metrics as engine_metrics
from engine_svc import settings as engine_settings
from engine_svc.cli import main as enginectl
from registry_svc import metrics as registry_metrics
from registry_svc import settings as registry_settings
from registry_svc.cli import main as registryctl
from registry_svc.domain import Totals

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "reference"
_NOTE = "Written by `python -m tools.reference` from the code; do not edit.\n"


def pages() -> dict[str, str]:
    """File name → text, for every page of the reference."""
    return {
        "configuration.md": configuration(),
        "metrics.md": metrics(),
        "commands.md": commands(),
    }


def main() -> int:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text)
    return 0


def configuration() -> str:
    engine = [
        (f"`{s.flag}`", f"`{s.env}`", _code(s.shown_default), s.range, s.help)
        for s in engine_settings.SETTINGS
    ]
    registry = [
        (f"`{o.flag}`", f"`{o.variable}`", _code(o.default), o.help)
        for o in registry_settings.OPTIONS
    ]
    clients = [
        ("`LORAPLEX_REGISTRY_ADDRESS`", "`127.0.0.1:50051`", "the registry, for `registryctl`"),
        ("`LORAPLEX_ENGINE_ADDRESS`", "`127.0.0.1:50052`", "the engine, for `enginectl`"),
    ]
    return "\n".join(
        (
            "# Configuration\n",
            _NOTE,
            "A flag wins over its environment variable, which wins over the default. An unknown"
            " variable with our prefix, a bad value or a contradiction stops the start with key,"
            " value and range. Sizes are in bytes; `512MiB` and `2GiB` are read too. Credentials of"
            " an object store come from the standard AWS variables and files.\n",
            "## Engine\n",
            _table(("flag", "variable", "default", "range", "meaning"), engine),
            "## Registry\n",
            _table(("flag", "variable", "default", "meaning"), registry),
            "## Clients\n",
            _table(("variable", "default", "meaning"), clients),
        )
    )


def metrics() -> str:
    engine = [(f"`{m.name}`", m.kind, ", ".join(m.labels), m.help) for m in engine_metrics.METRICS]
    return "\n".join(
        (
            "# Metrics\n",
            _NOTE,
            "Prometheus text at `/metrics`: the engine's on `--metrics-listen` (127.0.0.1:9400),"
            " the registry's on its own (127.0.0.1:9401). Adapter labels are bounded: beyond"
            " `--max-adapter-series` the label is `other`.\n",
            "## Engine\n",
            _table(("name", "kind", "labels", "meaning"), engine),
            "## Registry\n",
            _table(("name", "kind", "labels", "meaning"), list(_registry_metrics())),
        )
    )


def _registry_metrics() -> Iterator[tuple[str, ...]]:
    made = registry_metrics.Metrics(lambda: Totals(adapters={"ACTIVE": 0}), lambda: 0)
    made.observe("method", "OK", 0.0)
    for family in made.registry.collect():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = sorted({key for sample in family.samples for key in sample.labels} - {"le"})
        yield f"`{name}`", family.type, ", ".join(labels), family.documentation


def commands() -> str:
    programs = (
        registryctl.build_parser(),
        enginectl._parser(),
        registry_settings.build_parser(),
        engine_settings._parser(),
    )
    servers = ("loraplex-registry", "loraplex-engine")
    parts = ["# Commands\n", _NOTE]
    for parser in programs:
        parts.append(f"## {parser.prog}\n")
        if parser.prog in servers:
            parts.append(f"{parser.description} Its flags: [configuration](configuration.md).\n")
            continue
        for name, command in _leaves(parser, parser.prog):
            parts.append(f"### {name}\n")
            parts.append(f"{command.description or ''}\n")
            parts.append(_table(("argument", "meaning"), list(_arguments(command))))
    return "\n".join(parts)


def _leaves(
    parser: argparse.ArgumentParser, name: str
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    subparsers = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    if not subparsers:
        yield name, parser
        return
    for action in subparsers:
        helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
        for word, child in action.choices.items():
            child.description = child.description or helps.get(word, "")
            yield from _leaves(child, f"{name} {word}")


def _arguments(command: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    for action in command._actions:
        if isinstance(action, argparse._HelpAction) or action.help == argparse.SUPPRESS:
            continue
        shown = ", ".join(action.option_strings) or action.metavar or action.dest
        formatter = argparse.HelpFormatter(command.prog)
        meaning = formatter._expand_help(action) if action.help else ""
        if action.choices:
            meaning = "; ".join(filter(None, (meaning, "one of " + ", ".join(action.choices))))
        yield f"`{shown}`", meaning


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    text = ("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)
    return "\n".join(text) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


if __name__ == "__main__":
    sys.exit(main())
