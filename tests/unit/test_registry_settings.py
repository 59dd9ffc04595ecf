"""The registry's settings: order of precedence, refusals, secrets."""

from __future__ import annotations

import pytest

from registry_svc.settings import OPTIONS, PREFIX, SettingInvalid, build_parser, read_settings


def test_a_flag_wins_over_the_environment_and_that_over_the_default() -> None:
    variables = {PREFIX + "WORKERS": "3", PREFIX + "MAX_WATCHERS": "5"}
    settings = read_settings(["--workers", "4"], variables)
    assert (settings.workers, settings.max_watchers, settings.auth) == (4, 5, "none")
    assert settings.database_url.startswith("sqlite:////")
    assert settings.blob_store.startswith("file:///")


def test_source_prefixes_may_be_repeated_or_listed() -> None:
    flags = ["--source-prefix", "s3://a/b", "--source-prefix", "file:///c"]
    assert read_settings(flags, {}).source_prefix == ("s3://a/b", "file:///c")
    listed = {PREFIX + "SOURCE_PREFIX": "s3://a/b,file:///c"}
    assert read_settings([], listed).source_prefix == ("s3://a/b", "file:///c")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("listen", "localhost"),
        ("listen", "127.0.0.1:70000"),
        ("listen", "0.0.0.0:1"),
        ("listen", "example.com:1"),
        ("metrics_listen", "0.0.0.0:1"),
        ("workers", "0"),
        ("workers", "many"),
        ("max_lora_rank", "257"),
        ("upload_ttl_seconds", "nan"),
        ("drain_seconds", "-1"),
        ("auth", "tokens"),
        ("migrate", "perhaps"),
        ("blob_store", "blobs"),
        ("source_prefix", "http://x"),
        ("source_prefix", "s3://a/../b"),
        ("s3_endpoint_url", "http://127.0.0.1:1"),
    ],
)
def test_a_bad_value_names_key_value_and_range(name: str, value: str) -> None:
    with pytest.raises(SettingInvalid) as caught:
        read_settings([], {PREFIX + name.upper(): value})
    text = str(caught.value)
    assert name.upper() in text or name.replace("_", "-") in text
    assert value in text
    assert "must be" in text


def test_an_unknown_variable_is_refused_but_not_what_others_inject() -> None:
    with pytest.raises(SettingInvalid, match="LORAPLEX_REGISTRY_WORKER "):
        read_settings([], {PREFIX + "WORKER": "1"})
    injected = {
        PREFIX + "ADDRESS": "127.0.0.1:1",
        PREFIX + "SERVICE_HOST": "10.0.0.1",
        PREFIX + "SERVICE_PORT": "1",
        PREFIX + "SERVICE_PORT_GRPC": "1",
        PREFIX + "PORT": "tcp://10.0.0.1:1",
        PREFIX + "PORT_50051_TCP": "tcp://10.0.0.1:1",
        PREFIX + "PORT_50051_TCP_ADDR": "10.0.0.1",
        "LORAPLEX_ENGINE_X": "1",
    }
    assert read_settings([], injected).workers == 16


def test_no_setting_is_called_port_or_host_and_secrets_do_not_print() -> None:
    assert not [o.name for o in OPTIONS if o.name.endswith(("_port", "_host"))]
    url = "postgresql://u:hunter2@h/d"
    assert "hunter2" not in repr(read_settings(["--database-url", url], {}))


def test_help_names_every_flag_and_variable() -> None:
    text = "".join(build_parser().format_help().split())
    for option in OPTIONS:
        assert option.flag in text
        assert option.variable in text
