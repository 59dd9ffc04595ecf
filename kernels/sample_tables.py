"""What the sampling kernels read and write: one row a seat, and the rows of one step.

Index letters: S seats, V vocabulary, N rows of logits, W words of a seat, M words of a token mask.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

#: words of a seat's row of `SeatTable.words`
(
    FLAGS,
    INVERSE_TEMPERATURE,
    TOP_P,
    MIN_P,
    REPETITION,
    PRESENCE,
    FREQUENCY,
    TOP_K,
    BANNED_UNTIL,
) = range(9)
SEAT_WORDS = 16
#: bits of FLAGS: which work a row of the seat asks for; RANKED, log probabilities, is the caller's
PENALISED, BIASED, BANNED, DRAWN, CUT, RANKED = 1, 2, 4, 8, 16, 32
#: bits of a tally: the token stands in the prompt; it may not come before BANNED_UNTIL; the times
#: it was put out count in units of ONE_OUTPUT
IN_PROMPT, MAY_NOT_COME, ONE_OUTPUT = 1, 2, 4


@dataclass(frozen=True, slots=True)
class SeatTable:
    """Everything that sampling remembers of the seats, on the device.

    Args:
        words: [S, SEAT_WORDS] int32. INVERSE_TEMPERATURE, TOP_P, MIN_P and the three penalties are
            fp32 bits; INVERSE_TEMPERATURE counts where DRAWN is set; TOP_K is 1 … V, V = all;
            BANNED_UNTIL is the first position at which MAY_NOT_COME tokens may come.
        tally: [S, V] int32 of IN_PROMPT, MAY_NOT_COME, ONE_OUTPUT; counts where PENALISED or
            BANNED is set.
        bias: [S, V] fp32, added to the logits where BIASED is set.
        last_token: [S] int32; the seat's last sampled token, 0 after a row that was not finite.
    """

    words: torch.Tensor
    tally: torch.Tensor
    bias: torch.Tensor
    last_token: torch.Tensor

    @property
    def floats(self) -> torch.Tensor:
        """[S, SEAT_WORDS] fp32: the same words, for those that hold fp32 bits."""
        return self.words.view(torch.float32)


@dataclass(frozen=True, slots=True)
class SampleRows:
    """The rows of logits that one step samples.

    Args:
        seats: [N] int32; −1 = a row of padding, for which nothing is read or written.
        positions: [N] int32; tokens of the sequence before the one to sample.
        numbers: [N] fp64 in [0, 1); where in the cumulative probability a drawn row lands.
        token_masks: [≥ 1, M] int32 or None; bit i % 32 of word i // 32: token i is allowed.
        mask_of_row: [N] int32 or None; row of token_masks, −1 = everything is allowed.
        cut: whether seats with CUT may be among them.
    """

    seats: torch.Tensor
    positions: torch.Tensor
    numbers: torch.Tensor
    token_masks: torch.Tensor | None = None
    mask_of_row: torch.Tensor | None = None
    cut: bool = True
