"""Base models and their aliases."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from registry_svc.domain import BaseModel, Page
from registry_svc.repository.statements import insert_if_absent
from registry_svc.tables import BaseModelAliasRow, BaseModelRow


class BaseModelRepository:
    def __init__(self, session: Session) -> None:
        self._session = session

    def get(self, name: str, *, lock: bool = False) -> BaseModel | None:
        """By name alone; see `find` for aliases."""
        query = select(BaseModelRow).where(BaseModelRow.name == name)
        row = self._session.scalars(query.with_for_update() if lock else query).one_or_none()
        return _domain(row, self._aliases([name])) if row else None

    def find(self, name_or_alias: str) -> BaseModel | None:
        found = self.get(name_or_alias)
        if found is not None:
            return found
        alias = self._session.get(BaseModelAliasRow, name_or_alias)
        return self.get(alias.base_model) if alias else None

    def page(self, page: Page) -> list[BaseModel]:
        rows = self._session.scalars(
            select(BaseModelRow)
            .where(BaseModelRow.name > page.after)
            .order_by(BaseModelRow.name)
            .limit(page.size)
        ).all()
        aliases = self._aliases([row.name for row in rows])
        return [_domain(row, aliases) for row in rows]

    def add(self, model: BaseModel) -> None:
        self._session.add(
            BaseModelRow(
                name=model.name,
                weights_digest=model.weights_digest,
                config_json=model.config_json,
                vocabulary_digest=model.vocabulary_digest,
                chat_template_digest=model.chat_template_digest,
                eos_token_ids=list(model.eos_token_ids),
                generation=model.generation,
                create_time=model.create_time,
            )
        )
        self._session.flush()
        self.add_aliases(model.name, model.aliases)

    def add_aliases(self, name: str, aliases: Sequence[str]) -> None:
        for alias in aliases:
            insert_if_absent(self._session, BaseModelAliasRow, {"alias": alias, "base_model": name})

    def bump_generation(self, name: str) -> None:
        self._session.execute(
            update(BaseModelRow)
            .where(BaseModelRow.name == name)
            .values(generation=BaseModelRow.generation + 1)
        )
        self._session.expire_all()

    def _aliases(self, names: Sequence[str]) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        rows = self._session.scalars(
            select(BaseModelAliasRow)
            .where(BaseModelAliasRow.base_model.in_(names))
            .order_by(BaseModelAliasRow.alias)
        )
        for row in rows:
            found.setdefault(row.base_model, []).append(row.alias)
        return found


def _domain(row: BaseModelRow, aliases: dict[str, list[str]]) -> BaseModel:
    return BaseModel(
        name=row.name,
        weights_digest=row.weights_digest,
        config_json=row.config_json,
        aliases=tuple(aliases.get(row.name, ())),
        vocabulary_digest=row.vocabulary_digest,
        chat_template_digest=row.chat_template_digest,
        eos_token_ids=tuple(row.eos_token_ids),
        create_time=row.create_time,
        generation=row.generation,
    )
