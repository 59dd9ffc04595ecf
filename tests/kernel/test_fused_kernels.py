"""The fused elementwise kernels in Triton against their plain-torch references.

On a GPU, or with TRITON_INTERPRET=1 in Triton's interpreter on the CPU (test_interpreter.py).
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from kernels import add_rms_norm, rope_store, silu_mul_delta
from kernels.add_rms_norm_triton import add_rms_norm_triton
from kernels.lora_tables import LoraDelta, SiteTable
from kernels.rope_store_triton import rope_store_triton
from kernels.silu_mul_delta_triton import silu_mul_delta_triton
from tests.kernel.fused_case import ROUNDING, canary_like, delta_case, normal, padded
from tests.kernel.lora_case import CANARY

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
#: dtypes and launches; one may begin before the one ahead of it ends, but not in the interpreter
KINDS: list[tuple[torch.dtype, dict[str, Any]]] = [
    (torch.float32, {}),
    (torch.bfloat16, {}),
    *([] if INTERPRETED else [(torch.bfloat16, {"pdl": True}), (torch.float16, {})]),
]
EPS = 1e-5


def on_cpu(value: Any) -> Any:
    """The same arguments for a reference, which runs on the CPU."""
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, LoraDelta):
        table = SiteTable(*(getattr(value.table, name).cpu() for name in SiteTable.__slots__))
        return LoraDelta(value.delta.cpu(), value.row_slot.cpu(), table, value.cell)
    return value


def few_is_ten(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small cases take the way of many rows too."""
    for name in ("add_rms_norm", "silu_mul_delta", "rope_store"):
        monkeypatch.setattr(f"kernels.{name}_triton.FEW_ROWS", 10)
    # the rows of a delta are two more
    monkeypatch.setattr("kernels.add_delta_triton.EAGER_ROWS", 12)


