"""The loader as the core sees it (engine_svc.core.ports.WeightsSource), behind a socket.

The core calls from its loop and never blocks. A thread keeps the connection; when the loader has
died and is back, it repeats every want that has no answer yet.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from engine_svc.messages import CoreHello, Drop, Want
from engine_svc.processes.socket import Channel, Outbox, keep_connected
from engine_svc.types import AdapterRef, WeightsFailed, WeightsReady


class LoaderLink:
    """`wake` is called whenever `poll` has something new."""

    def __init__(self, path: str, authkey: bytes, wake: Callable[[], None]) -> None:
        self._path, self._authkey = path, authkey
        self.wake = wake
        self._answers: deque[WeightsReady | WeightsFailed] = deque()
        self._lock = threading.Lock()
        #: digest → the last Want that has no answer yet
        self._wanted: dict[str, Want] = {}
        #: digest → weights that the core was given and has not dropped
        self._held: dict[str, WeightsReady] = {}
        self._outbox: Outbox | None = None
        self._stopping = threading.Event()

    def start(self, hello: CoreHello) -> None:
        threading.Thread(
            target=keep_connected,
            args=(self._path, self._authkey, hello, self._stopping, self._use),
            name="loader-link",
            daemon=True,
        ).start()

    def stop(self) -> None:
        self._stopping.set()

    # ---- WeightsSource

    def want(self, ref: AdapterRef, rank: int) -> None:
        want = Want(ref, rank)
        with self._lock:
            if ref.digest in self._held or any(a.digest == ref.digest for a in self._answers):
                return  # the answer is there, the core has not polled it yet
            self._wanted[ref.digest] = want
            self._send(want)

    def drop(self, digest: str) -> None:
        with self._lock:
            if self._held.pop(digest, None) is not None:
                self._send(Drop(digest))

    def poll(self) -> tuple[WeightsReady | WeightsFailed, ...]:
        if not self._answers:
            return ()
        with self._lock:
            answers = tuple(self._answers)
            self._answers.clear()
        return answers

    # ---- the connection

    def _send(self, message: object) -> None:
        if self._outbox is not None:
            self._outbox.put(message)

    def _use(self, channel: Channel) -> None:
        outbox = Outbox(channel)
        with self._lock:
            self._outbox = outbox
            for held in self._held.values():
                outbox.put(held)
            for want in sorted(self._wanted.values(), key=lambda want: want.rank):
                outbox.put(want)
        try:
            while True:
                self._receive(channel.receive())
        finally:
            with self._lock:
                self._outbox = None
            outbox.close()

    def _receive(self, answer: WeightsReady | WeightsFailed) -> None:
        with self._lock:
            if self._wanted.pop(answer.digest, None) is None:
                self._refuse(answer)
                return
            if isinstance(answer, WeightsReady):
                self._held[answer.digest] = answer
            self._answers.append(answer)
        self.wake()

    def _refuse(self, answer: WeightsReady | WeightsFailed) -> None:
        """A want crossed its own answer and was answered again: give the second span back."""
        if isinstance(answer, WeightsReady) and answer.digest not in self._held:
            self._send(Drop(answer.digest))
