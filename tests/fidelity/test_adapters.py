"""What PEFT can write, each row alone and all of a base in one mixed batch, against PEFT."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_svc.model.lora import KernelLora
from engine_svc.types import NO_SLOT, SamplingParams
from tests.support.coverage import BASES, COVERAGE, CoverageCase
from tests.support.coverage_rows import write_row
from tests.support.direct_runner import (
    WAY_OPTIONS,
    WAY_TOLERANCE,
    WAYS,
    DirectRunner,
    SeatedSequence,
)
from tests.support.oracle import Comparison, Oracle, pack, write_checkpoint

#: PEFT warns of options that it changes, and of the bias of a LoRA above a layer without one
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

TOLERANCE = 1e-4
ADAPTER = "the adapter"
GREEDY = SamplingParams(max_tokens=64, seed=0, temperature=0.0)


@dataclass
class Base:
    """A base model with the adapters of the table that belong to it."""

    model_dir: Path
    cases: list[CoverageCase]
    packed: list[tuple[str, int, bytes]]
    #: what transformers says of the base, and PEFT of each case
    plain: Oracle
    oracles: list[Oracle]

    def runner(self, lora: str, cases: list[int]) -> DirectRunner:
        """With the adapters of `cases` in slots 0, 1, …; `lora`: "kernels" or one of WAYS."""
        packed = {digest: data for digest, _, data in (self.packed[case] for case in cases)}
        run = DirectRunner(
            self.model_dir, packed, arena_bytes=1 << 25, max_num_seqs=32, max_slots=len(cases),
            **WAY_OPTIONS["eager" if lora == "kernels" else lora],
        )  # fmt: skip
        if lora == "kernels":
            inner: Any = run.runner
            layout, slots = run.loaded.layout, len(cases)
            inner._model._lora = KernelLora(inner._bindings._site_table, layout, 512, slots)
        run.record_logits()
        for slot, case in enumerate(cases):
            digest, num_pages, _ = self.packed[case]
            run.load_slot(slot, digest, num_pages)
        return run


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Base]:
    return {name: build(name, tmp_path_factory.mktemp("base")) for name in BASES}


def build(name: str, root: Path) -> Base:
    architecture, changes = BASES[name]
    model_dir = write_checkpoint(root / "m", architecture, seed=4, **changes)
    run = DirectRunner(model_dir, arena_bytes=1 << 20)
    shapes = run.loaded
    run.close()
    cases = [case for case in COVERAGE if case.base == name]
    base = Base(model_dir, cases, [], Oracle(model_dir), [])
    for index, case in enumerate(base.cases):
        row = write_row(case, model_dir, root, index)
        base.packed.append(pack(row.served, shapes.base, shapes.layout))
        base.oracles.append(Oracle(row.trained_on, {ADAPTER: row.folder}))
    return base


def prompt(seat: int, length: int) -> list[int]:
    return [(13 * seat + 5 * i) % 130 for i in range(length)]


@pytest.mark.parametrize("case", COVERAGE, ids=lambda case: case.name)
def test_an_adapter_alone_equals_peft(bases: dict[str, Base], case: CoverageCase) -> None:
    base = bases[case.base]
    index = base.cases.index(case)
    run = base.runner("eager", [index])
    sequence = SeatedSequence(0, 0, prompt(index, 21), GREEDY)
    run.generate([sequence], 6, chunk=9)
    comparison, oracle = Comparison(), base.oracles[index]
    comparison.check(oracle, ADAPTER, sequence, sequence.logits, TOLERANCE)
    comparison.assert_few_close_calls()
    unchanged = base.plain.logits(sequence.prompt, None)
    changed = oracle.logits(sequence.prompt, ADAPTER) - unchanged
    assert changed.abs().max() > 30 * TOLERANCE, "the adapter must matter"
    run.close()


@pytest.mark.parametrize("lora", [*WAYS, "kernels"])
@pytest.mark.parametrize("name", BASES)
def test_every_kind_of_adapter_and_the_base_share_a_batch_with_joins_and_leaves(
    bases: dict[str, Base], name: str, lora: str
) -> None:
    base = bases[name]
    run = base.runner(lora, list(range(len(base.cases))))
    slots = [*range(len(base.cases)), NO_SLOT]
    sequences = [
        SeatedSequence(seat, slot, prompt(seat, 3 + 2 * seat), GREEDY)
        for seat, slot in enumerate(slots)
    ]
    # joins: new sequences at each turn of three tokens; leaves: at 11 tokens
    for joined in range(2, len(sequences) + 4, 4):
        run.generate([s for s in sequences[:joined] if len(s.outputs) < 9], 5, chunk=6)
    run.generate(sequences, 11, chunk=6)
    comparison = Comparison()
    for sequence in sequences:
        is_base = sequence.slot == NO_SLOT
        oracle = base.plain if is_base else base.oracles[sequence.slot]
        adapter = None if is_base else ADAPTER
        comparison.check(oracle, adapter, sequence, sequence.logits, WAY_TOLERANCE[lora])
    comparison.assert_few_close_calls()
    run.close()


def test_an_adapter_that_left_comes_back_in_another_slot_as_it_was(bases: dict[str, Base]) -> None:
    """DoRA, whose gains are kept, in pages that held another adapter."""
    base = bases["with biases"]
    names = [case.name for case in base.cases]
    dora, other = names.index("use_dora: a base with biases"), names.index("bias: all")
    run = base.runner("eager", [dora, other])
    run.generate([SeatedSequence(9, NO_SLOT, [1], GREEDY)], 1)  # binds both
    streams = []
    for seat, (slot, case) in enumerate(((0, dora), (1, other), (1, dora), (0, other))):
        digest, num_pages, _ = base.packed[case]
        pages = run.load_slot(slot, digest, num_pages)
        sequence = SeatedSequence(seat, slot, prompt(5, 17), GREEDY)
        run.generate([sequence], 5)
        comparison = Comparison()
        comparison.check(base.oracles[case], ADAPTER, sequence, sequence.logits, TOLERANCE)
        streams.append(sequence)
        run.free.extend(pages)
    first, _, again, _ = streams
    assert torch.equal(torch.stack(first.logits), torch.stack(again.logits))
    run.close()
