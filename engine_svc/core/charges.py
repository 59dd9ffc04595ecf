"""What a step charges: service at the configured prices, to the turn and on every level of shares.

What is computed again, or was found in the prefix index, is free.
"""

from __future__ import annotations

from engine_svc.core.flow import Flow
from engine_svc.core.sequence import Sequence
from engine_svc.core.shares import Ledger, Share
from engine_svc.core.turns import Turns
from engine_svc.types import EngineLimits


class Charges:
    """Service of the plan being made."""

    def __init__(self, limits: EngineLimits, ledger: Ledger, turns: Turns) -> None:
        self._limits = limits
        self._ledger = ledger
        self._turns = turns
        self.step_service = 0.0

    def chunk(self, sequence: Sequence, end: int) -> None:
        """A chunk that names its tokens, up to position `end`."""
        start = max(sequence.num_planned, sequence.num_charged)
        if end <= start:
            return
        decoded = end - max(start, sequence.num_prompt)
        limits = self._limits
        service = (end - start) * limits.prefill_price
        if decoded > 0:
            service += decoded * (limits.decode_price - limits.prefill_price)
        sequence.num_charged = end
        self.flow(sequence.flow, service)

    def flow(self, flow: Flow, service: float) -> None:
        turn = self._turns.get(flow.lane.digest)
        assert turn is not None, "service without a turn"
        turn.service += service
        self.step_service += service
        self._ledger.charge(flow.share, service)

    def decodes(self) -> None:
        """One position of everything that decodes in the step."""
        price, accounts = self._limits.decode_price, dict[Share, float]()
        for turn in self._turns.values():
            for flow, count in turn.lane.rows.items():
                service, share, account = count * price, flow.share, flow.account
                turn.service += service
                share.counter += service / share.weight
                accounts[account] = accounts.get(account, 0.0) + service
        self.step_service += self._ledger.charge_accounts(accounts)
