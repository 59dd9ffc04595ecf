"""How fast a checkpoint of several shards gets to the device, from the page cache."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Recorder
from benchmarks.made_models import write_model_folder
from benchmarks.random_files import RandomNumbers, write_safetensors
from benchmarks.step_floor import release, synchronize
from engine_svc.model.checkpoint import expected_shapes
from engine_svc.model.weights import load_weights
from loraplex.base_model import parse_config

SHARDS = 4


def write_checkpoint(folder: Path, config: Mapping[str, Any], *, tokenizer: bool = True) -> Path:
    """A model folder with random shards and their index; the files are in the page cache then."""
    write_model_folder(folder, config, tokenizer=tokenizer)
    numbers = RandomNumbers.normal(str(config["dtype"]), int(config["hidden_size"]) ** -0.5)
    shapes = list(expected_shapes(parse_config(dict(config))).items())
    weight_map = {}
    for index in range(SHARDS):
        name = f"model-{index + 1:05d}-of-{SHARDS:05d}.safetensors"
        mine = dict(shapes[index::SHARDS])
        write_safetensors(folder / name, mine, numbers)
        weight_map.update(dict.fromkeys(mine, name))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


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
