"""Names → what answers: the base model or one adapter version, as the caller's tenant sees them."""

from __future__ import annotations

import base64
import binascii
import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Protocol

from engine_svc.types import AdapterRef
from loraplex.common.v1 import common_pb2
from loraplex.engine.v1 import engine_pb2
from loraplex.status import FieldInvalid, InvalidArgument, NameInvalid, NotFound
from loraplex.tenants import DEFAULT_TENANT, TENANT_METADATA

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,127}")
_REFERENCE_LIMIT = 256
_DEFAULT_PAGE = 100
_MAX_PAGE = 1000
_TOKEN_PREFIX = b"models:1:"


class AdapterNames(Protocol):
    """The replica of the registry's names (engine_svc/names.py)."""

    def resolve(self, reference: str, tenant: str) -> AdapterRef:
        """Raises: NotFound: nothing of that name that `tenant` may use."""
        ...

    def list(self, tenant: str) -> Sequence[AdapterRef]:
        """The current version of every adapter that `tenant` may use."""
        ...

    @property
    def revision(self) -> int:
        """The registry's revision that was applied last."""
        ...


def tenant_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """The calling tenant. Raises: NameInvalid; FieldInvalid: it is named twice."""
    given = [value for key, value in metadata or () if key == TENANT_METADATA]
    if len(given) > 1:
        raise FieldInvalid(f"metadata {TENANT_METADATA}", given, "given once")
    value = given[0] if given else DEFAULT_TENANT
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise NameInvalid(
            f"metadata {TENANT_METADATA}", value, "1 … 128 characters of [a-z0-9._-], no sign first"
        )
    return value


class Models:
    """What this engine can answer as."""

    def __init__(self, base_model: str, context_tokens: int, names: AdapterNames) -> None:
        self.base_model = base_model
        self._context_tokens = context_tokens
        self._names = names

    @property
    def revision(self) -> int:
        return self._names.revision

    def resolve(self, reference: str, tenant: str) -> AdapterRef | None:
        """The adapter of a reference; None is the base model, asked for by its own name only.

        Raises: FieldInvalid: empty or too long. NotFound: the caller may use nothing of that name.
        """
        if not reference or len(reference) > _REFERENCE_LIMIT:
            limit = f"a model name of 1 … {_REFERENCE_LIMIT} characters"
            raise FieldInvalid("model", reference, limit)
        if reference == self.base_model:
            return None
        try:
            return self._names.resolve(reference, tenant)
        except NotFound as error:
            raise self._with_base_suggestion(error, reference) from error

    def page(
        self, request: engine_pb2.ListModelsRequest, tenant: str
    ) -> engine_pb2.ListModelsResponse:
        """One page, the base model first, then adapters by name.

        Raises: FieldInvalid, InvalidArgument PAGE_TOKEN_INVALID.
        """
        size = request.page_size or _DEFAULT_PAGE
        if not 0 < size <= _MAX_PAGE:
            raise FieldInvalid("page_size", request.page_size, f"in 0 … {_MAX_PAGE}")
        after = _read_token(request.page_token)
        models = [] if after is not None else [self._base()]
        adapters = sorted(self._names.list(tenant), key=lambda ref: ref.name)
        models += [self._model(ref) for ref in adapters if after is None or ref.name > after]
        page = models[:size]
        more = len(models) > size
        token = _write_token("" if not page[-1].parent else page[-1].id) if more else ""
        return engine_pb2.ListModelsResponse(models=page, next_page_token=token)

    def _base(self) -> engine_pb2.Model:
        return engine_pb2.Model(id=self.base_model, context_tokens=self._context_tokens)

    def _model(self, ref: AdapterRef) -> engine_pb2.Model:
        return engine_pb2.Model(
            id=ref.name,
            parent=self.base_model,
            adapter=identity_of(ref),
            max_rank=ref.max_rank,
            context_tokens=self._context_tokens,
        )

    def _with_base_suggestion(self, error: NotFound, reference: str) -> NotFound:
        """The names' own error, or a hint at the base model when that is what was meant."""
        if not difflib.get_close_matches(reference, [self.base_model], cutoff=0.75):
            return error
        return NotFound(
            f"{error.message} (the base model is {self.base_model!r})",
            reason=error.reason,
            metadata={**error.metadata, "base_model": self.base_model},
        )


def identity_of(ref: AdapterRef | None) -> common_pb2.AdapterIdentity:
    """Empty for the base model."""
    if ref is None:
        return common_pb2.AdapterIdentity()
    return common_pb2.AdapterIdentity(name=ref.name, version=ref.version, digest=ref.digest)


def _write_token(name: str) -> str:
    return base64.urlsafe_b64encode(_TOKEN_PREFIX + name.encode()).decode()


def _read_token(token: str) -> str | None:
    """The name after which a page begins; None without a token."""
    if not token:
        return None
    try:
        content = base64.b64decode(token.encode("ascii"), altchars=b"-_", validate=True)
        name = content.removeprefix(_TOKEN_PREFIX).decode("utf-8")
    except (binascii.Error, UnicodeError):
        content, name = b"", ""
    if not content.startswith(_TOKEN_PREFIX):
        raise InvalidArgument(
            "page_token is not one that this server wrote; start again without it",
            reason="PAGE_TOKEN_INVALID",
            metadata={"field": "page_token"},
        )
    return name
