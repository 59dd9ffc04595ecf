"""Random weights of a config's shapes, made on the device: for benchmarks, where only sizes count.

Every tensor has a seed of its own, so that neither order nor sharding changes its values.
"""

from __future__ import annotations

import zlib

import torch

EMBEDDING_NAME = "model.embed_tokens.weight"


class DummyWeights:
    """Implements `weights.WeightSource` without a file. Norms are ones, biases zeros; matrices are
    normal with deviation 1/√in_features and the embeddings with 1, so that activations stay near
    one."""

    def __init__(self, dtype: torch.dtype, seed: int = 0) -> None:
        self._dtype, self._seed = dtype, seed

    def dtype(self, name: str) -> torch.dtype:
        return self._dtype

    @torch.no_grad()
    def read(self, name: str, out: torch.Tensor) -> None:
        """Fill `out`, in place, with the tensor of this name."""
        if name.endswith("norm.weight"):
            out.fill_(1.0)
        elif name.endswith(".bias"):
            out.zero_()
        else:
            generator = torch.Generator(out.device)
            generator.manual_seed(self._seed + zlib.crc32(name.encode()))
            deviation = 1.0 if name == EMBEDDING_NAME else out.shape[-1] ** -0.5
            out.normal_(0.0, deviation, generator=generator)
