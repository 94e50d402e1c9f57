"""Drafters: cheap guesses at the tokens to come. None of them can change what the target says."""

from collections.abc import Sequence
from typing import Protocol

from specrt.acceptance import Proposal
from specrt.sampling import Sampler


class Drafter(Protocol):
    """Guesses tokens for one request at a time."""

    name: str

    def start(self, tokens: Sequence[int], sampler: Sampler) -> None:
        """Begin a request with prompt `tokens`; `sampler` is the request's, for drafters that sample."""
        ...

    def propose(self, tokens: Sequence[int], limit: int) -> Proposal:
        """Guess up to `limit` >= 1 tokens after `tokens`, which only grows by commits within a request.

        Tokens pushed to the sampler's history on the way are taken back by the caller.
        """
        ...


class NoDrafter:
    """Proposes nothing: plain decoding."""

    name = "none"

    def start(self, tokens: Sequence[int], sampler: Sampler) -> None:
        """Do nothing."""

    def propose(self, tokens: Sequence[int], limit: int) -> Proposal:
        """Propose nothing."""
        return Proposal()
