"""What the engine is measured to do, and the wait that a new request must expect by it.

The wait has two parts: for a place, the turns before the adapter's own at the length that turns
have had; in the flow's own queue, the service asked for before it, at the rate of service and the
flow's part of it as if all flows that demand now went on for ever. Nothing is predicted before it
was measured.
"""

from __future__ import annotations

from engine_svc.core.flow import Flow
from engine_svc.types import EngineLimits

_SMOOTHING = 0.1
#: a generation's length until some have ended, in tokens
_USUAL_OUTPUT = 128.0


class Rates:
    """Smoothed measurements; a pause without work is no part of any."""

    def __init__(self, limits: EngineLimits) -> None:
        self._limits = limits
        #: seconds of a step and of a turn, service a second, tokens of a generation; 0 = none yet
        self.step_s = 0.0
        self.turn_s = 0.0
        self.service_rate = 0.0
        #: of a copy into a slot, as far as the engine has seen
        self.longest_copy_s = 0.0
        self.output_tokens = _USUAL_OUTPUT
        self._last_step_s: float | None = None

    def step_planned(self, now: float, service: float) -> None:
        """A step follows another; `service` is what it will be charged."""
        if self._last_step_s is not None and now > self._last_step_s:
            seconds = now - self._last_step_s
            self.step_s = _smooth(self.step_s, seconds)
            self.service_rate = _smooth(self.service_rate, service / seconds)
        self._last_step_s = now

    def nothing_planned(self) -> None:
        self._last_step_s = None

    def turn_ended(self, seconds: float) -> None:
        """A turn that somebody waited for."""
        self.turn_s = _smooth(self.turn_s, seconds)

    def choice_ended(self, output_tokens: int) -> None:
        self.output_tokens += _SMOOTHING * (output_tokens - self.output_tokens)

    def queue_wait_s(self, flow: Flow) -> float:
        """Until what waits in the flow has been served."""
        if not flow.num_queued or not self.service_rate:
            return 0.0
        limits = self._limits
        service = (
            flow.queued_tokens * limits.prefill_price
            + flow.num_queued * self.output_tokens * limits.decode_price
        )
        return service / (self.service_rate * part_of(flow))


def part_of(flow: Flow) -> float:
    """The flow's part of the engine, if everybody who demands now goes on."""
    part = 1.0
    share = flow.share
    while share.parent is not None:
        others = share.parent.active_weight - (share.weight if share.is_active else 0.0)
        part *= share.weight / (share.weight + max(0.0, others))
        share = share.parent
    return part


def _smooth(old: float, new: float) -> float:
    return new if not old else old + _SMOOTHING * (new - old)
