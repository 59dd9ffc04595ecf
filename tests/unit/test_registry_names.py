"""Names, references, locations, weights: what is taken and what is not."""

from __future__ import annotations

import contextlib
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.address import is_loopback
from loraplex.status import InvalidArgument, LoraplexError, NameInvalid
from registry_svc.names import check_name, check_weight, parse_reference
from registry_svc.paging import read_page, write_token
from registry_svc.sources import parse_location

DIGEST = "sha256:" + "a" * 64


@given(st.text(max_size=140))
def test_a_name_that_passes_is_a_safe_path_part(name: str) -> None:
    with contextlib.suppress(NameInvalid):
        check_name("name", name)
        _assert_safe(name)


def _assert_safe(name: str) -> None:
    assert 1 <= len(name) <= 128
    assert name[0].isalnum()
    assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789._-")


@given(st.text(max_size=100))
def test_any_text_is_a_reference_or_refused_as_a_name(text: str) -> None:
    with contextlib.suppress(NameInvalid):
        assert text.startswith(parse_reference(text).name)


def test_references_carry_a_version_or_a_digest() -> None:
    assert parse_reference("a").version == 0
    assert parse_reference("a@3").version == 3
    assert parse_reference(f"a@{DIGEST}").digest == DIGEST


@pytest.mark.parametrize("weight", [math.nan, math.inf, -math.inf, -1.0, 1e-9, 1e9])
def test_an_absurd_weight_is_refused(weight: float) -> None:
    with pytest.raises(LoraplexError):
        check_weight("weight", weight)


def test_weight_zero_is_one() -> None:
    assert check_weight("weight", 0.0) == 1.0
    assert check_weight("weight", 2.5) == 2.5


@given(st.text(max_size=60))
def test_any_page_token_is_read_or_refused(token: str) -> None:
    reason = ""
    try:
        read_page(0, token, "list")
    except InvalidArgument as error:
        reason = error.reason
    assert reason in ("", "PAGE_TOKEN_INVALID")


@given(st.text(max_size=60).filter(lambda text: "\x00" not in text))
def test_a_page_token_comes_back(after: str) -> None:
    assert read_page(5, write_token("list", after), "list").after == after


def test_prefixes_compare_by_whole_segments() -> None:
    prefix = parse_location("p", "s3://bucket/adapters/1")
    for uri, below in (
        ("s3://bucket/adapters/1", True),
        ("s3://bucket/adapters/1/x", True),
        ("s3://bucket/adapters/10", False),
        ("s3://bucket/adapters/10/x", False),
        ("s3://bucket2/adapters/1/x", False),
        ("file:///bucket/adapters/1/x", False),
    ):
        assert parse_location("u", uri).lies_below(prefix) is below, uri


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1:1", True),
        ("localhost:1", True),
        ("[::1]:1", True),
        ("unix:/x", True),
        ("10.0.0.1:1", False),
        ("example.com:1", False),
        ("127.0.0.1.example.com:1", False),
    ],
)
def test_loopback_is_told_from_the_world(address: str, expected: bool) -> None:
    assert is_loopback(address) is expected
