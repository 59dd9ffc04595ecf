"""Compiles the attention kernels for NVIDIA GPUs without one; prints what came out as JSON lines.

    python tests/kernel/compile_attention_ahead.py

A process of its own: a kernel that was imported for the interpreter cannot be compiled.
"""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import asdict
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.attention_tuning import decode_tuning, prefill_tuning
from kernels.decode_attention_triton import decode_constants, decode_kernel
from kernels.prefill_attention_triton import prefill_constants, prefill_kernel
from tests.kernel.compile_ahead import resources, wide_loads

#: architecture → shared memory of a program, bytes
ARCHITECTURES = {80: 163 * 1024, 90: 227 * 1024}
ITEM_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
#: of a launch: each has constants of its own
ROWS, PREFILL_ROWS = (1, 8, 128), (64, 4096)
#: (H, Hk, D)
HEADS = ((32, 8, 128), (9, 3, 64), (32, 4, 80), (24, 8, 96), (16, 1, 256))
COMPUTED = ("q", "pages", "out")
FLOATS = ("parts", "weights")


def main() -> None:
    for architecture in ARCHITECTURES:
        for dtype in ITEM_BYTES:
            shapes = HEADS if (architecture, dtype) == (90, "bf16") else HEADS[:1]
            for index, shape in enumerate(shapes):
                dependent = len(shapes) > 1 and index == 0
                compile_both(architecture, dtype, shape, (False, True) if dependent else (False,))


def compile_both(
    architecture: int, dtype: str, shape: tuple[int, int, int], launches: tuple[bool, ...]
) -> None:
    """`launches`: of the decode kernel, without and with programmatic dependent launch."""
    heads, kv_heads, dim = shape
    model, item_bytes = (32, heads, kv_heads, dim, 16), ITEM_BYTES[dtype]
    for rows, pdl in itertools.product(ROWS, launches):
        decode = decode_tuning(rows, kv_heads, dim, item_bytes)
        constants = {
            **decode_constants(*model, 0, item_bytes, decode), "CAST": False, "PDL": pdl,
        }  # fmt: skip
        report(decode_kernel, dtype, architecture, constants, asdict(decode), (heads, rows))
    for rows in PREFILL_ROWS:
        prefill = prefill_tuning(rows, dim, item_bytes, ARCHITECTURES[architecture])
        constants = {**prefill_constants(*model, 0, item_bytes, prefill), "CAST": False}
        report(prefill_kernel, dtype, architecture, constants, asdict(prefill), (heads, rows))


def report(
    kernel: Any,
    dtype: str,
    architecture: int,
    constants: dict[str, Any],
    tuning: dict[str, int],
    heads_rows: tuple[int, int],
) -> None:
    """Compile one variant and print its loads, products and resources."""
    signature, attributes = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        numbers = name in ("layer", "min_chunk", "table_stride")
        pointer = dtype if name in COMPUTED else "fp32" if name in FLOATS else "i32"
        signature[name] = "i32" if numbers else f"*{pointer}"
        if not numbers:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    options = {name: tuning[name] for name in ("num_warps", "num_stages")}
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    ptx = compiled.asm["ptx"]
    line = {
        "kernel": kernel.__name__,
        "dtype": dtype,
        "architecture": architecture,
        "heads": heads_rows[0],
        "rows": heads_rows[1],
        "dim": constants["DIM"],
        "pdl": constants.get("PDL", False),
        "wide_loads": wide_loads(ptx),
        "wgmma": len(re.findall(r"wgmma\.mma_async", ptx)),
        "shared_bytes": compiled.metadata.shared,
        **resources(compiled.asm["cubin"]),
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
