"""Parallel heads as drafter: each guesses another of the next tokens from one feature (Medusa, arXiv 2401.10774).

With n committed tokens the target has features of the first n - 1. That of token n - 2 is what the target itself said
token n - 1 from; head 0 says token n from it, head 1 token n + 1, and so on. No head knows what the others say, so
that the ranked guesses of each are the same under every branch of a tree; and there is nothing to keep between steps.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specrt.acceptance import Proposal
from specrt.drafters.eagle import confidence_class
from specrt.engine import ParallelHeads
from specrt.sampling import Sampler


class MedusaDrafter:
    """Guesses with parallel heads, in one call of them: a chain, or a tree where there is one.

    features: the target engine's, [S, F], which it keeps as it goes. token_ids: of the heads' logits [V]. tree: see
    `specrt_profiles.drafter.DrafterSpec`; its first `limit` nodes are guessed, those of the first branch first.
    Greedy and `gumbel` requests get the guesses that are best under the same parameters (and noise) as the target's;
    parameters that look at earlier tokens see the best guess at each. `rejection` requests get the most probable
    tokens, in which no chance has a part.
    """

    name = "medusa"

    def __init__(
        self, heads: ParallelHeads, *, features: NDArray[np.float32], token_ids: NDArray[np.int64], vocab_size: int,
        tree: Sequence[tuple[int, ...]] | None = None,
    ) -> None:  # fmt: skip
        self._heads, self._features, self._token_ids = heads, features, token_ids
        chain = [(0,) * depth for depth in range(1, heads.num_heads + 1)]
        self._nodes = chain if tree is None else [node for node in tree if len(node) <= heads.num_heads]
        self._row = np.full(vocab_size, -np.inf, np.float32)  # ids that the heads lack stay impossible
        self._sampler: Sampler | None = None

    def start(self, tokens: Sequence[int], sampler: Sampler) -> None:
        """Take the request's sampler; there is nothing to feed."""
        self._sampler = sampler

    def propose(self, tokens: Sequence[int], limit: int) -> Proposal:
        """Guess up to `limit` tokens; nothing after a single token, of whose past nothing was computed."""
        if len(tokens) < 2 or limit < 1:
            return Proposal()
        nodes = sorted(self._nodes[:limit])  # branch by branch
        ranked = self._ranked(self._heads.guess(self._features[len(tokens) - 2]), nodes, position=len(tokens))
        places: dict[tuple[int, ...], int] = {(): -1}
        ids: list[int] = []
        parents: list[int] = []
        for node in nodes:
            guesses = ranked[len(node) - 1]
            if node[:-1] in places and node[-1] < len(guesses):
                places[node] = len(ids)
                ids.append(guesses[node[-1]])
                parents.append(places[node[:-1]])
        is_chain = parents == list(range(-1, len(ids) - 1))
        depth = max(map(len, places))
        probability = float(self._heads.confidence[:depth].prod(dtype=np.float64))
        return Proposal(
            tuple(ids), parents=None if is_chain else tuple(parents),
            confidence=confidence_class(probability ** (1 / depth)),
        )  # fmt: skip

    def _ranked(
        self, logits: NDArray[np.float32], nodes: Sequence[tuple[int, ...]], *, position: int
    ) -> list[list[int]]:
        """Return as many guesses of each head [M, V] as `nodes` take of it, the best first."""
        sampler, found = self._sampler, list[list[int]]()
        assert sampler is not None, "start comes first"
        for depth in range(max(map(len, nodes))):
            count = 1 + max(node[depth] for node in nodes if len(node) > depth)
            self._row[self._token_ids] = logits[depth]
            ids, _ = sampler.rank(self._row, position=position + depth)
            found.append(ids[:count].tolist())
            sampler.push(found[-1][0])
        return found
