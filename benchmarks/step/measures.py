"""The rows of `bench-step`. What is compared with each other runs alternately, round by round."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.shared.core_drive import CoreDriver, core_limits
from benchmarks.shared.harness import Recorder
from benchmarks.step import checks
from benchmarks.step.bench import Bench
from benchmarks.step.cases import PEER_PREFILL_S, PEER_TPOT_MS, RANK_16, Case, Size
from benchmarks.step.driver import Decoded
from engine_svc.types import NO_SLOT


def measure_tpot(recorder: Recorder, bench: Bench, rounds: int, with_peer: bool) -> None:
    """TPOT of every case; one round is held against what answers must be like."""
    cases = bench.size.cases
    samples = _rounds(bench, cases, rounds)
    base = next((samples[case].by_slot for case in cases if not case.groups), None)
    for case in cases:
        if base is not None:
            by_slot = samples[case].by_slot
            bench.failures += checks.without_effect(base[NO_SLOT], case.title, by_slot)
    for case in cases:
        peer = PEER_TPOT_MS.get(case.title) if with_peer else None
        _add_tpot(recorder, bench, case, samples[case], peer)


def measure_fragments(recorder: Recorder, bench: Bench, rounds: int) -> None:
    """Tax: time over the case with one adapter; for one adapter a sequence less the ratio of bytes
    that both must read."""
    cases = bench.size.fragments
    samples = _rounds(bench, cases, rounds)
    for whole, three, each in zip(cases[::3], cases[1::3], cases[2::3], strict=True):
        for case in (whole, three, each):
            _add_tpot(recorder, bench, case, samples[case], None)
        for case in (three, each):
            taxes = [a / b for a, b in zip(samples[case].tpot, samples[whole].tpot, strict=True)]
            name = case.name
            recorder.add(f"tax of {name}", taxes, "×", better="lower")
        ratio = bench.floor_bytes(each) / bench.floor_bytes(whole)
        beyond = [
            a / b - ratio for a, b in zip(samples[each].tpot, samples[whole].tpot, strict=True)
        ]
        recorder.add(f"tax of {each.name}, beyond its bytes", beyond, "×", better="lower")


def measure_prefill(recorder: Recorder, bench: Bench, rounds: int, with_peer: bool) -> None:
    """All prompts computed in steps of the token budget; adapters go round from prompt to
    prompt."""
    size = bench.size
    prompts, counts = size.prefill
    slots = {
        count: [bench.slots[RANK_16][i % count] if count else NO_SLOT for i in range(prompts)]
        for count in counts
    }
    for count in counts:
        bench.driver.prefill(slots[count][: prompts // 4 or 1], size.batched_tokens)
    seconds: dict[int, list[float]] = {count: [] for count in counts}
    for _ in range(rounds):
        for count in counts:
            seconds[count].append(bench.driver.prefill(slots[count], size.batched_tokens))
    for count in counts:
        name = f"{count} adapters" if count > 1 else ("1 adapter" if count else "base")
        peer = PEER_PREFILL_S.get(count) if with_peer else None
        case = f"prefill of {prompts} × {size.prompt}, {name}"
        recorder.add(case, seconds[count], "s", better="lower", peer=peer)
        if count:
            shares = [base / one for base, one in zip(seconds[0], seconds[count], strict=True)]
            case = f"prefill throughput, {name} / base"
            theirs = PEER_PREFILL_S[0] / peer if peer else None
            recorder.add(case, shares, "×", better="higher", peer=theirs)


def measure_core(recorder: Recorder, bench: Bench, rounds: int) -> None:
    """The same load as requests to EngineCore; ends the use of the driver: pages and slots are the
    core's from here."""
    size = bench.size
    limits = core_limits(bench.model, size.max_loras[1], size.max_num_seqs, size.batched_tokens)
    core = CoreDriver(bench.model, limits, bench.region)
    for case in size.core:
        refs = [one.ref for one in bench.adapters[case.ranks]]
        asked = [refs[slot] if slot >= 0 else None for slot in case.slots(range(len(refs)))]
        runs = [core.run(asked, size.prompt, size.output) for _ in range(rounds + 1)][1:]
        steps = [1e3 * one for run in runs for one in run.tpot_s]
        plans = [1e6 * one for run in runs for one in run.plan_s]
        name = case.title.removeprefix("TPOT, ")
        recorder.add(f"step through the core, {name}", steps, "ms", better="lower")
        recorder.add(f"planning, {name}", plans, "µs", better="lower")
        rates = [run.tokens_per_s for run in runs]
        recorder.add(f"whole run through the core, {name}", rates, "tokens/s", better="higher")


def measure_places(bench: Bench, rounds: int) -> list[float]:
    """TPOT in seconds of the case that both engines run, the first run left out."""
    return [bench.decode(bench.size.places).tpot_s for _ in range(rounds + 1)][1:]


def record_places(
    recorder: Recorder, size: Size, few: Sequence[float], many: Sequence[float]
) -> None:
    low, high = size.max_loras
    name = size.places.title
    for count, samples in ((low, few), (high, many)):
        in_ms = [1e3 * one for one in samples]
        recorder.add(f"{name}, {count} places", in_ms, "ms", better="lower")
    ratio = statistics.median(many) / statistics.median(few)
    recorder.add(f"{high} places / {low}", [ratio], "×", better="lower")


@dataclass(frozen=True, slots=True)
class _Samples:
    """Seconds by round: a token, and the median step on the device. `by_slot`: one answer each."""

    by_slot: Mapping[int, tuple[int, ...]]
    tpot: list[float] = field(default_factory=list)
    device: list[float] = field(default_factory=list)

    def add(self, decoded: Decoded) -> None:
        self.tpot.append(decoded.tpot_s)
        self.device.append(statistics.median(decoded.compute_s))


def _rounds(bench: Bench, cases: Sequence[Case], rounds: int) -> dict[Case, _Samples]:
    """All cases once for what they answer, which counts as the round where there is but one; then
    round by round."""
    samples = {}
    for case in cases:
        decoded = bench.decode(case)
        slots = case.slots(bench.slots[case.ranks])
        samples[case] = _Samples(checks.streams_by_slot(slots, decoded.tokens))
        share = checks.agreement(slots, decoded.tokens)
        if share < 1.0:
            print(f"# {case.title}: {share:.1%} of equal sequences agree in a token", flush=True)
        if rounds == 1:
            samples[case].add(decoded)
    for _ in range(rounds if rounds > 1 else 0):
        for case in cases:
            samples[case].add(bench.decode(case))
    return samples


def _add_tpot(
    recorder: Recorder, bench: Bench, case: Case, samples: _Samples, peer: float | None
) -> None:
    floor = 1e3 * bench.floor_bytes(case) / bench.floor.bytes_per_s
    in_ms = [1e3 * one for one in samples.tpot]
    recorder.add(case.title, in_ms, "ms", better="lower", floor=floor, peer=peer)
    on_device = [1e3 * one for one in samples.device]
    title = case.title.replace("TPOT", "device time")
    recorder.add(title, on_device, "ms", better="lower", floor=floor)
