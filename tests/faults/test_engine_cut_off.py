"""An engine whose registry stays away: adapters answer for a while, the base model for ever."""

from __future__ import annotations

from pathlib import Path

import grpc

from loraplex.status import from_rpc_error
from tests.support.engine_stack import Stack
from tests.support.tiny_model import TINY_NAME
from tests.support.waiting import eventually


def test_adapters_answer_until_the_limit_and_again_when_the_registry_is_back(
    tmp_path: Path,
) -> None:
    with Stack(tmp_path) as stack:
        stack.start_registry()
        stack.add_base_model()
        stack.publish("red", seed=1)
        stack.start_engine("--max-registry-staleness", "2")
        assert stack.generate("red").token_ids
        assert stack.registry is not None
        stack.registry.kill()
        assert stack.generate("red").token_ids, "not yet"
        eventually(lambda: is_cut_off(stack), 20.0)
        assert stack.generate(TINY_NAME).token_ids
        stack.start_registry()
        eventually(lambda: not is_cut_off(stack), 20.0)
        assert stack.generate("red").token_ids


def is_cut_off(stack: Stack) -> bool:
    try:
        for _ in stack.stream("red", max_tokens=1):
            pass
    except grpc.RpcError as error:
        refused = from_rpc_error(error)
        assert (refused.code.name, refused.reason) == ("UNAVAILABLE", "REGISTRY_UNREACHABLE")
        return True
    return False
