"""Which compiled variants of the Triton kernels steps need, before serving and while serving.

    python tests/kernel/served_variants.py 70 1024      (sequences and tokens of a step at most)

Prints those that only serving needs, one JSON object a line. Nothing is compiled or run: what a
launch asks Triton for is written down instead. A variant is what Triton tells apart: constants,
types, whether a pointer is aligned, whether a number is 1 or a multiple of 16. A process of its
own, since it puts the kernels in place of their references. The first line also names what torch
is asked for beside the kernels by steps without new sequences.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

import kernels.lora_delta_triton
import kernels.lora_shrink_triton
from engine_svc.model import lora
from engine_svc.model.gpu import launches, site_deltas, stepper, trunk
from engine_svc.model.gpu.synthetic_adapter import Outer, synthetic_row
from engine_svc.types import NO_SLOT, LateInputs, SamplingParams
from kernels.add_rms_norm_triton import add_rms_norm_triton
from kernels.decode_attention_triton import decode_attention_triton
from kernels.lora_add_triton import lora_add_triton
from kernels.rope_store_triton import rope_store_triton
from kernels.silu_mul_delta_triton import silu_mul_delta_triton
from tests.kernel.interpreted_model import interpret
from tests.support.direct_runner import DirectRunner, SeatedSequence
from tests.support.fake_graphs import FakeGraphs, warm_up
from tests.support.tiny_model import write_tiny_model

Variant = tuple[object, ...]
#: what an adapter has outside the layers, and its rank blocks
SLOTS = dict(enumerate([*((outer, 1) for outer in Outer), (Outer.NOTHING, 4)]))
WISHES = (
    SamplingParams(max_tokens=9, seed=1, temperature=0.0),
    SamplingParams(max_tokens=9, seed=1, top_p=0.5, logprobs=20),
    SamplingParams(max_tokens=9, seed=1, logprobs=0),
    SamplingParams(
        max_tokens=9, seed=2, repetition_penalty=1.3, logit_bias=((3, 1.0),), min_tokens=3,
        eos_token_ids=(4,),
    ),
)  # fmt: skip


class Launches:
    """Takes the place of Triton's launches."""

    def __init__(self) -> None:
        self.variants: set[Variant] = set()
        JITFunction.run = lambda kernel, *args, **kwargs: self._launched(kernel, args, kwargs)

    def _launched(self, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kwargs = {k: v for k, v in kwargs.items() if k not in ("grid", "warmup")}
        names = [parameter.name for parameter in kernel.params]
        bound = {**dict(zip(names, args, strict=False)), **kwargs}
        facts = [fact(parameter, bound.pop(parameter.name)) for parameter in kernel.params]
        # what is left are options of the compiler
        self.variants.add((kernel.__name__, *facts, *sorted(bound.items())))


def fact(parameter: Any, value: Any) -> tuple[object, ...]:
    """What Triton compiles an argument for."""
    name = parameter.name
    if parameter.is_constexpr:
        return name, value
    if isinstance(value, torch.Tensor):
        return name, str(value.dtype), value.data_ptr() % 16 == 0
    if parameter.do_not_specialize or not isinstance(value, int):
        return name, type(value).__name__
    return name, value.bit_length() > 31, value == 1, value % 16 == 0


def as_on_a_gpu() -> None:
    """Kernels in place of references, dependent launches where a GPU has them."""
    interpret()
    for wrapper in (
        kernels.lora_shrink_triton.lora_shrink_triton,
        kernels.lora_delta_triton.lora_delta_triton,
        lora_add_triton,
    ):
        setattr(lora, wrapper.__name__.removesuffix("_triton"), wrapper)
    for module in (kernels.lora_shrink_triton, kernels.lora_delta_triton):
        module.overlaps = lambda x: True
    early = launches.Launches(
        partial(add_rms_norm_triton, pdl=True),
        partial(decode_attention_triton, pdl=True),
        partial(rope_store_triton, pdl=True),
        partial(silu_mul_delta_triton, pdl=True),
    )
    trunk.trunk_launches = lambda like, overlap: early
    site_deltas.SiteDeltas._tuned = lambda self, tuning: (tuning,)  # type: ignore[method-assign]
    stepper.StepGraphs = FakeGraphs  # type: ignore[assignment,misc]


def steps(run: DirectRunner, seats: int, tokens: int) -> Iterator[list[tuple[SeatedSequence, int]]]:
    """Prompts of random lengths, of the base alone or of the highest rank now and then; all seats
    now and then."""
    rng = random.Random(seats)
    for number in range(60):
        count = seats if number % 3 == 0 else rng.randint(1, seats)
        left, step = rng.randint(count, tokens), []
        for seat in range(count):
            length = min(
                rng.choice([1, 1, 2]) * left // (count - seat), 250, left - count + seat + 1
            )
            slot = rng.choice([NO_SLOT, *SLOTS])
            if number % 4 < 2:
                slot = NO_SLOT if number % 4 == 0 else max(SLOTS)
            sequence = SeatedSequence(seat, slot, [5] * length, rng.choice(WISHES))
            step.append((sequence, length))
            left -= length
        yield step


class Operations(TorchDispatchMode):
    """Names of what torch does inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


def operations(run: DirectRunner, seats: int, rows: int) -> list[str]:
    """Of decodes, and of decodes beside a prompt that goes on."""
    long = SeatedSequence(0, NO_SLOT, [5] * rows, WISHES[0])
    others = [SeatedSequence(seat, 0, [5], WISHES[seat % len(WISHES)]) for seat in range(1, seats)]
    run.run([(long, 1), *((one, 1) for one in others)])
    found = Operations()
    for work in ([(one, 1) for one in others], [(long, rows - 2), *((one, 1) for one in others)]):
        plan, _ = run.plan(work or [(long, 1)], None, 0)
        with found:
            run.runner.forward(plan)
            run.runner.sample(plan, LateInputs())
        run.runner.collect(plan.step)
    for one in (long, *others):
        run.release(one)
    return sorted(found.names)


def main(seats: int, tokens: int, folder: Path) -> None:
    launched = Launches()
    as_on_a_gpu()
    run = DirectRunner(
        write_tiny_model(folder / "m"), static_buffers=True, max_num_seqs=seats,
        max_num_batched_tokens=tokens, max_slots=len(SLOTS), arena_bytes=1 << 25,
    )  # fmt: skip
    warm_up(run)
    warmed = set(launched.variants)
    runner: Any = run.runner
    vocab_size = run.loaded.base.vocab_size
    for slot, (outer, blocks) in SLOTS.items():
        runner.apply(slot, synthetic_row(run.loaded.layout, outer, vocab_size, blocks))
    for step in steps(run, seats, tokens):
        run.run(step, prompt_logprobs=random.Random(len(step)).choice([None, 0, 20]))
        for sequence, _ in step:
            sequence.pages.reverse()  # as one that comes back: its whole page table is new
        run.run([(sequence, 1) for sequence, _ in step])
        for sequence, _ in step:
            run.release(sequence)
    names = operations(run, seats, tokens - seats)
    print(json.dumps({"warmed": len(warmed), "operations": names}))
    for variant in sorted(launched.variants - warmed, key=str):
        print(json.dumps({"late": [str(part) for part in variant]}))
    run.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(int(sys.argv[1]), int(sys.argv[2]), Path(scratch))
