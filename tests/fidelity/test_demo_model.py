"""The demo model with its three adapters against transformers + PEFT in fp32, by the equality
rule."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from engine_svc.layout import adapter_layout, smallest_page_size
from engine_svc.types import NO_SLOT, SamplingParams
from loraplex.base_model import parse_config_json
from tests.support.demo_model import demo_adapter_dirs, demo_model_dir, demo_prompts
from tests.support.direct_runner import DirectRunner, SeatedSequence
from tests.support.oracle import Comparison, Oracle, pack

__all__ = ["demo_adapter_dirs", "demo_model_dir"]

TOLERANCE = 1e-3
NUM_TOKENS = 16
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, seed=0, temperature=0.0)


@pytest.fixture(scope="module")
def run(demo_model_dir: Path, demo_adapter_dirs: dict[str, Path]) -> Iterator[DirectRunner]:
    base = parse_config_json((demo_model_dir / "config.json").read_text())
    layout = adapter_layout(base, smallest_page_size(base, "float32"), "float32")
    packed = [pack(folder, base, layout) for folder in demo_adapter_dirs.values()]
    run = DirectRunner(
        demo_model_dir, {digest: data for digest, _, data in packed},
        arena_bytes=1 << 28, max_num_seqs=16, max_slots=4,
    )  # fmt: skip
    run.record_logits()
    for slot, (digest, num_pages, _) in enumerate(packed):
        run.load_slot(slot, digest, num_pages)
    yield run
    run.close()


def test_all_demo_adapters_and_the_base_equal_peft_alone_and_in_one_batch(
    run: DirectRunner, demo_model_dir: Path, demo_adapter_dirs: dict[str, Path]
) -> None:
    tokenizer = Tokenizer.from_file(str(demo_model_dir / "tokenizer.json"))
    names = [*demo_adapter_dirs, None]
    texts = demo_prompts()

    def prompt(name: str | None, index: int) -> list[int]:
        asked = texts[name or names[index % 3]][index]
        chat = f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"
        ids: list[int] = tokenizer.encode(chat).ids
        return ids

    def sequences(index: int) -> list[SeatedSequence]:
        return [
            SeatedSequence(
                4 * index + i, i if name else NO_SLOT, prompt(name, index), GREEDY
            )
            for i, name in enumerate(names)
        ]  # fmt: skip

    first, second = sequences(0), sequences(1)
    run.generate(first[:1], NUM_TOKENS)  # alone
    run.generate(first[1:], 5, chunk=16)
    # the second four join, the first leave before they end
    run.generate([*first[1:], *second], NUM_TOKENS, chunk=16)
    oracle, comparison = Oracle(demo_model_dir, demo_adapter_dirs), Comparison()
    for sequence in first + second:
        name = names[sequence.seat % 4]
        comparison.check(oracle, name, sequence, sequence.logits, TOLERANCE)
    assert comparison.positions == 8 * NUM_TOKENS
    comparison.assert_few_close_calls()
    # each adapter is visibly itself: it does not continue as the base would
    for i, name in enumerate(demo_adapter_dirs):
        mine = first[i]
        base = oracle.logits(mine.tokens[:-1], None)[len(mine.prompt) - 1 :].argmax(dim=1)
        assert base.tolist() != mine.outputs, f"{name} answers like the base"
