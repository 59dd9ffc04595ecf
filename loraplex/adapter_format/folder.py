"""A PEFT folder as training left it: what of it is stored, and what is left where it is.

Names alone decide; files that are not stored are never opened.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from loraplex.adapter_format.manifest import is_file_name
from loraplex.adapter_format.options import MAX_CONFIG_BYTES
from loraplex.adapter_format.tokenizer import (
    MAX_TEMPLATE_BYTES,
    MAX_TOKENIZER_BYTES,
    TOKENIZER_FILES,
)
from loraplex.status import AdapterRefused

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
MAX_WEIGHTS_BYTES = 16 << 30
MAX_ENTRIES = 10_000

_LIMITS = {
    CONFIG_FILE: MAX_CONFIG_BYTES,
    WEIGHTS_FILE: MAX_WEIGHTS_BYTES,
    "chat_template.jinja": MAX_TEMPLATE_BYTES,
    "generation_config.json": MAX_TEMPLATE_BYTES,
}
_STORED = (CONFIG_FILE, WEIGHTS_FILE, *TOKENIZER_FILES)
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_VOCABULARY_FILES = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


@dataclass(frozen=True, slots=True)
class FolderFile:
    """`path` is where the bytes lie, links resolved."""

    name: str
    path: Path
    size_bytes: int


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """`not_stored` are pairs of name and reason."""

    stored: tuple[FolderFile, ...]
    not_stored: tuple[tuple[str, str], ...]

    @property
    def files(self) -> dict[str, Path]:
        return {file.name: file.path for file in self.stored}


def read_folder(path: Path, shown: str = "") -> AdapterFolder:
    """List an adapter folder; messages call it `shown`, by default its path.

    Raises: AdapterRefused CONFIG_INVALID (no folder, no adapter_config.json, a link that leads
    out, a file of odd kind or size) or WEIGHTS_INVALID (no safetensors weights).
    """
    shown = shown or str(path)
    if not path.is_dir():
        what = "is a file; name the folder it lies in" if path.exists() else "does not exist"
        raise _refused("CONFIG_INVALID", shown, what)
    try:
        names = sorted(os.listdir(path))
    except OSError as error:
        raise _refused("CONFIG_INVALID", shown, f"unreadable: {error.strerror}") from error
    if len(names) > MAX_ENTRIES:
        raise _refused("CONFIG_INVALID", shown, f"more than {MAX_ENTRIES} entries")
    if CONFIG_FILE not in names:
        below = next((name for name in names if (path / name / CONFIG_FILE).is_file()), None)
        hint = (
            f"did you mean {shown.rstrip('/')}/{below}?"
            if below
            else "is this a PEFT adapter folder?"
        )
        raise _refused("CONFIG_INVALID", CONFIG_FILE, f"missing in {shown}; {hint}")
    if WEIGHTS_FILE not in names:
        raise _no_weights(names)
    if "tokenizer.json" not in names and any(name in names for name in _VOCABULARY_FILES):
        raise _refused(
            "VOCABULARY_MISMATCH",
            "tokenizer.json",
            "missing beside other tokenizer files, so the vocabulary cannot be compared; save the "
            "fast tokenizer, or remove the tokenizer files",
        )
    stored = tuple(_file(path, name) for name in names if name in _STORED)
    left = tuple((name, _why_not(path, name)) for name in names if name not in _STORED)
    return AdapterFolder(stored, left)


def _file(folder: Path, name: str) -> FolderFile:
    path = folder / name
    try:
        target = path.resolve(strict=True) if path.is_symlink() else path
        status = target.stat()
    except (OSError, RuntimeError) as error:
        raise _refused("CONFIG_INVALID", name, "is a link that leads nowhere") from error
    if path.is_symlink() and not _may_follow(folder, target):
        raise _refused("CONFIG_INVALID", name, f"is a link out of the folder, to {target}")
    if not stat.S_ISREG(status.st_mode):
        raise _refused("CONFIG_INVALID", name, "is no regular file")
    limit = _LIMITS.get(name, MAX_TOKENIZER_BYTES)
    if status.st_size > limit:
        raise _refused("CONFIG_INVALID", name, f"has {status.st_size} bytes; at most {limit}")
    return FolderFile(name, target, status.st_size)


def _may_follow(folder: Path, target: Path) -> bool:
    """Inside the folder, or from a hub cache's snapshot into the same repository's blobs."""
    real = folder.resolve()
    if target.is_relative_to(real):
        return True
    parents = [real, *real.parents]
    snapshots = next((parent for parent in parents if parent.parent.name == "snapshots"), None)
    return snapshots is not None and target.parent == snapshots.parent.parent / "blobs"


def _no_weights(names: list[str]) -> AdapterRefused:
    pickles = [name for name in names if name.endswith(_PICKLE_SUFFIXES)]
    other = [name for name in names if name.endswith(".safetensors")]
    if "adapter_model.bin" in names or (pickles and not other):
        return _refused(
            "WEIGHTS_INVALID",
            "adapter_model.bin" if "adapter_model.bin" in names else pickles[0],
            "weights exist only as pickle, which runs code when opened; save them again with "
            "save_pretrained(…, safe_serialization=True)",
        )
    hint = f"; found {', '.join(other[:3])}" if other else ""
    return _refused("WEIGHTS_INVALID", WEIGHTS_FILE, f"missing{hint}")


def _why_not(folder: Path, name: str) -> str:
    if not is_file_name(name):
        return "hidden, or a name with characters that are not stored"
    if (folder / name).is_dir():
        return "a folder"
    if name.endswith(_PICKLE_SUFFIXES):
        return "pickle: never opened"
    if name.endswith(".safetensors"):
        return f"only {WEIGHTS_FILE} holds the adapter"
    return "not needed to serve"


def _refused(reason: str, field: str, problem: str) -> AdapterRefused:
    return AdapterRefused(
        f"{field}: {problem}",
        reason=reason,
        metadata={"field": field, "value": field, "limit": problem[:300]},
    )
