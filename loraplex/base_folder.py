"""A base model's folder: found, read and digested, the same way by registry, engine and tools."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from loraplex.adapter_format.jsontext import canonical_json
from loraplex.adapter_format.spec import BaseModelFacts
from loraplex.adapter_format.tokenizer import (
    TOKENIZER_FILES,
    chat_template,
    generation_eos,
    text_digest,
    vocabulary,
    vocabulary_digest,
)
from loraplex.base_model import BaseModelSpec, parse_config_json
from loraplex.status import AdapterRefused, BaseModelUnsupported, NotFound

MAX_CONFIG_BYTES = 4 << 20
_INDEX_FILE = "model.safetensors.index.json"
_HASH_CHUNK_BYTES = 1 << 20
_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(?:/[A-Za-z0-9][A-Za-z0-9._-]*)?")


def find_base_folder(path_or_hub_id: str) -> Path:
    """The folder that a path, or a hub id in the local Hugging Face cache, means.

    Raises: NotFound BASE_MODEL_NOT_FOUND; nothing is ever downloaded.
    """
    path = Path(path_or_hub_id).expanduser()
    if path_or_hub_id and path.is_dir():
        return path
    cache = _hub_cache()
    if _HUB_ID.fullmatch(path_or_hub_id):
        repository = cache / ("models--" + path_or_hub_id.replace("/", "--"))
        snapshot = _snapshot(repository)
        if snapshot is not None:
            return snapshot
    raise NotFound(
        f"base model {path_or_hub_id!r}: no such folder, and no such model in the local Hugging "
        f"Face cache {cache}; download it first (`hf download {path_or_hub_id}`)",
        reason="BASE_MODEL_NOT_FOUND",
        metadata={"field": "model", "value": path_or_hub_id, "limit": "a folder or cached hub id"},
    )


def read_base_folder(
    path: Path,
    name: str,
    aliases: tuple[str, ...] = (),
    digest_cache: Path | None = None,
    *,
    dummy_weights: bool = False,
) -> tuple[BaseModelFacts, str, str]:
    """What adapters are held against, the canonical config.json, and the weights digest.

    Args: dummy_weights, for benchmarks: no weight file is looked for, and the digest is that of
    `dummy_weights_digest`.
    Raises: BaseModelUnsupported: no config.json or tokenizer.json, pickle-only weights, an index
    that names missing files, or a model that this build cannot serve.
    """
    config_text = _read(path / "config.json", MAX_CONFIG_BYTES)
    spec = parse_config_json(config_text)
    if not (path / "tokenizer.json").is_file():
        raise BaseModelUnsupported(
            "tokenizer.json",
            f"missing in {path.name}",
            "a folder with tokenizer.json; write it with "
            "AutoTokenizer.from_pretrained(…, use_fast=True).save_pretrained(folder)",
        )
    template, eos = base_chat(path, spec)
    with _as_base_model_error():
        tokens = vocabulary(_tokenizer_files(path))
    facts = BaseModelFacts(
        name=name,
        aliases=aliases,
        spec=spec,
        vocabulary_digest="" if tokens is None else vocabulary_digest(tokens),
        chat_template_digest="" if template is None else text_digest(template),
        eos_token_ids=eos,
    )
    config_json = canonical_json(json.loads(config_text)).decode("utf-8")
    if dummy_weights:
        return facts, config_json, dummy_weights_digest(config_json)
    return facts, config_json, weights_digest(path, digest_cache)


def base_chat(path: Path, spec: BaseModelSpec) -> tuple[str | None, tuple[int, ...]]:
    """The default chat template of a base model's folder, and its end-of-sequence ids:
    generation_config.json's where it names any, else config.json's, as transformers has it.

    Raises: BaseModelUnsupported: a file cannot be read.
    """
    files = _tokenizer_files(path)
    with _as_base_model_error():
        return chat_template(files), generation_eos(files) or spec.eos_token_ids


def _tokenizer_files(path: Path) -> dict[str, Path]:
    return {file: path / file for file in TOKENIZER_FILES if (path / file).is_file()}


@contextlib.contextmanager
def _as_base_model_error() -> Iterator[None]:
    try:
        yield
    except AdapterRefused as error:
        raise BaseModelUnsupported(
            error.metadata.get("field", "tokenizer"), error.message, "readable tokenizer files"
        ) from error


def weight_files(path: Path) -> tuple[Path, ...]:
    """The safetensors files of a base model: those that its index names, or all.

    Raises: BaseModelUnsupported when there are none, or the index names files that are missing.
    """
    files = sorted(path.glob("*.safetensors"))
    if not files:
        pickles = sorted(p.name for p in path.glob("*.bin")) + sorted(
            p.name for p in path.glob("*.pt*")
        )
        raise BaseModelUnsupported(
            "weights",
            pickles[:3],
            "safetensors files; convert with "
            "AutoModelForCausalLM.from_pretrained(…).save_pretrained(folder)",
        )
    index = path / _INDEX_FILE
    if index.is_file():
        files = [path / name for name in sorted(_indexed_files(index))]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise BaseModelUnsupported(
                _INDEX_FILE, f"names {missing[0]}, which is missing", "all shards present"
            )
    return tuple(files)


def weights_digest(path: Path, cache: Path | None = None) -> str:
    """`sha256:…` of the canonical JSON of the sorted weight files' names, sizes and digests.

    `cache` is a file that remembers digests by (path, size, mtime_ns).
    """
    known = _load_cache(cache)
    fresh: dict[str, str] = {}
    entries = []
    for file in weight_files(path):
        status = file.stat()
        key = f"{file.resolve()}|{status.st_size}|{status.st_mtime_ns}"
        digest = known.get(key) or _sha256(file)
        fresh[key] = digest
        entries.append({"name": file.name, "size": status.st_size, "sha256": digest})
    if cache is not None and not fresh.items() <= known.items():
        _store_cache(cache, {**known, **fresh})
    return "sha256:" + hashlib.sha256(canonical_json(entries)).hexdigest()


def dummy_weights_digest(config_json: str) -> str:
    """`sha256:…` that stands for random weights of a config: never that of any checkpoint, so that
    an engine with them serves only a base model that was registered as such."""
    entry = {"load_format": "dummy", "config": json.loads(config_json)}
    return "sha256:" + hashlib.sha256(canonical_json(entry)).hexdigest()


def _hub_cache() -> Path:
    if cache := os.environ.get("HF_HUB_CACHE"):
        return Path(cache)
    home = os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
    return Path(home) / "hub"


def _snapshot(repository: Path) -> Path | None:
    """The snapshot of `main`, or the only one."""
    with contextlib.suppress(OSError):
        revision = (repository / "refs" / "main").read_text().strip()
        folder = repository / "snapshots" / revision
        if re.fullmatch(r"[0-9a-f]+", revision) and folder.is_dir():
            return folder
    with contextlib.suppress(OSError):
        folders = sorted((repository / "snapshots").iterdir())
        if len(folders) == 1:
            return folders[0]
    return None


def _indexed_files(index: Path) -> set[str]:
    try:
        table = json.loads(_read(index, 64 << 20))["weight_map"]
        names = {str(name) for name in table.values()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BaseModelUnsupported(_INDEX_FILE, str(error), "a weight_map of file names") from error
    for name in names:
        if "/" in name or not name.endswith(".safetensors"):
            raise BaseModelUnsupported(_INDEX_FILE, name, "safetensors files in the same folder")
    return names


def _read(path: Path, limit: int) -> bytes:
    try:
        with path.open("rb") as stream:
            data = stream.read(limit + 1)
    except OSError as error:
        raise BaseModelUnsupported(path.name, error.strerror, f"a file in {path.parent}") from error
    if len(data) > limit:
        raise BaseModelUnsupported(path.name, f"over {limit} bytes", f"at most {limit} bytes")
    return data


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as stream:
        while chunk := stream.read(_HASH_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _load_cache(cache: Path | None) -> Mapping[str, str]:
    """A cache that cannot be read is no cache."""
    if cache is not None:
        with contextlib.suppress(OSError, ValueError):
            table: Any = json.loads(cache.read_text())
            if isinstance(table, dict):
                return {str(key): str(value) for key, value in table.items()}
    return {}


def _store_cache(cache: Path, table: Mapping[str, str]) -> None:
    with contextlib.suppress(OSError):
        cache.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=cache.parent, delete=False) as stream:
            json.dump(table, stream)
        os.replace(stream.name, cache)
