"""What of a device's memory the arena takes, and what an operator is told when it is too little."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from loraplex.status import FailedPrecondition, FieldInvalid

#: Arena on a CPU when its size is not given; memory is taken page by page as it is used.
CPU_ARENA_BYTES = 1 << 30
#: what torch, cuBLAS and Triton say, each in its own class of errors
_FULL = ("out of memory", "ALLOC_FAILED")


def arena_bytes_of(device: torch.device, asked: int, utilization: float, page_bytes: int) -> int:
    """Bytes for the arena, once all that comes before it is allocated.

    Args: asked, arena_bytes of the settings, 0: sized by the device; utilization, its share of a
    GPU then, weights and other programs included.
    Raises: FieldInvalid, FailedPrecondition when a GPU has no room for them.
    """
    if device.type == "cpu":
        return asked or CPU_ARENA_BYTES
    # what loading left in torch's hands counts as free
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    used = total - free
    taken = f"weights, buffers of a step and other programs take {used} of the GPU's {total} bytes"
    if asked > free:
        raise FieldInvalid(
            "arena_bytes", asked, f"at most {free}: {taken}", reason="CONFIG_INVALID"
        )
    if page_bytes > free:
        raise FailedPrecondition(f"{taken}, and no page of {page_bytes} fits beside them; end other"
                                 " programs, or use a GPU with more memory")  # fmt: skip
    if asked:
        return asked
    found = int(total * utilization) - used
    if found < page_bytes:
        least = math.ceil(100 * (used + page_bytes) / total) / 100
        raise FieldInvalid(
            "gpu_memory_utilization", utilization,
            f"at least {min(least, 1.0):.2f}: {taken}, and a page of the arena {page_bytes}",
            reason="CONFIG_INVALID",
        )  # fmt: skip
    return found


@contextmanager
def memory_for(what: str, remedy: str) -> Iterator[None]:
    """Names the settings to change when the GPU's memory ends inside.

    Raises: FailedPrecondition CONFIG_INVALID, in place of what the libraries raise.
    """
    try:
        yield
    except RuntimeError as error:
        said = str(error)
        if not any(text in said for text in _FULL):
            raise
        first = said.partition("\n")[0]
        raise FailedPrecondition(
            f"the GPU's memory does not suffice for {what}; {remedy} ({first})"
        ) from error
