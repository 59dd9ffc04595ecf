"""The peer of the CPU benchmark: transformers + PEFT, one padded batch of mixed adapters."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.shared.load import Stream


class PeftPeer:
    """The model in fp32 with all adapters loaded, as `adapter_names=` wants it."""

    def __init__(self, model_dir: Path, adapters: Sequence[Path]) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(model_dir, padding_side="left")
        base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        first, *others = adapters
        model = PeftModel.from_pretrained(base, first, adapter_name=first.name)
        for folder in others:
            model.load_adapter(folder, adapter_name=folder.name)
        self._model: Any = model.eval()

    def tokens_per_s(self, streams: Sequence[Stream], num_tokens: int) -> float:
        """Throughput of one batch, prefill included; exactly `num_tokens` tokens a stream."""
        began = time.monotonic()
        chats = [[{"role": "user", "content": stream.prompt}] for stream in streams]
        batch = self._tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        )
        with torch.inference_mode():
            ids = self._model.generate(
                **batch,
                adapter_names=[stream.model for stream in streams],
                min_new_tokens=num_tokens,
                max_new_tokens=num_tokens,
                do_sample=False,
            )
        wall_s = time.monotonic() - began
        assert ids.shape[1] == batch["input_ids"].shape[1] + num_tokens
        return len(streams) * num_tokens / wall_s
