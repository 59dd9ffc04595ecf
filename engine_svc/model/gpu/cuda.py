"""Streams and events, typed."""

from __future__ import annotations

from typing import Any

import torch

#: of the stream that steps run on: what runs beside them may go before it or after it, as
#: priorities below the usual one do not exist
MAIN_PRIORITY = -1

_event: Any = torch.cuda.Event
_stream: Any = torch.cuda.Stream


def new_event(*, timing: bool = False, blocking: bool = False) -> torch.cuda.Event:
    """`blocking`: who waits for it sleeps. An event that was never recorded counts as reached."""
    event: torch.cuda.Event = _event(enable_timing=timing, blocking=blocking)
    return event


def new_stream(device: torch.device, priority: int = 0) -> torch.cuda.Stream:
    """Lower priorities are sooner; 0 is the usual one."""
    stream: torch.cuda.Stream = _stream(device, priority=priority)
    return stream
