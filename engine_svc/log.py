"""Log lines: one JSON object each on standard error; events are `noun.past_verb`."""

from __future__ import annotations

import datetime
import json
import logging
import sys
import traceback
from typing import TextIO

_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}


class Log:
    """Writes lines of `process` that are at least as severe as `level`; threads may share it."""

    def __init__(self, process: str, level: str = "info", stream: TextIO | None = None) -> None:
        self._process = process
        self._least = _LEVELS[level]
        self._stream = stream if stream is not None else sys.stderr

    def debug(self, event: str, **fields: object) -> None:
        self._write("debug", event, fields)

    def info(self, event: str, **fields: object) -> None:
        self._write("info", event, fields)

    def warning(self, event: str, **fields: object) -> None:
        self._write("warning", event, fields)

    def error(self, event: str, **fields: object) -> None:
        self._write("error", event, fields)

    def exception(self, event: str, **fields: object) -> None:
        """An error with the stack of the exception that is being handled."""
        self._write("error", event, {**fields, "stack": traceback.format_exc()})

    def _write(self, level: str, event: str, fields: dict[str, object]) -> None:
        if _LEVELS[level] < self._least:
            return
        time = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        line = {"time": time, "level": level, "process": self._process, "event": event, **fields}
        self._stream.write(json.dumps(line, default=str) + "\n")
        self._stream.flush()


class LogHandler(logging.Handler):
    """Records of the standard library's loggers as lines of a Log; `extra` becomes fields."""

    _OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}

    def __init__(self, log: Log) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        fields = {key: value for key, value in vars(record).items() if key not in self._OWN}
        if record.exc_info:
            fields["stack"] = logging.Formatter().formatException(record.exc_info)
        level = max(name for name in _LEVELS.values() if name <= max(record.levelno, 10))
        write = {10: self._log.debug, 20: self._log.info, 30: self._log.warning}
        write.get(level, self._log.error)(record.getMessage(), **fields)
