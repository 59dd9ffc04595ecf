"""Compiles the Triton kernels for NVIDIA GPUs without one; prints what came out as JSON lines.

    python tests/kernel/compile_ahead.py

A process of its own: a kernel that was imported for the interpreter cannot be compiled.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels import (
    lora_add_triton,
    lora_delta_triton,
    lora_prefill_delta_triton,
    lora_prefill_shrink_triton,
    lora_shrink_triton,
)
from kernels.lora_tables import OFFSET_UNIT, PREFILL_TILE_ROWS, RANK_BLOCK, TILE_ROWS
from kernels.lora_tuning import DeltaTuning, ShrinkTuning, delta_tuning, num_splits, shrink_tuning

ARCHITECTURES = (80, 90)
ITEM_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
BLOCKS = {"RANK_BLOCK": RANK_BLOCK, "OFFSET_UNIT": OFFSET_UNIT, "NUM_SLICES": 2, "CAST": False}
#: pointer arguments that are not of the compute dtype
POINTERS = {
    "arena": "u8", "a_off": "i64", "b_off": "i64", "g_off": "i64", "c_off": "i64",
    "rank_of": "i32", "scale_of": "fp32", "tiles": "i32", "num_tiles": "i32", "spans": "i32",
    "live_at": "u8", "row_slot": "i32", "u": "fp32",
}  # fmt: skip
#: whole numbers that a model's shapes make multiples of 16; strides count elements
ALIGNED_NUMBERS = (
    "x_stride", "y_stride", "delta_stride", "u_split_stride", "u_row_stride", "u_slice_stride",
    "num_columns",
)  # fmt: skip
#: the two reductions of an 8B model: one partial is one read of a program, or it is longer
IN_FEATURES = (4096, 14336)
OUT_FEATURES = 28672


def main() -> None:
    for architecture in ARCHITECTURES:
        for dtype in ITEM_BYTES:
            for in_features in IN_FEATURES:
                for tile_rows in (TILE_ROWS, PREFILL_TILE_ROWS):
                    shrink(dtype, architecture, in_features, tile_rows)
            for in_features in IN_FEATURES:
                delta(dtype, architecture, in_features, TILE_ROWS)
            delta(dtype, architecture, IN_FEATURES[0], PREFILL_TILE_ROWS)
            constants = {"BLOCK_N": lora_add_triton.BLOCK_N, "OFFSET_UNIT": OFFSET_UNIT}
            warps = {"num_warps": lora_add_triton.NUM_WARPS}
            report(lora_add_triton.add_kernel, dtype, architecture, constants, warps)


def shrink(dtype: str, architecture: int, in_features: int, tile_rows: int) -> None:
    tuning = shrink_tuning(in_features, tile_rows)
    constants = {
        "K": in_features,
        "SPLIT_K": tuning.split_k,
        "BLOCK_K": tuning.block_k * 2 // ITEM_BYTES[dtype],
        "TILE_ROWS": tile_rows,
        **BLOCKS,
    }
    kernel = lora_prefill_shrink_triton.prefill_shrink_kernel
    if tile_rows == TILE_ROWS:
        kernel = lora_shrink_triton.shrink_kernel
        constants |= {
            "DOT_K": tuning.dot_k * 2 // ITEM_BYTES[dtype],
            "STAGES": tuning.num_stages,
            "PDL": tuning.early and architecture >= 90,
            "LEADS": tuning.leads and architecture >= 90,
        }
    else:
        constants |= {"BLOCK_R": tuning.block_ranks}
    report(kernel, dtype, architecture, constants, options_of(tuning))


def delta(dtype: str, architecture: int, in_features: int, tile_rows: int) -> None:
    partials = num_splits(in_features, tile_rows)
    tuning = delta_tuning(OUT_FEATURES, tile_rows, partials)
    constants = {
        "COLUMN_BLOCKS": OUT_FEATURES // tuning.block_columns,
        "NUM_SPLITS": partials,
        "SPLITS_POWER": triton.next_power_of_2(partials),
        "BLOCK_N": tuning.block_columns,
        "ALIGNED": True,
        **BLOCKS,
    }
    kernel = lora_prefill_delta_triton.prefill_delta_kernel
    if tile_rows == TILE_ROWS:
        kernel = lora_delta_triton.delta_kernel
        constants |= {
            "WIDE_RANKS": lora_delta_triton.WIDE_RANKS,
            "DOT_N": tuning.dot_columns,
            "TILE_ROWS": tile_rows,
            "PDL": tuning.early and architecture >= 90,
        }
    else:
        constants |= {
            "DOT_ROWS": tuning.dot_rows,
            "WIDE_RANKS": lora_delta_triton.WIDE_RANKS,
            "HELD_RANKS": lora_prefill_delta_triton.HELD_RANKS,
            "HELD_N": lora_prefill_delta_triton.held_columns(tuning, ITEM_BYTES[dtype]),
            "STAGES": tuning.num_stages,
        }
    report(kernel, dtype, architecture, constants, options_of(tuning))


def options_of(tuning: ShrinkTuning | DeltaTuning) -> dict[str, int]:
    return {
        "num_warps": tuning.num_warps,
        "num_stages": tuning.num_stages,
        "maxnreg": tuning.registers,
    }


def report(
    kernel: Any, dtype: str, architecture: int, constants: dict[str, Any], options: dict[str, int]
) -> None:
    """Compile one variant and print its loads and resources."""
    names = [name for name in kernel.arg_names if name not in constants]
    signature = dict.fromkeys(constants, "constexpr")
    attributes = {}
    for name in names:
        pointer = POINTERS.get(name) or (dtype if name in ("x", "y", "delta") else None)
        signature[name] = f"*{pointer}" if pointer else "i32"
        if pointer or name in ALIGNED_NUMBERS:
            attributes[(kernel.arg_names.index(name),)] = [["tt.divisibility", 16]]
    ordered = {name: signature[name] for name in kernel.arg_names}
    source = ASTSource(kernel, ordered, constants, attributes)
    compiled = triton.compile(
        source, target=GPUTarget("cuda", architecture, 32), options=dict(options)
    )
    print(
        json.dumps(
            {
                "kernel": kernel.__name__,
                "dtype": dtype,
                "architecture": architecture,
                "in_features": constants.get("K"),
                "wide_loads": wide_loads(compiled.asm["ptx"]),
                "narrow_loads": len(re.findall(r"ld\.global[.\w:]*\.b16", compiled.asm["ptx"])),
                "shared_bytes": compiled.metadata.shared,
                "warps": options["num_warps"],
                **resources(compiled.asm["cubin"]),
            }
        )
    )


def wide_loads(ptx: str) -> int:
    """Instructions that read 16 bytes a thread from global memory."""
    plain = re.findall(r"ld\.global[.\w:]*\.(?:v4\.[bf]32|v2\.[bf]64|v8\.[bf]16)", ptx)
    copies = re.findall(
        r"cp\.async\.\w+\.shared\.global[.\w:]*\s*\[[^\]]*\],\s*\[[^\]]*\],\s*0x10", ptx
    )
    return len(plain) + len(copies)


def resources(cubin: bytes) -> dict[str, int]:
    """Registers a thread and bytes spilled to local memory."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    usage = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text))
    return {
        "registers": int(usage["REG"]),
        "stack_bytes": int(usage["STACK"]),
        "spilled_bytes": int(usage["LOCAL"]),
    }


if __name__ == "__main__":
    main()
