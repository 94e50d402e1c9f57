"""A second, cheaper model as drafter, with its own KV buffers."""

from collections.abc import Callable, Sequence

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
    their laws. token_ids: of the engine's logits, None for all tokens from 0 on. reuse: a prefix cache for the engine,
    if there is one.
    """

    name = "model"

    def __init__(
        self, engine: Engine, *, vocab_size: int, token_ids: NDArray[np.int64] | None = None, reuse: Reuse | None = None
    ) -> None:  # fmt: skip
        self._engine, self._token_ids, self._reuse = engine, token_ids, reuse
        if token_ids is None and engine.vocab_size != vocab_size:
            self._token_ids = np.arange(min(engine.vocab_size, vocab_size))
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
        return guess_chain(
            self._catch_up(tokens), self._feed, self._sampler, start=len(tokens), limit=limit, row=self._row,
            token_ids=self._token_ids,
        )  # fmt: skip

    def _feed(self, token: int) -> Row:
        """Go on with a guess; return the logits [V] after it."""
        self._fed.append(token)
        return self._engine.decode(token)

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


def guess_chain(
    logits: Row, feed: Callable[[int], Row], sampler: Sampler, *, start: int, limit: int, row: NDArray[np.float32],
    token_ids: NDArray[np.int64] | None = None,
) -> Proposal:  # fmt: skip
    """Return a chain of `limit` guesses at the tokens from position `start` on, as a model's law has it.

    logits: those at `start`. feed: returns the logits after one more guess. row: [V] of the target, with what no guess
    can be at minus infinity. token_ids: of the first logits, None for logits of all tokens.
    """
    probs = np.zeros((limit, len(row))) if _samples(sampler) else None
    guesses: list[int] = []
    while True:
        node = len(guesses)
        if token_ids is not None:
            row[token_ids] = np.asarray(logits)[: len(token_ids)]
            logits = row
        if probs is None:
            token = sampler.pick(logits, position=start + node)
        else:
            token = _draw(sampler, logits, probs[node], start, node)
        guesses.append(token)
        if len(guesses) == limit:
            return Proposal(tuple(guesses), probs)
        sampler.push(token)
        logits = feed(token)


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
