"""What names, references and other small fields may look like."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from loraplex.shares import MAX_WEIGHT, MIN_WEIGHT, is_weight
from loraplex.status import FieldInvalid, NameInvalid

MAX_NAME = 128
MAX_ALIAS = 512
MAX_LABELS = 64
MAX_DESCRIPTION = 4096
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_VERSION = re.compile(r"[1-9][0-9]{0,17}")


@dataclass(frozen=True, slots=True)
class Reference:
    """`name`, `name@3` or `name@sha256:…`; without a version 0 and empty."""

    name: str
    version: int = 0
    digest: str = ""


def check_name(field: str, name: str) -> str:
    """Raises: NameInvalid."""
    if not _NAME.fullmatch(name) or len(name) > MAX_NAME:
        raise NameInvalid(
            field,
            name,
            f"1 to {MAX_NAME} of a-z, 0-9, '.', '_', '-', beginning with a letter or digit",
        )
    return name


def check_base_alias(field: str, alias: str) -> str:
    """Hub ids and paths: anything printable. Raises: NameInvalid."""
    if not alias or len(alias) > MAX_ALIAS or not alias.isprintable() or alias != alias.strip():
        raise NameInvalid(field, alias, f"1 to {MAX_ALIAS} printable characters, not space at ends")
    return alias


def check_digest(field: str, digest: str, *, optional: bool = False) -> str:
    """Raises: FieldInvalid."""
    if not (optional and not digest) and not _DIGEST.fullmatch(digest):
        raise FieldInvalid(field, digest, "sha256: and 64 lower-case hex digits")
    return digest


def parse_reference(text: str) -> Reference:
    """Raises: NameInvalid: no reference at all, not merely an unknown one."""
    name, at, version = text.partition("@")
    check_name("reference", name)
    if not at:
        return Reference(name)
    if _DIGEST.fullmatch(version):
        return Reference(name, digest=version)
    if not _VERSION.fullmatch(version):
        raise NameInvalid("reference", text, "name, name@3 or name@sha256:… (64 hex digits)")
    return Reference(name, version=int(version))


def check_weight(field: str, weight: float) -> float:
    """0 is read as 1. Raises: FieldInvalid: NaN, infinite, negative or absurd."""
    if weight == 0:
        return 1.0
    if not is_weight(weight):
        raise FieldInvalid(field, weight, f"0 (read as 1), or {MIN_WEIGHT} to {MAX_WEIGHT:g}")
    return weight


def check_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """Raises: FieldInvalid."""
    if len(labels) > MAX_LABELS:
        raise FieldInvalid("labels", f"{len(labels)} entries", f"at most {MAX_LABELS}")
    for key, value in labels.items():
        check_name("labels key", key)
        if len(value) > 256 or not value.isprintable():
            raise FieldInvalid(f"labels[{key}]", value, "at most 256 printable characters")
    return dict(labels)


def check_description(text: str) -> str:
    """Raises: FieldInvalid."""
    if len(text) > MAX_DESCRIPTION or "\x00" in text:
        shown = f"{len(text)} characters"
        raise FieldInvalid("description", shown, f"at most {MAX_DESCRIPTION}, no NUL")
    return text


def check_request_id(request_id: str) -> str:
    """Raises: FieldInvalid."""
    if len(request_id) > 64 or not request_id.isprintable():
        raise FieldInvalid("request_id", request_id, "at most 64 printable characters")
    return request_id
