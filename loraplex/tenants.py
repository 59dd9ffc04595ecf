"""How a call says whose it is until there are credentials: by metadata, or not at all."""

from __future__ import annotations

DEFAULT_TENANT = "default"
TENANT_METADATA = "x-loraplex-tenant"


def tenant_metadata(tenant: str | None) -> tuple[tuple[str, str], ...]:
    """The metadata of a call for `tenant`; none for the default one (None or empty)."""
    return ((TENANT_METADATA, tenant),) if tenant else ()
