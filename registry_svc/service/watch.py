"""Watching: every event after a revision, in order, and a word when nothing is missing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

from loraplex.status import FieldInvalid, LoraplexError, ResourceExhausted, Unavailable
from registry_svc.database import Database
from registry_svc.domain import Event
from registry_svc.repository.transaction import Transaction

BATCH = 500
#: Longest silence of a stream; the contract promises at most 10 s.
HEARTBEAT_S = 5.0
#: How often commits of other registry processes are looked for.
POLL_S = 0.25
MAX_ENGINE_ID = 128


class WatchHub:
    """Wakes watchers at commits: of this process at once, of others within POLL_S.

    Each watcher holds one thread of the server's pool, so there are at most `max_watchers`.
    """

    def __init__(self, database: Database, max_watchers: int) -> None:
        self._database, self._max_watchers = database, max_watchers
        self._changed = threading.Condition()
        self._latest, self._watchers, self._stopped = 0, 0, False
        self._poller = threading.Thread(target=self._poll, name="watch-poll", daemon=True)

    @property
    def watchers(self) -> int:
        return self._watchers

    def start(self) -> None:
        self._poller.start()

    def notify(self, revision: int) -> None:
        """A commit with this revision is visible."""
        with self._changed:
            self._latest = max(self._latest, revision)
            self._changed.notify_all()

    def wake(self) -> None:
        """Let watchers look whether their client is gone."""
        with self._changed:
            self._changed.notify_all()

    def stop(self) -> None:
        """End all streams with UNAVAILABLE / DRAINING, and accept none."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._poller.ident is not None:
            self._poller.join()

    def watch(
        self, from_revision: int, engine_id: str, is_active: Callable[[], bool]
    ) -> Iterator[Event | int]:
        """Events with a larger revision; an int: nothing up to it is missing.

        Raises: FieldInvalid: a revision that does not exist yet; ResourceExhausted QUEUE_FULL: too
        many watchers; Unavailable DRAINING.
        """
        if len(engine_id) > MAX_ENGINE_ID or not engine_id.isprintable():
            raise FieldInvalid("engine_id", engine_id, "at most 128 printable characters")
        self._enter()
        try:
            yield from self._follow(from_revision, engine_id, is_active)
        finally:
            with self._changed:
                self._watchers -= 1

    def _follow(
        self, position: int, engine_id: str, is_active: Callable[[], bool]
    ) -> Iterator[Event | int]:
        current = self._database.read(lambda tx: tx.events.revision())
        if not 0 <= position <= current:
            limit = f"0 to {current}, the registry's last revision; start from 0"
            raise FieldInvalid("from_revision", position, limit)
        self._see(engine_id, position)
        while is_active():
            self._check_running()
            events, current = self._read(position)
            for event in events:
                yield event
                position = event.revision
            if len(events) == BATCH:
                continue
            assert position == current, "one event a revision"
            yield current
            if not self._wait(position, is_active):
                self._see(engine_id, None)

    def _read(self, position: int) -> tuple[list[Event], int]:
        def use_case(tx: Transaction) -> tuple[list[Event], int]:
            return tx.events.after(position, BATCH), tx.events.revision()

        return self._database.read(use_case)

    def _wait(self, position: int, is_active: Callable[[], bool]) -> bool:
        """Until there is more, or HEARTBEAT_S has passed; True: there is more."""
        end = time.monotonic() + HEARTBEAT_S
        with self._changed:
            while self._latest <= position and not self._stopped and is_active():
                left = end - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(left)
            return True

    def _see(self, engine_id: str, applied: int | None) -> None:
        """Renew the engine's lease; where it resumes from is what it has applied."""
        if engine_id:
            self._database.write(lambda tx: tx.ledger.see_engine(engine_id, applied, tx.now))

    def _enter(self) -> None:
        with self._changed:
            self._check_running()
            if self._watchers >= self._max_watchers:
                raise ResourceExhausted(
                    f"{self._watchers} watchers are connected, as many as --max-watchers allows",
                    metadata={"limit": str(self._max_watchers)},
                    retry_after_s=5.0,
                )
            self._watchers += 1

    def _check_running(self) -> None:
        if self._stopped:
            raise Unavailable("the registry is shutting down; watch again", retry_after_s=1.0)

    def _poll(self) -> None:
        while not self._stopped:
            try:
                self.notify(self._database.read(lambda tx: tx.events.revision()))
            except LoraplexError:
                # a watcher's own read reports it at its next heartbeat
                self.wake()
            with self._changed:
                self._changed.wait_for(lambda: self._stopped, POLL_S)
