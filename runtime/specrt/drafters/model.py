"""A second, cheaper model as drafter, with its own KV buffers."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specrt.acceptance import Proposal
from specrt.engine import Engine
from specrt.prefix_cache import Reuse
from specrt.rows import Row
from specrt.sampling import Sampler


class ModelDrafter:
    """Guesses with a draft engine that shares the target's vocabulary.

    Every proposal first feeds the tokens that the draft has not seen yet: one after a rejection, two after full
    acceptance, any number after steps that others drafted. Greedy and `gumbel` requests get deterministic
    guesses under the same parameters (and noise) as the target's; `rejection` requests get sampled ones with
    their laws. reuse: a prefix cache for the engine, if there is one.
    """

    name = "model"

    def __init__(self, engine: Engine, *, vocab_size: int, reuse: Reuse | None = None) -> None:
        self._engine, self._reuse = engine, reuse
        self._known = min(vocab_size, engine.vocab_size)
        self._row = np.full(vocab_size, -np.inf, np.float32)  # ids that the draft lacks stay impossible
        self._fed: list[int] = []  # what the draft's KV buffers hold
        self._agreed = 0  # so many of them are known to be the text's
        self._sampler: Sampler | None = None

    def start(self, tokens: Sequence[int], sampler: Sampler) -> None:
        """Feed the prompt but its last token, as far as the draft's KV buffers cannot have it from before."""
        prompt = list(tokens[:-1]) if len(tokens) <= self._engine.capacity else []
        known = 0
        if self._reuse is None:
            self._engine.rollback(0)
        else:
            known = self._reuse(prompt, cold_bits=_samples(sampler))
        self._engine.prefill(prompt[known:])
        self._fed, self._agreed, self._sampler = prompt, 0, sampler

    def propose(self, tokens: Sequence[int], limit: int) -> Proposal:
        """Guess up to `limit` tokens, fewer where the draft's own capacity ends."""
        assert self._sampler is not None, "start comes first"
        limit = min(limit, self._engine.capacity - len(tokens) + 1)
        if limit < 1:
            return Proposal()
        sampler, start = self._sampler, len(tokens)
        probs = np.zeros((limit, len(self._row))) if _samples(sampler) else None
        proposal: list[int] = []
        logits = self._catch_up(tokens)
        while True:
            node = len(proposal)
            row = self._widen(logits)
            if probs is None:
                token = sampler.pick(row, position=start + node)
            else:
                token = _draw(sampler, row, probs[node], start, node)
            proposal.append(token)
            if len(proposal) == limit:
                break
            sampler.push(token)
            logits = self._engine.decode(token)
            self._fed.append(token)
        return Proposal(tuple(proposal), probs)

    def _catch_up(self, tokens: Sequence[int]) -> Row:
        """Drop what was rejected, feed what is new, and return the logits [V] after the last token."""
        fed = self._fed
        while self._agreed < min(len(fed), len(tokens)) and fed[self._agreed] == tokens[self._agreed]:
            self._agreed += 1
        kept = min(self._agreed, len(tokens) - 1)
        new = list(tokens[kept:])
        self._engine.rollback(kept)
        del fed[kept:]
        fed.extend(new)
        self._agreed = len(tokens)
        if len(new) > self._engine.verify_widths[-1]:
            self._engine.prefill(new[:-1])
            new = new[-1:]
        row: Row = self._engine.decode(new[0]) if len(new) == 1 else self._engine.verify(new)[-1]
        return row

    def _widen(self, logits: Row) -> Row:
        """Return the row with one entry per target id."""
        if len(logits) == len(self._row):
            return logits
        self._row[: self._known] = np.asarray(logits)[: self._known]
        return self._row


def _samples(sampler: Sampler) -> bool:
    """Tell whether guesses are drawn from the draft's law, so that its bits decide a seed's text."""
    return sampler.params.coupling == "rejection" and sampler.params.temperature > 0


def _draw(sampler: Sampler, row: Row, probs: NDArray[np.float64], start: int, node: int) -> int:
    """Draw a token from the draft's law, which is left in `probs` [V]."""
    law = sampler.law(row)
    index = sampler.chooser.draft(law.probs, start=start, node=node)
    if law.ids is None:
        probs[:] = law.probs
        return index
    probs[law.ids] = law.probs
    return int(law.ids[index])
