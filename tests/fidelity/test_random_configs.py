"""Any configuration that PEFT takes: served with PEFT's logits, or refused by the cause's name."""

from __future__ import annotations

import copy
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st
from peft import LoraConfig, PeftModel, get_peft_model

from engine_svc.types import SamplingParams
from loraplex.status import AdapterRefused
from tests.support.coverage import ALL
from tests.support.direct_runner import DirectRunner, SeatedSequence
from tests.support.oracle import load_base, pack, shake, write_checkpoint

#: PEFT warns of what it changes, of what it does not find, and of patterns that match nothing
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")

TOLERANCE = 1e-4
PROMPT = [3, 130, 7, 41, 41, 99, 0, 12, 64]
BASES = {
    "plain": ("LlamaForCausalLM", {}),
    "biased": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("Qwen2ForCausalLM", {}),
}
#: what else may be asked for: on the vocabulary's side, and then what is refused by this name
VOCABULARY: dict[str, dict[str, Any]] = {
    "saved head": {"modules_to_save": ["lm_head"]},
    "saved embeddings": {"modules_to_save": ["embed_tokens"]},
    "LoRA on the head": {"target_modules": ["q_proj", "lm_head"]},
    "LoRA on the embeddings": {"target_modules": ["v_proj", "embed_tokens"]},
    "LoRA on both": {"target_modules": ["lm_head", "embed_tokens"]},
}
UNSERVED: dict[str, dict[str, Any]] = {
    "trainable_token_indices": {"trainable_token_indices": [1, 2]},
    "pissa": {"init_lora_weights": "pissa"},
    "olora": {"init_lora_weights": "olora"},
    "layer_replication": {"layer_replication": [[0, 2], [1, 3]]},
    "alora_invocation_tokens": {"alora_invocation_tokens": [3, 4]},
}

