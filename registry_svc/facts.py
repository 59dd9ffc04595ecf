"""A registered base model as what adapters are held against."""

from __future__ import annotations

from loraplex.adapter_format import BaseModelFacts
from loraplex.base_model import parse_config_json
from registry_svc.domain import BaseModel


def base_model_facts(base: BaseModel) -> BaseModelFacts:
    return BaseModelFacts(
        name=base.name,
        aliases=base.aliases,
        spec=parse_config_json(base.config_json),
        vocabulary_digest=base.vocabulary_digest,
        chat_template_digest=base.chat_template_digest,
        eos_token_ids=base.eos_token_ids,
    )
