"""What a served trace says: waits and speeds, in total and by how popular an adapter is.

A *decile* is a tenth of the adapters, the most asked for first. A request counts as started when
its first token came before the measurement's end, and as finished when its last one did.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.serve.clients import Outcome
from benchmarks.shared.harness import Recorder, quantile
from benchmarks.shared.trace import TraceRequest

NUM_DECILES = 10
#: a client that sends later than this is what is measured, not the server
LATE_S = 0.1


@dataclass(frozen=True, slots=True)
class Group:
    """Requests that are looked at together. Times in s; −1: nobody started."""

    name: str
    requests: int
    started: int
    finished: int
    ttft_p50: float
    ttft_p99: float
    tpot_p50: float
    tpot_p99: float

    @property
    def share_started(self) -> float:
        return self.started / self.requests if self.requests else 1.0


@dataclass(frozen=True, slots=True)
class Report:
    """`window_s`: until the last request ended, or the cut."""

    total: Group
    deciles: tuple[Group, ...]
    window_s: float
    tokens: int
    late_s: float
    errors: tuple[tuple[str, int], ...]

    @property
    def finished_per_s(self) -> float:
        return self.total.finished / self.window_s

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.window_s


def by_popularity(requests: Sequence[TraceRequest], adapters: Sequence[str] = ()) -> list[str]:
    """Adapters, most asked for first. Args: adapters, in the order of their popularity where it is
    known; else the requests are counted."""
    if adapters:
        return list(adapters)
    counts = Counter(request.adapter for request in requests)
    return sorted(counts, key=lambda name: (-counts[name], name))


def report(outcomes: Sequence[Outcome], ranked: Sequence[str], cut_s: float) -> Report:
    place = {name: index for index, name in enumerate(ranked)}
    count = min(NUM_DECILES, len(ranked))
    deciles: list[list[Outcome]] = [[] for _ in range(count)]
    for outcome in outcomes:
        deciles[place[outcome.job.request.adapter] * count // len(ranked)].append(outcome)
    ended = [one.ended_s for one in outcomes]
    is_cut = any(one.ended_s < 0 and not one.error for one in outcomes)
    errors = Counter(one.error for one in outcomes if one.error)
    late = sorted(max(0.0, one.sent_s - one.job.request.time) for one in outcomes)
    return Report(
        _group("all", outcomes),
        tuple(_group(str(index + 1), mine) for index, mine in enumerate(deciles)),
        window_s=cut_s if is_cut else max([*ended, 0.001]),
        tokens=sum(one.tokens for one in outcomes),
        late_s=quantile(late, 0.99),
        errors=tuple(errors.most_common()),
    )


def print_report(found: Report) -> None:
    print(f"{'decile':<8}{'requests':>9}{'started':>9}{'finished':>9}"
          f"{'TTFT p50 s':>12}{'p99':>8}{'TPOT p50 ms':>13}{'p99':>8}")  # fmt: skip
    for group in (*found.deciles, found.total):
        times = (group.ttft_p50, group.ttft_p99, 1e3 * group.tpot_p50, 1e3 * group.tpot_p99)
        ttft_p50, ttft_p99, tpot_p50, tpot_p99 = (
            f"{one:.2f}" if one >= 0 else "-" for one in times
        )
        print(
            f"{group.name:<8}{group.requests:>9}{group.share_started:>9.0%}{group.finished:>9}"
            f"{ttft_p50:>12}{ttft_p99:>8}{tpot_p50:>13}{tpot_p99:>8}"
        )
    for error, count in found.errors:
        print(f"{count} × {error}")
    if found.late_s > LATE_S:
        print(f"The clients were late: p99 {found.late_s:.2f} s; give them more cores (--workers)")


def record(recorder: Recorder, name: str, found: Report, outcomes: Sequence[Outcome]) -> None:
    """The rows of one trace. TTFT and TPOT over the requests that started."""
    started = [one for one in outcomes if one.first_s >= 0]
    recorder.add(f"{name}: finished", [found.finished_per_s], "1/s", better="higher")
    recorder.add(f"{name}: tokens", [found.tokens_per_s], "tokens/s", better="higher")
    if started:
        ttft = [one.ttft_s for one in started]
        recorder.add(f"{name}: TTFT", ttft, "s", better="lower")
        recorder.add(f"{name}: TTFT p99", [found.total.ttft_p99], "s", better="lower")
        tpot = [1e3 * one.tpot_s for one in started if one.tokens > 1]
        if tpot:
            recorder.add(f"{name}: TPOT", tpot, "ms", better="lower")
    shares = [group.share_started for group in found.deciles]
    recorder.add(f"{name}: started, all", [found.total.share_started], "", better="higher")
    recorder.add(f"{name}: started, worst decile", [min(shares)], "", better="higher")
    recorder.add(f"{name}: started, last decile", [shares[-1]], "", better="higher")


def _group(name: str, outcomes: Sequence[Outcome]) -> Group:
    started = [one for one in outcomes if one.first_s >= 0]
    ttft = sorted(one.ttft_s for one in started) or [-1.0]
    tpot = sorted(one.tpot_s for one in started if one.tokens > 1) or [-1.0]
    return Group(
        name, len(outcomes), len(started), sum(one.ended_s >= 0 for one in outcomes),
        quantile(ttft, 0.5), quantile(ttft, 0.99), quantile(tpot, 0.5), quantile(tpot, 0.99),
    )  # fmt: skip
