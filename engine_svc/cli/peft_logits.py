"""PEFT's logits in fp32, where transformers and peft are installed (extra `compare`)."""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from loraplex.status import BaseModelUnsupported, FailedPrecondition


class PeftLogits:
    """One base model and one adapter on the CPU.

    Raises: FailedPrecondition CONFIG_INVALID without the two packages.
    """

    def __init__(self, base: Path, adapter: Path) -> None:
        try:
            transformers: Any = importlib.import_module("transformers")
            peft: Any = importlib.import_module("peft")
        except ImportError as error:
            raise FailedPrecondition(
                f"diff-logits compares with transformers and peft: {error}; "
                "pip install 'loraplex[engine,compare]'",
                reason="CONFIG_INVALID",
            ) from error
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        try:
            self._base = transformers.AutoModelForCausalLM.from_pretrained(
                base, dtype=torch.float32, attn_implementation="eager"
            ).eval()
        except (OSError, ValueError, KeyError) as error:
            limit = "a folder that transformers loads"
            raise BaseModelUnsupported(str(base), str(error)[:500], limit) from error
        self._peft_model: Any = peft.PeftModel
        self._adapter = adapter
        self._model: Any = None

    @torch.inference_mode()
    def of_base(self, token_ids: Sequence[int]) -> torch.Tensor:
        """[T, V]; before `of_adapter` is asked first, since an adapter may change the base."""
        assert self._model is None, "the base may be changed already"
        return self._logits(self._base, token_ids)

    @torch.inference_mode()
    def of_adapter(self, token_ids: Sequence[int]) -> torch.Tensor:
        """[T, V]."""
        if self._model is None:
            with contextlib.ExitStack() as stack:
                stack.enter_context(warnings.catch_warnings())
                warnings.simplefilter("ignore")
                # parameters made here must be able to live outside inference mode
                stack.enter_context(torch.inference_mode(False))
                loaded: Any = self._peft_model.from_pretrained(self._base, str(self._adapter))
                self._model = loaded.eval()
        return self._logits(self._model, token_ids)

    def continued(self, token_ids: Sequence[int], num_tokens: int) -> list[int]:
        """The prompt and the adapter's greedy tokens after it."""
        tokens = list(token_ids)
        for _ in range(num_tokens):
            tokens.append(int(self.of_adapter(tokens)[-1].argmax()))
        return tokens

    @staticmethod
    def _logits(model: Any, token_ids: Sequence[int]) -> torch.Tensor:
        logits: torch.Tensor = model(torch.tensor([list(token_ids)])).logits[0]
        return logits.float()
