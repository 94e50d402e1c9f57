"""The target's own first layers as drafter (LayerSkip, arXiv 2404.16710).

What they compute of a guess is what the target would compute of it, bit for bit: their KV goes where the target's goes,
and the call that verifies the guesses begins at the exit.
"""

from collections.abc import Sequence

import numpy as np

from specrt.acceptance import Proposal
from specrt.drafters.model import guess_chain
from specrt.engine import EarlyExit
from specrt.sampling import Sampler


class EarlyExitDrafter:
    """Guesses a chain with the layers below an exit.

    Greedy and `gumbel` requests get deterministic guesses under the same parameters (and noise) as the target's;
    `rejection` requests get sampled ones with their laws.
    """

    name = "early-exit"

    def __init__(self, below: EarlyExit, *, vocab_size: int) -> None:
        self._below = below
        self._row = np.full(vocab_size, -np.inf, np.float32)
        self._sampler: Sampler | None = None

    def start(self, tokens: Sequence[int], sampler: Sampler) -> None:
        """Take the request's sampler; the target has read the prompt."""
        self._sampler = sampler

    def propose(self, tokens: Sequence[int], limit: int) -> Proposal:
        """Guess up to `limit` tokens, fewer where the capacity ends."""
        assert self._sampler is not None, "start comes first"
        limit = min(limit, self._below.room)
        if limit < 1:
            return Proposal()
        self._below.begin()
        logits = self._below.guess(tokens[-1])
        return guess_chain(
            logits, self._below.guess, self._sampler, start=len(tokens), limit=limit, row=self._row
        )  # fmt: skip
