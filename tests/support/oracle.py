"""transformers + PEFT in fp32 as the oracle: checkpoints, adapters, and the equality rule.

write_checkpoint(folder, "LlamaForCausalLM", …)   a tiny random base model, saved by transformers
write_peft_adapter(model_dir, folder, …)          an adapter with random B, saved by PEFT
pack(folder, loaded-model's layout, base)         the same through our own check and packer
Oracle(model_dir, {name: folder})                 logits of base or adapter
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model

from engine_svc.adapters.packer import plan_packing, write_packed
from engine_svc.layout import AdapterLayout
from loraplex.adapter_format import BaseModelFacts, check_adapter, read_folder
from loraplex.base_model import BaseModelSpec
from tests.support.direct_runner import SeatedSequence

#: the equality rule: below this top-2 margin of the oracle, a greedy token may differ
MARGIN = 1e-3
TINY: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
}


def write_checkpoint(folder: Path, architecture: str, seed: int = 0, **changes: Any) -> Path:
    """A random model of TINY with `changes`, biases and norms not at their initial 0 and 1."""
    save = {"max_shard_size": changes.pop("max_shard_size", "5GB")}
    torch.manual_seed(seed)
    kind = getattr(transformers, architecture)
    model = kind(kind.config_class(**{**TINY, **changes})).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder, **save)
    return folder


def write_fused_twin(model_dir: Path, folder: Path) -> Path:
    """The weights of a Llama behind Phi-3's fused linears: the same function."""
    if folder.exists():
        return folder
    source = load_base(model_dir)
    weights = source.state_dict()
    for layer in range(source.config.num_hidden_layers):
        for part, fused, names in (
            ("self_attn", "qkv_proj", ("q_proj", "k_proj", "v_proj")),
            ("mlp", "gate_up_proj", ("gate_proj", "up_proj")),
        ):
            start = f"model.layers.{layer}.{part}"
            rows = [weights.pop(f"{start}.{name}.weight") for name in names]
            weights[f"{start}.{fused}.weight"] = torch.cat(rows)
    eps = source.config.rms_norm_eps
    config = transformers.Phi3Config(**{**TINY, "pad_token_id": 0, "rms_norm_eps": eps})
    twin = transformers.Phi3ForCausalLM(config).float()
    twin.load_state_dict(weights)
    twin.save_pretrained(folder)
    return folder


def load_base(model_dir: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def write_peft_adapter(
    model_dir: Path,
    folder: Path,
    seed: int = 0,
    save_embedding_layers: bool | str = "auto",
    **config: Any,
) -> Path:
    """An adapter of which nothing that was trained is at its initial value."""
    torch.manual_seed(seed)
    model = get_peft_model(load_base(model_dir), LoraConfig(task_type="CAUSAL_LM", **config))
    shake(model)
    model.save_pretrained(folder, save_embedding_layers=save_embedding_layers)
    return folder


@torch.no_grad()
def shake(model: Any) -> None:
    """Move everything that the adapter trains from its initial value."""
    for name, parameter in model.named_parameters():
        noise = torch.randn_like(parameter)
        if "lora_magnitude_vector" in name:
            parameter.mul_(1 + 0.3 * noise)
        elif "lora_" in name:
            parameter.copy_(noise * 0.1)
        elif "modules_to_save" in name:
            parameter.add_(noise * 0.05)
        elif name.endswith(".bias") and parameter.requires_grad:
            parameter.add_(noise * 0.2)


def pack(folder: Path, base: BaseModelSpec, layout: AdapterLayout) -> tuple[str, int, bytes]:
    """(digest, pages, packed file) through the product's own check and packer."""
    facts = BaseModelFacts("base", (), base)
    files = read_folder(folder).files
    checked = check_adapter(files, facts, base_model_confirmed=True)
    digest = checked.manifest.digest
    plan = plan_packing(checked.spec.parts, layout, digest)
    out = bytearray(plan.num_bytes)
    write_packed(plan, files["adapter_model.safetensors"], memoryview(out))
    return digest, plan.num_pages, bytes(out)


class Oracle:
    """One base model in transformers, its adapters in PEFT.

    An adapter that replaces biases changes PEFT's base model too, so it has a model of its own.
    """

    def __init__(self, model_dir: Path, adapters: Mapping[str, Path] | None = None) -> None:
        self.model: Any = load_base(model_dir)
        self._with_adapters = False
        self._alone: dict[str, Any] = {}
        for name, folder in (adapters or {}).items():
            if json.loads((folder / "adapter_config.json").read_text())["bias"] != "none":
                own = PeftModel.from_pretrained(load_base(model_dir), str(folder))
                self._alone[name] = own.eval()
            elif self._with_adapters:
                self.model.load_adapter(str(folder), adapter_name=name)
            else:
                self.model = PeftModel.from_pretrained(self.model, str(folder), adapter_name=name)
            self._with_adapters = True
        self.model.eval()

    @torch.no_grad()
    def logits(self, token_ids: Sequence[int], adapter: str | None) -> torch.Tensor:
        """[T, V] fp32 of every position, under one adapter or the bare base."""
        ids = torch.tensor([list(token_ids)])
        if adapter in self._alone:
            return self._alone[adapter](ids).logits[0]
        if not self._with_adapters:
            return self.model(ids).logits[0]
        if adapter is None:
            with self.model.disable_adapter():
                return self.model(ids).logits[0]
        self.model.set_adapter(adapter)
        return self.model(ids).logits[0]


@dataclass
class Comparison:
    """What the equality rule found; add up over streams."""

    positions: int = 0
    close_calls: int = 0
    worst: float = 0.0

    def check(
        self, oracle: Oracle, adapter: str | None, sequence: SeatedSequence,
        logits: Sequence[torch.Tensor], tolerance: float,
    ) -> None:  # fmt: skip
        """Hold a greedy stream and its logits rows against the oracle, teacher-forced on the
        stream's own tokens."""
        theirs = oracle.logits(sequence.tokens[:-1], adapter)[len(sequence.prompt) - 1 :]
        ours = torch.stack(list(logits))
        assert ours.shape == theirs.shape
        self.worst = max(self.worst, float((ours - theirs).abs().max()))
        assert self.worst <= tolerance, f"{adapter}: logits differ by {self.worst}"
        best = theirs.topk(2, dim=1)
        margins = (best.values[:, 0] - best.values[:, 1]).tolist()
        expected = best.indices[:, 0].tolist()
        for token, want, margin in zip(sequence.outputs, expected, margins, strict=True):
            self.positions += 1
            if token != want:
                assert margin < MARGIN, f"{adapter}: {token} instead of {want}, margin {margin}"
                self.close_calls += 1

    def assert_few_close_calls(self) -> None:
        assert self.close_calls <= 0.01 * self.positions, self
