"""Which modules an adapter targets, and with what rank and alpha: PEFT's own rules, by name.

Names are full module names without `base_model.model.`, such as `model.layers.3.mlp.up_proj`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import TypeVar

from loraplex.adapter_format.options import MAX_PATTERNS, LoraOptions

T = TypeVar("T")


def is_target(options: LoraOptions, name: str, *, is_output_head: bool = False) -> bool:
    """Whether PEFT puts a LoRA on the module `name`; `all-linear` leaves the output head out."""
    exclude, targets = options.exclude_modules, options.target_modules
    if exclude and _named(exclude, name):
        return False
    if isinstance(targets, str) and targets.lower() == "all-linear":
        return not is_output_head
    if isinstance(targets, str) or name in targets:
        # a full name is meant as it stands, whatever layers_to_transform says
        return _named(targets, name)
    return _named(targets, name) and _in_layers(options, name)


def rank_of(options: LoraOptions, name: str) -> int:
    return _by_pattern(options.rank_pattern, name, options.r)


def alpha_of(options: LoraOptions, name: str) -> float:
    return _by_pattern(options.alpha_pattern, name, options.lora_alpha)


def _named(modules: tuple[str, ...] | str, name: str) -> bool:
    """A string is a regular expression for the whole name, a list holds names or their ends."""
    if isinstance(modules, str):
        return re.fullmatch(modules, name) is not None
    return any(name == module or name.endswith(f".{module}") for module in modules)


def _in_layers(options: LoraOptions, name: str) -> bool:
    """The first numbered part of the name is the layer."""
    if options.layers_to_transform is None:
        return True
    if not options.layers_pattern:
        found = re.match(r".*?\.[^.]*\.(?P<index>\d+)\.", name)
    else:
        tries = (
            re.match(rf"(?:^|.*?\.){pattern}\.(?P<index>\d+)\.", name)
            for pattern in options.layers_pattern
        )
        found = next((match for match in tries if match is not None), None)
    return found is not None and int(found["index"]) in options.layers_to_transform


def _by_pattern(table: Sequence[tuple[str, T]], name: str, default: T) -> T:
    """The first pattern that matches the name's end after a dot, or all of it."""
    for pattern, value in table:
        if _at_end(pattern).match(name):
            return value
    return default


@functools.lru_cache(maxsize=MAX_PATTERNS)
def _at_end(pattern: str) -> re.Pattern[str]:
    """The `re` module's own cache is too small for one pattern a module."""
    return re.compile(rf"(.*\.)?({pattern})$")
