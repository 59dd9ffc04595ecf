"""Regular expressions that strangers wrote: only those that cannot run away.

Python's matcher backtracks and cannot be interrupted, so a pattern's number of ways to match a
name is bounded before it is used: no repeat around something that itself can match in more than
one way, and a limit on the product of all choices.
"""

from __future__ import annotations

import importlib
import itertools
import re
import warnings
from typing import Any

from loraplex.status import AdapterRefused

MAX_PATTERN_CHARS = 8000
#: ways to match one name; 40 ways a repeat, so four repeats in a row and a few choices pass
MAX_WAYS = 40**4 * 64
_WAYS_OF_A_REPEAT = 40

#: operators that wrap a sequence, and where in their argument it stands
_INNER = {"SUBPATTERN": 3, "ASSERT": 1, "ASSERT_NOT": 1, "ATOMIC_GROUP": None}

_parser: Any = importlib.import_module("re._parser")


def checked_pattern(field: str, pattern: str) -> str:
    """`pattern` itself.

    Raises: AdapterRefused CONFIG_INVALID when it is no regular expression or could run away.
    """
    problem = ""
    if len(pattern) > MAX_PATTERN_CHARS:
        problem = f"is longer than {MAX_PATTERN_CHARS} characters"
    else:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                re.compile(pattern)
                ways = _ways(_parser.parse(pattern))
            if ways > MAX_WAYS:
                problem = "could match in too many ways: nest no repeats, use fewer of them"
        except (re.error, RecursionError, OverflowError) as error:
            problem = f"is no regular expression: {str(error)[:100]}"
    if problem:
        raise AdapterRefused(
            f"adapter_config.json: {field} {pattern[:200]!r} {problem}",
            reason="CONFIG_INVALID",
            metadata={"field": field, "value": pattern[:200], "limit": problem},
        )
    return pattern


def _ways(sequence: Any) -> int:
    total = 1
    for operator, argument in sequence:
        total = min(total * _ways_of(str(operator), argument), MAX_WAYS + 1)
    return total


def _ways_of(operator: str, argument: Any) -> int:
    if operator in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
        return _ways_of_repeat(*argument)
    if operator == "BRANCH":
        return _ways_of_branch(argument[1])
    if operator in _INNER:
        inner = argument if _INNER[operator] is None else argument[_INNER[operator]]
        return _ways(inner)
    return MAX_WAYS + 1 if operator.startswith("GROUPREF") else 1


def _ways_of_repeat(least: Any, most: Any, inner: Any) -> int:
    ways = _ways(inner)
    if int(most) == 1:
        return ways + (0 if int(least) else 1)
    if ways > 1:
        return MAX_WAYS + 1
    return 1 if least == most else min(_WAYS_OF_A_REPEAT, int(most) - int(least) + 1)


def _ways_of_branch(alternatives: Any) -> int:
    """Plain texts of which none begins another can match in one way only."""
    texts = [_literal(alternative) for alternative in alternatives]
    if None not in texts:
        ordered = sorted(str(text) for text in texts)
        pairs = itertools.pairwise(ordered)
        if not any(after.startswith(before) for before, after in pairs):
            return 1
    return min(sum(_ways(alternative) for alternative in alternatives), MAX_WAYS + 1)


def _literal(sequence: Any) -> str | None:
    if all(str(operator) == "LITERAL" for operator, _ in sequence):
        return "".join(chr(code) for _, code in sequence)
    return None
