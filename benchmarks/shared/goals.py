"""Every number that loraplex promises itself, in one table. A goal without a row is not met."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Goal:
    """`bench`'s row `case` must be at least (better "higher") or at most (better "lower") this."""

    bench: str
    case: str
    better: str
    value: float
    unit: str

    def holds(self, measured: float) -> bool:
        return measured >= self.value if self.better == "higher" else measured <= self.value

    def __str__(self) -> str:
        sign = "≥" if self.better == "higher" else "≤"
        return f"{sign} {self.value:g} {self.unit}"


STEP_TPOT_MS = (
    ("1, base", 4.7), ("1, 1 adapter", 4.9),
    ("8, base", 4.9), ("8, 8 adapters", 5.3),
    ("64, base", 6.6), ("64, 1 adapter", 7.0), ("64, 8 adapters", 7.1),
    ("64, 32 adapters", 7.7), ("64, 64 adapters", 8.4),
    ("128, base", 8.4), ("128, 32 adapters", 9.8), ("128, 64 adapters", 10.5),
    ("256, base", 12.5), ("256, 8 adapters", 13.9), ("256, 32 adapters", 14.6),
    ("256, 64 adapters", 15.6),
)  # fmt: skip
#: cell of `ops` → at most so many µs a layer, in-layer and pair (one H200, 8B shape, bf16)
OPS = {
    "1 identical, rank 16": (3.0, 17.0),
    "8 distinct, rank 16": (10.0, 22.0),
    "64 identical, rank 16": (10.0, 31.0),
    "64 uniform-8, rank 16": (12.0, 31.0),
    "64 distinct, rank 16": (49.0, 60.0),
    "64 uniform-8, rank mixed": (20.0, 44.0),
    "64 distinct, rank mixed": (96.0, 112.0),
    "256 Zipf, rank 16": (46.0, 62.0),
    "256 distinct, rank 16": (188.0, 202.0),
    "8192 uniform-8, rank 16": (430.0, 575.0),
}

GOALS = (
    Goal("cpu", "throughput / transformers + PEFT", "higher", 1.0, "×"),
    Goal("cpu", "TPOT of three adapters / base", "lower", 1.3, "×"),
    Goal("cpu", "first token, first run", "lower", 60.0, "s"),
    Goal("cpu", "first token, second run", "lower", 15.0, "s"),
    Goal("cpu", "idle stack without weights and KV", "lower", 700.0, "MiB"),
    Goal("fairness", "worst wait / bound, all cells", "lower", 1.0, "×"),
    Goal("fairness", "smallest Jain index, all cells", "higher", 0.99, ""),
    Goal("fairness", "fewest rounds, all cells", "higher", 20, "rounds"),
    *(
        Goal(
            "fairness",
            f"max_loras {count}, {popularity}: finite trace / {peer}",
            "lower",
            1.03,
            "×",
        )
        for count in (32, 64)
        for popularity in ("uniform", "Zipf")
        for peer in ("baseline", "baseline with own copies")
    ),
    Goal("fairness", "planning, 256 sequences, 10,000 flows", "lower", 200.0, "µs"),
    Goal("fairness_live", "fair: worst wait / bound", "lower", 1.0, "×"),
    Goal("fairness_live", "fair: adapters that got a token", "higher", 12, "of 12"),
    *(Goal("step", f"TPOT, batch {case}", "lower", most, "ms") for case, most in STEP_TPOT_MS),
    Goal("step", "tax of 32 tokens as 20+8+4, rank 16", "lower", 1.05, "×"),
    Goal("step", "tax of 32 tokens as 20+8+4, ranks 8/16/64", "lower", 1.05, "×"),
    Goal("step", "tax of 32 tokens as 32 × 1, rank 16, beyond its bytes", "lower", 0.1, "×"),
    Goal("step", "tax of 32 tokens as 32 × 1, ranks 8/16/64, beyond its bytes", "lower", 0.1, "×"),
    *(
        Goal("step", f"prefill throughput, {adapters} / base", "higher", 0.9, "×")
        for adapters in ("1 adapter", "8 adapters", "64 adapters")
    ),
    Goal("step", "256 places / 8", "lower", 1.02, "×"),
    Goal("step", "16 GB of shards to the device", "lower", 6.0, "s"),
    Goal("serve", "start to SERVING", "lower", 25.0, "s"),
    Goal("serve", "gRPC / in-process", "higher", 0.95, "×"),
    Goal("serve", "1000 adapters at 40/s: finished / peer", "higher", 2.0, "×"),
    Goal("serve", "1000 adapters at 40/s: started, worst decile", "higher", 1.0, ""),
    Goal("registry", "verification of a 100 MB adapter", "lower", 2.0, "s"),
    Goal("registry", "memory of the verification / its size", "lower", 2.0, "×"),
    Goal("memory", "parse and pack, bf16, rank 8", "higher", 1.0, "GB/s"),
    Goal("memory", "parse and pack, bf16, rank 16", "higher", 1.0, "GB/s"),
    Goal("memory", "parse and pack, bf16, rank 64", "higher", 1.0, "GB/s"),
    Goal("memory", "bytes taken / used, ranks 4, 8, 16, 32, 64", "lower", 1.001, "×"),
    Goal("memory", "pages beyond the fewest, worst rank 4-64", "lower", 1.0, "pages"),
    *(
        Goal("ops", f"{cell}: {kind}", "lower", limits[index], "µs")
        for cell, limits in OPS.items()
        for index, kind in enumerate(("in-layer", "pair"))
    ),
)


def goals_of(bench: str) -> dict[str, Goal]:
    """Case → goal."""
    return {goal.case: goal for goal in GOALS if goal.bench == bench}
