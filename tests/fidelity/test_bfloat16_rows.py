"""Every kind of adapter in bf16, all of a base and the base itself in one batch, each no further
from fp32 than PEFT with that adapter alone. The rule: tests/support/bfloat16.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from engine_svc.types import NO_SLOT, SamplingParams
from tests.support.bfloat16 import (
    LARGE_WAYS,
    load_narrow,
    logits,
    misses,
    options_of,
    recorded,
    report,
    round_weights,
    too_small,
    with_adapter,
)
from tests.support.coverage import BASES, COVERAGE, VOCABULARY, CoverageCase
from tests.support.coverage_rows import WrittenRow, write_row
from tests.support.direct_runner import DirectRunner, SeatedSequence
from tests.support.oracle import load_base, pack, write_checkpoint

#: PEFT warns of options that it changes, of biases without a layer's own, of copies that it saves
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

SEQUENCES, NUM_TOKENS, CHUNK = 8, 48, 4
#: the bases' weights: at tests.support.oracle's 0.2 attention is so sharp that at single tokens any
#: rounding is 10 × as far from fp32 as at others, ours and PEFT's, and chance has the percentile
SHARPNESS = 0.12

#: name → rows, seed, architecture and changes to its config
TABLES: dict[str, tuple[list[CoverageCase], int, str, dict[str, Any]]] = {
    **{name: ([c for c in COVERAGE if c.base == name], 4, *BASES[name]) for name in BASES},
    **{
        f"vocabulary, {name}": (
            list(VOCABULARY), 7, "LlamaForCausalLM", {"tie_word_embeddings": name == "tied"}
        )
        for name in ("untied", "tied")
    },
}  # fmt: skip


@dataclass(frozen=True)
class Base:
    model_dir: Path
    cases: list[CoverageCase]
    rows: list[WrittenRow]
    packed: list[tuple[str, int, bytes]]

    def generate(self, way: str) -> list[list[SeatedSequence]]:
        """The rows' sequences, then the base's, all in one batch. Their prompts end at different
        steps and so do they."""
        streams = [
            [
                SeatedSequence(
                    seat,
                    row if row < len(self.rows) else NO_SLOT,
                    [(13 * seat + 5 * i) % 130 for i in range(3 + row)],
                    SamplingParams(max_tokens=999, seed=seat),
                )
                for seat in range(SEQUENCES * row, SEQUENCES * (row + 1))
            ]
            for row in range(len(self.rows) + 1)
        ]
        everyone = [sequence for row in streams for sequence in row]
        run = DirectRunner(
            self.model_dir, {digest: data for digest, _, data in self.packed},
            arena_bytes=1 << 25, max_num_seqs=len(everyone), max_slots=len(self.rows),
            max_num_batched_tokens=max(512, CHUNK * len(everyone)), **options_of(way),
        )  # fmt: skip
        inner: Any = run.runner
        inner._arena.bytes.fill_(0xFF)
        run.record_logits()
        for slot, (digest, num_pages, _) in enumerate(self.packed):
            run.load_slot(slot, digest, num_pages)
        run.generate(everyone, NUM_TOKENS, chunk=CHUNK)
        run.close()
        return streams


@pytest.fixture(scope="module")
def base_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Base]:
    return cache(lambda name: build(name, tmp_path_factory.mktemp("base")))


def build(name: str, root: Path) -> Base:
    cases, seed, architecture, changes = TABLES[name]
    model_dir = write_checkpoint(
        root / "m", architecture, seed, initializer_range=SHARPNESS, **changes
    )
    round_weights(model_dir / "model.safetensors")
    run = DirectRunner(model_dir, arena_bytes=1 << 20, **options_of("eager"))
    shapes = run.loaded
    run.close()
    rows = [
        write_row(case, model_dir, root, index, narrow=True) for index, case in enumerate(cases)
    ]
    packed = [pack(row.served, shapes.base, shapes.layout) for row in rows]
    return Base(model_dir, cases, rows, packed)


@pytest.mark.parametrize("way", LARGE_WAYS)
@pytest.mark.parametrize("name", TABLES)
def test_every_row_in_one_batch_is_no_further_from_fp32_than_peft(
    base_of: Callable[[str], Base], name: str, way: str
) -> None:
    base = base_of(name)
    exact_of = cache(load_base)
    narrow_of = cache(lambda model_dir: load_narrow(model_dir, way))
    *streams, of_base = base.generate(way)
    plain = logits(exact_of(base.model_dir), of_base)
    yardstick = logits(narrow_of(base.model_dir), of_base) - plain
    failed = {"the base": misses(recorded(of_base) - plain, yardstick)}
    for case, row, sequences in zip(base.cases, base.rows, streams, strict=True):
        exact = logits(with_adapter(exact_of(row.trained_on), row.folder), sequences)
        peft = logits(with_adapter(narrow_of(row.trained_on), row.folder), sequences)
        error = recorded(sequences) - exact
        effect = exact - logits(exact_of(base.model_dir), sequences)
        failed[case.name] = misses(error, peft - exact) + too_small(effect, error)
    assert not report(failed), report(failed)
