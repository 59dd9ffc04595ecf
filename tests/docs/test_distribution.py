"""Wheel and sdist: what is in them, and that both services run from the wheel far from a clone."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest

from examples.demo_stack import Service, service_environment
from tests.support.tiny_model import TINY_NAME, write_tiny_model

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("loraplex", "engine_svc", "registry_svc", "kernels", "migrations")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an sdist made from the clone and a wheel made from that sdist."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    return next(built.glob("*.whl"))


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture
def env(unpacked: Path) -> dict[str, str]:
    """Imports of ours come from the unpacked wheel, before anything that is installed."""
    return {**service_environment(), "PYTHONPATH": str(unpacked), "OMP_NUM_THREADS": "1"}


def test_the_wheel_holds_the_packages_their_types_protos_and_migrations(unpacked: Path) -> None:
    for package in PACKAGES:
        assert (unpacked / package / "py.typed").is_file(), package
        tracked = subprocess.run(
            ["git", "ls-files", package], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.split()
        missing = [name for name in tracked if not (unpacked / name).is_file()]
        assert missing == []
    protos = {path.relative_to(ROOT / "protos") for path in ROOT.glob("protos/loraplex/**/*.proto")}
    assert len(protos) == 3
    assert all((unpacked / "loraplex" / "protos" / path).is_file() for path in protos)
    assert list(unpacked.glob("migrations/versions/*.py"))
    licenses = {path.name for path in unpacked.glob("*.dist-info/licenses/*")}
    assert licenses == {"LICENSE", "NOTICE"}


def test_the_wheel_holds_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [PurePosixPath(name) for name in archive.namelist()]
    assert {name.parts[0] for name in names if "dist-info" not in name.parts[0]} == set(PACKAGES)
    assert not [name for name in names if "tests" in name.parts or "__pycache__" in name.parts]
    assert not [name for name in names if name.suffix in {".safetensors", ".binpb", ".pyc"}]


def test_the_wheel_declares_the_four_programs(unpacked: Path) -> None:
    text = next(unpacked.glob("*.dist-info/entry_points.txt")).read_text()
    for program in ("registryctl", "enginectl", "loraplex-registry", "loraplex-engine"):
        assert f"{program} = " in text


def test_the_sdist_holds_what_a_test_run_needs_and_no_build(built: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for name in ("pyproject.toml", "dev.py", "Makefile", "tests/conftest.py", "LICENSE", "NOTICE",
                 "constraints-cpu.txt", "docker-compose.yml"):  # fmt: skip
        assert name in names
    assert not [name for name in names if name.startswith((".venv", ".loraplex", "dist/", ".git/"))]


def test_the_programs_answer_from_the_wheel(env: dict[str, str], tmp_path: Path) -> None:
    for module in ("registry_svc.main", "engine_svc.main", "registry_svc.cli.main",
                   "engine_svc.cli.main"):  # fmt: skip
        command = [sys.executable, "-m", module, "--help"]
        done = subprocess.run(
            command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert "usage:" in done.stdout
    probe = "import engine_svc, loraplex, registry_svc; print(engine_svc.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", probe],
        cwd=tmp_path, env=env, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.startswith(env["PYTHONPATH"] + os.sep)


@pytest.fixture
def started(env: dict[str, str], tmp_path: Path) -> Iterator[list[Service]]:
    services: list[Service] = []
    yield services
    for service in reversed(services):
        service.terminate()
        service.wait()


def test_both_services_start_from_the_wheel_outside_the_clone(
    env: dict[str, str], tmp_path: Path, started: list[Service]
) -> None:
    model = write_tiny_model(tmp_path / TINY_NAME)
    any_port = ("--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0")
    registry = Service(
        "registry", ("-m", "registry_svc.main", *any_port), tmp_path / "registry.log", env, tmp_path
    )
    started.append(registry)
    address = registry.address()
    env["LORAPLEX_REGISTRY_ADDRESS"] = address
    command = [sys.executable, "-m", "registry_svc.cli.main", "base-model", "add", TINY_NAME]
    subprocess.run([*command, "--from", str(model)], cwd=tmp_path, env=env, check=True,
                   capture_output=True)  # fmt: skip
    store = (tmp_path / ".loraplex" / "registry" / "blobs").as_uri()
    engine = Service(
        "engine",
        ("-m", "engine_svc.main", "--model", str(model), "--registry-address", address,
         "--blob-store", store, *any_port),
        tmp_path / "engine.log", env, tmp_path,
    )  # fmt: skip
    started.append(engine)
    health = [sys.executable, str(ROOT / "deploy" / "jobs" / "health.py")]
    for served in (address, engine.address()):
        done = subprocess.run(
            [*health, served], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stdout.strip()) == (0, "SERVING"), done.stderr
