"""The one namespace of adapters, aliases, base models and their aliases."""

from __future__ import annotations

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from loraplex.status import AlreadyExists
from registry_svc.repository.statements import insert_if_absent
from registry_svc.tables import NameRow

_SHOWN = {
    "adapter": "an adapter",
    "alias": "an alias",
    "base_model": "a base model",
    "base_model_alias": "an alias of base model",
}


class NameRepository:
    def __init__(self, session: Session) -> None:
        self._session = session

    def claim(self, name: str, kind: str, owner: str) -> None:
        """Make `name` mean this and nothing else; a second equal claim is no error.

        Raises: AlreadyExists NAME_TAKEN.
        """
        row = {"name": name, "kind": kind, "owner": owner}
        if not insert_if_absent(self._session, NameRow, row):
            self.require_free(name, kind, owner)

    def require_free(self, name: str, kind: str, owner: str) -> None:
        """Return when nothing else has the name. Raises: AlreadyExists NAME_TAKEN."""
        taken = self.owner(name)
        if taken is None or taken == (kind, owner):
            return
        of = f" {taken[1]!r}" if taken[0] == "base_model_alias" else ""
        raise AlreadyExists(
            f"name {name!r} is taken by {_SHOWN[taken[0]]}{of}; choose another",
            metadata={"name": name, "taken_by": taken[0]},
        )

    def owner(self, name: str) -> tuple[str, str] | None:
        """(kind, owner) of a name that is taken."""
        found = self._session.execute(
            select(NameRow.kind, NameRow.owner).where(NameRow.name == name)
        ).one_or_none()
        return (found.kind, found.owner) if found else None

    def release(self, name: str) -> None:
        self._session.execute(delete(NameRow).where(NameRow.name == name))
