"""loraplex.client against a real server, and stubs that know nothing of our package."""

import asyncio
import importlib.util
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from engine_svc.frontend.text.model_text import ModelText
from engine_svc.types import Admitted, Request, SequenceOutput
from loraplex.client import AsyncClient, Client
from loraplex.status import InvalidArgument, NotFound, Unavailable
from tests.support.fake_core_link import HOLD, FakeCoreLink, Step
from tests.support.frontend_server import BASE, running_frontend

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def text(demo_model_dir: Path) -> ModelText:
    return ModelText.load(demo_model_dir)


async def in_thread(work: Callable[[], Any]) -> Any:
    return await asyncio.get_running_loop().run_in_executor(None, work)


async def test_the_client_streams_text_and_keeps_what_the_stream_said(text: ModelText) -> None:
    async with running_frontend(text) as frontend:

        def work() -> None:
            with Client(frontend.address) as client:
                stream = client.generate("sql-lora", prompt="one two", max_tokens=2, seed=7)
                assert "".join(stream) == "one two"
                assert stream.started is not None
                assert stream.started.seed == 7
                assert stream.started.adapter.name == "sql-lora"
                assert [end.choice for end in stream.finished] == [0]
                assert stream.summary is not None
                assert stream.summary.usage.completion_tokens == 2
                assert client.generate(BASE, token_ids=[19556]).text() == "Hello"
                chat = [{"role": "user", "content": "Hi"}]
                assert "Hi\nassistant" in client.generate(BASE, messages=chat).text()
                events = list(client.generate(BASE, prompt="x", n=2, stop="y").events())
                assert {event.delta.choice for event in events} == {0, 1}
                assert [m.id for m in client.list_models()] == [BASE, "kefu-lora", "sql-lora"]

        await in_thread(work)
        assert frontend.link.requests[0].sampling.max_tokens == 2


async def test_the_clients_errors_are_ours(text: ModelText) -> None:
    async with running_frontend(text) as frontend:

        def work() -> None:
            with Client(frontend.address, tenant="one") as client:
                with pytest.raises(NotFound) as missing:
                    client.generate("nobody", prompt="x").text()
                assert missing.value.reason == "MODEL_NOT_FOUND"
                with pytest.raises(InvalidArgument) as refused:
                    client.generate(BASE, prompt="x", temperature=-1).text()
                assert refused.value.metadata["field"] == "sampling.temperature"
                with pytest.raises(TypeError, match="exactly one"):
                    client.generate(BASE)
                with pytest.raises(TypeError, match="temprature"):
                    client.generate(BASE, prompt="x", temprature=1)
            with Client(frontend.address, tenant="BAD") as client, pytest.raises(InvalidArgument):
                client.list_models()

        await in_thread(work)


async def test_the_async_client_does_the_same(text: ModelText) -> None:
    async with running_frontend(text) as frontend, AsyncClient(frontend.address) as client:
        stream = client.generate("kefu-lora", prompt="one two")
        assert "".join([piece async for piece in stream]) == "one two"
        assert stream.summary is not None
        assert await client.generate(BASE, prompt="one two").text() == "one two"
        kinds = [
            event.WhichOneof("item") async for event in client.generate(BASE, prompt="x").events()
        ]
        assert kinds == ["started", "delta", "finished", "summary"]
        assert len(await client.list_models()) == 3
        with pytest.raises(NotFound):
            await client.generate("nobody", prompt="x").text()


async def test_cancelling_a_stream_reaches_the_core(text: ModelText) -> None:
    def script(request: Request) -> Iterator[Step]:
        yield (Admitted(request.request_id),)
        yield (SequenceOutput(request.request_id, 0, (19556,)),)
        yield HOLD

    link = FakeCoreLink(script)
    async with running_frontend(text, link) as frontend, AsyncClient(frontend.address) as client:
        stream = client.generate(BASE, prompt="x")
        async for piece in stream:
            assert piece == "Hello"
            break
        stream.cancel()
        async with asyncio.timeout(10):
            while not link.cancelled:
                await asyncio.sleep(0.001)


async def test_nobody_there_is_unavailable() -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(Unavailable):
            await client.list_models()


def test_the_address_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses: list[str] = []

    def channel(address: str) -> grpc.Channel:
        addresses.append(address)
        return grpc.insecure_channel(address)

    monkeypatch.setattr("loraplex.client.insecure_channel", channel)
    monkeypatch.delenv("LORAPLEX_ENGINE_ADDRESS", raising=False)
    Client().close()
    monkeypatch.setenv("LORAPLEX_ENGINE_ADDRESS", "127.0.0.1:7")
    Client().close()
    Client("127.0.0.1:8").close()
    assert addresses == ["127.0.0.1:50052", "127.0.0.1:7", "127.0.0.1:8"]


STRANGER = """
    import sys
    stubs, packages, address = sys.argv[1:]
    sys.path[:0] = [stubs, packages]
    import grpc
    from loraplex.engine.v1 import engine_pb2, engine_pb2_grpc
    assert engine_pb2.__file__.startswith(stubs), engine_pb2.__file__
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        stub = engine_pb2_grpc.EngineStub(channel)
        request = engine_pb2.GenerateRequest(model="sql-lora", prompt="one two three")
        for message in stub.Generate(request, timeout=20):
            print(message.WhichOneof("item"), message.delta.text)
"""


def link_packages(folder: Path, *names: str) -> Path:
    """A folder with these installed packages and nothing else."""
    folder.mkdir()
    for name in names:
        spec = importlib.util.find_spec(name)
        assert spec is not None
        origin = Path(next(iter(spec.submodule_search_locations or [spec.origin or ""])))
        (folder / origin.name).symlink_to(origin)
    return folder


async def test_stubs_made_from_protos_alone_can_stream(text: ModelText, tmp_path: Path) -> None:
    stubs = tmp_path / "stubs"
    stubs.mkdir()
    packages = link_packages(tmp_path / "packages", "grpc", "google", "typing_extensions")

    async def run(*arguments: str) -> str:
        process = await asyncio.create_subprocess_exec(
            sys.executable, *arguments,
            cwd=tmp_path, env={}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        out, err = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == 0, err.decode()
        return out.decode()

    await run(
        "-m", "grpc_tools.protoc", f"-I{ROOT / 'protos'}",
        f"--python_out={stubs}", f"--grpc_python_out={stubs}",
        *(str(path) for path in sorted((ROOT / "protos").rglob("*.proto"))),
    )  # fmt: skip
    stranger = textwrap.dedent(STRANGER)
    async with running_frontend(text) as frontend:
        # -S: no site-packages, so nothing of ours, installed or not
        out = await run("-S", "-c", stranger, str(stubs), str(packages), frontend.address)
    kinds, texts = zip(*(line.split(" ", 1) for line in out.splitlines()), strict=True)
    assert "".join(texts) == "one two three"
    assert (kinds[0], kinds[1], *kinds[-2:]) == ("started", "delta", "finished", "summary")
