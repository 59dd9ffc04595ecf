"""One timeline with real bytes: the core and the GPU's way, late steps, poisoned pages.

Whatever the core plans, each request must get the tokens that it gets alone. A step executes when
it is launched, or as late as its result is asked for; a load writes its pages the moment it is
started; pages are overwritten with NaN as soon as their last step has committed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine_svc.types import AdapterRef
from tests.support.direct_runner import WAY_OPTIONS, WAYS, DirectRunner
from tests.support.fake_graphs import use_fake_graphs, warm_up
from tests.support.life import Alone, Life, Packed
from tests.support.oracle import pack, write_checkpoint, write_peft_adapter

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:peft")

ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {"r": 9, "target_modules": "all-linear"},
    "DoRA and biases": {"r": 4, "target_modules": "all-linear", "use_dora": True, "bias": "all"},
    "vocabulary": {"r": 5, "target_modules": ["q_proj", "lm_head", "embed_tokens"]},
}
SEATS = 5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Packed]]:
    root = tmp_path_factory.mktemp("timeline")
    folder = write_checkpoint(root / "m", "Qwen2ForCausalLM", seed=8)
    shapes = DirectRunner(folder, arena_bytes=1 << 20)
    packed = []
    for seed, (name, config) in enumerate(ADAPTERS.items()):
        path = write_peft_adapter(folder, root / str(seed), seed=seed, lora_alpha=16, **config)
        digest, num_pages, data = pack(path, shapes.loaded.base, shapes.loaded.layout)
        packed.append(Packed(AdapterRef(name, 1, digest), num_pages, data))
    return folder, packed


def direct_runner(
    way: str, model: tuple[Path, list[Packed]], arena_bytes: int, **changes: Any
) -> DirectRunner:
    folder, packed = model
    options: dict[str, Any] = {
        "max_num_seqs": SEATS, "max_num_batched_tokens": SEATS + 27, "max_slots": 3,
        "arena_bytes": arena_bytes, **WAY_OPTIONS[way], **changes,
    }  # fmt: skip
    return DirectRunner(folder, {one.ref.digest: one.data for one in packed}, **options)


@pytest.fixture(scope="module", params=WAYS[1:])
def way(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def alone(way: str, model: tuple[Path, list[Packed]]) -> Iterator[Alone]:
    run = direct_runner(way, model, 1 << 20)
    yield Alone(run, model[1])
    run.close()


@pytest.mark.parametrize("seed", range(3))
def test_every_request_gets_its_own_tokens_whenever_steps_execute(
    way: str, model: tuple[Path, list[Packed]], alone: Alone, seed: int
) -> None:
    run = direct_runner(way, model, 34 * 9300)
    life = Life(run, model[1], seed, seats=SEATS, tokens=SEATS + 27)
    life.live()
    assert life.core._books.num_preempted > 0
    life.check(alone)
    run.close()


@pytest.mark.parametrize(("seats", "tokens"), [(1, 17), (2, 150), (9, 25), (17, 300)])
def test_replayed_steps_give_every_request_what_the_cpu_engine_gives_it_alone(
    model: tuple[Path, list[Packed]], monkeypatch: pytest.MonkeyPatch, seats: int, tokens: int
) -> None:
    use_fake_graphs(monkeypatch)
    step = {"max_num_seqs": seats, "max_num_batched_tokens": tokens}
    run = direct_runner("static", model, 34 * 9300, **step)
    warm_up(run)
    life = Life(run, model[1], seats, seats=seats, tokens=tokens, ranked=True)
    life.live()
    inner: Any = run.runner
    assert len(inner._stepper._graphs.replayed) > 30
    oracle = direct_runner("eager", model, 1 << 20)
    life.check(Alone(oracle, model[1]))
    run.close()
    oracle.close()
