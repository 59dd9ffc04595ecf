"""Shares and limits that `registryctl` refuses before it asks the registry."""

from __future__ import annotations

import pytest

from registry_svc.cli.main import main

ADAPTER = ("update", "sql-lora", "--weight")
TENANT = ("tenant", "update", "acme", "--weight")


@pytest.mark.parametrize("command", [ADAPTER, TENANT])
@pytest.mark.parametrize("weight", ["0", "-1", "nan", "inf", "1e-9", "1e9", "much"])
def test_an_absurd_weight_is_refused_with_its_flag(
    command: tuple[str, ...], weight: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command[:-1], f"--weight={weight}"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert f"argument --weight: '{weight}'; must be 0.001 to 1000" in said


@pytest.mark.parametrize("flag", ["--max-queued-requests", "--max-queued-tokens"])
@pytest.mark.parametrize("limit", ["-1", "nan", "1.5", "99999999999999999999", "9" * 5000])
def test_an_absurd_queue_limit_is_refused_with_its_flag(
    flag: str, limit: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["tenant", "update", "acme", f"{flag}={limit}"])
    assert ended.value.code == 2
    assert f"argument {flag}: '{limit}'; must be 0 (no limit) to " in capsys.readouterr().err
