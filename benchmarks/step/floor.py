"""The least that a decode step can take: the bytes that it must read, over the bandwidth of a copy
measured in the same run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from engine_svc.layout import DTYPE_BYTES
from engine_svc.model.build import LoadedModel


@dataclass(frozen=True, slots=True)
class StepFloor:
    """Of one model. `bytes_per_s` counts bytes read plus bytes written."""

    bytes_per_s: float
    weights_bytes: int
    kv_token_bytes: int

    @classmethod
    def of(cls, model: LoadedModel, bytes_per_s: float) -> StepFloor:
        base, item = model.base, DTYPE_BYTES[model.dtype]
        # a step reads one row of the embeddings for each token
        weights = model.weights_bytes - base.vocab_size * base.hidden_size * item
        return cls(bytes_per_s, weights, model.layout.page_bytes // model.page_size)

    def num_bytes(self, contexts: Sequence[int], adapters_bytes: Iterable[int]) -> int:
        """Args: contexts, tokens that each sequence attends to; bytes of each distinct adapter."""
        return self.weights_bytes + sum(contexts) * self.kv_token_bytes + sum(adapters_bytes)

    def seconds(self, contexts: Sequence[int], adapters_bytes: Iterable[int]) -> float:
        return self.num_bytes(contexts, adapters_bytes) / self.bytes_per_s


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def release(device: str) -> None:
    """Give freed memory back to the device."""
    if device == "cuda":
        torch.cuda.empty_cache()


def device_name(device: str, cpu_name: str) -> str:
    """A folder's name for the machine."""
    if device != "cuda":
        return cpu_name
    return "-".join(torch.cuda.get_device_name().lower().split())
