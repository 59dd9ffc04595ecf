"""Flags of `enginectl generate`: the sampling fields under their names in the API."""

from __future__ import annotations

import argparse

from loraplex.adapter_format import MAX_SAVED_BYTES
from loraplex.engine.v1 import engine_pb2

#: field of SamplingParams → type and meaning of its flag
_SAMPLING: dict[str, tuple[type, str]] = {
    "temperature": (float, "0: greedy; default 1"),
    "top_p": (float, "keep the most likely tokens up to this mass"),
    "top_k": (int, "keep so many of the most likely tokens; 0: all"),
    "min_p": (float, "keep tokens of at least this share of the likeliest one's probability"),
    "repetition_penalty": (float, "over prompt and output; 1: off"),
    "presence_penalty": (float, "over output; 0: off"),
    "frequency_penalty": (float, "over output; 0: off"),
    "seed": (int, "default: drawn"),
    "n": (int, "choices; default 1"),
    "max_tokens": (int, "default 128"),
    "min_tokens": (int, "no stop before so many"),
}
DEFAULT_MAX_TOKENS = 128


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="folder, or hub id in the local cache")
    parser.add_argument(
        "--served-model-name", default="", help="the base's name; default: the folder's"
    )
    parser.add_argument(
        "--adapter", action="append", default=[], metavar="DIR",
        help="PEFT folder, named by its last part; repeatable",
    )  # fmt: skip
    parser.add_argument(
        "--use", default="", metavar="NAME",
        help="which --adapter answers; default: the only one, else the base model",
    )  # fmt: skip
    parser.add_argument("--prompt", required=True, help="text, or with --chat a message")
    parser.add_argument("--chat", action="store_true", help="the prompt is a user's chat message")
    parser.add_argument("--system", default="", help="system message of a chat")
    parser.add_argument(
        "--base-model-alias", action="append", default=[], metavar="NAME",
        help="hub id or path by which adapters call this base; repeatable",
    )  # fmt: skip
    parser.add_argument(
        "--base-model-confirmed", action="store_true",
        help="the adapters were trained on this base although they name another one",
    )  # fmt: skip
    parser.add_argument(
        "--max-saved-bytes", type=int, default=MAX_SAVED_BYTES,
        help="limit of an adapter's whole embeddings and output head",
    )  # fmt: skip
    for name, (kind, meaning) in _SAMPLING.items():
        parser.add_argument("--" + name.replace("_", "-"), type=kind, dest=name, help=meaning)
    parser.add_argument("--stop", action="append", default=[], help="stop string; repeatable")
    parser.add_argument(
        "--ignore-eos", action="store_true", help="end-of-sequence tokens do not stop"
    )
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")


def sampling_of(arguments: argparse.Namespace) -> engine_pb2.SamplingParams:
    """The fields that were given; --max-tokens is 128 here where it is not."""
    given = {name: value for name in _SAMPLING if (value := getattr(arguments, name)) is not None}
    given.setdefault("max_tokens", DEFAULT_MAX_TOKENS)
    if arguments.ignore_eos:
        given["ignore_eos"] = True
    return engine_pb2.SamplingParams(stop=arguments.stop, **given)
