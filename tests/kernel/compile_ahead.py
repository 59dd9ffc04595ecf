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

from kernels import lora_expand_triton, lora_shrink_triton
from kernels.lora_tables import OFFSET_UNIT, RANK_BLOCK, TILE_ROWS

ARCHITECTURES = (80, 90)
ITEM_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
BLOCKS = {"TILE_ROWS": TILE_ROWS, "RANK_BLOCK": RANK_BLOCK, "OFFSET_UNIT": OFFSET_UNIT}
#: pointer arguments that are not of the compute dtype
POINTERS = {
    "arena": "u8", "a_off": "i64", "b_off": "i64", "g_off": "i64", "c_off": "i64",
    "rank_of": "i32", "scale_of": "fp32", "tiles": "i32", "num_tiles": "i32", "spans": "i32",
    "u": "fp32", "out": "fp32",
}  # fmt: skip
#: whole numbers that a model's shapes make multiples of 16; strides count elements
ALIGNED_NUMBERS = ("x_stride", "y_stride", "out_row_stride", "out_slice_stride", "u_row_stride")


def main() -> None:
    for architecture in ARCHITECTURES:
        for dtype in ITEM_BYTES:
            shrink = {
                "K": 4096,
                "BLOCK_K": lora_shrink_triton.BLOCK_BYTES // ITEM_BYTES[dtype],
                "CAST": False,
                **BLOCKS,
            }
            expand = {
                "NUM_SLICES": 3,
                "BLOCK_N": lora_expand_triton.BLOCK_N,
                "ALIGNED": True,
                **BLOCKS,
            }
            stages = {"num_warps": lora_shrink_triton.NUM_WARPS, "num_stages": 3}
            warps = {"num_warps": lora_expand_triton.NUM_WARPS}
            report(lora_shrink_triton.shrink_kernel, dtype, architecture, shrink, stages)
            report(lora_expand_triton.expand_kernel, dtype, architecture, expand, warps)


def report(
    kernel: Any, dtype: str, architecture: int, constants: dict[str, Any], options: dict[str, int]
) -> None:
    """Compile one variant and print its loads and resources."""
    names = [name for name in kernel.arg_names if name not in constants]
    signature = dict.fromkeys(constants, "constexpr")
    attributes = {}
    for name in names:
        pointer = POINTERS.get(name) or (dtype if name in ("x", "y") else None)
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
                "wide_loads": wide_loads(compiled.asm["ptx"]),
                "shared_bytes": compiled.metadata.shared,
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
