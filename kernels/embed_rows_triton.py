"""kernels.embed_rows on the GPU: one program a row and block of columns."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit  # type: ignore[untyped-decorator]
def embed_rows_kernel(  # type: ignore[no-untyped-def]
    token_ids, row_seat, last_token, embedding, out, residual,
    num_columns, embedding_stride, out_stride, residual_stride, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = columns < num_columns
    seat = tl.load(row_seat + row)
    token = tl.load(token_ids + row).to(tl.int64)
    late = tl.load(last_token + seat, mask=(token < 0) & (seat >= 0), other=0).to(tl.int64)
    token = tl.where(token < 0, late, token)
    source = embedding + token * embedding_stride + columns
    values = tl.load(source, mask=live & (seat >= 0), other=0.0)
    tl.store(out + row * out_stride + columns, values.to(out.dtype.element_ty), mask=live)
    zeros = tl.zeros((BLOCK,), dtype=residual.dtype.element_ty)
    tl.store(residual + row * residual_stride + columns, zeros, mask=live)


def embed_rows_triton(
    token_ids: torch.Tensor,
    row_seat: torch.Tensor,
    last_token: torch.Tensor,
    embedding: torch.Tensor,
    out: torch.Tensor,
    residual: torch.Tensor,
) -> None:
    """`kernels.embed_rows.embed_rows` in Triton; graph-safe."""
    num_rows, num_columns = out.shape
    grid = (num_rows, triton.cdiv(num_columns, BLOCK))
    if num_rows == 0:
        return
    launch: Any = embed_rows_kernel[grid]
    launch(
        token_ids, row_seat, last_token, embedding, out, residual,
        num_columns, embedding.stride(0), out.stride(0), residual.stride(0), BLOCK=BLOCK,
    )  # fmt: skip
