import asyncio
import os
from collections.abc import AsyncIterator

import pytest

from engine_svc.frontend.text.chat_template import ChatTemplateFailed
from engine_svc.frontend.text.template_process import PENALTY_S, TemplateProcess

CHAT = [{"role": "user", "content": "Hi 🦥"}]
GOOD = "{{ bos_token }}{{ messages[0].content }}{% if add_generation_prompt %}A:{% endif %}"
FOREVER = "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}"


@pytest.fixture
async def templates() -> AsyncIterator[TemplateProcess]:
    process = TemplateProcess(render_limit_s=1.0)
    yield process
    await process.close()


def pid_of(templates: TemplateProcess) -> int:
    assert templates._process is not None
    return templates._process.pid


async def test_it_renders_and_keeps_its_process(templates: TemplateProcess) -> None:
    assert await templates.render(GOOD, {"bos_token": "<s>"}, CHAT, True) == "<s>Hi 🦥A:"
    first = pid_of(templates)
    assert await templates.render(GOOD, {}, CHAT, False) == "Hi 🦥"
    assert pid_of(templates) == first


async def test_chats_at_once_take_turns(templates: TemplateProcess) -> None:
    chats = [[{"role": "user", "content": str(index)}] for index in range(8)]
    texts = await asyncio.gather(*(templates.render(GOOD, {}, chat, False) for chat in chats))
    assert texts == [str(index) for index in range(8)]


async def test_a_template_error_keeps_the_process(templates: TemplateProcess) -> None:
    with pytest.raises(ChatTemplateFailed, match="not this"):
        await templates.render("{{ raise_exception('not this') }}", {}, CHAT, True)
    first = pid_of(templates)
    await templates.render(GOOD, {}, CHAT, True)
    assert pid_of(templates) == first


async def test_a_template_without_end_is_killed_and_the_next_one_served(
    templates: TemplateProcess,
) -> None:
    with pytest.raises(ChatTemplateFailed, match="took longer than 1 s"):
        await templates.render(FOREVER, {}, CHAT, True)
    assert await templates.render(GOOD, {}, CHAT, False) == "Hi 🦥"


async def test_a_template_that_passed_a_limit_is_refused_at_once_for_a_while() -> None:
    now = 0.0
    templates = TemplateProcess(render_limit_s=0.2, now=lambda: now)
    try:
        for _ in range(2):
            with pytest.raises(ChatTemplateFailed, match="took longer"):
                await templates.render(FOREVER, {}, CHAT, True)
            assert templates._process is None
            now += PENALTY_S - 1
        await templates.render(GOOD, {}, CHAT, True)
        first = pid_of(templates)
        with pytest.raises(ChatTemplateFailed, match="took longer"):
            await templates.render(FOREVER, {}, CHAT, True)
        await templates.render(GOOD, {}, CHAT, True)
        assert pid_of(templates) != first
    finally:
        await templates.close()


async def test_memory_is_limited(templates: TemplateProcess) -> None:
    with pytest.raises(ChatTemplateFailed):
        await templates.render("{{ ('x' * 10**9) | length }}", {}, CHAT, True)


async def test_a_cancelled_render_does_not_answer_the_next_one(templates: TemplateProcess) -> None:
    await templates.render(GOOD, {}, CHAT, True)
    task = asyncio.create_task(templates.render(FOREVER, {}, CHAT, True))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await templates.render(GOOD, {}, CHAT, False) == "Hi 🦥"


async def test_close_leaves_no_process(templates: TemplateProcess) -> None:
    await templates.render(GOOD, {}, CHAT, True)
    pid = pid_of(templates)
    await templates.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
