"""The manifest: what an adapter version is, as one canonical JSON text whose digest names it.

    {"schema": 1, "base_model": name, "config": {…}, "files": [{"name", "size", "sha256"}, …]}

`config` holds every PEFT option that changes the output, defaults filled in, and `chat_template`
and `eos_token_ids` where they differ from the base model's. `template_tokens` are the special
tokens that the folder's chat template names, as the folder spells them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from loraplex.adapter_format.jsontext import canonical_json, parse_object
from loraplex.adapter_format.options import LoraOptions, options_from_json
from loraplex.status import AdapterRefused

SCHEMA = 1
_HEX = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class ManifestFile:
    """`sha256` is the blob's key: 64 hex digits."""

    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """`digest` is `sha256:` and the hex digest of `canonical_json`."""

    digest: str
    canonical_json: bytes
    base_model: str
    config: Mapping[str, Any]
    files: tuple[ManifestFile, ...]

    @property
    def options(self) -> LoraOptions:
        return options_from_json(self.config)

    @property
    def chat_template(self) -> str | None:
        value = self.config.get("chat_template")
        return value if isinstance(value, str) else None

    @property
    def template_tokens(self) -> Mapping[str, str] | None:
        value = self.config.get("template_tokens")
        return dict(value) if isinstance(value, Mapping) else None

    @property
    def eos_token_ids(self) -> tuple[int, ...] | None:
        value = self.config.get("eos_token_ids")
        return None if value is None else tuple(value)


def build_manifest(
    base_model: str, config: Mapping[str, Any], files: tuple[ManifestFile, ...]
) -> Manifest:
    ordered = tuple(sorted(files, key=lambda file: file.name))
    text = canonical_json(
        {
            "schema": SCHEMA,
            "base_model": base_model,
            "config": config,
            "files": [
                {"name": file.name, "size": file.size_bytes, "sha256": file.sha256}
                for file in ordered
            ],
        }
    )
    return Manifest(_digest(text), text, base_model, config, ordered)


def parse_manifest(text: bytes) -> Manifest:
    """Read a manifest back; its digest is computed, not believed.

    Raises: AdapterRefused CONFIG_INVALID when it is not one that this build understands.
    """
    table = parse_object(text, "manifest", "CONFIG_INVALID")
    try:
        if table["schema"] != SCHEMA:
            raise _invalid(f"schema is {str(table['schema'])[:40]}, this build reads {SCHEMA}")
        config = table["config"]
        options_from_json(config)
        files = tuple(
            ManifestFile(str(file["name"]), int(file["size"]), str(file["sha256"]))
            for file in table["files"]
        )
        manifest = Manifest(_digest(text), text, str(table["base_model"]), config, files)
    except (KeyError, TypeError, ValueError) as error:
        raise _invalid(f"cannot be read: {str(error)[:200]}") from error
    for file in files:
        if not _HEX.fullmatch(file.sha256) or file.size_bytes < 0 or not is_file_name(file.name):
            raise _invalid(f"file entry {file.name[:100]!r} is not valid")
    return manifest


def is_file_name(name: str) -> bool:
    """A plain name: no directory part, nothing hidden, printable ASCII."""
    return bool(re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}", name))


def _digest(text: bytes) -> str:
    return "sha256:" + hashlib.sha256(text).hexdigest()


def _invalid(problem: str) -> AdapterRefused:
    return AdapterRefused(f"manifest: {problem}", reason="CONFIG_INVALID")
