"""How a child of the supervisor begins and ends: `python -m engine_svc.processes.child ROLE FD`.

The child gets a Boot over the inherited socket FD, which is also its life line: when the other end
closes, the supervisor wants it to stop, or is dead. On Linux the kernel ends it as well.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from engine_svc.log import Log, LogHandler
from engine_svc.messages import Boot, ChildFailed, Drain
from engine_svc.processes.socket import Channel, ChannelClosed
from loraplex.status import LoraplexError

#: role → module with `run(child) -> None`
ROLES = {
    "core": "engine_svc.processes.core_process",
    "loader": "engine_svc.processes.loader_process",
    "frontend": "engine_svc.processes.frontend_process",
}
_PR_SET_PDEATHSIG = 1
#: Seconds that a child has to end after its life line closed.
_EXIT_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Child:
    """What every child process has."""

    boot: Boot
    control: Channel
    log: Log

    def tell(self, message: object) -> None:
        """Report to the supervisor; without one the process is about to end anyway."""
        try:
            self.control.send(message)
        except ChannelClosed:
            self.log.warning("supervisor.lost")

    def watch(self, drain: Callable[[float], None], stop: Callable[[], None]) -> None:
        """Start the thread that waits for the supervisor's word: `drain(seconds)`, then `stop`."""

        def run() -> None:
            try:
                while True:
                    message = self.control.receive()
                    if isinstance(message, Drain):
                        drain(message.seconds)
            except ChannelClosed:
                timer = threading.Timer(_EXIT_SECONDS, os._exit, (1,))
                timer.daemon = True
                timer.start()
                stop()

        threading.Thread(target=run, name="control", daemon=True).start()


def main(argv: list[str]) -> int:
    role, fd = argv[0], int(argv[1])
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = Channel(Connection(fd))
    try:
        boot: Boot = control.receive()
    except ChannelClosed:
        return 1
    log = Log(role, boot.settings.log_level)
    logging.basicConfig(handlers=[LogHandler(log)], level=logging.INFO)
    child = Child(boot, control, log)
    run: Callable[[Child], Any] = importlib.import_module(ROLES[role]).run
    try:
        run(child)
    except LoraplexError as error:
        log.error("process.failed", reason=error.reason, message=error.message)
        child.tell(ChildFailed(error.message, fatal=True))
        return 1
    except Exception:
        log.exception("process.failed")
        child.tell(ChildFailed(f"{role} failed; its log has the stack", fatal=False))
        return 1
    return 0


def _die_with_parent() -> None:
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    # Threads in native code (gRPC, tokenizers, torch) must not hold up the end.
    os._exit(code)
