"""Sources that the server reads itself, and every kind of adapter that is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loraplex.blobs import open_blob_store
from loraplex.status import LoraplexError
from registry_svc.sources import Sources
from tests.support.registry_service import Registry, environment, running_registry, sqlite_url
from tests.support.s3 import S3Server
from tests.support.tiny_adapters import BASE_NAME, adapter_tensors, tiny_base, write_adapter

pytest_plugins = ("tests.support.registry_fixtures",)


def _nan(folder: Path) -> Path:
    tensors = adapter_tensors(tiny_base().spec)
    next(iter(tensors.values()))[0, 0] = np.nan
    return write_adapter(folder, tensors=tensors)


def _without(name: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        write_adapter(folder)
        (folder / name).unlink()
        return folder

    return make


def _truncated(folder: Path) -> Path:
    weights = write_adapter(folder) / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    return folder


def _corrupt(folder: Path) -> Path:
    weights = write_adapter(folder) / "adapter_model.safetensors"
    weights.write_bytes(b"\xff" * 8 + weights.read_bytes()[8:])
    return folder


def _config(**changes: Any) -> Callable[[Path], Path]:
    return lambda folder: write_adapter(folder, config=changes)


REFUSED = {
    "no config": (_without("adapter_config.json"), "CONFIG_INVALID"),
    "truncated weights": (_truncated, "WEIGHTS_INVALID"),
    "corrupt weights": (_corrupt, "WEIGHTS_INVALID"),
    "not a number": (_nan, "WEIGHTS_NOT_FINITE"),
    "another base by name": (_config(base_model_name_or_path="org/x"), "BASE_MODEL_MISMATCH"),
    "unknown module": (_config(target_modules=["nonsense"]), "TARGET_UNSUPPORTED"),
    "rank above the limit": (lambda folder: write_adapter(folder, rank=257), "RANK_UNSUPPORTED"),
    "no weights": (_without("adapter_model.safetensors"), "WEIGHTS_INVALID"),
    "another base by shapes": (
        lambda folder: write_adapter(folder, tiny_base(hidden_size=64).spec),
        "BASE_MODEL_MISMATCH",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_bad_folder_is_refused_and_nothing_is_seen(tmp_path: Path, case: str) -> None:
    make, reason = REFUSED[case]
    flags = ("--source-prefix", f"file://{tmp_path}/folders")
    store = (tmp_path / "blobs").as_uri()
    with running_registry(tmp_path, sqlite_url(tmp_path), store, *flags) as registry:
        registry.add_base()
        folder = make(tmp_path / "folders" / "bad")
        refused = registry.refused(
            "RegisterAdapter", name="bad", base_model=BASE_NAME, source_uri=f"file://{folder}"
        )
        assert (refused.code.name, refused.reason) == ("FAILED_PRECONDITION", reason)
        assert "scratch" not in refused.message
        assert refused.metadata.keys() >= {"field", "value"} or reason.endswith("MISMATCH")
        assert registry.refused("GetAdapter", name="bad").reason == "ADAPTER_NOT_FOUND"
        assert not list((tmp_path / "blobs").rglob("sha256/*/*"))
        assert not list((tmp_path / "scratch").iterdir()), "no copy stays"


def test_a_confirmed_base_model_is_accepted_and_audited(registry: Registry) -> None:
    registry.add_base()
    folder = registry.adapter(1, config={"base_model_name_or_path": "org/other"})
    with pytest.raises(LoraplexError) as caught:
        registry.publish("sql", folder)
    assert "org/other" in caught.value.message
    assert "--base-model-confirmed" in caught.value.message
    assert registry.publish("sql", folder, base_model_confirmed=True).created


def test_a_local_folder_is_copied_and_the_rest_is_named(tmp_path: Path) -> None:
    flags = ("--source-prefix", f"file://{tmp_path}/folders/1")
    with running_registry(
        tmp_path, sqlite_url(tmp_path), (tmp_path / "blobs").as_uri(), *flags
    ) as registry:
        registry.add_base()
        folder = write_adapter(tmp_path / "folders" / "1" / "sql")
        (folder / "optimizer.pt").write_bytes(b"never opened")
        fields = {"name": "sql", "base_model": BASE_NAME}
        done = registry.call("RegisterAdapter", source_uri=f"file://{folder}", **fields)
        assert done.created
        assert any("optimizer.pt" in text for text in done.not_stored)
        (folder / "adapter_model.safetensors").unlink()
        for file in done.version.manifest.files:
            assert registry.store.contains(file.sha256), "a copy, not a reference"
        outside = write_adapter(tmp_path / "folders" / "10" / "sql")
        (tmp_path / "folders" / "1" / "link").symlink_to(outside)
        for uri, reason in (
            (f"file://{outside}", "SOURCE_NOT_ALLOWED"),
            (f"file://{tmp_path}/folders/1/link", "SOURCE_NOT_ALLOWED"),
            (f"file://{tmp_path}/folders/1/../10/sql", "FIELD_INVALID"),
            (f"file://{tmp_path}/folders/1/%2e%2e/10/sql", "FIELD_INVALID"),
            (f"file://{tmp_path}/folders/1/none", "SOURCE_NOT_FOUND"),
            ("s3://bucket/sql", "SOURCE_NOT_ALLOWED"),
            ("http://host/sql", "FIELD_INVALID"),
            (str(outside), "FIELD_INVALID"),
        ):
            refused = registry.refused("RegisterAdapter", source_uri=uri, **fields)
            assert refused.reason == reason, uri
        assert registry.refused("RegisterAdapter", **fields).metadata["field"] == "source"


@pytest.mark.s3
def test_an_s3_folder_is_copied_and_its_absence_is_told_from_wrong_keys(
    s3_store: S3Server, tmp_path: Path
) -> None:
    client, prefix = s3_store.client(), f"in-{tmp_path.name}"
    folder = write_adapter(tmp_path / "made")
    for path in folder.iterdir():
        key = f"{prefix}/1/sql/{path.name}"
        client.put_object(Bucket=s3_store.bucket, Key=key, Body=path.read_bytes())
    client.put_object(Bucket=s3_store.bucket, Key=f"{prefix}/1/sql/checkpoint-1/x", Body=b"1")
    client.put_object(Bucket=s3_store.bucket, Key=f"{prefix}/1/sql/training_args.bin", Body=b"1")
    root = f"s3://{s3_store.bucket}/{prefix}"
    flags = ("--s3-endpoint-url", s3_store.endpoint_url, "--source-prefix", f"{root}/1",
             "--source-prefix", "s3://no-such-bucket/x")  # fmt: skip
    fields = {"name": "sql", "base_model": BASE_NAME}
    with (
        environment(s3_store.environment),
        running_registry(
            tmp_path, sqlite_url(tmp_path), (tmp_path / "blobs").as_uri(), *flags
        ) as registry,
    ):
        registry.add_base()
        done = registry.call("RegisterAdapter", source_uri=f"{root}/1/sql", **fields)
        assert done.created
        assert {text.split(":")[0] for text in done.not_stored} == {
            "training_args.bin",
            "checkpoint-1/",
        }
        for uri, reason in (
            (f"{root}/1/none", "SOURCE_NOT_FOUND"),
            ("s3://no-such-bucket/x/sql", "SOURCE_NOT_FOUND"),
            (f"{root}/10/sql", "SOURCE_NOT_ALLOWED"),
            (f"{root}/1/../10/sql", "FIELD_INVALID"),
        ):
            refused = registry.refused("RegisterAdapter", source_uri=uri, **fields)
            assert refused.reason == reason, uri
        outside = registry.refused("RegisterAdapter", source_uri=f"{root}/1", **fields)
        assert outside.reason == "CONFIG_INVALID"
        assert f"missing in {root}/1;" in outside.message
        assert "scratch" not in outside.message
        with environment({"AWS_SECRET_ACCESS_KEY": "wrong"}):
            denied = registry.refused("RegisterAdapter", source_uri=f"{root}/1/sql", **fields)
        assert (denied.code.name, denied.reason) == ("UNAVAILABLE", "BLOB_STORE_DENIED")
        assert "credentials" in denied.message
        assert "wrong" not in json.dumps([denied.message, denied.metadata])


@pytest.mark.s3
def test_a_source_server_that_is_down_is_unreachable_not_absent(tmp_path: Path) -> None:
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    sources = Sources(("s3://bucket",), "http://127.0.0.1:9")
    with environment(keys), pytest.raises(LoraplexError) as caught:
        sources.stage("s3://bucket/x", tmp_path, 1 << 20)
    assert caught.value.reason == "BLOB_STORE_UNREACHABLE"


@pytest.mark.s3
def test_a_blob_store_with_wrong_keys_or_without_bucket_stops_the_start(
    s3_store: S3Server,
) -> None:
    with environment({**s3_store.environment, "AWS_SECRET_ACCESS_KEY": "wrong"}):
        store = open_blob_store(f"s3://{s3_store.bucket}/x", s3_store.endpoint_url)
        with pytest.raises(LoraplexError) as caught:
            store.check()
        assert caught.value.reason == "BLOB_STORE_DENIED"
    with environment(s3_store.environment):
        store = open_blob_store("s3://no-such-bucket/x", s3_store.endpoint_url)
        with pytest.raises(LoraplexError) as caught:
            store.check()
        assert caught.value.reason == "BLOB_STORE_UNREACHABLE"
        assert "does not exist" in caught.value.message
