import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from engine_svc.frontend.text.chat_template import (
    OUTPUT_LIMIT,
    TEMPLATE_LIMIT,
    ChatTemplate,
    ChatTemplateFailed,
    read_special_tokens,
)
from loraplex.base_folder import base_chat
from loraplex.base_model import parse_config_json
from tests.support.demo_model import ROOT

CHATS = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "你好 <b>&'\""}],
    [
        {"role": "user", "content": " a "},
        {"role": "assistant", "content": "b\n"},
        {"role": "user", "content": ""},
    ],
]
TEMPLATES = [
    None,
    "{%- for message in messages %}\n  {%- if loop.last %}{% continue %}{% endif %}\n"
    "[{{ message.role | upper }}] {{ message['content'] | trim }}\n{%- endfor %}{{ eos_token }}",
    "{{ bos_token }}{{ messages | tojson }}{% if tools is none %}!{% endif %}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
    "{{ ns.n }}{{ '\n' }}   {% if add_generation_prompt %}\nA:\n{% endif %}",
]


def default_template(folder: Path) -> str | None:
    spec = parse_config_json((ROOT / "examples" / "demo_model" / "config.json").read_bytes())
    return base_chat(folder, spec)[0]


@pytest.mark.parametrize("source", TEMPLATES)
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("opens", [True, False])
def test_rendering_equals_transformers(
    source: str | None, chat: list[dict[str, str]], opens: bool, demo_model_dir: Path
) -> None:
    oracle = AutoTokenizer.from_pretrained(demo_model_dir)
    source = source or default_template(demo_model_dir)
    assert source is not None
    ours = ChatTemplate(source, read_special_tokens(demo_model_dir)).render(chat, opens)
    assert ours == oracle.apply_chat_template(
        chat, chat_template=source, tokenize=False, add_generation_prompt=opens
    )


def test_a_template_file_comes_before_the_tokenizers_config(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "old"}))
    assert default_template(tmp_path) == "old"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "newer"}))
    assert default_template(tmp_path) == "newer"
    (tmp_path / "chat_template.jinja").write_text("new")
    assert default_template(tmp_path) == "new"


def test_of_named_templates_the_default_one_counts(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert default_template(tmp_path) == "d"


def test_what_a_template_raises_reaches_the_caller() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(ChatTemplateFailed, match="roles must alternate"):
        template.render(CHATS[0], True)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}{{ ''.__class__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% include '/etc/passwd' %}",
        "{{ range(10**9) | list }}",
        "{{ 1 // 0 }}",
        "{{ nothing.at.all }}",
        "{{ messages[7].content }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ 'x' + 1 }}",
    ],
)
def test_what_the_sandbox_or_python_refuses_is_the_templates_failure(source: str) -> None:
    with pytest.raises(ChatTemplateFailed):
        ChatTemplate(source, {}).render(CHATS[0], True)


def test_a_broken_template_is_refused_when_it_is_read() -> None:
    with pytest.raises(ChatTemplateFailed, match="endfor"):
        ChatTemplate("{% for x in y %}", {})


def test_size_of_template_and_output_are_limited() -> None:
    with pytest.raises(ChatTemplateFailed, match=str(TEMPLATE_LIMIT)):
        ChatTemplate("x" * (TEMPLATE_LIMIT + 1), {})
    endless = "{% for i in range(90000) %}{% for j in range(90000) %}" + "x" * 999
    template = ChatTemplate(endless + "{% endfor %}{% endfor %}", {})
    with pytest.raises(ChatTemplateFailed, match=str(OUTPUT_LIMIT)):
        template.render(CHATS[0], True)
