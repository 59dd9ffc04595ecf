"""Adapter versions and their files."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from registry_svc.domain import StoredFile, Version
from registry_svc.tables import AdapterVersionFileRow, AdapterVersionRow


class VersionRepository:
    def __init__(self, session: Session) -> None:
        self._session = session

    def get(self, adapter: str, version: int) -> Version | None:
        row = self._session.get(AdapterVersionRow, (adapter, version))
        return self._domain([row])[0] if row else None

    def get_many(self, keys: Sequence[tuple[str, int]]) -> dict[tuple[str, int], Version]:
        """Those of `keys` that exist, in few queries however many there are."""
        adapters = sorted({adapter for adapter, _ in keys})
        wanted, rows = set(keys), []
        for start in range(0, len(adapters), 500):
            found = self._session.scalars(
                select(AdapterVersionRow).where(
                    AdapterVersionRow.adapter.in_(adapters[start : start + 500])
                )
            )
            rows += [row for row in found if (row.adapter, row.version) in wanted]
        return {(item.adapter, item.version): item for item in self._domain(rows)}

    def by_digest(self, adapter: str, digest: str) -> Version | None:
        row = self._session.scalars(
            select(AdapterVersionRow).where(
                AdapterVersionRow.adapter == adapter, AdapterVersionRow.digest == digest
            )
        ).one_or_none()
        return self._domain([row])[0] if row else None

    def before(self, adapter: str, version: int) -> Version | None:
        """The newest version below `version` that is not retired."""
        row = self._session.scalars(
            select(AdapterVersionRow)
            .where(
                AdapterVersionRow.adapter == adapter,
                AdapterVersionRow.version < version,
                AdapterVersionRow.retired.is_(False),
            )
            .order_by(AdapterVersionRow.version.desc())
            .limit(1)
        ).one_or_none()
        return self._domain([row])[0] if row else None

    def page(self, adapter: str, below: int, limit: int) -> list[Version]:
        """Newest first, those with a number below `below`."""
        rows = self._session.scalars(
            select(AdapterVersionRow)
            .where(AdapterVersionRow.adapter == adapter, AdapterVersionRow.version < below)
            .order_by(AdapterVersionRow.version.desc())
            .limit(limit)
        ).all()
        return self._domain(rows)

    def add(self, version: Version) -> None:
        self._session.add(
            AdapterVersionRow(
                adapter=version.adapter,
                version=version.version,
                digest=version.digest,
                canonical_json=version.canonical_json,
                base_model=version.base_model,
                max_rank=version.max_rank,
                weights_bytes=version.weights_bytes,
                parameter_count=version.parameter_count,
                create_time=version.create_time,
                retired=version.retired,
            )
        )
        self._session.flush()
        for file in version.files:
            self._session.add(
                AdapterVersionFileRow(
                    adapter=version.adapter,
                    version=version.version,
                    name=file.name,
                    size_bytes=file.size_bytes,
                    sha256=file.sha256,
                )
            )
        self._session.flush()

    def retire_all(self, adapter: str) -> None:
        """The versions of an adapter that is gone no longer protect their blobs."""
        self._set_retired(True, AdapterVersionRow.adapter == adapter)

    def revive(self, adapter: str, version: int) -> None:
        self._set_retired(
            False, AdapterVersionRow.adapter == adapter, AdapterVersionRow.version == version
        )

    def count(self) -> int:
        return self._session.scalars(select(func.count()).select_from(AdapterVersionRow)).one()

    def _set_retired(self, retired: bool, *where: object) -> None:
        self._session.execute(
            update(AdapterVersionRow).where(*where).values(retired=retired)  # type: ignore[arg-type]
        )
        self._session.expire_all()

    def _domain(self, rows: Sequence[AdapterVersionRow]) -> list[Version]:
        files: dict[tuple[str, int], list[StoredFile]] = {}
        adapters = sorted({row.adapter for row in rows})
        for start in range(0, len(adapters), 500):
            found = self._session.scalars(
                select(AdapterVersionFileRow)
                .where(AdapterVersionFileRow.adapter.in_(adapters[start : start + 500]))
                .order_by(AdapterVersionFileRow.name)
            )
            for file in found:
                item = StoredFile(file.name, file.size_bytes, file.sha256)
                files.setdefault((file.adapter, file.version), []).append(item)
        return [_version(row, files.get((row.adapter, row.version), [])) for row in rows]


def _version(row: AdapterVersionRow, files: Sequence[StoredFile]) -> Version:
    return Version(
        adapter=row.adapter,
        version=row.version,
        digest=row.digest,
        canonical_json=row.canonical_json,
        files=tuple(files),
        base_model=row.base_model,
        max_rank=row.max_rank,
        weights_bytes=row.weights_bytes,
        parameter_count=row.parameter_count,
        create_time=row.create_time,
        retired=row.retired,
    )
