"""docker-compose.yml and the Dockerfiles against Compose itself, hadolint and our own settings."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine_svc import settings as engine_settings
from registry_svc import settings as registry_settings

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
DOCKERFILES = sorted((ROOT / "deploy").glob("*.Dockerfile"))
OUR_IMAGES = ("loraplex-registry", "loraplex-demo", "loraplex-engine", "loraplex-engine-gpu")
#: variables of other programs that our services and jobs read
FOREIGN = {"PGPASSFILE", "AWS_SHARED_CREDENTIALS_FILE", "AWS_DEFAULT_REGION"}
SECRETS = {"POSTGRES_PASSWORD", "S3_ACCESS_KEY", "S3_SECRET_KEY"}


def compose_config(*args: str) -> dict[str, Any]:
    """The file as Compose reads it, every profile included, without anybody's .env."""
    clean = {k: v for k, v in os.environ.items() if k not in SECRETS}
    done = subprocess.run(
        [str(BIN / "docker-compose"), "--profile", "*", "--env-file", "/dev/null", "config",
         "--format", "json", *args],
        cwd=ROOT, env=clean, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    config: dict[str, Any] = json.loads(done.stdout)
    return config


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    found: dict[str, Any] = compose_config()["services"]
    return found


def ours(services: dict[str, Any]) -> dict[str, Any]:
    return {
        name: service
        for name, service in services.items()
        if service["image"].partition(":")[0] in OUR_IMAGES
    }


def test_compose_accepts_the_file_without_an_env_file() -> None:
    done = subprocess.run(
        [str(BIN / "docker-compose"), "--env-file", "/dev/null", "config", "-q"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.stem)
def test_hadolint_accepts_every_dockerfile(dockerfile: Path) -> None:
    done = subprocess.run(
        [str(BIN / "hadolint"), str(dockerfile)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.stem)
def test_every_image_is_pinned_and_ends_as_another_user_than_root(dockerfile: Path) -> None:
    lines = dockerfile.read_text().splitlines()
    stages = [line.split() for line in lines if line.startswith("FROM ")]
    names = {stage[3] for stage in stages if len(stage) > 3}
    for stage in stages:
        assert stage[1] in names or re.fullmatch(r"[\w./-]+:\d+\.\d+\.\d+[\w.-]*", stage[1]), stage
    users = [line.split()[1] for line in lines if line.startswith("USER ")]
    assert users[-1] == "10001:10001"
    assert any(line.startswith("HEALTHCHECK ") for line in lines)


def test_foreign_images_are_pinned(services: dict[str, Any]) -> None:
    foreign = {s["image"] for s in services.values()} - {
        s["image"] for s in ours(services).values()
    }
    assert len(foreign) == 3
    for image in foreign:
        assert re.search(r":\d+\.\d+", image), image


def test_nothing_is_reachable_from_outside_while_there_are_no_tokens(
    services: dict[str, Any],
) -> None:
    for name, service in services.items():
        assert "ports" not in service, name
        if name != "pod":
            assert service["network_mode"] in ("service:pod", "none"), name


def test_no_secret_stands_in_the_file(services: dict[str, Any]) -> None:
    for name, service in services.items():
        for key, value in (service.get("environment") or {}).items():
            if re.search("PASSWORD|SECRET|KEY", key) and not key.endswith("_FILE"):
                assert value == "", f"{name}: {key}"
    text = (ROOT / "docker-compose.yml").read_text()
    assert not re.search(r"://[^/\s]*:[^/@\s]*@", text), "a password in a URL"


def test_containers_of_ours_are_confined(services: dict[str, Any]) -> None:
    for name, service in ours(services).items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert "no-new-privileges:true" in service["security_opt"], name
        assert "user" not in service, f"{name}: the image decides"


def test_every_variable_is_a_setting_of_its_service(services: dict[str, Any]) -> None:
    engine = {setting.env for setting in engine_settings.SETTINGS}
    registry = {option.variable for option in registry_settings.OPTIONS}
    clients = {"LORAPLEX_REGISTRY_ADDRESS", "LORAPLEX_ENGINE_ADDRESS"}
    for name, service in ours(services).items():
        known = {"engine": engine, "registry": registry, "secrets": SECRETS}
        kind = "engine" if name.startswith("engine") else name
        allowed = known.get(kind, clients) | FOREIGN
        assert set(service.get("environment") or {}) <= allowed, name


def test_every_command_is_one_that_its_program_accepts(services: dict[str, Any]) -> None:
    seen = set()
    for name, service in ours(services).items():
        command, environment = service["command"], service.get("environment") or {}
        if command[:2] == ["-m", "engine_svc.main"]:
            settings = engine_settings.load(command[2:], environment)
            assert settings.blob_store.startswith("s3://")
        elif command[:2] == ["-m", "registry_svc.main"]:
            assert registry_settings.read_settings(command[2:], environment).blob_store
        elif command[:2] == ["-m", "registry_svc.cli.main"]:
            from registry_svc.cli.main import build_parser

            build_parser().parse_args(command[2:])
        else:
            assert (ROOT / command[0]).is_file(), f"{name}: {command[0]}"
        seen.add(command[0] if command[0] != "-m" else command[1])
    assert len(seen) == 8, seen


def test_registry_and_engine_share_one_store(services: dict[str, Any]) -> None:
    registry = services["registry"]["environment"]
    for name in ("engine", "engine-gpu"):
        engine = services[name]["environment"]
        for key in ("BLOB_STORE", "S3_ENDPOINT_URL"):
            assert engine[f"LORAPLEX_ENGINE_{key}"] == registry[f"LORAPLEX_REGISTRY_{key}"]
    assert services["bucket"]["command"][1] == registry["LORAPLEX_REGISTRY_BLOB_STORE"]


def test_health_checks_name_the_port_that_the_command_listens_on(services: dict[str, Any]) -> None:
    for name, dockerfile in (
        ("registry", "registry"), ("engine", "engine"), ("engine-gpu", "engine-gpu"),
    ):  # fmt: skip
        text = (ROOT / "deploy" / f"{dockerfile}.Dockerfile").read_text()
        probed = re.search(r'jobs/health\.py", "([\d.:]+)"', text)
        listen = re.search(r"--listen=([\d.:]+)", " ".join(services[name]["command"]))
        assert probed is not None
        assert listen is not None
        assert probed[1] == listen[1]


def test_plain_up_starts_the_cpu_engine_and_neither_client_nor_gpu() -> None:
    done = subprocess.run(
        [str(BIN / "docker-compose"), "--env-file", "/dev/null", "config", "--services"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert set(done.stdout.split()) == {
        "pod", "secrets", "postgres", "s3", "prepare", "bucket", "migrate", "registry", "publish",
        "engine",
    }  # fmt: skip


def test_the_images_get_what_they_copy() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    kept = {line[1:] for line in ignored if line.startswith("!")}
    for dockerfile in DOCKERFILES:
        for line in dockerfile.read_text().splitlines():
            if line.startswith("COPY ") and "--from" not in line and line.split()[1] != ".":
                source = line.split()[1]
                assert source.split("/")[0] in kept, source
                assert (ROOT / source).exists(), source
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    included = {path.split("/")[0] for path in wheel["force-include"]}
    assert set(wheel["packages"]) | included <= kept
    assert {project["project"]["readme"], *project["project"]["license-files"]} <= kept


def test_secrets_are_drawn_once_and_readable_by_their_owner_alone(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    job = [sys.executable, str(ROOT / "deploy" / "jobs" / "make_secrets.py"), str(folder)]
    env = {**os.environ, "POSTGRES_PASSWORD": "given", "S3_ACCESS_KEY": ""}
    subprocess.run(job, env=env, check=True, capture_output=True)
    pgpass = folder / "loraplex" / "pgpass"
    assert pgpass.read_text() == "*:*:*:loraplex:given\n"
    assert (folder / "postgres" / "password").read_text() == "given"
    assert pgpass.stat().st_mode & 0o777 == 0o600
    before = (folder / "s3" / "s3.json").read_text()
    keys = json.loads(before)["identities"][0]["credentials"][0]
    assert len(keys["accessKey"]) == 20
    assert keys["secretKey"] in (folder / "loraplex" / "aws_credentials").read_text()
    subprocess.run(job, check=True, capture_output=True)
    assert (folder / "s3" / "s3.json").read_text() == before
    shutil.rmtree(folder)
