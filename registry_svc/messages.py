"""Domain values as protobuf messages, and request fields back as domain values."""

from __future__ import annotations

import datetime as dt
import hashlib
from typing import Any

from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from loraplex.registry.v1 import registry_pb2 as pb
from loraplex.status import FieldInvalid
from registry_svc.domain import (
    Adapter,
    AdapterState,
    Alias,
    BaseModel,
    Event,
    EventType,
    StoredFile,
    Tenant,
    Version,
)
from registry_svc.names import check_description, check_labels, check_weight

MAX_QUEUE_LIMIT = 2**53
_STATES = {
    AdapterState.ACTIVE: pb.ADAPTER_STATE_ACTIVE,
    AdapterState.DRAINING: pb.ADAPTER_STATE_DRAINING,
    AdapterState.DELETED: pb.ADAPTER_STATE_DELETED,
}
_EVENTS = {
    EventType.ADAPTER_CHANGED: pb.EVENT_TYPE_ADAPTER_CHANGED,
    EventType.ADAPTER_DELETED: pb.EVENT_TYPE_ADAPTER_DELETED,
    EventType.BASE_MODEL_CHANGED: pb.EVENT_TYPE_BASE_MODEL_CHANGED,
    EventType.ALIAS_CHANGED: pb.EVENT_TYPE_ALIAS_CHANGED,
    EventType.TENANT_CHANGED: pb.EVENT_TYPE_TENANT_CHANGED,
}


def timestamp(time: dt.datetime) -> Timestamp:
    message = Timestamp()
    message.FromDatetime(time)
    return message


def base_model(model: BaseModel) -> pb.BaseModel:
    return pb.BaseModel(
        name=model.name,
        weights_digest=model.weights_digest,
        aliases=model.aliases,
        config_json=model.config_json,
        vocabulary_digest=model.vocabulary_digest,
        chat_template_digest=model.chat_template_digest,
        eos_token_ids=model.eos_token_ids,
        etag=model.etag,
        create_time=timestamp(model.create_time),
    )


def read_base_model(message: pb.BaseModel) -> BaseModel:
    return BaseModel(
        name=message.name,
        weights_digest=message.weights_digest,
        config_json=message.config_json,
        aliases=tuple(message.aliases),
        vocabulary_digest=message.vocabulary_digest,
        chat_template_digest=message.chat_template_digest,
        eos_token_ids=tuple(message.eos_token_ids),
        create_time=dt.datetime.fromtimestamp(0, dt.UTC),
    )


def adapter(item: Adapter) -> pb.Adapter:
    return pb.Adapter(
        name=item.name,
        tenant=item.tenant,
        base_model=item.base_model,
        state=_STATES[item.state],
        current_version=item.current_version,
        visibility=pb.VISIBILITY_PUBLIC if item.public else pb.VISIBILITY_PRIVATE,
        labels=item.labels,
        description=item.description,
        weight=item.weight,
        etag=item.etag,
        create_time=timestamp(item.create_time),
        update_time=timestamp(item.update_time),
    )


def version(item: Version) -> pb.AdapterVersion:
    manifest = pb.Manifest(
        digest=item.digest,
        canonical_json=item.canonical_json,
        files=[
            pb.File(name=file.name, size_bytes=file.size_bytes, sha256=file.sha256)
            for file in item.files
        ],
    )
    return pb.AdapterVersion(
        adapter=item.adapter,
        version=item.version,
        manifest=manifest,
        base_model=item.base_model,
        max_rank=item.max_rank,
        weights_bytes=item.weights_bytes,
        parameter_count=item.parameter_count,
        create_time=timestamp(item.create_time),
    )


def alias(item: Alias) -> pb.SetAliasResponse:
    return pb.SetAliasResponse(alias=item.alias, adapter=item.adapter, version=item.version)


def tenant(item: Tenant) -> pb.Tenant:
    return pb.Tenant(
        name=item.name,
        weight=item.weight,
        max_queued_requests=item.max_queued_requests,
        max_queued_tokens=item.max_queued_tokens,
        etag=item.etag,
    )


def event(item: Event) -> pb.Event:
    return pb.Event(
        revision=item.revision,
        type=_EVENTS[item.type],
        adapter=adapter(item.adapter) if item.adapter else None,
        version=version(item.version) if item.version else None,
        base_model=base_model(item.base_model) if item.base_model else None,
        alias=alias(item.alias) if item.alias else None,
        tenant=tenant(item.tenant) if item.tenant else None,
        time=timestamp(item.time),
    )


def read_files(files: Any) -> list[StoredFile]:
    return [StoredFile(file.name, file.size_bytes, file.sha256) for file in files]


def read_visibility(value: int) -> bool | None:
    """None: unspecified. Raises: FieldInvalid: a number that this build does not know."""
    if value == pb.VISIBILITY_UNSPECIFIED:
        return None
    if value not in (pb.VISIBILITY_PRIVATE, pb.VISIBILITY_PUBLIC):
        raise FieldInvalid("visibility", value, "PRIVATE or PUBLIC")
    return value == pb.VISIBILITY_PUBLIC


def adapter_changes(request: pb.UpdateAdapterRequest) -> dict[str, object]:
    """Field of Adapter → new value. Raises: FieldInvalid."""
    given, changes = request.adapter, dict[str, object]()
    for path in _mask(request.update_mask.paths, "visibility, labels, description, weight"):
        if path == "visibility":
            changes["public"] = bool(read_visibility(given.visibility))
        elif path == "labels":
            changes["labels"] = check_labels(given.labels)
        elif path == "description":
            changes["description"] = check_description(given.description)
        else:
            changes["weight"] = check_weight("adapter.weight", given.weight)
    return changes


def tenant_changes(request: pb.UpdateTenantRequest) -> dict[str, object]:
    """Field of Tenant → new value. Raises: FieldInvalid."""
    given, changes = request.tenant, dict[str, object]()
    for path in _mask(request.update_mask.paths, "weight, max_queued_requests, max_queued_tokens"):
        if path == "weight":
            changes["weight"] = check_weight("tenant.weight", given.weight)
            continue
        value = getattr(given, path)
        if not 0 <= value <= MAX_QUEUE_LIMIT:
            raise FieldInvalid(f"tenant.{path}", value, f"0 (no limit) to {MAX_QUEUE_LIMIT}")
        changes[path] = value
    return changes


def fingerprint(request: Message) -> str:
    """SHA-256 of a request without its request_id: what makes two requests the same."""
    copy = type(request)()
    copy.CopyFrom(request)
    copy.ClearField("request_id")
    return hashlib.sha256(copy.SerializeToString(deterministic=True)).hexdigest()


def _mask(paths: Any, allowed: str) -> list[str]:
    if not paths:
        raise FieldInvalid("update_mask", "empty", f"some of {allowed}")
    for path in paths:
        if path not in allowed.split(", "):
            raise FieldInvalid("update_mask", path, f"some of {allowed}")
    return list(paths)
