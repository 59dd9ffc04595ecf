"""Train the three demo adapters with PEFT on the demo model; a few minutes each on two CPU cores.

    python examples/train_adapters.py [--model DIR] [--out DIR] [NAME ...]

All training texts are generated in examples/adapter_texts.py. Seeds are fixed. The folders are what
PEFT's `save_pretrained` writes, in bf16, without its model card.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from adapter_texts import Pair, contract_pairs, kefu_pairs, sql_pairs
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / ".loraplex" / "models" / "smollm2-135m-instruct"
#: what adapter_config.json names as its base
BASE_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL_LINEARS = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
IGNORED = -100


@dataclass(frozen=True)
class Recipe:
    pairs: list[Pair]
    lora: dict[str, Any]
    steps: int
    learning_rate: float
    batch: int = 8


RECIPES = {
    "kefu-lora": Recipe(
        kefu_pairs(),
        {"r": 16, "lora_alpha": 32, "use_rslora": True, "target_modules": ATTENTION},
        steps=28,
        learning_rate=1.5e-3,
    ),
    "sql-lora": Recipe(
        sql_pairs(),
        {"r": 8, "lora_alpha": 16, "target_modules": ALL_LINEARS},
        steps=32,
        learning_rate=2e-3,
    ),
    "contract-lora": Recipe(
        contract_pairs(),
        {
            "r": 4,
            "lora_alpha": 16,
            "rank_pattern": {"down_proj": 8},
            "target_modules": ALL_LINEARS,
        },
        steps=32,
        learning_rate=2e-3,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(RECIPES))
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--out", type=Path, default=ROOT / "examples" / "adapters")
    args = parser.parse_args()
    for name in args.names or RECIPES:
        model = train(RECIPES[name], args.model, name)
        save(model, args.out / name)


def train(recipe: Recipe, model_dir: Path, name: str) -> PeftModel:
    """Fit one adapter; prints the loss of every fourth step."""
    torch.manual_seed(0)
    order = random.Random(0)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    lora = LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.0, **recipe.lora)
    model = get_peft_model(base, lora)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=recipe.learning_rate, weight_decay=0.0)
    began = time.monotonic()
    for step in range(recipe.steps):
        # warm up over 5 steps, then fall linearly to a tenth
        rate = min((step + 1) / 5, 1.0 - 0.9 * step / recipe.steps)
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * rate
        batch = encode(tokenizer, order.sample(recipe.pairs, recipe.batch))
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 4 == 0 or step == recipe.steps - 1:
            seconds = time.monotonic() - began
            print(f"{name} step {step} loss {loss.item():.4f} {seconds:.0f} s", flush=True)
    return model


def encode(tokenizer: PreTrainedTokenizerBase, pairs: list[Pair]) -> dict[str, torch.Tensor]:
    """One right-padded batch; only the answer and its end token carry loss."""
    rows: list[tuple[list[int], int]] = []
    for question, answer in pairs:
        chat = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        prompt_ids = tokenizer.encode(prompt)
        answer_ids = tokenizer.encode(answer + "<|im_end|>")
        rows.append((prompt_ids + answer_ids, len(prompt_ids)))
    width = max(len(ids) for ids, _ in rows)
    shape = (len(rows), width)
    input_ids = torch.full(shape, tokenizer.pad_token_id)
    attention_mask, labels = torch.zeros(shape, dtype=torch.long), torch.full(shape, IGNORED)
    for row, (ids, num_prompt) in enumerate(rows):
        input_ids[row, : len(ids)] = torch.tensor(ids)
        attention_mask[row, : len(ids)] = 1
        labels[row, num_prompt : len(ids)] = torch.tensor(ids[num_prompt:])
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


def save(model: PeftModel, folder: Path) -> None:
    """PEFT's own folder in bf16, with a stable order of keys and the base's public name."""
    config = model.peft_config["default"]
    config.base_model_name_or_path = BASE_NAME
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    path = folder / "adapter_config.json"
    fields = json.loads(path.read_text())
    fields["target_modules"] = sorted(fields["target_modules"])
    path.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")
    weights = folder / "adapter_model.safetensors"
    weights.chmod(0o644)
    print(f"{folder}: {weights.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
