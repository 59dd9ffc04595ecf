"""`enginectl merge`: write a base model with one adapter folded into its weights."""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from engine_svc.cli.adapter_source import adapter_folder, names_base
from engine_svc.model.merge import MergedWeights
from loraplex.adapter_format import WEIGHTS_FILE, CheckedAdapter, check_adapter, read_folder
from loraplex.adapter_format.tokenizer import TOKENIZER_FILES
from loraplex.base_folder import find_base_folder, read_base_folder
from loraplex.printing import size
from loraplex.status import FieldInvalid

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
#: files beside the weights that a tokenizer may need, and that nothing here reads
_MORE_FILES = ("special_tokens_map.json", "added_tokens.json", "tokenizer.model", "vocab.json",
               "merges.txt")  # fmt: skip
_DTYPES = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16,
           "float16": torch.float16}  # fmt: skip


def merge(arguments: argparse.Namespace) -> None:
    """Raises: LoraplexError: what publishing would refuse, or a folder that is not empty."""
    out = Path(arguments.out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FieldInvalid("--out", arguments.out, "a new or an empty folder")
    base_folder = find_base_folder(arguments.model)
    name = arguments.served_model_name or base_folder.resolve().name
    aliases = (arguments.model, *arguments.base_model_alias)
    facts, _, _ = read_base_folder(base_folder, name, aliases)
    with tempfile.TemporaryDirectory(prefix="lpx-") as scratch:
        adapter = adapter_folder(arguments, Path(scratch))
        files = read_folder(adapter).files
        checked = check_adapter(
            files, facts, base_model_confirmed=not names_base(arguments),
            max_saved_bytes=1 << 62,
        )  # fmt: skip
        merged = MergedWeights(base_folder, facts.spec, files[WEIGHTS_FILE], checked.spec.parts)
        out.mkdir(parents=True, exist_ok=True)
        num_bytes = _write_weights(merged, out, _DTYPES[arguments.dtype])
        _copy_texts(base_folder, adapter, out, checked)
        changes = merged.config_changes
        if arguments.dtype != "auto":
            changes = {**changes, "dtype": arguments.dtype, "torch_dtype": arguments.dtype}
        _write_config(base_folder / "config.json", out / "config.json", changes)
    print(f"{out}: {name} with {arguments.adapter}, {size(num_bytes)}")


def _write_weights(merged: MergedWeights, out: Path, dtype: torch.dtype | None) -> int:
    """One file at a time, with the base's file names; returns bytes of tensors."""
    names: dict[str, list[str]] = defaultdict(list)
    for name in merged.names:
        names[merged.file_of(name)].append(name)
    total = 0
    for file, tensors in names.items():
        content = {name: merged.tensor(name, dtype) for name in tensors}
        total += sum(tensor.nbytes for tensor in content.values())
        path = out / file
        path.touch()
        mode = path.stat().st_mode
        save_file(content, path, metadata={"format": "pt"})
        path.chmod(mode)  # save_file leaves a file that only its owner can read
    if set(names) != {_SINGLE}:
        weight_map = {name: file for file, tensors in names.items() for name in tensors}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (out / _INDEX).write_text(json.dumps(index, indent=2, sort_keys=True))
    return total


def _copy_texts(base: Path, adapter: Path, out: Path, checked: CheckedAdapter) -> None:
    """Tokenizer and generation files: the base's, but the adapter's where a version holds them."""
    own = {
        "generation_config.json": checked.spec.eos_token_ids is not None,
        "tokenizer_config.json": checked.spec.template_tokens is not None,
    }
    for name in (*TOKENIZER_FILES, *_MORE_FILES):
        source = adapter / name if own.get(name) and (adapter / name).is_file() else base / name
        if source.is_file():
            shutil.copyfile(source, out / name)
    if checked.spec.chat_template is not None:
        (out / "chat_template.jinja").write_text(checked.spec.chat_template, "utf-8")
    if checked.spec.eos_token_ids is not None:
        path = out / "generation_config.json"
        table = json.loads(path.read_text()) if path.is_file() else {}
        table["eos_token_id"] = list(checked.spec.eos_token_ids)
        path.write_text(json.dumps(table, indent=2))


def _write_config(source: Path, target: Path, changes: dict[str, Any]) -> None:
    table = json.loads(source.read_text("utf-8"))
    if "dtype" not in table and "torch_dtype" in table:
        changes = {key: value for key, value in changes.items() if key != "dtype"}
    elif "torch_dtype" not in table:
        changes = {key: value for key, value in changes.items() if key != "torch_dtype"}
    target.write_text(json.dumps({**table, **changes}, indent=2))
