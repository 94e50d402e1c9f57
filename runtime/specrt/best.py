"""What the best tokens of a row and the sum over all tell of the row, so that its values can stay where they are.

A row is left there only if the tokens are sure to be those of the whole row. Scores here are `(logit - largest) /
temperature` as in `specrt.sampling`, [K], by falling score and ascending id. That order is sure for tokens above the
last one only; others that are not listed may tie with it.
"""

import numpy as np
from numpy.typing import NDArray

from specrt.noise import gumbel, loud
from specrt.rows import Top, logsumexp_error

Ids = NDArray[np.int64]
Scores = NDArray[np.float64]
_ROUNDING = 1e-9  # of sums in float64, for which 2^20 roundings are 1e-10


def totals(top: Top, scores: Scores, *, size: int, temperature: float, cut: bool) -> tuple[float, float]:
    """Return bounds of the sum of exp(score) over all `size` tokens; with `cut`, some not listed may be left out.

    At temperature 1 the tokens that are not listed have a mass M = exp(logsumexp - largest) less that of the listed
    ones, known but for `logsumexp_error`. There are n of them, each with a mass x_j of at most x, that of the last
    listed one. At a temperature T these are x_j^a, a = 1 / T. With q = M / (n x), which is at most 1,

        sum x_j^a = x^a sum (x_j / x)^a  lies between  x^a n q  and  x^a n q^a:

    (x_j / x)^a is at most x_j / x for a > 1 and at least that for a < 1, which gives the first; the mean of powers is
    at least (a > 1) or at most (a < 1) the power of the mean, which gives the second (Jensen; Hoelder's n^(1-a) M^a).
    """
    masses = np.exp(top.logits.astype(np.float64) - float(top.logits[0]))
    num_others = max(1, size - len(scores))
    room = num_others * max(float(masses[-1]), 1e-300)  # not 0: where the last one has no mass, nothing has
    error, above = logsumexp_error(top.logsumexp), top.logsumexp - float(top.logits[0])
    low, high = (min(1.0, max(0.0, (np.exp(above + e) - masses.sum()) / room)) for e in (-error, error))
    power, known, unit = 1 / temperature, np.exp(scores).sum(), num_others * np.exp(scores[-1])
    least = known if cut else known + unit * min(low, low**power)
    return float(least) * (1 - _ROUNDING), float(known + unit * max(high, high**power)) * (1 + _ROUNDING)


def num_of_top_k(scores: Scores, top_k: int) -> int | None:
    """Return how many of a row's tokens survive top-k, if all of those are listed; ties with the last are kept."""
    if not 0 < top_k < len(scores) or scores[-1] >= scores[top_k - 1]:
        return None
    return int(np.count_nonzero(scores >= scores[top_k - 1]))


def survivors(
    scores: Scores, bounds: tuple[float, float] | None, *, top_p: float, min_p: float
) -> tuple[int, int]:  # fmt: skip
    """Return how many of the listed tokens survive top-p and min-p for sure, and how many may.

    The survivors are the first ones in the order of scores, as many as both filters leave. bounds: of the sum that
    top-p takes a part of, None without top-p. K + 1 stands for tokens that are not listed: they may survive where the
    last one's like may.
    """
    num_above, few, many = int(np.count_nonzero(scores > scores[-1])), len(scores), len(scores) + 1
    if bounds is not None:
        mass = np.cumsum(np.exp(scores))
        few, many = (int(np.searchsorted(mass, top_p * total, side="left")) + 1 for total in bounds)
    if min_p:
        num_near = int(np.count_nonzero(scores >= np.log(min_p)))
        few, many = min(few, num_near), min(many, num_near)
    return min(few, num_above), many if many <= num_above else len(scores) + 1


def is_decided(
    ids: Ids, scores: Scores, bits: NDArray[np.uint64], *, sure: int, possible: int
) -> bool:  # fmt: skip
    """Tell whether one of the `sure` first tokens has the largest score + noise of all that may survive.

    sure, possible: see `survivors`. bits: [V], see `specrt.noise.gumbel_contenders`. All noise is known: a token that
    is not listed is out where its own noise added to the last score, which is not below the token's, is too little.
    """
    values = scores + gumbel(bits[ids])
    least = float(values[:sure].max(initial=-np.inf))
    if (values[sure:possible] >= least).any():
        return False
    return possible <= len(ids) or bool(np.isin(loud(bits, least - float(scores[-1])), ids).all())
