"""protos/ alone are enough for a client: stubs generated elsewhere stream without our package."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from tests.docs.fake_engine import serving

ROOT = Path(__file__).resolve().parents[2]
CLIENT = ROOT / "examples" / "clients" / "python"


@pytest.fixture(scope="module")
def engine_address() -> Iterator[str]:
    with serving() as address:
        yield address


@pytest.fixture(scope="module")
def generated_client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the client's two files and stubs made from a copy of protos/."""
    folder = tmp_path_factory.mktemp("a client")
    for name in ("generate.py", "stream.py"):
        (folder / name).write_text((CLIENT / name).read_text())
    command = [sys.executable, "generate.py", str(ROOT / "protos"), "gen"]
    subprocess.run(command, cwd=folder, check=True)
    return folder


def run_client(folder: Path, address: str, *args: str) -> subprocess.CompletedProcess[str]:
    """Without site: no editable install of ours is in reach, only the packages' own folder."""
    packages = str(Path(grpc.__file__).parents[1])
    env = {
        **os.environ,
        "PYTHONPATH": packages,
        "LORAPLEX_ENGINE_ADDRESS": address,
        "http_proxy": "http://127.0.0.1:9",
    }
    return subprocess.run(
        [sys.executable, "-S", "stream.py", *args],
        cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip


def test_stubs_from_the_protos_alone_stream_without_our_package(
    generated_client: Path, engine_address: str
) -> None:
    done = run_client(generated_client, engine_address, "sql-lora", "all of t")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "SELECT * -- all of t\n64 tokens, TTFT 0.500 s\n"
    ours = subprocess.run(
        [sys.executable, "-S", "-c", "import loraplex.engine"],
        cwd=generated_client, env={"PYTHONPATH": str(Path(grpc.__file__).parents[1])},
        capture_output=True, check=False,
    )  # fmt: skip
    assert ours.returncode != 0, "our package was in reach, the test shows nothing"


def test_a_refusal_reaches_the_client_as_one_line(
    generated_client: Path, engine_address: str
) -> None:
    done = run_client(generated_client, engine_address, "nobody", "x")
    assert done.returncode == 1
    assert done.stderr == "NOT_FOUND: no model 'nobody'\n"


@pytest.mark.parametrize("language", ["python", "go", "typescript"])
def test_each_client_folder_has_sources_and_a_generator_configuration(language: str) -> None:
    import yaml

    folder = CLIENT.parent / language
    config = yaml.safe_load((folder / "buf.gen.yaml").read_text())
    assert config["version"] == "v2"
    assert all(plugin["out"] == "gen" for plugin in config["plugins"])
    sources = [
        path for path in folder.rglob("*.*") if path.suffix in {".py", ".go", ".ts"}
        and "gen" not in path.parts and "node_modules" not in path.parts
    ]  # fmt: skip
    assert any("Generate" in path.read_text() or ".generate(" in path.read_text()
               for path in sources)  # fmt: skip
