"""The workloads of VTC's paper, scaled down: two clients of unlike demand, and one that comes and
goes. Source: Sheng et al., Fairness in Serving Large Language Models (OSDI 2024), section 5.

The clients are tenants of the base model. Four seats, many more open requests of each than those:
both are backlogged all the time that they are there.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.support.crowd import Crowd, crowd
from tests.support.engine_stack import Stack
from tests.support.tiny_model import TINY_NAME
from tests.support.waiting import eventually

#: shares of a live engine: other work on the machine can idle a client for a moment
pytestmark = pytest.mark.slow

LIGHT, HEAVY = "light", "heavy"
#: as 1.5 and 3 requests a second: one asks twice as much as the other
LIGHT_CLIENTS, HEAVY_CLIENTS = 8, 16
MAX_TOKENS = 16
#: answers that a window needs, so that one answer more or less is below the tolerance
WINDOW_TOKENS = 60 * MAX_TOKENS
TOLERANCE = 1.2


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("vtc")) as stack:
        stack.start_registry()
        stack.add_base_model()
        stack.start_engine(
            "--max-num-seqs", "4", "--max-num-batched-tokens", "32", "--max-queue-wait", "600"
        )
        yield stack


def window(people: Crowd) -> Counter[str]:
    """Tokens of each tenant while WINDOW_TOKENS come."""
    before = Counter(people.tokens_of_tenant)

    def enough() -> Counter[str] | None:
        gained = Counter(people.tokens_of_tenant)
        gained.subtract(before)
        return gained if sum(gained.values()) >= WINDOW_TOKENS else None

    return eventually(enough, 60)


def test_two_backlogged_clients_are_served_alike_however_much_each_asks(stack: Stack) -> None:
    with crowd(stack, MAX_TOKENS) as people:
        people.start(TINY_NAME, LIGHT_CLIENTS, tenant=LIGHT)
        people.start(TINY_NAME, HEAVY_CLIENTS, tenant=HEAVY)
        eventually(lambda: len(people.tokens_of_tenant) == 2)
        gained = window(people)
    assert not people.errors
    assert 1 / TOLERANCE <= gained[LIGHT] / gained[HEAVY] <= TOLERANCE, gained


def test_weights_share_the_engine_as_they_say(stack: Stack) -> None:
    stack.registryctl("tenant", "update", LIGHT, "--weight", "3")
    try:
        with crowd(stack, MAX_TOKENS) as people:
            people.start(TINY_NAME, 2 * LIGHT_CLIENTS, tenant=LIGHT)
            people.start(TINY_NAME, HEAVY_CLIENTS, tenant=HEAVY)
            eventually(lambda: {f.tenant_weight for f in stack.state().flows} == {1.0, 3.0})
            gained = window(people)
    finally:
        stack.registryctl("tenant", "update", LIGHT, "--weight", "1")
    assert not people.errors
    assert 3 / TOLERANCE <= gained[LIGHT] / gained[HEAVY] <= 3 * TOLERANCE, gained


def test_who_was_away_has_banked_nothing(stack: Stack) -> None:
    with crowd(stack, MAX_TOKENS) as people:
        people.start(TINY_NAME, HEAVY_CLIENTS, tenant=HEAVY)
        assert window(people)[LIGHT] == 0
        # all that it did not use is lost: from now on both are served alike
        people.start(TINY_NAME, LIGHT_CLIENTS, tenant=LIGHT)
        began = time.monotonic()
        eventually(lambda: people.tokens_of_tenant[LIGHT] > 0)
        came_in_s = time.monotonic() - began
        gained = window(people)
    assert not people.errors
    assert 1 / TOLERANCE <= gained[LIGHT] / gained[HEAVY] <= TOLERANCE, gained
    # nor does it wait for what the other had meanwhile
    assert came_in_s < 5.0
