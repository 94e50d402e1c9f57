"""Random numbers by key instead of by order: a draw depends on its purpose and position, not on earlier draws.

The generator is Philox 4x64 (Salmon et al. 2011) through NumPy's `random_raw`, whose stream is stable across
releases. The key is (seed, stream); the counter is (block, position or length, node, purpose). So discarded
proposals use nothing up, and no two purposes ever share a number.
"""

from enum import IntEnum
from typing import Any

import numpy as np
from numpy.random import Philox
from numpy.typing import NDArray

_WINDOW = 6.0  # scores within this distance of the best are always compared; any value > 0 gives the same answer


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

    scores: [V], or [m] with their ascending token `ids`; the largest must be 0. bits: [V], by token id. Without
    ids only those near the top, or with noise large enough to reach it from below, are looked at; the answer is
    the same.
    """
    if ids is None:
        near = np.flatnonzero(scores >= -_WINDOW)
        best = float((scores[near] + gumbel(bits[near])).max())
        # A score below -_WINDOW wins only with noise above best + _WINDOW, that is with u < chance.
        chance = -np.expm1(-np.exp(-(best + _WINDOW)))
        limit = min(int(chance * 2.0**64 * (1 + 1e-9)) + (1 << 13), 2**64 - 1)
        far = np.flatnonzero(bits <= np.uint64(limit))
        ids = np.union1d(near, far)
        scores = scores[ids]
    return int(ids[np.argmax(scores + gumbel(bits[ids]))])


def gumbel_best(
    scores: NDArray[np.float64], ids: NDArray[np.int64] | None, bits: NDArray[np.uint64], *, count: int
) -> list[int]:
    """Return the `count` tokens with the largest score + noise, falling; the first is that of `gumbel_argmax`.

    Fewer where fewer have a finite score. Arguments as there.
    """
    known = np.flatnonzero(scores > -np.inf)
    tokens = known if ids is None else ids[known]
    found: list[int] = tokens[largest(scores[known] + gumbel(bits[tokens]), count)].tolist()
    return found


def largest(values: NDArray[Any], count: int) -> NDArray[np.int64]:
    """Return the indices of the `count` largest finite values [m], falling, the lowest first on ties."""
    known = np.flatnonzero(values > -np.inf)
    kept = values[known]
    if count < len(kept):
        limit = np.partition(kept, -count)[-count]
        known, kept = known[kept >= limit], kept[kept >= limit]
    found: NDArray[np.int64] = known[np.argsort(-kept, kind="stable")[:count]]
    return found


def inverse_cdf(weights: NDArray[np.float64], u: float) -> int:
    """Return the index that u in [0, 1) draws from non-negative `weights` [m], never one of weight zero."""
    cdf = np.cumsum(weights)
    index = int(np.searchsorted(cdf, u * cdf[-1], side="right"))
    if index < len(weights) and weights[index] > 0:
        return index
    return int(np.flatnonzero(weights)[-1])  # rounding put u * total at or beyond the end
