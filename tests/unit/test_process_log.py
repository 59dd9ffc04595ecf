"""Log lines: one JSON object each, whoever writes them."""

from __future__ import annotations

import io
import json
import logging

from engine_svc.log import Log, LogHandler


def test_a_line_is_json_with_time_level_process_and_event() -> None:
    stream = io.StringIO()
    Log("core", stream=stream).info("adapter.loaded", adapter="sql\nlora", bytes=3)
    line = json.loads(stream.getvalue())
    assert stream.getvalue().count("\n") == 1
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "level": "info", "process": "core", "event": "adapter.loaded",
        "adapter": "sql\nlora", "bytes": 3,
    }  # fmt: skip


def test_lines_below_the_level_are_not_written() -> None:
    stream = io.StringIO()
    log = Log("core", "warning", stream)
    log.info("step.done")
    log.error("core.failed")
    assert [json.loads(line)["event"] for line in stream.getvalue().splitlines()] == ["core.failed"]


def test_records_of_standard_loggers_become_lines_with_their_extra_and_stack() -> None:
    stream = io.StringIO()
    logger = logging.Logger("elsewhere")
    logger.addHandler(LogHandler(Log("loader", "debug", stream)))
    logger.warning("registry.lost", extra={"revision": 4})
    try:
        raise ValueError("broken")
    except ValueError:
        logger.exception("adapter.load_crashed")
    lost, crashed = (json.loads(line) for line in stream.getvalue().splitlines())
    assert (lost["event"], lost["level"], lost["revision"]) == ("registry.lost", "warning", 4)
    assert crashed["level"] == "error"
    assert "ValueError: broken" in crashed["stack"]
