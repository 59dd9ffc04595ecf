"""Checkpoints of several shards, made from a config alone: the numbers are random."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.shared.made_models import write_model_folder
from benchmarks.shared.random_files import RandomNumbers, write_safetensors
from engine_svc.model.checkpoint import expected_shapes
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
