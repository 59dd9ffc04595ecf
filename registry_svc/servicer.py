"""The RPCs of AdapterRegistry: request fields → use case → response. No rule lives here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc

from loraplex.registry.v1 import registry_pb2 as pb
from loraplex.registry.v1 import registry_pb2_grpc
from loraplex.status import FieldInvalid, InvalidArgument
from loraplex.tenants import DEFAULT_TENANT, TENANT_METADATA
from registry_svc import messages
from registry_svc.domain import AdapterFilter, Caller
from registry_svc.names import check_name
from registry_svc.paging import read_page, write_token
from registry_svc.receive import BlobReader, read_header
from registry_svc.service.adapters import Adapters
from registry_svc.service.base_models import BaseModels
from registry_svc.service.publish import Publisher, PublishRequest
from registry_svc.service.tenants import Tenants
from registry_svc.service.uploads import Uploads
from registry_svc.service.watch import WatchHub

_NEWEST = 2**62


@dataclass(frozen=True, slots=True)
class Services:
    base_models: BaseModels
    adapters: Adapters
    uploads: Uploads
    publisher: Publisher
    tenants: Tenants
    watch: WatchHub
    #: seconds without a message after which an upload's client is taken for gone
    upload_idle_s: float = 60.0


class RegistryServicer(registry_pb2_grpc.AdapterRegistryServicer):
    def __init__(self, services: Services) -> None:
        self._services = services

    def RegisterBaseModel(self, request: Any, context: Any) -> pb.RegisterBaseModelResponse:
        stored, created = self._services.base_models.register(
            caller(context),
            messages.read_base_model(request.base_model),
            request.request_id,
            messages.fingerprint(request),
        )
        return pb.RegisterBaseModelResponse(base_model=messages.base_model(stored), created=created)

    def GetBaseModel(self, request: Any, context: Any) -> pb.GetBaseModelResponse:
        found = self._services.base_models.get(request.name)
        return pb.GetBaseModelResponse(base_model=messages.base_model(found))

    def ListBaseModels(self, request: Any, context: Any) -> pb.ListBaseModelsResponse:
        query = "base_models"
        page = read_page(request.page_size, request.page_token, query)
        found = self._services.base_models.list(page)
        return pb.ListBaseModelsResponse(
            base_models=[messages.base_model(item) for item in found],
            next_page_token=write_token(query, found[-1].name) if len(found) == page.size else "",
        )

    def StartUpload(self, request: Any, context: Any) -> pb.StartUploadResponse:
        files = messages.read_files(request.files)
        upload, missing = self._services.uploads.start(caller(context), files)
        return pb.StartUploadResponse(
            upload_id=upload.id,
            missing_sha256=missing,
            expire_time=messages.timestamp(upload.expire_time),
        )

    def UploadBlob(self, request_iterator: Any, context: Any) -> pb.UploadBlobResponse:
        with BlobReader(request_iterator, context, self._services.upload_idle_s) as reader:
            header = read_header(reader)
            stored = self._services.uploads.receive(
                caller(context), header.upload_id, header.sha256, header.size_bytes, reader
            )
        return pb.UploadBlobResponse(stored=stored)

    def RegisterAdapter(self, request: Any, context: Any) -> pb.RegisterAdapterResponse:
        done = self._services.publisher.publish(
            caller(context),
            PublishRequest(
                name=request.name,
                base_model=request.base_model,
                upload_id=request.upload_id,
                source_uri=request.source_uri,
                base_model_confirmed=request.base_model_confirmed,
                public=messages.read_visibility(request.visibility),
                labels=dict(request.labels),
                description=request.description,
                request_id=request.request_id,
                fingerprint=messages.fingerprint(request),
            ),
        )
        return pb.RegisterAdapterResponse(
            adapter=messages.adapter(done.adapter),
            version=messages.version(done.version),
            created=done.created,
            notice=done.notice,
            not_stored=done.not_stored,
        )

    def GetAdapter(self, request: Any, context: Any) -> pb.GetAdapterResponse:
        found, current, aliases = self._services.adapters.get(caller(context), request.name)
        return pb.GetAdapterResponse(
            adapter=messages.adapter(found),
            current=messages.version(current),
            aliases=[alias.alias for alias in aliases],
        )

    def ListAdapters(self, request: Any, context: Any) -> pb.ListAdaptersResponse:
        wanted = AdapterFilter(
            request.base_model, request.tenant, request.name_prefix, request.include_inactive
        )
        query = f"adapters {wanted}"
        page = read_page(request.page_size, request.page_token, query)
        found = self._services.adapters.list(caller(context), wanted, page)
        return pb.ListAdaptersResponse(
            adapters=[messages.adapter(item) for item in found],
            next_page_token=write_token(query, found[-1].name) if len(found) == page.size else "",
        )

    def ListAdapterVersions(self, request: Any, context: Any) -> pb.ListAdapterVersionsResponse:
        query = f"versions {request.name}"
        page = read_page(request.page_size, request.page_token, query)
        if page.after and not page.after.isdecimal():
            raise InvalidArgument(
                "page_token was not written by this list", reason="PAGE_TOKEN_INVALID"
            )
        below = int(page.after) if page.after else _NEWEST
        found = self._services.adapters.versions(caller(context), request.name, below, page.size)
        last = str(found[-1].version) if len(found) == page.size else ""
        return pb.ListAdapterVersionsResponse(
            versions=[messages.version(item) for item in found],
            next_page_token=write_token(query, last) if last else "",
        )

    def UpdateAdapter(self, request: Any, context: Any) -> pb.UpdateAdapterResponse:
        changes = messages.adapter_changes(request)
        given = request.adapter
        changed = self._services.adapters.update(caller(context), given.name, given.etag, changes)
        return pb.UpdateAdapterResponse(adapter=messages.adapter(changed))

    def RollbackAdapter(self, request: Any, context: Any) -> pb.RollbackAdapterResponse:
        changed, current = self._services.adapters.roll_back(
            caller(context), request.name, request.version, request.etag
        )
        return pb.RollbackAdapterResponse(
            adapter=messages.adapter(changed), current=messages.version(current)
        )

    def SetAlias(self, request: Any, context: Any) -> pb.SetAliasResponse:
        stored = self._services.adapters.set_alias(
            caller(context), request.alias, request.adapter, request.version
        )
        return messages.alias(stored)

    def UnregisterAdapter(self, request: Any, context: Any) -> pb.UnregisterAdapterResponse:
        ended = self._services.adapters.unregister(
            caller(context), request.name, request.drain_seconds, request.etag
        )
        return pb.UnregisterAdapterResponse(
            adapter=messages.adapter(ended.adapter),
            revision=ended.revision,
            confirmed_by=ended.confirmed_by,
            unreachable=ended.unreachable,
        )

    def ResolveAdapter(self, request: Any, context: Any) -> pb.ResolveAdapterResponse:
        found, version, revision = self._services.adapters.resolve(
            caller(context), request.reference
        )
        return pb.ResolveAdapterResponse(
            adapter=messages.adapter(found),
            version=messages.version(version),
            revision=revision,
        )

    def WatchAdapters(self, request: Any, context: Any) -> Iterator[pb.WatchAdaptersResponse]:
        hub = self._services.watch
        context.add_callback(hub.wake)
        for item in hub.watch(request.from_revision, request.engine_id, context.is_active):
            if isinstance(item, int):
                yield pb.WatchAdaptersResponse(caught_up_revision=item)
            else:
                yield pb.WatchAdaptersResponse(event=messages.event(item))

    def GetTenant(self, request: Any, context: Any) -> pb.GetTenantResponse:
        found = self._services.tenants.get(request.name)
        return pb.GetTenantResponse(tenant=messages.tenant(found))

    def UpdateTenant(self, request: Any, context: Any) -> pb.UpdateTenantResponse:
        changes = messages.tenant_changes(request)
        given = request.tenant
        changed = self._services.tenants.update(caller(context), given.name, given.etag, changes)
        return pb.UpdateTenantResponse(tenant=messages.tenant(changed))


def caller(context: grpc.ServicerContext) -> Caller:
    """Who asks, by metadata. Raises: NameInvalid: no tenant's name; FieldInvalid: two of them."""
    given = [value for key, value in context.invocation_metadata() if key == TENANT_METADATA]
    if len(given) > 1:
        raise FieldInvalid(TENANT_METADATA, given, "given once")
    name = given[0] if given else ""
    return Caller(check_name(TENANT_METADATA, str(name)) if name else DEFAULT_TENANT)
