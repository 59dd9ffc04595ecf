"""The sampling cases of `bench-elementwise`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.elementwise.cases import Case, Shape
from engine_svc.model.gpu.sampler import GpuSampler
from engine_svc.model.gpu.sampler_state import SamplerState
from engine_svc.model.sampler import Sampler
from engine_svc.model.seats import SeatState
from engine_svc.types import SamplingParams, SeatOpening
from kernels.rank_tokens import MAX_TOP, rank_scratch
from kernels.rank_tokens_triton import rank_tokens_triton
from kernels.sample_triton import sample_triton

#: the decreasing weight of a token by its rank: nine tenths of it lie on about a hundred tokens
PEAK = 1.5
PROMPT = tuple(range(1, 400))
#: by title: parameters, whether logits are peaked, whether the launch may leave candidates out
WISHES: dict[str, tuple[dict[str, Any], bool, bool]] = {
    "greedy": ({"temperature": 0.0}, True, True),
    "greedy, captured for any": ({"temperature": 0.0}, True, False),
    "temperature": ({}, True, True),
    "top_p 0.9": ({"top_p": 0.9}, True, False),
    "top_k 50, top_p 0.9": ({"top_k": 50, "top_p": 0.9}, True, False),
    "min_p 0.05": ({"min_p": 0.05}, True, False),
    "top_p 0.9 of flat logits": ({"top_p": 0.9}, False, False),
    "penalties, greedy": ({"temperature": 0.0, "repetition_penalty": 1.2}, True, True),
    "penalties, top_p 0.9": ({"presence_penalty": 0.5, "top_p": 0.9}, True, False),
}


def opened(shape: Shape, rows: int, device: str, wish: dict[str, Any]) -> GpuSampler:
    target = torch.device(device)
    sampler = GpuSampler(SamplerState(rows, shape.vocab, 1024, target), rows, target)
    sampler.open(openings(rows, wish))
    sampler.stage(range(rows), [500] * rows)
    return sampler


def openings(rows: int, wish: dict[str, Any]) -> list[SeatOpening]:
    return [
        SeatOpening(row, SamplingParams(64, seed=row, **wish), 0, PROMPT, (7, 8, 9))
        for row in range(rows)
    ]


def logits_of(shape: Shape, rows: int, device: str, peaked: bool) -> torch.Tensor:
    x = torch.randn(rows, shape.vocab, device=device)
    if peaked:
        x = -PEAK * torch.log(1.0 + x.argsort(dim=1).float()) + 0.1 * x
    return x.to(shape.dtype)


def samplers(shape: Shape, device: str) -> Iterator[Case]:
    rows_cases = (1, 64, 256) if device == "cuda" else (2,)
    for rows in rows_cases:
        logits = {peaked: logits_of(shape, rows, device, peaked) for peaked in (False, True)}
        for title, (wish, peaked, plain) in WISHES.items():
            sampler = opened(shape, rows, device, wish)
            size = logits[peaked].nbytes
            if "penalties" in title:
                size += rows * shape.vocab * 4
            yield Case(
                f"sample {rows}, {title}",
                size,
                lambda s=sampler, x=logits[peaked], cut=not plain: launch(s, x, cut),
            )
        yield ranking(shape, logits[True])


def launch(sampler: GpuSampler, logits: torch.Tensor, cut: bool) -> None:
    """As `GpuSampler.enqueue`, but Triton on any device."""
    rows = sampler.rows(cut)
    sample_triton(logits, rows, sampler.state.table, sampler.scratch, sampler.tokens)


def ranking(shape: Shape, logits: torch.Tensor) -> Case:
    rows, device = len(logits), logits.device
    asking = torch.arange(rows, dtype=torch.int32, device=device)
    scratch = rank_scratch(rows, shape.vocab, device)
    chosen = torch.zeros(rows, device=device)
    ids = torch.zeros((rows, MAX_TOP), dtype=torch.int32, device=device)
    values = torch.zeros((rows, MAX_TOP), device=device)
    return Case(
        f"log probabilities {rows}, top {MAX_TOP}",
        logits.nbytes,
        lambda: rank_tokens_triton(logits, asking, asking, MAX_TOP, scratch, chosen, ids, values),
    )


def hosts(shape: Shape, device: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """What a step costs the host, and what the CPU engine's sampler takes on this device."""
    for rows in (64, 256) if device == "cuda" else (2,):
        logits = logits_of(shape, rows, device, True)
        seats, positions = list(range(rows)), [500] * rows
        for title in ("greedy", "top_p 0.9"):
            wish = WISHES[title][0]
            sampler = opened(shape, rows, device, wish)
            yield (
                f"host: launch {rows}, {title}",
                lambda s=sampler, x=logits, a=seats, p=positions: s.launch(x, a, p, {}),
            )
            state = SeatState(rows, shape.vocab, logits.device)
            for opening in openings(rows, wish):
                state.open(opening)
            oracle = Sampler(state)
            yield (
                f"host and device: CPU engine's sampler {rows}, {title}",
                lambda o=oracle, x=logits, a=seats, p=positions: o.sample(
                    x.float(), a, p, {}
                ).tolist(),
            )
