"""The engine's settings: order of sources, refusals, and the table as data."""

from __future__ import annotations

import re

import pytest

from engine_svc.settings import AUTO, ENV_PREFIX, SETTINGS, SettingInvalid, load, shown

MODEL = ["--model", "/models/tiny"]


def test_flag_beats_environment_and_environment_beats_default() -> None:
    environ = {"LORAPLEX_ENGINE_MAX_LORAS": "7", "LORAPLEX_ENGINE_FRONTENDS": "3"}
    settings = load([*MODEL, "--max-loras", "2"], environ)
    assert (settings.max_loras, settings.frontends, settings.max_num_seqs) == (2, 3, 64)


def test_base_model_name_defaults_to_the_folder() -> None:
    assert load(MODEL, {}).base_model_name == "tiny"
    assert load([*MODEL, "--served-model-name", "base"], {}).base_model_name == "base"


def test_unknown_variable_with_our_prefix_stops_the_start() -> None:
    with pytest.raises(SettingInvalid, match="LORAPLEX_ENGINE_MAX_LORA is not a setting"):
        load(MODEL, {"LORAPLEX_ENGINE_MAX_LORA": "2"})


@pytest.mark.parametrize(
    "name",
    ["PORT", "PORT_50052_TCP", "PORT_50052_TCP_ADDR", "SERVICE_HOST", "SERVICE_PORT_GRPC", "HOST"],
)
def test_variables_that_kubernetes_injects_are_ignored(name: str) -> None:
    environ = {ENV_PREFIX.removesuffix("_") + "_" + name: "tcp://10.0.0.1:50052"}
    assert load(MODEL, environ) == load(MODEL, {})


def test_no_setting_has_a_name_that_would_be_ignored() -> None:
    assert not [s.env for s in SETTINGS if re.search(r"_PORT(_|$)|_HOST$", s.env)]


def test_address_variable_of_clients_is_not_an_error() -> None:
    load(MODEL, {"LORAPLEX_ENGINE_ADDRESS": "127.0.0.1:50052"})


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--max-loras", "0"],
            "--max-loras is '0'; must be auto, or a whole number from 1 to 4096",
        ),
        (["--max-loras", "two"], "--max-loras is 'two'; must be auto, or a whole number from 1"),
        (["--dtype", "int8"], "--dtype is 'int8'; must be one of auto, float32"),
        (["--drain-seconds", "nan"], "--drain-seconds is 'nan'; must be a number from 0"),
        (["--enable-prefix-caching", "maybe"], "'maybe'; must be true or false"),
        (["--host-cache-bytes", "1"], "--host-cache-bytes is '1'; must be auto, or a whole"),
        (["--listen", "50052"], "--listen is '50052'; must be host:port"),
        (["--listen", "0.0.0.0:1"], "must be a loopback address while --auth is none"),
        (["--blob-store", "/tmp"], "--blob-store is '/tmp'; must be file:///dir or s3://"),
        (["--max-cpu-loras", "1", "--max-loras", "4"], "must be 0 or at least --max-loras (4)"),
        (["--listen", "127.0.0.1:9", "--metrics-listen", "127.0.0.1:9"], "must differ from"),
        (["--quantum", "511"], "--quantum is 511; must be auto or at least 512"),
        (["--device", "cuda", "--quantum", "1023"], "must be auto or at least 1024"),
        (["--decode-price", "20", "--quantum", "1279"], "must be auto or at least 1280"),
        (
            ["--max-num-batched-tokens", "64"],
            "--max-num-batched-tokens is 64; must be at least 80",
        ),
    ],
)
def test_bad_value_names_key_value_and_range(flags: list[str], message: str) -> None:
    with pytest.raises(SettingInvalid, match=re.escape(message)):
        load([*MODEL, *flags], {})


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--quantum", "0"),
        ("--quantum", "-3"),
        ("--prefill-price", "nan"),
        ("--decode-price", "inf"),
        ("--decode-price", "0"),
        ("--batch-grant-every", "1"),
        ("--max-queue-wait", "nan"),
        ("--max-queue-wait", "0"),
        ("--max-queued-tokens", "0"),
        ("--tenant-max-queued-requests", "-1"),
        ("--tenant-max-queued-tokens", "-1"),
        ("--closing-steps", "-1"),
        ("--turn-max-steps", "0"),
    ],
)
def test_absurd_shares_and_limits_of_the_scheduler_are_refused(flag: str, value: str) -> None:
    with pytest.raises(SettingInvalid, match=re.escape(f"{flag} is '{value}'; must be ")):
        load([*MODEL, flag, value], {})


def test_the_quantum_is_computed_unless_a_number_is_given() -> None:
    assert load(MODEL, {}).quantum == load([*MODEL, "--quantum", "auto"], {}).quantum == AUTO
    assert load([*MODEL, "--quantum", "4096"], {}).quantum == 4096


def test_bad_variable_is_named_by_its_variable() -> None:
    with pytest.raises(SettingInvalid, match="LORAPLEX_ENGINE_PAGE_SIZE is '-1'"):
        load(MODEL, {"LORAPLEX_ENGINE_PAGE_SIZE": "-1"})


def test_missing_model_is_named() -> None:
    with pytest.raises(SettingInvalid, match=r"--model .or LORAPLEX_ENGINE_MODEL. is missing"):
        load([], {})


def test_unknown_flag_stops_the_start(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load([*MODEL, "--max-lora", "2"], {})
    assert "--max-lora" in capsys.readouterr().err


@pytest.mark.parametrize(("text", "value"), [("64MiB", 64 << 20), ("1.5GiB", 3 << 29)])
def test_sizes_take_units(text: str, value: int) -> None:
    assert load([*MODEL, "--host-cache-bytes", text], {}).host_cache_bytes == value


def test_every_default_is_inside_its_own_range() -> None:
    for setting in SETTINGS:
        if not setting.limits.get("required"):
            assert setting.parse(setting.shown_default, setting.flag) == setting.default
        assert setting.help


def test_settings_shown_in_a_log_are_all_there() -> None:
    assert set(shown(load(MODEL, {}))) == {setting.name for setting in SETTINGS}
