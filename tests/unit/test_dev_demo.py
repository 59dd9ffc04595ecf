"""What the demo prints, and that it leaves no process behind whatever its services do."""

import signal
from pathlib import Path

import pytest

from examples import demo
from examples.demo_stack import ADAPTERS, ADAPTERS_DIR, Service, StackFailed, service_environment
from examples.demo_text import Printer, table
from loraplex.common.v1 import common_pb2
from loraplex.engine.v1 import engine_pb2
from tests.support.waiting import eventually


def summary(name: str, version: int, tokens: int) -> engine_pb2.Summary:
    identity = common_pb2.AdapterIdentity(
        name=name, version=version, digest="sha256:" + "ab" * 32 if version else ""
    )
    return engine_pb2.Summary(
        adapter=identity,
        usage=engine_pb2.Usage(completion_tokens=tokens),
        wait_place_s=0.25,
        wait_load_s=0.125,
        load_s=0.5,
        ttft_s=1.0,
        tpot_s=0.02,
    )


def test_the_table_sums_requests_and_averages_latencies() -> None:
    rows = [("sql-lora", [summary("sql-lora", 3, 10), summary("sql-lora", 3, 5)])]
    rows.append(("base", [summary("", 0, 7)]))
    lines = table(rows).splitlines()
    assert lines[3].split() == (
        "sql-lora v3 sha256:abababab… 2 15 500 250 0 0 0 500 1000 20".replace("…", "ab").split()
    )
    assert lines[4].split()[:5] == ["base", "base", "–", "1", "7"]


def test_pieces_of_interleaved_streams_keep_their_words_and_their_names(capsys) -> None:
    printer = Printer(["a", "bb"])
    words = [f"word{number} " for number in range(40)]
    for word in words:
        printer.text("a", word)
        printer.text("bb", word.upper())
    printer.text("a", "one\ntwo")
    for name in ("a", "bb"):
        printer.end(name)
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 70 for line in lines)
    spoken = {name: [] for name in ("a", "bb")}
    for line in lines:
        name, _, text = line.partition(" │ ")
        spoken[name.strip()].extend(text.split())
    assert spoken["a"] == [*"".join(words).split(), "one", "two"]
    assert spoken["bb"] == "".join(words).upper().split()


def start(folder: Path, body: str) -> Service:
    (folder / "fake_service.py").write_text(body)
    env = {**service_environment(), "PYTHONPATH": str(folder)}
    return Service("engine", ["-m", "fake_service"], folder / "log", env)


def is_running(pid: int) -> bool:
    """False also for a killed process that nobody has reaped yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_service_that_ends_early_shows_what_it_said(tmp_path: Path) -> None:
    service = start(tmp_path, "print('port 1 is taken'); raise SystemExit(3)")
    with pytest.raises(StackFailed, match="port 1 is taken"):
        service.address()
    assert service.wait() == 3


def test_what_a_service_started_ends_with_it(tmp_path: Path) -> None:
    body = (
        "import json, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "line = {'event': 'server.started', 'address': f'127.0.0.1:{child.pid}'}\n"
        "print('not json'); print(json.dumps(line), flush=True)\n"
        "time.sleep(60)\n"
    )
    service = start(tmp_path, body)
    child = int(service.address().rpartition(":")[2])
    service.terminate()
    assert service.wait() == -signal.SIGTERM
    assert eventually(lambda: not is_running(child))


def test_services_get_no_setting_of_the_caller(monkeypatch) -> None:
    monkeypatch.setenv("LORAPLEX_ENGINE_MAX_LORAS", "7")
    assert not any(name.startswith("LORAPLEX_") for name in service_environment())


def test_adapters_of_the_demo_are_the_folders_that_peft_wrote(tmp_path: Path) -> None:
    assert set(demo.adapter_names(ADAPTERS_DIR)) == set(ADAPTERS)
    (tmp_path / "empty").mkdir()
    assert demo.adapter_names(tmp_path) == ()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--model", "m"], "given together"),
        (["--adapters", str(ADAPTERS_DIR)], "given together"),
        (["--model", "m", "--adapters", "nowhere"], "holds no folder with adapter_config.json"),
    ],
)
def test_the_demo_says_which_flag_is_missing(
    flags: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["demo.py", *flags])
    with pytest.raises(SystemExit) as ended:
        demo.main()
    assert ended.value.code == 2
    assert says in capsys.readouterr().err
