"""Misspelt LORAPLEX_ variables stop the commands; those of other programs pass."""

from __future__ import annotations

import pytest

import engine_svc.cli.main
import registry_svc.cli.main
from loraplex.environment import refuse_misspelt
from loraplex.status import InvalidArgument

ADDRESS = "LORAPLEX_ENGINE_ADDRESS"
KNOWN = ("LORAPLEX_ENGINE_LISTEN", "LORAPLEX_ENGINE_REGISTRY_ADDRESS")


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("LORAPLEX_ENGIN_ADDRESS", ADDRESS),
        ("LORAPLEX_ADDRESS", ADDRESS),
        ("LORAPLEX_ENGINE_ADRESS", ADDRESS),
        ("LORAPLEX_ENIGNE_LISTEN", "LORAPLEX_ENGINE_LISTEN"),
    ],
)
def test_a_misspelt_variable_is_refused_with_the_nearest_name(name: str, near: str) -> None:
    with pytest.raises(InvalidArgument, match=rf"{name} .*did you mean {near}\?"):
        refuse_misspelt({name: "x"}, ADDRESS, KNOWN)


@pytest.mark.parametrize(
    "name",
    [
        ADDRESS, *KNOWN, "LORAPLEX_REGISTRY_WORKERS", "LORAPLEX_TEST_POSTGRES_URL",
        "LORAPLEX_ENGINE_MAX_LORAS", "LORAPLEX_PORT", "LORAPLEX_PORT_50052_TCP_ADDR",
        "LORAPLEX_SERVICE_HOST", "PATH",
    ],
)  # fmt: skip
def test_variables_of_other_programs_pass(name: str) -> None:
    refuse_misspelt({name: "x"}, ADDRESS, KNOWN)


@pytest.mark.parametrize(
    ("main", "arguments", "name", "near"),
    [
        (registry_svc.cli.main.main, ["list"], "LORAPLEX_REGISTRY_ADRESS", "_REGISTRY_ADDRESS"),
        (registry_svc.cli.main.main, ["list"], "LORAPLEX_REGSITRY_WORKERS", "_REGISTRY_WORKERS"),
        (engine_svc.cli.main.main, ["state"], "LORAPLEX_ENGIN_ADDRESS", "_ENGINE_ADDRESS"),
    ],
)
def test_the_commands_end_as_for_a_bad_argument(
    main, arguments, name, near, monkeypatch, capsys
) -> None:
    monkeypatch.setenv(name, "127.0.0.1:1")
    assert main(arguments) == 2
    errors = capsys.readouterr().err
    assert name in errors
    assert f"did you mean LORAPLEX{near}?" in errors
