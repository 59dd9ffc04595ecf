"""The supervisor: starts the engine's processes, restarts what dies, forwards signals, ends clean.

    hold the port → core, loader, frontends in parallel → all ready: one line on stdout
    a child dies → start it again (backoff, limit)
    SIGTERM      → drain the frontends → stop core and loader → exit 0

It runs no thread of the request path and imports neither torch nor gRPC.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path

from engine_svc.host_memory import host_cache_bytes
from engine_svc.log import Log
from engine_svc.messages import (
    Boot,
    ChildFailed,
    ChildNotReady,
    ChildReady,
    Drain,
    PeerStalled,
)
from engine_svc.processes import run_folder, socket_folder
from engine_svc.processes.metrics_server import MetricsServer
from engine_svc.processes.port import hold_port
from engine_svc.processes.socket import ChannelClosed
from engine_svc.processes.supervised import Supervised, child_environ, exit_text
from engine_svc.settings import EngineSettings, shown, split_address

#: Seconds that core and loader have to end by themselves after the frontends are gone.
STOP_SECONDS = 3.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Supervisor:
    """One engine. `announce` gets the one line that says it serves."""

    def __init__(self, settings: EngineSettings, announce: Callable[[str], None]) -> None:
        self._settings = settings
        self._announce = announce
        self._log = Log("supervisor", settings.log_level)
        self._announced = False
        self._signals = 0
        self._failure: str | None = None
        self._children: list[Supervised] = []

    def run(self) -> int:
        """Until a signal (0) or a failure that a restart does not mend (1).

        Raises: SettingInvalid: a port is taken, the run folder cannot be written.
        """
        settings = self._settings
        wakeup = self._catch_signals()
        port = hold_port("--listen", settings.listen)
        self._address = port.address
        folder = run_folder.create(Path(settings.run_dir))
        sockets = socket_folder.create()
        try:
            self._metrics = MetricsServer(
                "--metrics-listen", settings.metrics_listen, folder.metrics
            )
            self._start(folder, sockets.path)
            self._watch(wakeup)
            self._stop()
        finally:
            for child in self._children:
                child.kill()
                child.reap(STOP_SECONDS)
            sockets.remove()
            folder.remove()
            port.close()
        if self._failure is not None:
            self._log.error("engine.failed", message=self._failure)
            return 1
        self._log.info("engine.stopped")
        return 0

    # ---- start

    def _start(self, folder: run_folder.RunFolder, socket_dir: str) -> None:
        settings = dataclasses.replace(
            self._settings, host_cache_bytes=host_cache_bytes(self._settings.host_cache_bytes)
        )
        host_port = split_address("", self._address)[1]
        boot = Boot(
            settings=settings,
            engine_id=settings.engine_id or f"{socket.gethostname()}-{host_port}",
            listen=self._address,
            socket_dir=socket_dir,
            host_region_path=str(folder.host_region),
            authkey=os.urandom(32),
        )
        self._environ = child_environ(str(folder.metrics))
        frontends = [
            Supervised("frontend", dataclasses.replace(boot, index=index))
            for index in range(settings.frontends)
        ]
        self._children = [Supervised("core", boot), Supervised("loader", boot), *frontends]
        self._log.info("engine.starting", address=self._address, settings=shown(settings))
        self._start_due()

    def _start_due(self) -> None:
        now = time.monotonic()
        for child in self._children:
            if child.start_at is not None and child.start_at <= now:
                child.start(self._environ)
                self._log.info("process.started", name=child.name, pid=child.pid)

    # ---- watch

    def _watch(self, wakeup: socket.socket) -> None:
        while not self._signals and self._failure is None:
            for source in wait([wakeup, *self._channels()], self._seconds_to_next_start()):
                if source is wakeup:
                    wakeup.recv(64)
                else:
                    self._hear(self._child_of(source))
            self._start_due()

    def _channels(self) -> list[int]:
        return [child.channel.fileno() for child in self._children if child.channel is not None]

    def _child_of(self, fileno: object) -> Supervised:
        for child in self._children:
            if child.channel is not None and child.channel.fileno() == fileno:
                return child
        raise AssertionError(f"no child has the channel {fileno}")

    def _seconds_to_next_start(self) -> float | None:
        times = [child.start_at for child in self._children if child.start_at is not None]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _hear(self, child: Supervised) -> None:
        assert child.channel is not None
        try:
            message = child.channel.receive()
        except ChannelClosed:
            self._ended(child)
            return
        match message:
            case ChildReady(facts):
                child.ready = child.was_ready = True
                self._log.info("process.ready", name=child.name, **facts)
                self._announce_once()
            case ChildNotReady(cause):
                child.ready = False
                self._log.warning("process.waiting", name=child.name, cause=cause)
            case ChildFailed(text, fatal) if fatal and not child.was_ready:
                self._failure = text
            case PeerStalled(index, pid):
                self._kill_stalled(index, pid)

    def _ended(self, child: Supervised) -> None:
        pid, was_ready = child.pid, child.was_ready
        code = child.reap(STOP_SECONDS)
        if code is None:
            child.kill()
            code = child.reap(STOP_SECONDS)
        self._metrics.forget(pid)
        how = exit_text(code or 0)
        delay_s = child.backoff.ended(time.monotonic(), was_ready)
        if delay_s is None:
            self._failure = self._failure or f"{child.name} ended too often, last with {how}"
            return
        self._log.error("process.ended", name=child.name, pid=pid, how=how, restart_in_s=delay_s)
        child.start_at = time.monotonic() + delay_s

    def _kill_stalled(self, index: int, pid: int) -> None:
        for child in self._children:
            if child.role == "frontend" and child.boot.index == index and child.pid == pid:
                self._log.error("frontend.stalled", name=child.name, pid=pid)
                child.kill()

    def _announce_once(self) -> None:
        if not self._announced and all(child.ready for child in self._children):
            self._announced = True
            line = {
                "event": "server.started",
                "address": self._address,
                "metrics": self._metrics.address,
            }
            self._announce(json.dumps(line))

    # ---- stop

    def _catch_signals(self) -> socket.socket:
        reading, writing = socket.socketpair()
        writing.setblocking(False)
        signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
        self._wakeup_writer = writing
        for number in _SIGNALS:
            signal.signal(number, self._count_signal)
        return reading

    def _count_signal(self, number: int, frame: object) -> None:
        self._signals += 1

    def _stop(self) -> None:
        """Drain the frontends (a second signal cuts that short), then end everything."""
        seconds = self._settings.drain_seconds if self._failure is None else 0.0
        self._log.info("engine.draining", seconds=seconds)
        frontends = [child for child in self._children if child.role == "frontend"]
        for child in self._children:
            if not child.was_ready:  # it holds nothing yet, and may be busy importing
                child.kill()
        for child in frontends:
            child.tell(Drain(seconds))
        deadline = time.monotonic() + seconds + STOP_SECONDS
        signals = self._signals
        while any(child.is_running for child in frontends):
            for child in frontends:
                if (
                    child.is_running
                    and child.reap(0.02) is None
                    and (time.monotonic() > deadline or self._signals > signals)
                ):
                    child.kill()
        for child in self._children:
            child.let_go()
        deadline = time.monotonic() + STOP_SECONDS
        for child in self._children:
            if child.reap(max(0.0, deadline - time.monotonic())) is None:
                child.kill()
                child.reap(STOP_SECONDS)


def announce_on_stdout(line: str) -> None:
    """Print the line at once, also into a pipe."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
