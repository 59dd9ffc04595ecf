"""The one check of an adapter: at publish, in `registryctl verify`, and for local folders."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from loraplex.adapter_format.folder import CONFIG_FILE, WEIGHTS_FILE
from loraplex.adapter_format.manifest import Manifest, ManifestFile, build_manifest, is_file_name
from loraplex.adapter_format.options import (
    MAX_CONFIG_BYTES,
    LoraOptions,
    options_to_json,
    parse_adapter_config,
)
from loraplex.adapter_format.resolve import resolve_parts
from loraplex.adapter_format.spec import (
    AdapterParts,
    AdapterSpec,
    BaseModelFacts,
    CoverageReport,
    coverage,
)
from loraplex.adapter_format.tensors import check_finite, read_header
from loraplex.adapter_format.tokenizer import (
    chat_template,
    generation_eos,
    template_tokens,
    text_digest,
    tokenizer_eos,
    vocabulary,
    vocabulary_digest,
)
from loraplex.adapter_format.vocabulary import (
    MAX_SAVED_BYTES,
    saved_modules,
    split_vocabulary,
    vocabulary_targets,
)
from loraplex.status import AdapterRefused

MAX_RANK = 256
_HASH_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class CheckedAdapter:
    manifest: Manifest
    spec: AdapterSpec
    report: CoverageReport


def check_adapter(
    files: Mapping[str, Path],
    base: BaseModelFacts,
    *,
    max_rank: int = MAX_RANK,
    base_model_confirmed: bool = False,
    max_saved_bytes: int = MAX_SAVED_BYTES,
) -> CheckedAdapter:
    """Hold an adapter against a base model, down to every value of every tensor.

    Args:
        files: name → where the bytes lie, as `AdapterFolder.files` gives them.
        base_model_confirmed: the caller vouches that it was trained on `base`, whatever its
            configuration calls it.
        max_saved_bytes: of embed_tokens and lm_head that the adapter brings whole.

    Raises: AdapterRefused with the first problem: what, which value, what would be right.
    """
    config_path, weights_path = _required(files, CONFIG_FILE), _required(files, WEIGHTS_FILE)
    options, declared = parse_adapter_config(_read_config(config_path))
    if not base_model_confirmed:
        _check_declared_base(declared, base)
    template, tokens, eos = _check_tokenizer(files, base)
    parts = adapter_parts(
        options, weights_path, base, max_rank=max_rank, max_saved_bytes=max_saved_bytes
    )
    check_finite(weights_path, parts.tensors)
    config = options_to_json(options)
    if template is not None:
        config["chat_template"] = template
    if tokens is not None:
        config["template_tokens"] = tokens
    if eos is not None:
        config["eos_token_ids"] = list(eos)
    entries = tuple(hash_file(name, path) for name, path in sorted(files.items()))
    manifest = build_manifest(base.name, config, entries)
    spec = replace(adapter_spec(parts, template, eos), template_tokens=tokens)
    return CheckedAdapter(manifest, spec, coverage(parts))


def adapter_parts(
    options: LoraOptions,
    weights: Path | memoryview,
    base: BaseModelFacts,
    *,
    max_rank: int = MAX_RANK,
    max_saved_bytes: int = MAX_SAVED_BYTES,
) -> AdapterParts:
    """Parts of weights whose values were checked before: header and shapes only.

    Args: weights, their file or all of its bytes.
    """
    of_layers, of_vocabulary = split_vocabulary(read_header(weights, WEIGHTS_FILE))
    outside = vocabulary_targets(options, of_vocabulary, base, max_rank)
    inside = resolve_parts(options, of_layers, base, max_rank, may_be_none=bool(outside))
    saved = saved_modules(options, of_vocabulary, base, max_saved_bytes)
    return replace(inside, targets=inside.targets + outside, saved=saved)


def adapter_spec(
    parts: AdapterParts,
    template: str | None = None,
    eos_token_ids: tuple[int, ...] | None = None,
) -> AdapterSpec:
    return AdapterSpec(
        parts=parts,
        max_rank=max(target.rank for target in parts.targets),
        weights_bytes=sum(tensor.num_bytes for tensor in parts.tensors),
        parameter_count=sum(math.prod(tensor.shape) for tensor in parts.tensors),
        chat_template=template,
        eos_token_ids=eos_token_ids,
    )


def hash_file(name: str, path: Path) -> ManifestFile:
    """Size and SHA-256 of a file."""
    digest, size = hashlib.sha256(), 0
    try:
        with path.open("rb", buffering=0) as stream:
            while chunk := stream.read(_HASH_CHUNK_BYTES):
                digest.update(chunk)
                size += len(chunk)
    except OSError as error:
        raise AdapterRefused(
            f"{name}: cannot be read: {error.strerror}", reason="WEIGHTS_INVALID"
        ) from error
    return ManifestFile(name, size, digest.hexdigest())


def _required(files: Mapping[str, Path], name: str) -> Path:
    for other in files:
        if not is_file_name(other):
            raise AdapterRefused(
                f"file name {other[:100]!r} has characters that are not allowed",
                reason="CONFIG_INVALID",
                metadata={"field": "files", "value": other[:100], "limit": "[A-Za-z0-9._-]"},
            )
    if name not in files:
        reason = "CONFIG_INVALID" if name == CONFIG_FILE else "WEIGHTS_INVALID"
        raise AdapterRefused(
            f"{name} is missing", reason=reason, metadata={"field": name, "limit": "present"}
        )
    return files[name]


def _read_config(path: Path) -> bytes:
    try:
        with path.open("rb") as stream:
            return stream.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise AdapterRefused(
            f"{CONFIG_FILE}: cannot be read: {error.strerror}", reason="CONFIG_INVALID"
        ) from error


def _check_declared_base(declared: str, base: BaseModelFacts) -> None:
    if declared.rstrip("/") in (base.name, *(alias.rstrip("/") for alias in base.aliases)):
        return
    trained_on = (
        f"was trained on {declared!r}" if declared else "does not say what it was trained on"
    )
    raise AdapterRefused(
        f"adapter_config.json: the adapter {trained_on}, the target is {base.name!r}. If both are "
        f"the same weights, say so once for all (`registryctl base-model alias {base.name} "
        f"{declared or 'NAME'}`) or for this adapter (`--base-model-confirmed`)",
        reason="BASE_MODEL_MISMATCH",
        metadata={"field": "base_model_name_or_path", "value": declared, "limit": base.name},
    )


def _check_tokenizer(
    files: Mapping[str, Path], base: BaseModelFacts
) -> tuple[str | None, Mapping[str, str] | None, tuple[int, ...] | None]:
    """Chat template and end-of-sequence ids where they differ from the base's, and the special
    tokens that the folder's template names."""
    tokens = vocabulary(files)
    if tokens is not None and base.vocabulary_digest:
        digest = vocabulary_digest(tokens)
        if digest != base.vocabulary_digest:
            raise AdapterRefused(
                f"tokenizer.json: its vocabulary of {len(tokens)} tokens is not {base.name}'s; an "
                "adapter must be served with the tokenizer of its base",
                reason="VOCABULARY_MISMATCH",
                metadata={
                    "field": "tokenizer.json", "value": digest, "limit": base.vocabulary_digest,
                },
            )  # fmt: skip
    template = chat_template(files)
    special = None if template is None else template_tokens(files, template)
    if template is not None and text_digest(template) == base.chat_template_digest:
        template = None
    known = tuple(sorted(set(base.eos_token_ids)))
    eos = generation_eos(files)
    if eos is None and tokens is not None:
        own = tokenizer_eos(files, tokens)
        eos = tuple(sorted({*known, own})) if own is not None else None
    for token_id in eos or ():
        if token_id >= base.spec.vocab_size:
            raise AdapterRefused(
                f"end-of-sequence id {token_id} is outside {base.name}'s vocabulary of "
                f"{base.spec.vocab_size}",
                reason="VOCABULARY_MISMATCH",
                metadata={
                    "field": "eos_token_id", "value": str(token_id),
                    "limit": str(base.spec.vocab_size),
                },
            )  # fmt: skip
    return template, special, None if eos == known else eos
