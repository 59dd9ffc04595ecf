"""What the registry talks about: frozen values without SQL, gRPC or a clock."""

from __future__ import annotations

import datetime as dt
import enum
from dataclasses import dataclass, field

from loraplex.tenants import DEFAULT_TENANT


class AdapterState(enum.Enum):
    ACTIVE = "ACTIVE"
    DRAINING = "DRAINING"
    DELETED = "DELETED"


class EventType(enum.Enum):
    ADAPTER_CHANGED = "ADAPTER_CHANGED"
    ADAPTER_DELETED = "ADAPTER_DELETED"
    BASE_MODEL_CHANGED = "BASE_MODEL_CHANGED"
    ALIAS_CHANGED = "ALIAS_CHANGED"
    TENANT_CHANGED = "TENANT_CHANGED"


class BlobState(enum.Enum):
    UPLOADING = "uploading"
    STORED = "stored"
    DELETING = "deleting"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks."""

    tenant: str = DEFAULT_TENANT


@dataclass(frozen=True, slots=True)
class StoredFile:
    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class BaseModel:
    name: str
    weights_digest: str
    config_json: str
    aliases: tuple[str, ...]
    vocabulary_digest: str
    chat_template_digest: str
    eos_token_ids: tuple[int, ...]
    create_time: dt.datetime
    generation: int = 1

    @property
    def etag(self) -> str:
        return f"{self.name}:{self.generation}"


@dataclass(frozen=True, slots=True)
class Adapter:
    name: str
    tenant: str
    base_model: str
    state: AdapterState
    current_version: int
    last_version: int
    public: bool
    labels: dict[str, str]
    description: str
    weight: float
    create_time: dt.datetime
    update_time: dt.datetime
    drain_deadline: dt.datetime | None = None
    generation: int = 1

    @property
    def etag(self) -> str:
        return f"{self.name}:{self.generation}"

    def visible_to(self, caller: Caller) -> bool:
        return self.public or self.tenant == caller.tenant


@dataclass(frozen=True, slots=True)
class Version:
    """The immutable n-th content of an adapter; only `retired` can change."""

    adapter: str
    version: int
    digest: str
    canonical_json: bytes
    files: tuple[StoredFile, ...]
    base_model: str
    max_rank: int
    weights_bytes: int
    parameter_count: int
    create_time: dt.datetime
    retired: bool = False


@dataclass(frozen=True, slots=True)
class Alias:
    """`adapter` empty: the alias was removed; `version` 0: it follows the current one."""

    alias: str
    adapter: str
    version: int


@dataclass(frozen=True, slots=True)
class Tenant:
    name: str
    weight: float = 1.0
    max_queued_requests: int = 0
    max_queued_tokens: int = 0
    generation: int = 1

    @property
    def etag(self) -> str:
        return f"{self.name}:{self.generation}"


@dataclass(frozen=True, slots=True)
class Upload:
    id: str
    tenant: str
    expire_time: dt.datetime
    files: tuple[StoredFile, ...]


@dataclass(frozen=True, slots=True)
class Event:
    """One change. Its revision is given at commit; 0 until then."""

    type: EventType
    time: dt.datetime
    revision: int = 0
    adapter: Adapter | None = None
    version: Version | None = None
    base_model: BaseModel | None = None
    alias: Alias | None = None
    tenant: Tenant | None = None


@dataclass(frozen=True, slots=True)
class EngineLease:
    """What is known of a watching engine."""

    id: str
    applied_revision: int
    last_seen_time: dt.datetime


@dataclass(frozen=True, slots=True)
class AdapterFilter:
    """What a list shows; empty strings mean any."""

    base_model: str = ""
    tenant: str = ""
    name_prefix: str = ""
    include_inactive: bool = False


@dataclass(frozen=True, slots=True)
class Page:
    """At most `size` items whose key lies behind `after` (empty: from the first)."""

    size: int
    after: str = ""


@dataclass(frozen=True, slots=True)
class Totals:
    """What `/metrics` shows of the database."""

    adapters: dict[str, int] = field(default_factory=dict)
    versions: int = 0
    blob_bytes: int = 0
    revision: int = 0
