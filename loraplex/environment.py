"""A misspelt variable of ours must not pass in silence: those that nothing reads are refused."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping

from loraplex.status import InvalidArgument

_PREFIX = "LORAPLEX_"
#: What other programs of ours read; each checks its own.
_OTHERS = ("LORAPLEX_ENGINE_", "LORAPLEX_REGISTRY_", "LORAPLEX_TEST_")
#: Kubernetes injects these for a service called loraplex or loraplex-….
_INJECTED = re.compile(r"_PORT(_|$)|_HOST$")
#: From here on two names differ by a slip of the finger: ADRESS is ADDRESS, LISTEN is not.
_SLIP = 0.92


def refuse_misspelt(environ: Mapping[str, str], address: str, known: Iterable[str]) -> None:
    """For a command that reads the variable `address`; `known` are the settings of its service.

    Raises: InvalidArgument: a LORAPLEX_ variable that no program reads, or that misspells
    `address`; the message names the nearest known one.
    """
    names = sorted({address, *known})
    for name in sorted(environ):
        if not name.startswith(_PREFIX) or name in names or _INJECTED.search(name):
            continue
        slip = difflib.get_close_matches(name, [address], n=1, cutoff=_SLIP)
        if name.startswith(_OTHERS) and not slip:
            continue
        near = (slip or difflib.get_close_matches(name, names, n=1, cutoff=0.0))[0]
        raise InvalidArgument(
            f"{name} is no variable that loraplex reads; did you mean {near}? else unset it",
            metadata={"field": name, "value": "set", "limit": near},
        )
