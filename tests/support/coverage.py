"""What PEFT can write and loraplex serves: one row a kind of adapter, with a config that makes it.

The fidelity suite trains nothing but lets PEFT build and save each row, and serves it; the table of
docs/adapters.md is made of the same rows.

    python -m tests.support.coverage    writes the table into docs/adapters.md
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
ALL = [*ATTENTION, *MLP]

#: name → architecture and changes to its config
BASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("LlamaForCausalLM", {}),
    "with biases": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "with biases on q, k, v": ("Qwen2ForCausalLM", {}),
}


@dataclass(frozen=True)
class CoverageCase:
    """`option` and `what` are for people; `config` is LoraConfig's.

    `fused` trains on the same weights behind fused linears (Phi-3's names).
    """

    option: str
    what: str
    config: dict[str, Any] = field(hash=False)
    base: str = "plain"
    fused: bool = False

    @property
    def name(self) -> str:
        return f"{self.option}: {self.what}"


def _ranks() -> list[CoverageCase]:
    return [
        CoverageCase(
            "r", f"rank {rank}", {"r": rank, "lora_alpha": 2 * rank, "target_modules": modules}
        )
        for rank, modules in (
            (1, ["q_proj"]), (3, ALL), (5, ["o_proj", "gate_proj"]), (12, MLP), (17, ALL),
            (24, ["q_proj", "v_proj"]), (100, ["down_proj"]), (256, ["k_proj", "up_proj"]),
        )
    ]  # fmt: skip


COVERAGE: tuple[CoverageCase, ...] = (
    *_ranks(),
    CoverageCase(
        "use_rslora", "alpha / √r",
        {"r": 33, "lora_alpha": 8, "use_rslora": True, "target_modules": ["v_proj", "down_proj"]},
    ),
    CoverageCase(
        "rank_pattern, alpha_pattern", "other ranks and alphas by module",
        {
            "r": 4, "lora_alpha": 8, "target_modules": ALL,
            "rank_pattern": {"down_proj": 7, r"layers\.1\.self_attn\.q_proj": 2},
            "alpha_pattern": {"up_proj": 3, "k_proj": 20},
        },
    ),
    CoverageCase(
        "target_modules", "all-linear", {"r": 3, "lora_alpha": 6, "target_modules": "all-linear"}
    ),
    CoverageCase(
        "target_modules", "a regular expression",
        {"r": 6, "lora_alpha": 6, "target_modules": r".*\.(0|2)\.mlp\.(gate|up)_proj"},
    ),
    CoverageCase(
        "exclude_modules", "a list",
        {"r": 4, "lora_alpha": 9, "target_modules": "all-linear",
         "exclude_modules": ["o_proj", "gate_proj"]},
    ),
    CoverageCase(
        "exclude_modules", "a regular expression",
        {"r": 4, "lora_alpha": 9, "target_modules": ALL,
         "exclude_modules": r".*\.layers\.1\..*"},
    ),
    CoverageCase(
        "layers_to_transform", "some layers",
        {"r": 5, "lora_alpha": 20, "target_modules": ATTENTION, "layers_to_transform": [1]},
    ),
    CoverageCase(
        "layers_pattern", "the name of the list of layers",
        {"r": 5, "lora_alpha": 20, "target_modules": MLP, "layers_to_transform": [0, 2],
         "layers_pattern": "layers"},
    ),
    CoverageCase(
        "fan_in_fan_out", "true, which PEFT itself takes as false for linear layers",
        {"r": 4, "lora_alpha": 8, "fan_in_fan_out": True, "target_modules": ["q_proj", "up_proj"]},
    ),
    CoverageCase(
        "fused projections", "qkv_proj and gate_up_proj, for a base where they are split",
        {"r": 6, "lora_alpha": 12, "target_modules": ["qkv_proj", "gate_up_proj", "down_proj"]},
        fused=True,
    ),
    CoverageCase(
        "fused projections", "qkv_proj alone, of rank 20, with rank_pattern and rsLoRA",
        {"r": 20, "lora_alpha": 12, "target_modules": ["qkv_proj"], "use_rslora": True,
         "rank_pattern": {r"layers\.1\.self_attn\.qkv_proj": 3}},
        fused=True,
    ),
    CoverageCase(
        "bias", "all, of a base without any", {"r": 4, "target_modules": ALL, "bias": "all"}
    ),
    CoverageCase(
        "bias", "all", {"r": 4, "target_modules": ["q_proj", "down_proj"], "bias": "all"},
        base="with biases",
    ),
    CoverageCase(
        "bias", "lora_only", {"r": 4, "target_modules": ["k_proj", "o_proj"], "bias": "lora_only"},
        base="with biases on q, k, v",
    ),
    CoverageCase(
        "lora_bias", "a bias of B",
        {"r": 4, "lora_alpha": 12, "target_modules": ["q_proj", "o_proj", "up_proj"],
         "lora_bias": True},
    ),
    CoverageCase(
        "lora_bias", "together with bias all",
        {"r": 4, "lora_alpha": 12, "target_modules": ["v_proj", "gate_proj"], "lora_bias": True,
         "bias": "all"},
        base="with biases",
    ),
    CoverageCase(
        "use_dora", "all linear layers",
        {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "use_dora": True},
    ),
    CoverageCase(
        "use_dora", "some modules, with rsLoRA and rank_pattern",
        {"r": 5, "lora_alpha": 8, "target_modules": ["k_proj", "up_proj", "down_proj"],
         "use_dora": True, "use_rslora": True, "rank_pattern": {"up_proj": 19}},
    ),
    CoverageCase(
        "use_dora", "a base with biases",
        {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "o_proj", "gate_proj"],
         "use_dora": True},
        base="with biases",
    ),
    CoverageCase(
        "use_dora", "together with bias all",
        {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "use_dora": True,
         "bias": "all"},
        base="with biases on q, k, v",
    ),
    CoverageCase(
        "use_dora", "fused projections",
        {"r": 4, "lora_alpha": 8, "target_modules": ["qkv_proj", "gate_up_proj"],
         "use_dora": True},
        fused=True,
    ),
)  # fmt: skip