@pytest.mark.parametrize(("dtype", "options"), KINDS)
@pytest.mark.parametrize(
    ("rows", "width", "with_delta"),
    [
        (1, 64, False),
        (13, 320, True),
        (5, 577, True),
        (2, 4096, True),
        (21, 40, True),
        (12, 4096, False),
    ],
)
def test_residual_add_and_norm_equal_the_reference(
    rows: int, width: int, with_delta: bool, dtype: torch.dtype, options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    few_is_ten(monkeypatch)
    x = padded(normal(rows, width, seed=1, dtype=dtype), DEVICE)
    residual = normal(rows, width, seed=2, dtype=dtype).to(DEVICE)
    weight = normal(width, seed=3, dtype=dtype).to(DEVICE)
    out = canary_like((rows + 1, width), dtype, DEVICE)
    delta = delta_case(rows, width, dtype, DEVICE) if with_delta else None
    expected_residual, expected = residual.cpu().clone(), torch.empty(rows, width, dtype=dtype)
    add_rms_norm.add_rms_norm(
        x.cpu(), expected_residual, weight.cpu(), EPS, expected, on_cpu(delta)
    )
    add_rms_norm_triton(x, residual, weight, EPS, out[:rows], delta, **options)
    torch.testing.assert_close(residual.cpu(), expected_residual, **ROUNDING[dtype])
    # of the residual as it was rounded: a neighbour there would count twice
    add_rms_norm.add_rms_norm(
        torch.zeros_like(expected), residual.cpu().clone(), weight.cpu(), EPS, expected
    )
    torch.testing.assert_close(out[:rows].cpu(), expected, **ROUNDING[dtype])
    assert (out[rows:] == CANARY).all()


@pytest.mark.parametrize(("dtype", "options"), KINDS)
@pytest.mark.parametrize(
    ("rows", "width", "with_delta"),
    [(1, 64, False), (7, 1040, True), (5, 333, True), (21, 2064, True), (13, 2064, False)],
)
def test_gated_activation_equals_the_reference(
    rows: int, width: int, with_delta: bool, dtype: torch.dtype, options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    few_is_ten(monkeypatch)
    gate_up = padded(3 * normal(rows, 2 * width, seed=1, dtype=dtype), DEVICE)
    out = canary_like((rows + 1, width), dtype, DEVICE)
    delta = delta_case(rows, 2 * width, dtype, DEVICE) if with_delta else None
    expected = torch.empty(rows, width, dtype=dtype)
    silu_mul_delta.silu_mul_delta(gate_up.cpu(), expected, on_cpu(delta))
    silu_mul_delta_triton(gate_up, out[:rows], delta, **options)
    torch.testing.assert_close(out[:rows].cpu(), expected, **ROUNDING[dtype])
    assert (out[rows:] == CANARY).all()


#: heads, KV heads, head dim, rotated numbers
SHAPES = {
    "grouped": (8, 2, 32, 32),
    "odd": (9, 3, 64, 64),
    "partial rotation": (4, 4, 96, 32),
    "half that is no power of two": (6, 2, 80, 80),
    "llama": (32, 8, 128, 128),
}


@pytest.mark.parametrize(("dtype", "options"), KINDS)
@pytest.mark.parametrize(
    ("shape", "with_norm", "use_rope", "with_delta"),
    [
        ("grouped", True, False, True),
        ("grouped", False, False, False),
        ("odd", True, True, False),
        ("partial rotation", True, True, True),
        ("partial rotation", False, True, False),
        ("half that is no power of two", True, True, True),
        ("llama", False, True, True),
        ("llama", True, True, False),
    ],
)
def test_rotation_and_store_equal_the_reference(
    shape: str, with_norm: bool, use_rope: bool, with_delta: bool, dtype: torch.dtype,
    options: dict[str, Any],
) -> None:  # fmt: skip
    heads, kv_heads, dim, rotated = SHAPES[shape]
    check_rope_store(
        7, heads, kv_heads, dim, rotated, dtype, with_norm, use_rope, with_delta, options
    )


@pytest.mark.parametrize("shape", ["odd", "partial rotation"])
def test_many_rows_take_wider_groups_of_heads(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    few_is_ten(monkeypatch)
    heads, kv_heads, dim, rotated = SHAPES[shape]
    check_rope_store(20, heads, kv_heads, dim, rotated, torch.bfloat16, True, True, True, {})


def check_rope_store(
    rows: int, heads: int, kv_heads: int, dim: int, rotated: int, dtype: torch.dtype,
    with_norm: bool, use_rope: bool, with_delta: bool, options: dict[str, Any],
) -> None:  # fmt: skip
    """Rows of three seats, of padding, and of a seat whose page is missing."""
    page_size, layers, layer, context = 4, 3, 1, 600
    qkv = padded(normal(rows, (heads + 2 * kv_heads) * dim, seed=1, dtype=dtype), DEVICE)
    seats = torch.tensor([(2, 2, -1, 0, 0, 1, 3)[row % 7] for row in range(rows)])
    # each seat's rows at positions of their own
    positions = torch.arange(rows) * (seats >= 0)
    page_table = torch.full((4, context // page_size), -1, dtype=torch.int32)
    page_table[:3] = torch.randperm(
        3 * page_table.shape[1], generator=torch.Generator().manual_seed(4)
    ).view(3, -1)
    num_pages = 3 * page_table.shape[1]
    pages = canary_like((num_pages, layers, 2, page_size, kv_heads, dim), dtype, DEVICE)
    angles = torch.outer(torch.arange(context).float(), torch.rand(rotated // 2)).unsqueeze(1)
    q_out = canary_like((rows, heads, dim), dtype, DEVICE)
    arguments = (
        qkv, positions.int().to(DEVICE), seats.int().to(DEVICE), page_table.to(DEVICE), pages,
        layer, angles.cos().to(DEVICE, dtype), angles.sin().to(DEVICE, dtype), q_out,
        (1 + normal(dim, seed=5, dtype=dtype)).to(DEVICE) if with_norm else None,
        (1 + normal(dim, seed=6, dtype=dtype)).to(DEVICE) if with_norm else None,
        EPS, use_rope,
        delta_case(rows, qkv.shape[1], dtype, DEVICE) if with_delta else None,
    )  # fmt: skip
    # copies: on a CPU the reference would share them
    reference = [on_cpu(a).clone() if isinstance(a, torch.Tensor) else on_cpu(a) for a in arguments]
    rope_store.rope_store(*reference)
    rope_store_triton(*arguments, **options)
    torch.testing.assert_close(pages.cpu(), reference[4], **ROUNDING[dtype])
    torch.testing.assert_close(q_out.cpu(), reference[8], **ROUNDING[dtype])
    written = (pages != CANARY).any(dim=-1).sum().item()
    assert written == 2 * kv_heads * int(((seats >= 0) & (seats < 3)).sum())


def test_empty_batches_launch_nothing() -> None:
    nothing = torch.empty(0, 64, device=DEVICE)
    weight = torch.ones(64, device=DEVICE)
    add_rms_norm_triton(nothing, nothing.clone(), weight, EPS, nothing.clone())
    silu_mul_delta_triton(nothing, torch.empty(0, 32, device=DEVICE))
    check_rope_store(0, 2, 1, 16, 16, torch.float32, False, True, False, {})
