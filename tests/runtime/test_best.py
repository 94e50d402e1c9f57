"""Rows that stay where they are: what is known of them gives tokens, laws and ranks of the whole row, or nothing."""

import math
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from specrt.best import totals
from specrt.errors import RequestError
from specrt.rows import Top, logsumexp_error
from specrt.sampling import Sampler, SamplingParams

Logits = NDArray[np.float32]
TEMPERATURES = (0.3, 0.7, 1.0, 1.3, 2.0)


class TopRow:
    """A row of which the best tokens are known, those that tie in any order and choice; counts uses of the rest.

    Its logsumexp is as wrong as a device's may be.
    """

    def __init__(self, logits: Logits, rng: np.random.Generator, *, num_best: int) -> None:
        self.logits, self.num_uses = logits, 0
        order = rng.permutation(len(logits))
        ids = order[np.argsort(-logits[order], kind="stable")][:num_best]
        true = logsumexp(logits)
        off = logsumexp_error(true) * rng.choice([-0.99, 0.0, 0.99]) if math.isfinite(true) else 0.0
        self.top = Top(ids.astype(np.int64), logits[ids], true + off)

    def __len__(self) -> int:
        return len(self.logits)

    def __getitem__(self, token: int) -> float:
        return float(self.logits[token])

    def argmax(self) -> int:
        return int(self.logits.argmax())

    def __array__(self, dtype: object = None, copy: bool | None = None) -> NDArray[np.float32]:
        self.num_uses += 1
        return np.array(self.logits, dtype)  # type: ignore[call-overload, no-any-return]


def logsumexp(logits: Logits) -> float:
    wide = logits.astype(np.float64)
    with np.errstate(invalid="ignore"):
        return float(wide.max() + np.log(np.exp(wide - wide.max()).sum()))


def sampler(size: int, **params: object) -> Sampler:
    return Sampler(SamplingParams(**params), [0], vocab_size=size, end_ids=())  # type: ignore[arg-type]


def assert_as_whole(row: TopRow, **how: object) -> int:
    """Assert that token, law and ranks are those of the whole row; return how often it was looked at for the token."""
    size = len(row)
    ours, judge = sampler(size, **how), sampler(size, **how)
    assert ours.pick(row, position=5) == judge.pick(row.logits, position=5)
    uses = row.num_uses
    for known, whole in zip(ours.rank(row, position=5), judge.rank(row.logits, position=5), strict=True):
        np.testing.assert_array_equal(known, whole)
    found, wanted = ours.law(row), judge.law(row.logits)
    np.testing.assert_array_equal(found.probs, wanted.probs)
    every = np.arange(size)
    np.testing.assert_array_equal(
        every if found.ids is None else found.ids, every if wanted.ids is None else wanted.ids
    )
    return uses


FEW = ({"top_k": 3}, {"top_k": 1}, {"top_k": 5, "top_p": 0.7}, {"top_k": 4, "min_p": 0.3}, {"min_p": 0.4})
MANY: tuple[dict[str, float], ...] = (
    {},
    {"top_p": 0.7},
    {"top_k": 8},
    {"top_k": 9},
    {"min_p": 0.01, "top_p": 0.5},
    {"top_k": 2, "presence_penalty": 1},
)


@pytest.mark.parametrize("params", [*FEW, *MANY])
@pytest.mark.parametrize("levels", [2, 6, 1000])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 1e308])
def test_a_row_of_which_the_best_tokens_are_known_gives_the_same_token(
    params: dict[str, float], levels: int, temperature: float
) -> None:
    rng = np.random.default_rng(levels)
    uses = []
    for seed in range(40):
        row = TopRow((rng.integers(0, levels, 40) * np.float32(0.7)).astype(np.float32), rng, num_best=8)
        for coupling in ("gumbel", "rejection"):
            assert_as_whole(row, temperature=temperature, seed=seed, coupling=coupling, **params)
        uses.append(row.num_uses)
    if levels == 2 or "presence_penalty" in params:
        assert min(uses) > 0, "too many tie with the best"
    elif params in FEW and levels == 1000 and temperature == 1.0 and "min_p" not in params:
        assert max(uses) == 0


