"""One base-model projection: y = x·Wᵀ + b."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

#: Rows for which oneDNN lays out a packed weight. Measured on 2 AVX-512 cores, one thread, W
#: [3072, 576] fp32, rows 1/8/64: packed for 64 0.45/0.50/2.2 ms, for 1 0.48/0.81/2.6 ms,
#: not packed 0.72/0.97/2.6 ms.
_PACK_ROWS = 64
#: oneDNN makes a kernel for every number of rows it meets and keeps it: measured 0.5 MiB each, over
#: 1 GiB after prompts of every length up to 512 on the demo model. Up to _EXACT_ROWS, where reading
#: the weight decides, rows are passed as they are; above, padded to a multiple of _EXACT_ROWS, in
#: blocks of _BLOCK_ROWS (512 rows of [4096, 2048] in such blocks: 41.2 ms, in one call 38.6 ms).
_EXACT_ROWS = 8
_BLOCK_ROWS = 128


class Linear:
    """On a CPU in fp32 the weight is kept in oneDNN's own layout only, else as it is."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """Args: weight [out_features, in_features], bias [out_features] or None."""
        self.out_features, self.in_features = weight.shape
        self._bias = bias
        self._packed = (
            weight.device.type == "cpu" and weight.dtype == torch.float32 and torch._C._has_mkldnn
        )
        if self._packed:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_ROWS)
        self._weight = weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in_features] → [T, out_features]; each row depends on that row alone."""
        if not self._packed:
            return F.linear(x, self._weight, self._bias)
        blocks = row_blocks(x.shape[0])
        if len(blocks) == 1 and blocks[0][1] == blocks[0][2]:
            return self._multiply(x)
        y = x.new_empty(x.shape[0], self.out_features)
        for first, rows, padded in blocks:
            part = F.pad(x[first : first + rows], (0, 0, 0, padded - rows))
            y[first : first + rows] = self._multiply(part)[:rows]
        return y

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._weight, self._bias, "none", [], ""
        )
        return y

    @property
    def bias(self) -> torch.Tensor | None:
        return self._bias

    def plain_weight(self) -> torch.Tensor:
        """[out_features, in_features]; a copy where the weight is kept in oneDNN's layout."""
        return self._weight.to_dense() if self._packed else self._weight

    @property
    def num_bytes(self) -> int:
        bias = 0 if self._bias is None else self._bias.numel()
        return (self.in_features * self.out_features + bias) * self._weight.dtype.itemsize


@functools.lru_cache(maxsize=_BLOCK_ROWS * 8)
def row_blocks(num_rows: int) -> tuple[tuple[int, int, int], ...]:
    """(first row, rows, rows with padding) of the calls that compute `num_rows` rows."""
    blocks = []
    for first in range(0, num_rows, _BLOCK_ROWS):
        rows = min(_BLOCK_ROWS, num_rows - first)
        padded = rows if rows <= _EXACT_ROWS else -(-rows // _EXACT_ROWS) * _EXACT_ROWS
        blocks.append((first, rows, padded))
    return tuple(blocks)
