"""Use cases of base models."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from loraplex.base_model import parse_config_json
from loraplex.status import AlreadyExists, FieldInvalid
from registry_svc.database import Database
from registry_svc.domain import BaseModel, Caller, Event, EventType, Page
from registry_svc.names import check_base_alias, check_digest, check_name, check_request_id
from registry_svc.repository.transaction import Transaction
from registry_svc.service.lookup import known_base_model

MAX_ALIASES = 64
MAX_CONFIG_BYTES = 1024 * 1024
_METHOD = "RegisterBaseModel"


@dataclass(frozen=True, slots=True)
class BaseModels:
    database: Database

    def register(
        self, caller: Caller, model: BaseModel, request_id: str, fingerprint: str
    ) -> tuple[BaseModel, bool]:
        """Add a base model, or give the one of that name and digest new aliases.

        Returns: it, and whether it is new.
        Raises: AlreadyExists NAME_TAKEN: a name or alias means something else already.
        """
        _check(model)
        check_request_id(request_id)

        def use_case(tx: Transaction) -> tuple[BaseModel, bool]:
            if request_id:
                seen = tx.ledger.recall(caller.tenant, request_id, _METHOD, fingerprint)
                if seen is not None:
                    return known_base_model(tx, seen["name"]), bool(seen["created"])
            stored, created = _put(tx, caller, model)
            if request_id:
                outcome = {"name": stored.name, "created": created}
                tx.ledger.remember(caller.tenant, request_id, _METHOD, fingerprint, outcome, tx.now)
            return stored, created

        return self.database.write(use_case).value

    def get(self, name: str) -> BaseModel:
        """By name or alias. Raises: NotFound BASE_MODEL_NOT_FOUND."""
        check_base_alias("name", name)
        return self.database.read(lambda tx: known_base_model(tx, name))

    def list(self, page: Page) -> list[BaseModel]:
        return self.database.read(lambda tx: tx.base_models.page(page))


def _put(tx: Transaction, caller: Caller, model: BaseModel) -> tuple[BaseModel, bool]:
    tx.names.claim(model.name, "base_model", model.name)
    known = tx.base_models.get(model.name, lock=True)
    if known is not None and known.weights_digest != model.weights_digest:
        raise AlreadyExists(
            f"base model {model.name!r} exists with other weights"
            f" ({known.weights_digest}); give this one another name",
            metadata={"name": model.name, "weights_digest": known.weights_digest},
        )
    new_aliases = tuple(
        alias
        for alias in dict.fromkeys(model.aliases)
        if known is None or alias not in known.aliases
    )
    for alias in new_aliases:
        tx.names.claim(alias, "base_model_alias", model.name)
    if known is None:
        tx.base_models.add(dataclasses.replace(model, create_time=tx.now))
    elif new_aliases:
        if len(known.aliases) + len(new_aliases) > MAX_ALIASES:
            raise FieldInvalid("aliases", len(known.aliases) + len(new_aliases), "at most 64")
        tx.base_models.add_aliases(model.name, new_aliases)
        tx.base_models.bump_generation(model.name)
    else:
        return known, False
    stored = known_base_model(tx, model.name)
    tx.publish(Event(EventType.BASE_MODEL_CHANGED, tx.now, base_model=stored))
    tx.ledger.audit(
        caller.tenant, "base_model.registered", model.name, {"aliases": list(new_aliases)}, tx.now
    )
    return stored, known is None


def _check(model: BaseModel) -> None:
    check_name("base_model.name", model.name)
    check_digest("base_model.weights_digest", model.weights_digest)
    check_digest("base_model.vocabulary_digest", model.vocabulary_digest, optional=True)
    check_digest("base_model.chat_template_digest", model.chat_template_digest, optional=True)
    if len(model.aliases) > MAX_ALIASES:
        raise FieldInvalid("base_model.aliases", len(model.aliases), f"at most {MAX_ALIASES}")
    for alias in model.aliases:
        check_base_alias("base_model.aliases", alias)
    if len(model.config_json) > MAX_CONFIG_BYTES:
        size = f"{len(model.config_json)} bytes"
        raise FieldInvalid("base_model.config_json", size, f"at most {MAX_CONFIG_BYTES} bytes")
    spec = parse_config_json(model.config_json)
    if any(not 0 <= token < spec.vocab_size for token in model.eos_token_ids):
        limit = f"token ids below vocab_size {spec.vocab_size}"
        raise FieldInvalid("base_model.eos_token_ids", model.eos_token_ids, limit)
