"""Random numbers by key instead of by order: a draw depends on its purpose and position, not on earlier draws.

The generator is Philox 4x64 (Salmon et al. 2011) through NumPy's `random_raw`, whose stream is stable across
releases. The key is (seed, stream); the counter is (block, position or length, node, purpose). So discarded
proposals use nothing up, and no two purposes ever share a number.
"""

from enum import IntEnum

import numpy as np
from numpy.random import Philox
from numpy.typing import NDArray

WINDOW = 6.0  # scores within this distance of the best are always compared; any value > 0 gives the same best one


class Purpose(IntEnum):
    """What a random number is for."""

    NOISE = 0
    TOKEN = 1
    DRAFT = 2
    ACCEPT = 3


class Noise:
    """The random numbers of one request, fixed by `seed` and `stream`, both in [0, 2**64)."""

    def __init__(self, seed: int, stream: int, *, vocab_size: int) -> None:
        self._key = np.array([seed, stream], np.uint64)
        self._vocab_size = vocab_size
        self._rows: dict[int, NDArray[np.uint64]] = {}

    def row(self, position: int) -> NDArray[np.uint64]:
        """Return 64 random bits [V] for every token id at a position; kept until `forget`."""
        row = self._rows.get(position)
        if row is None:
            row = self._rows[position] = self._bits(Purpose.NOISE, position, 0).random_raw(self._vocab_size)
        return row

    def forget(self, position: int) -> None:
        """Drop kept rows before `position`."""
        for old in [p for p in self._rows if p < position]:
            del self._rows[old]

    def uniform(self, purpose: Purpose, position: int, node: int = 0) -> float:
        """Return a number in [0, 1) with 53 random bits."""
        return float(int(self._bits(purpose, position, node).random_raw()) >> 11) * 2.0**-53

    def _bits(self, purpose: Purpose, position: int, node: int) -> Philox:
        return Philox(key=self._key, counter=np.array([0, position, node, purpose], np.uint64))


def gumbel(bits: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Turn 64 random bits into standard Gumbel noise, -log(-log(1 - u)) with u in (0, 1).

    52 of the bits are used: with 53 the largest u would round to 1 and its noise to minus infinity.
    """
    u = ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    result: NDArray[np.float64] = -np.log(-np.log1p(-u))
    return result


def gumbel_argmax(scores: NDArray[np.float64], ids: NDArray[np.int64] | None, bits: NDArray[np.uint64]) -> int:
    """Return the token that maximises score + noise, the lowest id on ties (Gumbel 1954; Maddison et al. 2014).

    scores: [V], or [m] with their ascending token `ids`; the largest must be 0. bits: [V], by token id.
    """
    ids, values = gumbel_contenders(scores, ids, bits)
    return int(ids[np.argmax(values)])


def gumbel_contenders(
    scores: NDArray[np.float64], ids: NDArray[np.int64] | None, bits: NDArray[np.uint64], *, within: float = 0.0
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return ascending tokens and their score + noise: all that come `within` a distance of the best, and others.

    The other arguments are those of `gumbel_argmax`. Without ids only tokens near the top, or with noise large enough
    to reach it from below, are looked at.
    """
    if ids is None:
        near = np.flatnonzero(scores >= -WINDOW)
        least = float((scores[near] + gumbel(bits[near])).max()) - within
        ids = np.union1d(near, loud(bits, least + WINDOW))  # a score below -WINDOW needs that much to get there
        scores = scores[ids]
    return ids, scores + gumbel(bits[ids])


def loud(bits: NDArray[np.uint64], least: float) -> NDArray[np.int64]:
    """Return all tokens whose Gumbel noise is `least` or more, and perhaps some where it is less by rounding."""
    chance = -np.expm1(-np.exp(-least))  # noise is larger where u is smaller, and `least` at u = chance
    limit = min(int(chance * 2.0**64 * (1 + 1e-9)) + (1 << 13), 2**64 - 1)
    return np.flatnonzero(bits <= np.uint64(limit))


def inverse_cdf(weights: NDArray[np.float64], u: float) -> int:
    """Return the index that u in [0, 1) draws from non-negative `weights` [m], never one of weight zero."""
    cdf = np.cumsum(weights)
    index = int(np.searchsorted(cdf, u * cdf[-1], side="right"))
    if index < len(weights) and weights[index] > 0:
        return index
    return int(np.flatnonzero(weights)[-1])  # rounding put u * total at or beyond the end
