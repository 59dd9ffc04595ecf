"""What PEFT can write and loraplex serves: one row a kind of adapter, with a config that makes it.

The fidelity suite trains nothing but lets PEFT build and save each row, and serves it; the table of
docs/adapters.md is made of the same rows.

    python -m tests.support.coverage    writes the table into docs/adapters.md
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loraplex.adapter_format import options

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

    `fused` trains on the same weights behind fused linears (Phi-3's names). `written` are fields of
    adapter_config.json that are changed after saving; `dtype` is what the weights are cast to then;
    `keys` are replacements in the names of tensors, which PEFT itself would not load.
    `copies` is PEFT's default, to save the base's own weights beside a LoRA on the vocabulary.
    """

    option: str
    what: str
    config: dict[str, Any] = field(hash=False)
    base: str = "plain"
    fused: bool = False
    written: dict[str, Any] = field(default_factory=dict, hash=False)
    dtype: str = "float32"
    keys: tuple[tuple[str, str], ...] = ()
    copies: bool = True

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


def _names() -> list[CoverageCase]:
    """Tensors under the names that other tools and wrappers leave."""
    variants: dict[str, tuple[tuple[str, str], ...]] = {
        "without base_model.model.": (("base_model.model.", ""),),
        "with the adapter's name": ((".lora_A.", ".lora_A.default."), (".lora_B.", ".lora_B.my.")),
        "of a language model inside a larger one": (
            (".model.layers", ".model.language_model.layers"),
        ),
        "of a compiled model": (("base_model.model.", "base_model.model._orig_mod."),),
    }
    config = {"r": 4, "lora_alpha": 12, "target_modules": ["v_proj", "down_proj"]}
    return [
        CoverageCase("names of tensors", what, config, keys=keys) for what, keys in variants.items()
    ]


COVERAGE: tuple[CoverageCase, ...] = (
    *_ranks(),
    *(
        CoverageCase(
            "weights", f"in {dtype}", {"r": 9, "lora_alpha": 12, "target_modules": ALL}, dtype=dtype
        )
        for dtype in ("float16", "bfloat16")
    ),
    CoverageCase(
        "weights", "in bfloat16, with DoRA and biases",
        {"r": 4, "lora_alpha": 8, "target_modules": ALL, "use_dora": True, "bias": "all"},
        base="with biases", dtype="bfloat16",
    ),
    *_names(),
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
        {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "up_proj"]},
        written={"fan_in_fan_out": True},
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

#: these have a suite of their own (tests/fidelity/test_vocabulary.py), on tied and untied bases
VOCABULARY: tuple[CoverageCase, ...] = (
    CoverageCase(
        "target_modules", "lm_head",
        {"r": 5, "lora_alpha": 9, "target_modules": ["lm_head", "q_proj"]},
    ),
    CoverageCase(
        "target_modules", "lm_head alone, saved without a copy of the base's",
        {"r": 17, "lora_alpha": 9, "target_modules": ["lm_head"]}, copies=False,
    ),
    CoverageCase(
        "target_modules", "embed_tokens",
        {"r": 19, "lora_alpha": 12, "target_modules": ["embed_tokens", "down_proj"]},
    ),
    CoverageCase(
        "target_modules", "both sides of the vocabulary, rsLoRA and patterns",
        {
            "r": 3, "lora_alpha": 4, "use_rslora": True, "rank_pattern": {"embed_tokens": 7},
            "alpha_pattern": {"lm_head": 2},
            "target_modules": ["lm_head", "embed_tokens", "v_proj"],
        },
        copies=False,
    ),
    CoverageCase(
        "target_modules", "embed_tokens by a regular expression",
        {"r": 2, "target_modules": r".*(embed_tokens|up_proj)"}, copies=False,
    ),
    CoverageCase(
        "use_dora", "lm_head and embed_tokens",
        {"r": 4, "lora_alpha": 9, "target_modules": ["lm_head", "embed_tokens", "k_proj"],
         "use_dora": True},
    ),
    CoverageCase(
        "use_dora", "embed_tokens of rank 19, saved without a copy of the base's",
        {"r": 19, "lora_alpha": 9, "target_modules": ["embed_tokens"], "use_dora": True},
        copies=False,
    ),
    CoverageCase(
        "use_dora", "lm_head, saved without a copy of the base's",
        {"r": 3, "lora_alpha": 9, "target_modules": ["lm_head", "o_proj"], "use_dora": True},
        copies=False,
    ),
    CoverageCase(
        "lora_bias", "lm_head",
        {"r": 3, "lora_alpha": 9, "target_modules": ["lm_head"], "lora_bias": True},
    ),
    CoverageCase(
        "modules_to_save", "lm_head",
        {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    ),
    CoverageCase(
        "modules_to_save", "embed_tokens",
        {"r": 4, "target_modules": "all-linear", "modules_to_save": ["embed_tokens"]},
    ),
    CoverageCase(
        "modules_to_save", "both",
        {"r": 1, "target_modules": ["o_proj"],
         "modules_to_save": ["lm_head", "model.embed_tokens"]},
    ),
    CoverageCase(
        "modules_to_save", "lm_head, with LoRA on embed_tokens",
        {"r": 6, "target_modules": ["embed_tokens", "k_proj"], "modules_to_save": ["lm_head"]},
    ),
    CoverageCase(
        "modules_to_save", "embed_tokens, with DoRA in the layers",
        {"r": 4, "target_modules": ["q_proj", "down_proj"], "modules_to_save": ["embed_tokens"],
         "use_dora": True},
    ),
)  # fmt: skip

PAGE = Path(__file__).resolve().parents[2] / "docs" / "adapters.md"


def page(text: str) -> str:
    """docs/adapters.md with its generated parts as the code has them now."""
    return _between(_between(text, "coverage", _coverage_table()), "refused", _refused_list())


def _coverage_table() -> str:
    lines = ["| option | what | example | base |", "|---|---|---|---|"]
    for case in (*COVERAGE, *VOCABULARY):
        example = json.dumps({**case.config, **case.written}).replace("|", "\\|")
        base = BASES[case.base][0].removesuffix("ForCausalLM")
        base += f" {case.base}" if case.base != "plain" else ""
        lines.append(f"| `{case.option}` | {case.what} | `{example}` | {base} |")
    return "\n".join(lines)


def _refused_list() -> str:
    inits = ", ".join(f"`{init}`" for init in options.PLAIN_INITS if isinstance(init, str))
    lines = [
        "- `peft_type` other than `LORA`; `task_type` other than `CAUSAL_LM`",
        f"- `init_lora_weights` that changes the base's weights: all but true, false, {inits}",
        *(f"- `{field}`" for field in options.REFUSED),
        "- any option that is not known here, unless it is empty",
    ]
    return "\n".join(lines)


def _between(text: str, name: str, content: str) -> str:
    start, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    before, _, rest = text.partition(start)
    _, _, after = rest.partition(end)
    return f"{before}{start}{content}\n{end}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
