"""Acceptance as algebra: what is accepted and what replaces it add up to the target's law."""

import numpy as np
import pytest

from specrt.acceptance import Law, Proposal, accept, residual
from specrt.noise import Noise, Purpose, inverse_cdf
from specrt.sampling import KeyedChooser, Sampler, SamplingParams

PAIRS = {
    "random": lambda rng, v: (rng.dirichlet(np.ones(v)), rng.dirichlet(np.ones(v))),
    "sharp": lambda rng, v: (rng.dirichlet(np.full(v, 0.05)), rng.dirichlet(np.full(v, 0.05))),
    "equal": lambda rng, v: (lambda law: (law, law.copy()))(rng.dirichlet(np.ones(v))),
    "disjoint": lambda rng, v: (np.eye(v)[0] / 2 + np.eye(v)[1] / 2, np.eye(v)[2]),
    "one-hot draft": lambda rng, v: (rng.dirichlet(np.ones(v)), np.eye(v)[3]),
    "one-hot target": lambda rng, v: (np.eye(v)[2], rng.dirichlet(np.ones(v))),
    "zero where the draft is not": lambda rng, v: (
        np.r_[0.0, rng.dirichlet(np.ones(v - 1))],
        rng.dirichlet(np.ones(v)),
    ),
}


@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.parametrize("sparse", [False, True])
def test_accepted_and_residual_mass_add_up_to_the_target(kind: str, sparse: bool) -> None:
    rng = np.random.default_rng(0)
    for size in (4, 7, 50):
        target, draft = PAIRS[kind](rng, size)
        ids = np.flatnonzero(target) if sparse else None
        law = Law(ids, target[ids] if sparse else target)
        accepted = draft * np.array([min(1.0, law.of(i) / d) if d else 0.0 for i, d in enumerate(draft)])
        weights = residual(law, draft)
        replaced = np.zeros(size)
        replaced[ids if sparse else slice(None)] = weights / weights.sum()
        np.testing.assert_allclose(accepted + (1 - accepted.sum()) * replaced, target, rtol=0, atol=1e-12)


def test_a_residual_without_mass_is_the_target() -> None:
    law = np.array([0.25, 0.75])
    np.testing.assert_array_equal(residual(Law(None, law), law), law)


def test_the_law_of_a_missing_token_is_zero() -> None:
    law = Law(np.array([2, 5]), np.array([0.25, 0.75]))
    assert [law.of(i) for i in (0, 2, 3, 5, 9)] == [0, 0.25, 0, 0.75, 0]


class FixedNoise(Noise):
    def __init__(self, u: float) -> None:
        super().__init__(0, 0, vocab_size=4)
        self.u = u

    def uniform(self, purpose: Purpose, position: int, node: int = 0) -> float:
        return self.u


@pytest.mark.parametrize(("target", "draft"), [(0.1, 0.4), (0.4, 0.1), (0.3, 0.3), (1.0, 1.0)])
def test_accepts_with_probability_target_over_draft(target: float, draft: float) -> None:
    edge = min(1.0, target / draft)
    for u in (0.0, np.nextafter(edge, 0) - 1e-12, np.nextafter(1, 0)):
        assert KeyedChooser(FixedNoise(u)).accepts(target, draft, start=1, node=0) == (u < edge)


def test_a_token_the_target_excludes_is_never_accepted() -> None:
    assert not KeyedChooser(FixedNoise(0.0)).accepts(0.0, 0.5, start=1, node=0)


def test_equal_laws_accept_whatever_is_drawn() -> None:
    assert KeyedChooser(FixedNoise(np.nextafter(1, 0))).accepts(0.3, 0.3, start=1, node=0)


@pytest.mark.parametrize("u", [0.0, 0.3, 0.999999, np.nextafter(1, 0)])
def test_inverse_cdf_never_draws_weight_zero(u: float) -> None:
    weights = np.array([0.0, 0.5, 0.0, 0.5, 0.0])
    assert weights[inverse_cdf(weights, u)] > 0


def test_inverse_cdf_draws_in_proportion() -> None:
    weights = np.array([1.0, 0.0, 2.0, 1.0])
    drawn = [inverse_cdf(weights, u) for u in np.arange(1000) / 1000]
    assert [drawn.count(i) for i in range(4)] == [250, 0, 500, 250]


def test_inverse_cdf_survives_a_sum_that_rounds_beyond_the_end() -> None:
    weights = np.full(50_000, np.float64(np.float32(1 / 50_000)))
    assert inverse_cdf(weights, np.nextafter(1, 0)) == len(weights) - 1


def greedy_sampler(size: int = 4) -> Sampler:
    return Sampler(SamplingParams(), [0], vocab_size=size, end_ids=())


def one_hot_rows(*tokens: int, size: int = 4) -> np.ndarray:
    return np.eye(size, dtype=np.float32)[list(tokens)]


@pytest.mark.parametrize(
    ("proposed", "wanted", "num_accepted", "next_token"),
    [
        ((), (2,), 0, 2),
        ((1, 2, 3), (1, 2, 3, 0), 3, 0),
        ((1, 2, 3), (1, 0, 3, 0), 1, 0),
        ((1, 2, 3), (0, 2, 3, 0), 0, 0),
    ],
)
def test_greedy_accepts_the_agreeing_prefix(
    proposed: tuple[int, ...], wanted: tuple[int, ...], num_accepted: int, next_token: int
) -> None:
    verdict = accept(Proposal(proposed), one_hot_rows(*wanted), greedy_sampler(), start=1)
    assert (verdict.num_accepted, verdict.next_token) == (num_accepted, next_token)


def test_rows_after_a_rejection_are_not_looked_at() -> None:
    rows = one_hot_rows(0, 1, 2)
    rows[1:] = np.nan  # looking would raise
    assert accept(Proposal((3, 1)), rows, greedy_sampler(), start=1).num_accepted == 0


def test_exact_ties_go_to_the_lowest_id() -> None:
    rows = np.array([[0, 5, 5, 1]], np.float32)
    assert accept(Proposal(), rows, greedy_sampler(), start=1).next_token == 1
