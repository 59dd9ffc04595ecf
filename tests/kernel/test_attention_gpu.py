"""Decode and prefill attention on a GPU: real sizes with the tuned constants, and CUDA graphs."""

from __future__ import annotations

import pytest
import torch

from kernels.decode_attention import DecodeScratch, decode_attention, decode_scratch
from kernels.decode_attention_triton import decode_attention_triton
from kernels.prefill_attention import prefill_attention, tile_rows
from tests.kernel.attention_case import LAYER, AttentionCase, attention_case

pytestmark = pytest.mark.gpu
HEADS_8B = (32, 8, 128)
HEADS = [HEADS_8B, (9, 3, 64), (16, 1, 256), (32, 4, 80), (24, 8, 96)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
LENGTHS = [1, 16, 100, 640, 641, 1023, 1500, 2500]
CHUNKS = [(0, 300), (333, 129), (64, 1), (1000, 17), (0, 64), (640, 40)]


def decode(case: AttentionCase, scratch: DecodeScratch, out: torch.Tensor) -> torch.Tensor:
    return decode_attention(
        case.q, case.pages, case.page_table, case.decode_rows, case.row_seat, case.positions, LAYER,
        case.num_kv_heads, 0, out, scratch,
    )  # fmt: skip


def scratch_of(case: AttentionCase) -> DecodeScratch:
    _, heads, dim = case.q.shape
    rows = case.decode_rows.shape[0]
    return decode_scratch(rows, heads, case.num_kv_heads, dim, case.q.device)


def decode_case(
    lengths: list[int], heads: tuple[int, int, int], dtype: torch.dtype, seed: int = 0
) -> AttentionCase:
    return attention_case(
        [(length - 1, 1) for length in lengths], heads, dtype, seed=seed, device="cuda"
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("copies", [1, 24])
def test_decode_of_small_and_large_batches_equals_dense_attention(
    copies: int, heads: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """A large batch has fewer and longer parts."""
    lengths = LENGTHS if copies == 1 else [*(1 + length % 300 for length in LENGTHS * copies), 1500]
    case = decode_case(lengths, heads, dtype)
    scratch = scratch_of(case)
    case.check(decode(case, scratch, case.empty_out()))
    assert not scratch.arrived.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
def test_prefill_of_long_chunks_equals_dense_attention(
    heads: tuple[int, int, int], dtype: torch.dtype
) -> None:
    rows = tile_rows(heads[0], heads[1])
    case = attention_case(CHUNKS, heads, dtype, rows_a_tile=rows, device="cuda")
    out = prefill_attention(
        case.q, case.pages, case.page_table, case.tiles, case.num_tiles, LAYER, case.num_kv_heads,
        0, case.empty_out(),
    )  # fmt: skip
    case.check(out)


def test_decode_gives_the_same_bits_whichever_part_arrives_last() -> None:
    case = decode_case(LENGTHS, HEADS_8B, torch.bfloat16)
    scratch = scratch_of(case)
    first = decode(case, scratch, case.empty_out())
    for _ in range(50):
        assert torch.equal(decode(case, scratch, case.empty_out()), first)


@pytest.mark.parametrize("pdl", [False, True])
def test_captured_decode_follows_a_batch_that_changes_in_place(pdl: bool) -> None:
    """Three launches a replay share one scratch."""
    cases = [
        decode_case(lengths, HEADS_8B, torch.bfloat16, seed)
        for seed, lengths in enumerate(([900, 3, 640, 77], [2, 900, 1, 899], [16, 17, 900, 64]))
    ]
    live, scratch = cases[0], scratch_of(cases[0])
    outs = [live.empty_out() for _ in range(3)]
    page_table = torch.full((7, 64), -1, dtype=torch.int32, device="cuda")
    pages = torch.full((256, *live.pages.shape[1:]), torch.nan, dtype=torch.bfloat16, device="cuda")

    def step() -> None:
        for out in outs:
            decode_attention_triton(
                live.q, pages, page_table, live.decode_rows, live.row_seat, live.positions, LAYER,
                live.num_kv_heads, 0, out, scratch, pdl=pdl,
            )  # fmt: skip

    def load(case: AttentionCase) -> None:
        pages[: case.pages.shape[0]].copy_(case.pages)
        page_table[:, : case.page_table.shape[1]].copy_(case.page_table)
        for name in ("q", "decode_rows", "row_seat", "positions"):
            getattr(live, name).copy_(getattr(case, name))

    load(cases[0])
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for case in [*cases[1:], cases[1]]:
        load(case)
        for out in outs:
            out.copy_(case.empty_out())
        graph.replay()
        for out in outs:
            case.check(out)
        assert not scratch.arrived.any()