modules = st.lists(st.sampled_from(ALL), min_size=1, max_size=4, unique=True)
ends = st.sampled_from(
    [*ALL, r"mlp\.up_proj", r"layers\.1\..*", r".*k_proj", r"model\.layers\.0\.self_attn\.v_proj"]
)


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of LoraConfig; PEFT may still refuse the combination."""
    regex = r".*layers\.[02]\.(self_attn|mlp)\.(q|k|up|down)_proj"
    targets = draw(st.one_of(modules, modules, st.just("all-linear"), st.just(regex)))
    dora, init = draw(st.booleans()), draw(st.sampled_from([True, True, "gaussian", "eva", "mica"]))
    config: dict[str, Any] = {
        "r": draw(st.integers(1, 40)),
        "lora_alpha": draw(st.sampled_from([1, 7, 16, 33])),
        "target_modules": targets,
        "use_rslora": draw(st.booleans()),
        "use_dora": dora,
        "lora_bias": not dora and init is True and draw(st.booleans()),
        "bias": draw(st.sampled_from(["none", "none", "all", "lora_only"])),
        "init_lora_weights": init,
        "rank_pattern": draw(st.dictionaries(ends, st.integers(1, 20), max_size=2)),
        "alpha_pattern": draw(st.dictionaries(ends, st.integers(1, 20), max_size=2)),
        "exclude_modules": draw(st.sampled_from([None, None, ["o_proj"], r".*layers\.1\..*"])),
    }
    if isinstance(targets, list):
        config["layers_to_transform"] = draw(st.sampled_from([None, None, [1], [0, 2]]))
    extra = draw(st.sampled_from([None, None, *VOCABULARY, *UNSERVED]))
    if extra is not None:
        config.update((VOCABULARY | UNSERVED)[extra])
        config["cause"] = extra if extra in UNSERVED else None
    return config


class World:
    def __init__(self, name: str, root: Path) -> None:
        architecture, changes = BASES[name]
        self.model_dir = write_checkpoint(root / "m", architecture, seed=9, **changes)
        self.base = load_base(self.model_dir)
        shapes = DirectRunner(self.model_dir, arena_bytes=1 << 20)
        self.shapes = shapes.loaded
        shapes.close()

    def trained(self, config: dict[str, Any], folder: Path) -> bool:
        """Save an adapter; False when PEFT itself refuses."""
        try:
            torch.manual_seed(1)
            wanted = LoraConfig(task_type="CAUSAL_LM", **config)
            model = get_peft_model(copy.deepcopy(self.base), wanted)
        except (ValueError, TypeError, RuntimeError):
            return False
        shake(model)
        model.save_pretrained(folder)
        return True

    @torch.no_grad()
    def theirs(self, folder: Path) -> torch.Tensor:
        model = PeftModel.from_pretrained(copy.deepcopy(self.base), str(folder)).eval()
        return model(torch.tensor([PROMPT])).logits[0, -1]

    def ours(self, folder: Path) -> torch.Tensor | AdapterRefused:
        try:
            digest, num_pages, packed = pack(folder, self.shapes.base, self.shapes.layout)
        except AdapterRefused as error:
            return error
        run = DirectRunner(self.model_dir, {digest: packed}, arena_bytes=1 << 22)
        run.record_logits()
        run.load_slot(0, digest, num_pages)
        sequence = SeatedSequence(
            0, 0, PROMPT, SamplingParams(max_tokens=2, seed=0, temperature=0.0)
        )
        run.generate([sequence], 1)
        run.close()
        return sequence.logits[0]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, World]:
    return {name: World(name, tmp_path_factory.mktemp(name)) for name in BASES}


MAX_EXAMPLES = 50
#: the same examples each time; a failing one is not shrunk, which would take minutes
PROFILE = settings(
    max_examples=MAX_EXAMPLES, deadline=None, derandomize=True, database=None,
    phases=[Phase.generate], suppress_health_check=list(HealthCheck),
)  # fmt: skip


@PROFILE
@given(config=configs(), base=st.sampled_from(list(BASES)))
def test_what_peft_saves_is_served_equal_or_refused_by_its_cause(
    worlds: dict[str, World], config: dict[str, Any], base: str
) -> None:
    world, cause = worlds[base], config.pop("cause", None)
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        if not world.trained(config, folder):
            event("refused by PEFT")
            return
        ours = world.ours(folder)
        if isinstance(ours, AdapterRefused):
            event("refused" if cause else "refused, and PEFT cannot load it either")
            if cause:
                assert cause in ours.message
            else:
                # patterns that overlap: PEFT saves them in another order than it used them in
                assert "rank" in ours.message
                with pytest.raises(RuntimeError, match="size mismatch"):
                    world.theirs(folder)
            return
        event("served")
        assert (ours - world.theirs(folder)).abs().max() <= TOLERANCE


#: fields of adapter_config.json that say something else than the tensors
TWISTS: list[dict[str, Any]] = [
    {"r": 3}, {"lora_alpha": 5}, {"use_rslora": True}, {"use_dora": True}, {"use_dora": False},
    {"bias": "none"}, {"bias": "all"}, {"bias": "lora_only"}, {"lora_bias": True},
    {"rank_pattern": {"q_proj": 2}}, {"alpha_pattern": {"up_proj": 2, "q_proj": 3}},
    {"target_modules": ["q_proj"]}, {"target_modules": "all-linear"}, {"target_modules": None},
    {"layers_pattern": "layers"}, {"layers_to_transform": [0]}, {"init_lora_weights": "eva"},
    {"exclude_modules": ["q_proj"]}, {"fan_in_fan_out": True}, {"init_lora_weights": None},
    {"init_lora_weights": "gaussian"}, {"init_lora_weights": "pissa"}, {"lora_dropout": 0.5},
    {"modules_to_save": ["lm_head"]}, {"megatron_config": {"a": 1}}, {"invented": 5},
]  # fmt: skip


@settings(PROFILE, max_examples=40)
@given(
    twist=st.sampled_from(TWISTS),
    config=st.sampled_from(
        [
            {"target_modules": ["q_proj", "up_proj"], "use_dora": True},
            {"target_modules": ["q_proj", "v_proj"], "bias": "all"},
            {"target_modules": ["q_proj", "up_proj"], "lora_bias": True, "bias": "lora_only"},
        ]
    ),
    base=st.sampled_from(list(BASES)),
)
def test_a_configuration_that_contradicts_the_tensors_is_served_as_peft_does_or_refused(
    worlds: dict[str, World], twist: dict[str, Any], config: dict[str, Any], base: str
) -> None:
    world, (field,) = worlds[base], twist
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        assert world.trained({"r": 6, "lora_alpha": 9, **config}, folder)
        file = folder / "adapter_config.json"
        written = json.loads(file.read_text())
        file.write_text(json.dumps({**written, **twist}))
        ours = world.ours(folder)
        if isinstance(ours, AdapterRefused):
            event("refused")
            assert written.get(field) != twist[field], ours.message
            assert field in ours.message or "_proj" in ours.message
            return
        event("served")
        assert (ours - world.theirs(folder)).abs().max() <= TOLERANCE
