"""Adapter folders that the server itself may read: `file:///…` and `s3://…` below allowed
prefixes.

What is read is copied into a scratch folder first, so that what is checked is what is stored.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import unquote, urlsplit

from loraplex.adapter_format import AdapterFolder, read_folder
from loraplex.adapter_format.manifest import is_file_name
from loraplex.blob_content import CHUNK_BYTES
from loraplex.status import FieldInvalid, InvalidArgument, NotFound, ResourceExhausted

MAX_OBJECTS = 10_000


@dataclass(frozen=True, slots=True)
class Staged:
    """Copies of a folder's files; `not_stored` says what was left and why."""

    files: Mapping[str, Path]
    not_stored: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Location:
    """A URI as parts that compare by whole segments: prefix `a/1` does not hold `a/10`."""

    scheme: str
    bucket: str
    segments: tuple[str, ...]

    @property
    def path(self) -> str:
        return "/".join(self.segments)

    def lies_below(self, prefix: Location) -> bool:
        same = (self.scheme, self.bucket) == (prefix.scheme, prefix.bucket)
        return same and self.segments[: len(prefix.segments)] == prefix.segments


def parse_location(field: str, uri: str) -> Location:
    """Raises: FieldInvalid: another scheme, or segments that lead elsewhere."""
    limit = "s3://bucket/folder or file:///absolute/folder"
    parts = urlsplit(uri)
    path = unquote(parts.path) if parts.scheme == "file" else parts.path
    known = (parts.scheme == "s3" and parts.netloc) or (
        parts.scheme == "file" and not parts.netloc and path.startswith("/")
    )
    if not known or parts.query or parts.fragment or not uri.isprintable():
        raise FieldInvalid(field, uri, limit)
    segments = tuple(segment for segment in path.split("/") if segment)
    if ".." in segments or "." in segments:
        raise FieldInvalid(field, uri, f"{limit}, without . and .. in it")
    return Location(parts.scheme, parts.netloc, segments)


class Sources:
    """Copies from locations below `prefixes`; with none of them nothing may be read."""

    def __init__(self, prefixes: tuple[str, ...], s3_endpoint_url: str | None) -> None:
        self._prefixes = tuple(parse_location("source_prefix", prefix) for prefix in prefixes)
        self._shown = ", ".join(prefixes) or "none is configured"
        self._s3_endpoint_url = s3_endpoint_url

    def stage(self, uri: str, scratch: Path, max_bytes: int) -> Staged:
        """Copy the folder at `uri` into the empty folder `scratch`.

        Raises: InvalidArgument SOURCE_NOT_ALLOWED; NotFound SOURCE_NOT_FOUND; AdapterRefused;
        ResourceExhausted SIZE_LIMIT or DISK_FULL; Unavailable BLOB_STORE_DENIED or _UNREACHABLE.
        """
        location = parse_location("source_uri", uri)
        if not any(location.lies_below(prefix) for prefix in self._prefixes):
            raise InvalidArgument(
                f"source_uri {uri} lies below no prefix that this server may read"
                f" ({self._shown}); set --source-prefix, or upload the folder",
                reason="SOURCE_NOT_ALLOWED",
                metadata={"field": "source_uri", "value": uri[:200], "limit": self._shown},
            )
        with disk_errors(scratch):
            if location.scheme == "file":
                return self._stage_folder(uri, location, scratch, max_bytes)
            return self._stage_objects(uri, location, scratch, max_bytes)

    def _stage_folder(self, uri: str, at: Location, scratch: Path, max_bytes: int) -> Staged:
        asked = Path("/" + at.path)
        if not asked.is_dir():
            raise source_not_found(uri)
        real = asked.resolve()
        roots = [Path("/" + prefix.path) for prefix in self._prefixes if prefix.scheme == "file"]
        if not any(real.is_relative_to(root.resolve()) for root in roots):
            raise InvalidArgument(
                f"source_uri {uri} is a link out of the allowed prefixes",
                reason="SOURCE_NOT_ALLOWED",
                metadata={"field": "source_uri", "value": uri[:200]},
            )
        folder = read_folder(real)
        check_total(sum(file.size_bytes for file in folder.stored), max_bytes)
        copies = {}
        for file in folder.stored:
            with file.path.open("rb") as source:
                copies[file.name] = copy_file(
                    read_pieces(source), scratch / file.name, file.size_bytes
                )
        return Staged(copies, _reasons(folder))

    def _stage_objects(self, uri: str, at: Location, scratch: Path, max_bytes: int) -> Staged:
        from botocore.exceptions import BotoCoreError, ClientError

        from loraplex.s3 import is_absent, s3_client, s3_failure

        client = s3_client(self._s3_endpoint_url)
        try:
            sizes, folders = _list_objects(client, at)
            if not sizes and not folders:
                raise source_not_found(uri)
            folder, odd = _classify(sizes, folders, scratch)
            check_total(sum(file.size_bytes for file in folder.stored), max_bytes)
            copies = {}
            for file in folder.stored:
                key = "/".join((*at.segments, file.name))
                body = client.get_object(Bucket=at.bucket, Key=key)["Body"]
                copies[file.name] = copy_file(
                    body.iter_chunks(CHUNK_BYTES), scratch / file.name, file.size_bytes
                )
        except (BotoCoreError, ClientError) as error:
            if is_absent(error):
                raise source_not_found(uri) from error
            raise s3_failure(error, uri) from error
        return Staged(copies, (*_reasons(folder), *odd))


