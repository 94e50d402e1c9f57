"""A head as drafter: one layer that reads what the target computed (EAGLE, arXiv 2401.15077, 2406.16858, 2503.01840).

Row i of the head stands for token i + 1 and a feature of token i. With n committed tokens the target has features of
the first n - 1, which give the head's rows up to n - 2 and its guess at token n. Rows of guesses go on from there with
the head's own features; they are dropped when the guess is made, and the target's features take their place after the
next verify call.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from specrt.acceptance import Proposal
from specrt.engine import HeadEngine
from specrt.prefix_cache import Reuse
from specrt.sampling import Sampler

Logits = NDArray[np.float32]  # [V] of the head
_CLASSES = 5  # of confidence: what a controller learns, it learns for each


class EagleDrafter:
    """Guesses a chain with a head, or a tree.

    features: the target engine's, [S, F], which it keeps as it goes. token_ids: of the head's logits [V]. Greedy and
    `gumbel` requests get guesses under the same parameters (and noise) as the target's; `rejection` requests the most
    probable token, which no chance has a part in. reuse: a prefix cache for the head, if there is one.

    tree: of all guesses the likeliest are proposed, as in EAGLE-2, but only the best one of each place is followed: a
    call of the head per level, of one row. Following others as well brings nothing up to 15 guesses (docs/trees.md).
    """

    name = "eagle"

    def __init__(
        self, head: HeadEngine, *, features: NDArray[np.float32], token_ids: NDArray[np.int64], vocab_size: int,
        reuse: Reuse | None = None, tree: bool = False,
    ) -> None:  # fmt: skip
        self._head, self._features, self._token_ids, self._reuse = head, features, token_ids, reuse
        self._row = np.full(vocab_size, -np.inf, np.float32)  # ids that the head lacks stay impossible
        self._is_tree = tree
        self._sampler: Sampler | None = None

    def start(self, tokens: Sequence[int], sampler: Sampler) -> None:
        """Feed the prompt's rows but the last one, as far as the head cannot have them from before."""
        self._sampler = sampler
        rows = list(tokens[1:-1])
        if self._reuse is None:
            self._head.rollback(0)
        else:
            self._reuse(rows, cold_bits=False)
        known = self._head.kv_length
        if rows[known:]:
            self._head.read(rows[known:], self._features[known : len(rows)])

    def propose(self, tokens: Sequence[int], limit: int) -> Proposal:
        """Guess up to `limit` tokens; nothing after a single token, of whose past nothing was computed."""
        assert self._sampler is not None, "start comes first"
        head, known, end = self._head, self._head.kv_length, len(tokens) - 1
        limit = min(limit, head.capacity - end + 1)
        if end < 1 or limit < 1:
            return Proposal()
        logits = head.read(tokens[known + 1 :], self._features[known:end])
        found = self._tree(tokens, limit, logits) if self._is_tree else self._chain(tokens, limit, logits)
        head.rollback(end)
        return replace(found, confidence=confidence_class(found.confidence))

    def _chain(self, tokens: Sequence[int], limit: int, logits: Logits) -> Proposal:
        """Guess the best token after the best token; `logits` are those after `tokens`."""
        guesses: list[int] = []
        probability = 1.0
        while True:
            token = self._pick(logits, position=len(tokens) + len(guesses))
            guesses.append(token)
            probability *= self._head.confidence
            if len(guesses) == limit:
                return Proposal(tuple(guesses), confidence=probability ** (1 / limit))
            logits = self._feed(token)

    def _tree(self, tokens: Sequence[int], limit: int, logits: Logits) -> Proposal:
        """Guess the likeliest tokens in each place of a chain, which goes on as long as that finds likelier ones."""
        ids: list[int] = []
        parents: list[int] = []
        chances: list[float] = []
        node, depth = -1, 0
        while True:
            known, chance = len(ids), chances[node] if ids else 1.0
            for token, probability in self._likeliest(logits, limit, position=len(tokens) + depth):
                ids.append(token)
                parents.append(node)
                chances.append(chance * probability)
            best = sorted(range(len(ids)), key=lambda i: -chances[i])[:limit]
            going_on = [i for i in best[: limit - 1] if i >= known]  # what follows the last one would not be among them
            if not going_on:
                return Proposal.grown(ids, parents, chances, nodes=best)
            node, depth = going_on[0], depth + 1
            logits = self._feed(ids[node])

    def _feed(self, token: int) -> Logits:
        """Go on with a guess; return the logits after it."""
        assert self._sampler is not None
        self._sampler.push(token)
        return self._head.step(token)

    def _likeliest(self, logits: Logits, count: int, *, position: int) -> Iterator[tuple[int, float]]:
        """Return the best tokens for a position and how likely each is, by what ranks them."""
        assert self._sampler is not None
        self._row[self._token_ids] = logits
        ids, scores = self._sampler.rank(self._row, position=position)
        weights = np.exp(scores - scores[0])
        return zip(ids[:count].tolist(), (weights[:count] / weights.sum()).tolist(), strict=True)

    def _pick(self, logits: Logits, *, position: int) -> int:
        sampler = self._sampler
        assert sampler is not None
        if sampler.params.coupling == "rejection" and sampler.params.temperature > 0:
            return int(self._token_ids[logits.argmax()])  # a draw here would be the target's own
        self._row[self._token_ids] = logits
        return sampler.pick(self._row, position=position)


def confidence_class(probability: float) -> float:
    """Return the middle of the class that a head's probability belongs to, for `Proposal.confidence`."""
    return (min(int(probability * _CLASSES), _CLASSES - 1) + 0.5) / _CLASSES
