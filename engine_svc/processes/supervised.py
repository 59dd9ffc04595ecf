"""One supervised child: start, life line, end, and when it may start again."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections import deque
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from engine_svc.messages import Boot
from engine_svc.processes.socket import Channel, ChannelClosed
from engine_svc.processes.threads import quiet_threads

FIRST_BACKOFF_SECONDS = 0.1
LONGEST_BACKOFF_SECONDS = 5.0
#: So many ends inside the window and the engine gives up.
MAX_ENDS = 10
ENDS_WINDOW_SECONDS = 120.0
#: So many starts in a row that never got ready, and it gives up too.
MAX_FAILED_STARTS = 3
_ROOT = str(Path(__file__).resolve().parents[2])


@dataclass(slots=True)
class Backoff:
    """When a child that ended may start again; all times are seconds of one clock."""

    ends: deque[float] = field(default_factory=deque)
    failed_starts: int = 0

    def ended(self, now: float, was_ready: bool = True) -> float | None:
        """Seconds to wait before the next start; None: it ended too often."""
        self.failed_starts = 0 if was_ready else self.failed_starts + 1
        if self.failed_starts >= MAX_FAILED_STARTS:
            return None
        self.ends.append(now)
        while self.ends[0] < now - ENDS_WINDOW_SECONDS:
            self.ends.popleft()
        if len(self.ends) > MAX_ENDS:
            return None
        return min(LONGEST_BACKOFF_SECONDS, FIRST_BACKOFF_SECONDS * 2.0 ** (len(self.ends) - 1))


class Supervised:
    """A child process of `role`, started any number of times."""

    def __init__(self, role: str, boot: Boot) -> None:
        self.role = role
        self.boot = boot
        self.backoff = Backoff()
        self.ready = False
        #: this process has been ready once
        self.was_ready = False
        #: when to start it; None: it runs or must not run
        self.start_at: float | None = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self.channel: Channel | None = None

    @property
    def name(self) -> str:
        return f"{self.role}-{self.boot.index}" if self.role == "frontend" else self.role

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    @property
    def is_running(self) -> bool:
        return self._process is not None

    def start(self, environ: dict[str, str]) -> None:
        """Start the process with a fresh life line and tell it its Boot."""
        assert self._process is None, self.name
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "engine_svc.processes.child", self.role,
                 str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                # standard output belongs to the supervisor's one line
                stdout=sys.stderr.fileno(),
                env=environ,
            )  # fmt: skip
        self.channel = Channel(Connection(ours.detach()))
        self.start_at = None
        self.ready = self.was_ready = False
        self.tell(self.boot)

    def tell(self, message: object) -> None:
        """Send, if it still listens; that it does not is noticed by its life line."""
        if self.channel is not None:
            try:
                self.channel.send(message)
            except ChannelClosed:
                return

    def let_go(self) -> None:
        """Close the life line: the child stops by itself."""
        if self.channel is not None:
            self.channel.close()
            self.channel = None

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def reap(self, timeout_s: float) -> int | None:
        """The exit status once the process has ended; None: it runs on after `timeout_s`."""
        if self._process is None:
            return 0
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        self._process = None
        self.ready = False
        self.let_go()
        return code


def child_environ(metrics_dir: str) -> dict[str, str]:
    """This process's environment without our settings (children get them in their Boot)."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("LORAPLEX_ENGINE_")}
    paths = [_ROOT, *filter(None, [environ.get("PYTHONPATH")])]
    return {
        **environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PROMETHEUS_MULTIPROC_DIR": metrics_dir,
        "TOKENIZERS_PARALLELISM": "false",
        **quiet_threads(environ),
    }


def exit_text(code: int) -> str:
    """An exit status in words: `signal SIGKILL` or `status 1`."""
    if code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"status {code}"
