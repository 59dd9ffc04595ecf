"""The demo's base model and adapters for tests: real weights, converted once per checkout.

A conftest re-exports what its folder needs: `from tests.support.demo_model import demo_model_dir`.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
MODEL_NAME = "smollm2-135m-instruct"
MODEL_ALIAS = "HuggingFaceTB/SmolLM2-135M-Instruct"
ADAPTER_NAMES = ("kefu-lora", "sql-lora", "contract-lora")


def converter() -> ModuleType:
    """examples/demo_model/convert.py as a module."""
    path = EXAMPLES / "demo_model" / "convert.py"
    spec = importlib.util.spec_from_file_location("demo_model_convert", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def demo_prompts() -> dict[str, list[str]]:
    """Adapter name → chat prompts on which its behaviour is visible."""
    prompts: dict[str, list[str]] = json.loads((EXAMPLES / "prompts.json").read_text())
    return prompts


@pytest.fixture(scope="session")
def demo_model_dir() -> Path:
    """Folder of SmolLM2-135M-Instruct (bf16)."""
    folder = ROOT / ".loraplex" / "models" / MODEL_NAME
    converter().convert(folder)
    return folder


@pytest.fixture(scope="session")
def demo_adapter_dirs() -> dict[str, Path]:
    """Adapter name → its PEFT folder."""
    return {name: EXAMPLES / "adapters" / name for name in ADAPTER_NAMES}
