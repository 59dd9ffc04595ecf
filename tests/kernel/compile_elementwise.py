"""Compiles the elementwise and sampling kernels for sm_90 without a GPU; prints what came out as
JSON lines.

    python tests/kernel/compile_elementwise.py

A process of its own: a kernel that was imported for the interpreter cannot be compiled.
"""

from __future__ import annotations

import json
import re
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels import rank_tokens
from kernels.add_rms_norm_triton import add_rms_norm_kernel
from kernels.rank_tokens_triton import rank_blocks_kernel, rank_rows_kernel
from kernels.rope_store_triton import rope_store_kernel
from kernels.sample import BLOCK, CANDIDATES
from kernels.sample_candidates_triton import candidates_kernel
from kernels.sample_draw_triton import draw_kernel
from kernels.sample_triton import CANDIDATE_WARPS, DRAW_WARPS, SCAN_WARPS, scan_kernel
from kernels.silu_mul_delta_triton import silu_mul_delta_kernel
from tests.kernel.compile_ahead import resources, wide_loads

#: pointer arguments that are not of the compute dtype
POINTERS = {
    "positions": "i32", "row_seat": "i32", "page_table": "i32", "row_slot": "i32", "live": "u8",
    "g_off": "i64", "arena": "u8", "seats": "i32", "words": "i32", "floats": "fp32",
    "tally": "i32", "bias": "fp32", "token_masks": "i32", "mask_of_row": "i32", "maxima": "fp32",
    "sums": "fp32", "rests": "fp32", "places": "i32", "counts": "i32", "faults": "i32",
    "values": "fp32", "value_columns": "i32", "numbers": "fp64", "last_token": "i32",
    "tokens": "i32", "rows": "i32", "chosen": "fp32", "top_ids": "i32", "top_values": "fp32",
}  # fmt: skip
#: pointer arguments of the compute dtype
COMPUTE = (
    "x", "residual", "weight", "out", "gate_up", "qkv", "pages", "cos", "sin", "q_out", "q_norm",
    "k_norm", "delta", "logits",
)  # fmt: skip
FLOATS = ("eps",)
#: whole numbers that are not multiples of 16
ODD_NUMBERS = (
    "cell",
    "num_cells",
    "layer",
    "seat_stride",
    "num_blocks",
    "mask_words",
    "top",
    "top_stride",
)
DELTA = {"HAS_DELTA": True, "OFFSET_UNIT": 16}


def main() -> None:
    for pdl in (False, True):
        for eager in (False, True):
            shared = {**DELTA, "EAGER": eager, "PDL": pdl}
            norm = {"C": 4096, "BLOCK_C": 4096, **shared}
            report(add_rms_norm_kernel, norm, num_warps=16 if eager else 8)
            block = 512 if eager else 2048
            silu = {"WIDTH": 14336, "BLOCK": block, **shared}
            report(silu_mul_delta_kernel, silu, num_warps=2 if eager else 4)
            rope = {
                "HEADS": 32, "KV_HEADS": 8, "DIM": 128, "HALF": 64, "PAGE_SIZE": 16,
                "GROUP": 4 if eager else 8, "BLOCK_HALF": 64, "BLOCK_TAIL": 0, "NORM": eager,
                "ROPE": True, **shared,
            }  # fmt: skip
            report(rope_store_kernel, rope, num_warps=1 if eager else 2)
    for masked in (False, True):
        scan = {"MASKED": masked, "BLOCK": BLOCK, "CANDIDATES": CANDIDATES}
        report(scan_kernel, scan, num_warps=SCAN_WARPS)
        report(candidates_kernel, scan, num_warps=CANDIDATE_WARPS)
        report(draw_kernel, {**scan, "BLOCKS": 64}, num_warps=DRAW_WARPS)
    ranks = {"KEPT": rank_tokens.KEPT}
    report(rank_blocks_kernel, {"BLOCK": rank_tokens.BLOCK, **ranks}, num_warps=8)
    report(rank_rows_kernel, {"BLOCKS": 64, **ranks}, num_warps=8)


def report(kernel: Any, constants: dict[str, Any], **options: int) -> None:
    """Compile one variant in bf16 and print its loads and resources."""
    signature: dict[str, str] = {}
    attributes = {}
    for index, name in enumerate(kernel.arg_names):
        pointer = POINTERS.get(name) or ("bf16" if name in COMPUTE else None)
        if name in constants:
            signature[name] = "constexpr"
        elif name in FLOATS:
            signature[name] = "fp32"
        else:
            signature[name] = f"*{pointer}" if pointer else "i32"
            if name not in ODD_NUMBERS:
                attributes[(index,)] = [["tt.divisibility", 16]]
    pdl = {"launch_pdl": True} if constants.get("PDL") else {}
    compiled = triton.compile(
        ASTSource(kernel, signature, constants, attributes),
        target=GPUTarget("cuda", 90, 32),
        options={**options, **pdl},
    )
    ptx = compiled.asm["ptx"]
    print(
        json.dumps(
            {
                "kernel": kernel.__name__,
                "constants": constants,
                "wide_loads": wide_loads(ptx),
                "narrow_loads": len(re.findall(r"ld\.global[.\w:]*\.[bsu]16\b", ptx)),
                "waits": ptx.count("griddepcontrol.wait"),
                "shared_bytes": compiled.metadata.shared,
                **resources(compiled.asm["cubin"]),
            }
        )
    )


if __name__ == "__main__":
    main()