def rows(rng: np.random.Generator, size: int) -> Iterator[Logits]:
    """Yield peaked, flat and tied rows, and some whose other tokens are as uneven, or as even, as can be."""
    for spread in (0.3, 2.0, 5.0):
        yield spread * rng.standard_normal(size)
    yield np.full(size, 3.0)
    yield rng.integers(0, 4, size).astype(float)
    best = np.sort(rng.uniform(0, 6, 80))[::-1][: size // 2]
    for rest in (best[-1], -np.inf, best[-1] - 4, -rng.exponential(3, size - len(best))):
        row = np.full(size, rest) if np.isscalar(rest) else rest
        yield rng.permutation(np.concatenate([best, row[: size - len(best)]]))
    few = np.full(size - len(best), -np.inf)
    few[:5] = best[-1] - 1e-3
    yield rng.permutation(np.concatenate([best, few]))


def critical_top_ps(logits: Logits, temperature: float, rng: np.random.Generator) -> list[float]:
    """Return values just below and above shares of the first tokens, where bounds decide."""
    scores = np.sort((logits.astype(np.float64) - logits.max()) / temperature)[::-1]
    shares = np.cumsum(np.exp(scores)) / np.exp(scores).sum()
    near = rng.choice(shares[:70], 3) * (1 + rng.choice([-1e-3, -3e-5, -1e-12, 0, 1e-12, 3e-5, 1e-3], 3))
    return [min(float(p), 1.0) for p in (*near, *rng.uniform(0.1, 0.999, 2))]


@pytest.mark.parametrize("size", [40, 64, 65, 300, 3000])
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_every_row_gives_the_tokens_laws_and_ranks_of_the_whole_one(size: int, temperature: float) -> None:
    rng = np.random.default_rng(size)
    for seed in range(20 if size < 3000 else 4):
        for logits in rows(rng, size):
            row = TopRow(logits.astype(np.float32), rng, num_best=min(size, 64))
            for top_p in (1.0, *critical_top_ps(row.logits, temperature, rng)):
                how = {"top_p": top_p, "min_p": rng.choice([0, 0, 0.003, 0.1]), "top_k": rng.choice([0, 0, 0, 64, 70])}
                coupling = rng.choice(["gumbel", "rejection"])
                assert_as_whole(row, temperature=temperature, seed=seed, coupling=str(coupling), **how)


SURE: dict[str, dict[str, object]] = {
    "unfiltered": {},
    "hot": {"temperature": 1.3},
    "cold": {"temperature": 0.5},
    "top-p": {"top_p": 0.9, "coupling": "rejection"},
    "top-p, hot": {"top_p": 0.9, "temperature": 1.3, "coupling": "rejection"},
    "top-p, cold": {"top_p": 0.9, "temperature": 0.5, "coupling": "rejection"},
    "top-p, min-p": {"top_p": 0.9, "min_p": 0.05, "coupling": "rejection"},
    "top-p, wide top-k": {"top_p": 0.9, "top_k": 100, "coupling": "rejection"},
    "min-p, wide top-k": {"min_p": 0.05, "top_k": 100, "coupling": "rejection"},
    "min-p where top-p leaves all": {"top_p": 0.9999999, "min_p": 0.05, "coupling": "rejection"},
}
UNSURE: dict[str, dict[str, object]] = {
    "rejection": {"coupling": "rejection"},
    "top-p of many": {"top_p": 1 - 1e-9, "coupling": "rejection"},
    "min-p of many": {"min_p": 1e-12, "coupling": "rejection"},
    "wide top-k": {"top_k": 64, "coupling": "rejection"},
    "a penalty": {"repetition_penalty": 1.1},
}


@pytest.mark.parametrize("name", [*SURE, *UNSURE])
def test_rows_stay_where_they_are_if_that_can_be(name: str) -> None:
    rng = np.random.default_rng(1)
    how: dict[str, object] = {"temperature": 1.0, **(SURE | UNSURE)[name]}
    uses = []
    for seed in range(30):
        peaked = np.concatenate([rng.uniform(0, 4, 12), rng.normal(-18, 0.5, 988)]).astype(np.float32)
        uses.append(assert_as_whole(TopRow(rng.permutation(peaked), rng, num_best=64), seed=seed, **how))
    assert uses == [name in UNSURE] * 30


def test_flat_rows_are_looked_at_where_the_noise_of_others_may_reach() -> None:
    rng = np.random.default_rng(2)
    uses = []
    for seed in range(200):
        row = np.concatenate([rng.uniform(3, 4, 20), rng.uniform(-3, -1, 980)]).astype(np.float32)
        uses.append(assert_as_whole(TopRow(row, rng, num_best=64), temperature=1.0, seed=seed))
    assert 20 < sum(uses) < 180


def test_noise_alone_decides_among_those_that_top_p_may_leave() -> None:
    """At a high temperature bounds of the sum are far apart: how many are left is open, the token is not."""
    rng = np.random.default_rng(3)
    uses: dict[str, int] = {"gumbel": 0, "rejection": 0}
    for seed in range(100):
        row = np.concatenate([rng.uniform(0, 3, 30), rng.normal(-9, 1, 970)]).astype(np.float32)
        for coupling in uses:
            how = {"temperature": 1.6, "top_p": 0.95, "seed": seed, "coupling": coupling}
            uses[coupling] += assert_as_whole(TopRow(row, rng, num_best=64), **how)
    assert uses["gumbel"] < 30 < 70 < uses["rejection"]


@pytest.mark.parametrize("temperature", [1e-300, *TEMPERATURES, 1e308])
def test_the_sum_at_any_temperature_lies_between_its_bounds_which_are_reached(temperature: float) -> None:
    rng = np.random.default_rng(4)
    best = np.sort(rng.uniform(0, 2, 64))[::-1].astype(np.float32)
    even = np.full(500, best[-1] - 3, np.float32)  # Jensen's case
    uneven = np.where(np.arange(500) < 25, best[-1], -np.inf).astype(np.float32)  # the other
    widths = {}
    for name, rest in (("even", even), ("uneven", uneven), ("any", best[-1] - rng.exponential(2, 500))):
        logits = np.concatenate([best, rest]).astype(np.float32)
        scores = (logits.astype(np.float64) - float(logits[0])) / temperature
        true = np.exp(scores).sum()
        for off in (-1, 0, 1):
            said = logsumexp(logits) + off * logsumexp_error(logsumexp(logits))
            top = Top(np.arange(64), best, said)
            low, high = totals(top, scores[:64], size=564, temperature=temperature, cut=False)
            assert low <= true <= high
            assert totals(top, scores[:64], size=564, temperature=temperature, cut=True)[0] < np.exp(scores[:64]).sum()
        widths[name] = (true / low - 1, high / true - 1)
    if temperature in TEMPERATURES:
        first, second = (0, 1) if temperature < 1 else (1, 0)
        assert widths["even"][first] < 3e-3
        assert widths["uneven"][second] < 3e-3


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 90])
def test_rows_that_hold_no_numbers_are_looked_at(bad: float, place: int) -> None:
    rng = np.random.default_rng(5)
    for params in ({"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.5}, {}):
        logits = np.linspace(9, -9, 100).astype(np.float32)
        logits[place] = bad
        row = TopRow(logits, rng, num_best=64)
        if bad == -np.inf:
            assert_as_whole(row, temperature=1.0, **params)
            continue
        with pytest.raises(RequestError, match="no token is left"):
            sampler(100, temperature=1.0, **params).pick(row, position=1)
        assert row.num_uses == 1