def copy_file(pieces: Iterator[bytes], target: Path, size_bytes: int) -> Path:
    """Write `pieces` to `target`. Raises: FieldInvalid: not `size_bytes` of them."""
    seen = 0
    with target.open("wb") as out:
        for piece in pieces:
            seen += len(piece)
            if seen > size_bytes:
                break
            out.write(piece)
    if seen != size_bytes:
        raise FieldInvalid(
            target.name, f"{seen} bytes", f"{size_bytes} bytes: it changed meanwhile"
        )
    return target


def read_pieces(source: BinaryIO) -> Iterator[bytes]:
    while piece := source.read(CHUNK_BYTES):
        yield piece


def check_total(total_bytes: int, max_bytes: int) -> None:
    """Raises: ResourceExhausted SIZE_LIMIT."""
    if total_bytes > max_bytes:
        raise ResourceExhausted(
            f"the adapter has {total_bytes} bytes, more than --max-adapter-bytes {max_bytes}",
            reason="SIZE_LIMIT",
            metadata={"field": "files", "value": str(total_bytes), "limit": str(max_bytes)},
        )


def source_not_found(uri: str) -> NotFound:
    return NotFound(
        f"nothing lies at {uri}", reason="SOURCE_NOT_FOUND", metadata={"source_uri": uri[:200]}
    )


@contextlib.contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """A full scratch disk is RESOURCE_EXHAUSTED / DISK_FULL."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ResourceExhausted(f"no space left in {folder}", reason="DISK_FULL") from error


def _list_objects(client: Any, at: Location) -> tuple[dict[str, int], list[str]]:
    """(name → size, folder names) directly below a location."""
    prefix = at.path + "/" if at.segments else ""
    sizes: dict[str, int] = {}
    folders: list[str] = []
    pages = client.get_paginator("list_objects_v2")
    for page in pages.paginate(Bucket=at.bucket, Prefix=prefix, Delimiter="/"):
        for item in page.get("Contents", ()):
            if name := item["Key"].removeprefix(prefix):
                sizes[name] = item["Size"]
        folders += [item["Prefix"].removeprefix(prefix) for item in page.get("CommonPrefixes", ())]
        if len(sizes) + len(folders) > MAX_OBJECTS:
            raise FieldInvalid("source_uri", at.path, f"a folder of at most {MAX_OBJECTS} objects")
    return sizes, folders


def _classify(
    sizes: Mapping[str, int], folders: list[str], scratch: Path
) -> tuple[AdapterFolder, tuple[str, ...]]:
    """What of an object listing is stored, by the rule for folders: names and sizes decide, so an
    empty file of the right length stands for each object."""
    outline = scratch / "outline"
    outline.mkdir()
    odd = [f"{name}: a folder" for name in folders]
    for name, size in sizes.items():
        if not is_file_name(name):
            odd.append(f"{name}: hidden, or a name with characters that are not stored")
            continue
        with (outline / name).open("wb") as stand_in:
            stand_in.truncate(size)
    return read_folder(outline), tuple(odd)


def _reasons(folder: AdapterFolder) -> tuple[str, ...]:
    return tuple(f"{name}: {reason}" for name, reason in folder.not_stored)
