"""How fast a checkpoint of several shards gets to the device, from the page cache."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.shared.harness import Recorder
from benchmarks.shared.made_checkpoints import write_checkpoint
from benchmarks.step.floor import release, synchronize
from engine_svc.model.weights import load_weights
from loraplex.base_model import parse_config


def measure_shards(
    recorder: Recorder, scratch: Path, config: Mapping[str, Any], device: str, rounds: int
) -> None:
    """From open to the last byte on the device; the first round brings the staging buffers."""
    folder = write_checkpoint(scratch / "checkpoint", config, tokenizer=False)
    base = parse_config(dict(config))
    dtype: torch.dtype = getattr(torch, str(config["dtype"]))
    seconds, num_bytes = [], 0
    for _ in range(rounds + 1):
        began = time.perf_counter()
        weights = load_weights(folder, base, dtype, torch.device(device))
        synchronize(device)
        seconds.append(time.perf_counter() - began)
        num_bytes = weights.num_bytes
        del weights
        release(device)
    case = "16 GB of shards to the device" if num_bytes > 15e9 else "shards to the device"
    recorder.add(case, seconds[1:], "s", better="lower")
    rates = [num_bytes / 1e9 / one for one in seconds[1:]]
    recorder.add("rate of loading shards", rates, "GB/s", better="higher")
