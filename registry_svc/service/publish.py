"""Publishing: stage, check, store, and only then commit a version.

upload id ─┐                                             ┌─ content is a version: return it
           ├─▶ staged copies ─▶ check_adapter ─▶ commit ─┤
source URI ┘   (scratch)        (fail closed)            └─ next number, current, event
"""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from loraplex.adapter_format import CheckedAdapter, check_adapter
from loraplex.blobs import BlobStore
from loraplex.status import DataLoss, FieldInvalid
from registry_svc.database import Database
from registry_svc.domain import Adapter, BaseModel, BlobState, Caller, StoredFile, Upload, Version
from registry_svc.facts import base_model_facts
from registry_svc.names import (
    check_base_alias,
    check_description,
    check_labels,
    check_name,
    check_request_id,
)
from registry_svc.repository.transaction import Transaction
from registry_svc.service.commit import CommitPlan, Published, check_publishable, commit
from registry_svc.service.lookup import known_base_model
from registry_svc.service.uploads import Uploads, live_upload
from registry_svc.sources import Sources, Staged, disk_errors

METHOD = "RegisterAdapter"
#: Beginning of the names of scratch folders.
SCRATCH = "loraplex-publish-"


@dataclass(frozen=True, slots=True)
class PublishRequest:
    """Exactly one of `upload_id` and `source_uri` is set; `public` None: unchanged."""

    name: str
    base_model: str
    upload_id: str = ""
    source_uri: str = ""
    base_model_confirmed: bool = False
    public: bool | None = None
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    description: str = ""
    request_id: str = ""
    #: SHA-256 of the whole request without request_id
    fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class Publisher:
    database: Database
    store: BlobStore
    uploads: Uploads
    sources: Sources
    scratch_dir: Path
    max_adapter_bytes: int
    max_lora_rank: int
    max_saved_bytes: int

    def publish(self, caller: Caller, request: PublishRequest) -> Published:
        """Make a folder the next version of a name.

        Raises: AdapterRefused: the check's first finding; NotFound, FieldInvalid, AlreadyExists
        NAME_TAKEN, Unavailable, DataLoss, ResourceExhausted. Nothing is visible then.
        """
        _check_request(request)

        def prepare(tx: Transaction) -> Published | BaseModel:
            if request.request_id:
                seen = recalled(tx, caller, request)
                if seen is not None:
                    return seen
            check_publishable(tx, caller, request.name)
            return known_base_model(tx, request.base_model)

        base = self.database.read(prepare)
        if isinstance(base, Published):
            return base
        self.scratch_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=self.scratch_dir) as scratch:
            staged, upload = self._stage(caller, request, Path(scratch))
            checked = check_adapter(
                staged.files,
                base_model_facts(base),
                max_rank=self.max_lora_rank,
                max_saved_bytes=self.max_saved_bytes,
                base_model_confirmed=request.base_model_confirmed,
            )
            files = tuple(
                StoredFile(file.name, file.size_bytes, file.sha256)
                for file in checked.manifest.files
            )
            if upload is None:
                upload = self._store(caller, staged, files)
            elif set(files) != set(upload.files):
                raise DataLoss(f"upload {upload.id}: stored blobs are not what was announced")
        return self._commit(caller, request, base, upload, checked, staged.not_stored)

    def discard_scratch(self, age_s: float) -> int:
        """Remove what publishes of a registry that was killed left. Returns: how many folders."""
        old = [
            folder
            for folder in self.scratch_dir.glob(f"{SCRATCH}*")
            if time.time() - folder.stat().st_mtime >= age_s
        ]
        for folder in old:
            shutil.rmtree(folder, ignore_errors=True)
        return len(old)

    def _stage(
        self, caller: Caller, request: PublishRequest, scratch: Path
    ) -> tuple[Staged, Upload | None]:
        if request.source_uri:
            return self.sources.stage(request.source_uri, scratch, self.max_adapter_bytes), None
        upload = self._complete_upload(caller, request.upload_id)
        with disk_errors(scratch):
            copies = {file.name: self._fetch(file, scratch / file.name) for file in upload.files}
        return Staged(copies), upload

    def _fetch(self, file: StoredFile, target: Path) -> Path:
        """Copy a stored blob. One that is gone or damaged is asked for again at the next upload.

        Raises: DataLoss DIGEST_MISMATCH.
        """
        digest = hashlib.sha256()
        try:
            with target.open("wb") as out:
                for piece in self.store.chunks(file.sha256):
                    digest.update(piece)
                    out.write(piece)
            if digest.hexdigest() != file.sha256:
                raise DataLoss(
                    f"the stored blob of {file.name} is damaged; publish again",
                    metadata={"sha256": file.sha256},
                )
        except DataLoss:
            self.database.write(partial(self._distrust, sha256=file.sha256))
            raise
        return target

    def _distrust(self, tx: Transaction, sha256: str) -> None:
        if tx.blobs.lock_state(sha256) is BlobState.STORED:
            self.store.delete(sha256)
            tx.blobs.set_state(sha256, BlobState.UPLOADING)

    def _complete_upload(self, caller: Caller, upload_id: str) -> Upload:
        """The upload, renewed, when every blob of it was sent."""

        def use_case(tx: Transaction) -> Upload:
            upload = live_upload(tx, caller, upload_id, lock=True)
            tx.blobs.extend_upload(upload.id, tx.now + self.uploads.ttl)
            for file in sorted(upload.files, key=lambda file: file.sha256):
                if tx.blobs.lock_state(file.sha256) is not BlobState.STORED:
                    limit = f"an upload of which every file was sent; missing: {file.name}"
                    raise FieldInvalid("upload_id", upload_id, limit)
            return upload

        return self.database.write(use_case).value

    def _store(self, caller: Caller, staged: Staged, files: tuple[StoredFile, ...]) -> Upload:
        upload, missing = self.uploads.start(caller, files)
        for file in files:
            if file.sha256 in missing:
                with staged.files[file.name].open("rb") as source:
                    self.uploads.receive(caller, upload.id, file.sha256, file.size_bytes, source)
        return upload

    def _commit(
        self,
        caller: Caller,
        request: PublishRequest,
        base: BaseModel,
        upload: Upload,
        checked: CheckedAdapter,
        not_stored: tuple[str, ...],
    ) -> Published:
        plan = CommitPlan(
            name=request.name,
            base_model=base.name,
            base_model_confirmed=request.base_model_confirmed,
            upload_id=upload.id,
            manifest=checked.manifest,
            max_rank=checked.spec.max_rank,
            weights_bytes=checked.spec.weights_bytes,
            parameter_count=checked.spec.parameter_count,
            public=request.public,
            labels=dict(request.labels),
            description=request.description,
            not_stored=not_stored,
        )

        def use_case(tx: Transaction) -> Published:
            if request.request_id:
                seen = recalled(tx, caller, request)
                if seen is not None:
                    return seen
            published = commit(tx, caller, plan)
            if request.request_id:
                outcome = {
                    "name": request.name,
                    "version": published.version.version,
                    "created": published.created,
                    "notice": published.notice,
                    "not_stored": list(published.not_stored),
                }
                tx.ledger.remember(
                    caller.tenant,
                    request.request_id,
                    METHOD,
                    request.fingerprint,
                    outcome,
                    tx.now,
                )
            return published

        return self.database.write(use_case).value


def recalled(tx: Transaction, caller: Caller, request: PublishRequest) -> Published | None:
    """The answer that the same request got before, with the adapter as it is now."""
    seen = tx.ledger.recall(caller.tenant, request.request_id, METHOD, request.fingerprint)
    if seen is None:
        return None
    adapter: Adapter | None = tx.adapters.get(seen["name"])
    version: Version | None = tx.versions.get(seen["name"], seen["version"])
    assert adapter is not None, "adapters are never removed"
    assert version is not None, "versions are never removed"
    return Published(adapter, version, seen["created"], seen["notice"], tuple(seen["not_stored"]))


def _check_request(request: PublishRequest) -> None:
    check_name("name", request.name)
    check_base_alias("base_model", request.base_model)
    check_labels(request.labels)
    check_description(request.description)
    check_request_id(request.request_id)
    if bool(request.upload_id) == bool(request.source_uri):
        raise FieldInvalid("source", "not exactly one", "one of upload_id and source_uri")
