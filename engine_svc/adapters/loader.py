"""The loader: brings adapters into the host region for one core, beside the step loop.

Implements `WeightsSource` (engine_svc/core/ports.py). `want`, `drop` and `poll` take a lock for
microseconds and never do I/O; worker threads fetch. One fetch a digest at a time, in the order of
the ranks that the core gave. Each adapter fails alone.

An adapter's weights are *held* from its WeightsReady until the core drops them; what is not held
stays in the region until room is needed, least recently used out first. What came from the store is
kept in the disk cache after the answer, by one thread while others fetch.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from engine_svc.adapters.fetch import Abandoned, Fetched, Fetcher
from engine_svc.adapters.host_region import HostRegion
from engine_svc.adapters.residency import Residency
from engine_svc.failures import failure_of
from engine_svc.types import AdapterRef, Failure, HostSpan, WeightsFailed, WeightsReady
from loraplex.status import (
    FailedPrecondition,
    Internal,
    LoraplexError,
    ResourceExhausted,
    Unavailable,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """UNAVAILABLE is tried `attempts` times with doubling pauses; then, as after any other error,
    the failure is the answer to every want for the time named here."""

    attempts: int = 4
    first_pause_s: float = 0.25
    remember_unavailable_s: float = 1.0
    remember_refusal_s: float = 10.0


@dataclass(frozen=True, slots=True)
class LoaderStats:
    """Counts since start, and what is there now."""

    host_bytes: int
    host_adapters: int
    held_adapters: int
    waiting: int
    host_evictions: int
    #: finished fetches by tier: "store", "disk"
    loads: tuple[tuple[str, int], ...]
    failures: int


@dataclass(slots=True)
class _Job:
    ref: AdapterRef
    rank: int
    order: int
    wanted_s: float
    not_before_s: float = 0.0
    attempts: int = 0
    running: bool = False
    #: its core is gone and no later one has asked: the weights stay, nobody is told
    silent: bool = False


class Loader:
    """`max_adapters` 0: the host region's bytes are the only limit.

    A fetch waits at most `room_wait_s` for what is held to be dropped. `on_answer` is called, from
    any thread and under the lock, when `poll` has something new: it may wake a loop, not call back.
    """

    def __init__(
        self,
        fetcher: Fetcher,
        region: HostRegion,
        *,
        max_adapters: int = 0,
        threads: int = 2,
        retry: RetryPolicy | None = None,
        room_wait_s: float = 300.0,
        on_answer: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fetcher, self._region = fetcher, region
        self._retry = retry or RetryPolicy()
        self._on_answer, self._clock, self._room_wait_s = on_answer, clock, room_wait_s
        self._changed = threading.Condition()
        self._jobs: dict[str, _Job] = {}
        self._residency = Residency(region, max_adapters)
        self._failed: OrderedDict[str, tuple[float, Failure]] = OrderedDict()
        #: by digest, not polled yet
        self._answers: dict[str, WeightsReady | WeightsFailed] = {}
        self._room_waiters: list[_Job] = []
        self._order = 0
        self._stopping = False
        self._failures = 0
        self._loads: dict[str, int] = {}
        self._threads = [
            threading.Thread(target=self._work, name=f"loader-{index}", daemon=True)
            for index in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    # ---- WeightsSource

    def want(self, ref: AdapterRef, rank: int) -> None:
        with self._changed:
            if ref.digest in self._answers:
                return
            job = self._jobs.get(ref.digest)
            if job is not None:
                job.rank, job.silent = rank, False
                self._changed.notify_all()
                return
            fetched = self._residency.try_hold(ref.digest)
            now = self._clock()
            if fetched is not None:
                self._answer(_ready(ref.digest, fetched, "host", 0.0))
            elif (failure := self._remembered(ref.digest, now)) is not None:
                self._answer(WeightsFailed(ref.digest, failure))
            else:
                self._order += 1
                self._jobs[ref.digest] = _Job(ref, rank, self._order, now)
                self._changed.notify_all()

    def drop(self, digest: str) -> None:
        with self._changed:
            self._residency.let_go(digest)
            self._changed.notify_all()

    def poll(self) -> tuple[WeightsReady | WeightsFailed, ...]:
        with self._changed:
            answers = tuple(self._answers.values())
            self._answers.clear()
            return answers

    # ---- for the process around it

    def forget_core(self) -> None:
        """The core is gone: nothing is held, nothing waits for an answer."""
        with self._changed:
            self._residency.let_go_all()
            self._jobs = {digest: job for digest, job in self._jobs.items() if job.running}
            for job in self._jobs.values():
                job.silent = True
            self._answers.clear()
            self._changed.notify_all()

    def adopt(self, weights: WeightsReady) -> None:
        """The core still holds these weights from a loader that died: keep their bytes in place."""
        with self._changed:
            fetched = Fetched(weights.span, weights.num_pages, weights.used_bytes, weights.tier)
            if not self._residency.adopt(weights.digest, fetched):
                log.error("adapter.adoption_failed", extra={"digest": weights.digest})

    def stats(self) -> LoaderStats:
        with self._changed:
            return LoaderStats(
                host_bytes=self._residency.num_bytes,
                host_adapters=len(self._residency),
                held_adapters=self._residency.num_held,
                waiting=len(self._jobs),
                host_evictions=self._residency.evictions,
                loads=tuple(sorted(self._loads.items())),
                failures=self._failures,
            )

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the threads; a download ends at its next chunk."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(timeout_s)

    # ---- worker threads

    def _work(self) -> None:
        while (work := self._next()) is not None:
            work()

    def _next(self) -> Callable[[], None] | None:
        """A fetch, or a copy for the disk cache; None when the loader stops."""
        with self._changed:
            while not self._stopping:
                now = self._clock()
                idle = [job for job in self._jobs.values() if not job.running]
                due = [job for job in idle if job.not_before_s <= now]
                residency = self._residency
                if residency.num_uncopied and residency.num_pinned < self._most_copies(bool(due)):
                    return partial(self._keep, *residency.pin_uncopied())
                if due:
                    job = min(due, key=lambda job: (job.rank, job.order))
                    job.running = True
                    return partial(self._fetch, job)
                pause = min((job.not_before_s - now for job in idle), default=None)
                self._changed.wait(pause)
            return None

    def _fetch(self, job: _Job) -> None:
        try:
            room = _Room(self, job)
            fetched = self._fetcher.fetch(job.ref, room, lambda: not self._stopping)
        except Abandoned:
            return
        except LoraplexError as error:
            self._failed_once(job, error)
        except Exception:
            log.exception("adapter.load_crashed", extra={"digest": job.ref.digest})
            self._failed_once(job, Internal("loading the adapter failed; see the engine's log"))
        else:
            self._succeeded(job, fetched)

    def _most_copies(self, others_wait: bool) -> int:
        """Threads that may make copies now: half, so that who comes next is fetched at once; one
        while others wait, or what leaves a small region would never have a copy."""
        return 1 if others_wait else max(1, len(self._threads) // 2)

    def _succeeded(self, job: _Job, fetched: Fetched) -> None:
        digest = job.ref.digest
        load_s = self._clock() - job.wanted_s
        with self._changed:
            del self._jobs[digest]
            self._residency.add(digest, fetched, held=not job.silent)
            self._loads[fetched.tier] = self._loads.get(fetched.tier, 0) + 1
            if not job.silent:
                self._answer(_ready(digest, fetched, fetched.tier, load_s))
            self._changed.notify_all()
        log.info(
            "adapter.loaded",
            extra={
                "adapter": job.ref.name, "version": job.ref.version, "digest": digest,
                "tier": fetched.tier, "load_s": round(load_s, 4),
                "num_bytes": fetched.span.num_bytes,
            },
        )  # fmt: skip

    def _keep(self, digest: str, fetched: Fetched) -> None:
        """In the disk cache too; it was pinned for that."""
        try:
            view = self._region.view(fetched.span)
            self._fetcher.keep(digest, view, lambda: not self._stopping)
        except Exception:
            log.exception("disk_cache.write_crashed", extra={"digest": digest})
        finally:
            with self._changed:
                self._residency.unpin(digest)
                self._changed.notify_all()

    def _failed_once(self, job: _Job, error: LoraplexError) -> None:
        retried = isinstance(error, Unavailable)
        transient = retried or isinstance(error, ResourceExhausted)
        with self._changed:
            now = self._clock()
            job.attempts += 1
            job.running = False
            if retried and job.attempts < self._retry.attempts:
                job.not_before_s = now + self._retry.first_pause_s * 2 ** (job.attempts - 1)
                self._changed.notify_all()
                return
            if transient and error.retry_after_s is None:
                error.retry_after_s = self._retry.remember_unavailable_s
            del self._jobs[job.ref.digest]
            self._failures += 1
            failure = failure_of(error)
            remember_s = (
                self._retry.remember_unavailable_s if transient else self._retry.remember_refusal_s
            )
            self._remember(job.ref.digest, now + remember_s, failure)
            if not job.silent:
                self._answer(WeightsFailed(job.ref.digest, failure))
            self._changed.notify_all()

    # ---- under the lock

    def _answer(self, answer: WeightsReady | WeightsFailed) -> None:
        self._answers[answer.digest] = answer
        if self._on_answer is not None:
            self._on_answer()

    def _remembered(self, digest: str, now: float) -> Failure | None:
        until, failure = self._failed.get(digest, (0.0, None))
        if now < until:
            return failure
        self._failed.pop(digest, None)
        return None

    def _remember(self, digest: str, until_s: float, failure: Failure) -> None:
        self._failed[digest] = (until_s, failure)
        self._failed.move_to_end(digest)
        while len(self._failed) > _MAX_REMEMBERED:
            self._failed.popitem(last=False)

    def _take_room(self, job: _Job, num_bytes: int) -> HostSpan:
        """Wait for a span; who is wanted sooner goes first."""
        if num_bytes > self._region.num_bytes:
            raise FailedPrecondition(
                f"adapter {job.ref.name!r} takes {num_bytes} bytes of host memory, the host cache "
                f"has {self._region.num_bytes}; raise --host-cache-bytes",
                reason="ADAPTER_TOO_LARGE",
                metadata={"value": str(num_bytes), "limit": str(self._region.num_bytes)},
            )
        with self._changed:
            self._room_waiters.append(job)
            try:
                give_up_s = self._clock() + self._room_wait_s
                while not self._stopping:
                    first = min(self._room_waiters, key=lambda job: (job.rank, job.order))
                    if first is job and (span := self._residency.try_take(num_bytes)) is not None:
                        return span
                    left_s = give_up_s - self._clock()
                    if left_s <= 0:
                        raise self._no_room(job.ref, num_bytes)
                    self._changed.wait(left_s)
                raise Abandoned
            finally:
                self._room_waiters.remove(job)
                self._changed.notify_all()

    def _no_room(self, ref: AdapterRef, num_bytes: int) -> ResourceExhausted:
        return ResourceExhausted(
            f"adapter {ref.name!r} waited {self._room_wait_s:g} s for {num_bytes} bytes of the "
            f"host cache; all of its {self._region.num_bytes} are in use; raise --host-cache-bytes",
            metadata={"value": str(num_bytes), "limit": str(self._region.num_bytes)},
            retry_after_s=1.0,
        )

    def _give_back(self, span: HostSpan) -> None:
        with self._changed:
            self._region.give_back(span)
            self._changed.notify_all()

    def check_integrity(self) -> None:
        with self._changed:
            self._residency.check_integrity()
            assert not any(digest in self._residency for digest in self._jobs)


_MAX_REMEMBERED = 1024


class _Room:
    """The host region as one job sees it."""

    def __init__(self, loader: Loader, job: _Job) -> None:
        self._loader, self._job = loader, job

    def take(self, num_bytes: int) -> HostSpan:
        return self._loader._take_room(self._job, num_bytes)

    def give_back(self, span: HostSpan) -> None:
        self._loader._give_back(span)

    def view(self, span: HostSpan) -> memoryview:
        return self._loader._region.view(span)


def _ready(digest: str, fetched: Fetched, tier: str, load_s: float) -> WeightsReady:
    return WeightsReady(digest, fetched.span, fetched.num_pages, fetched.used_bytes, tier, load_s)
