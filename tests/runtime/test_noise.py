"""Keyed random numbers: stable, distinct by key, and used as the formulas say."""

import itertools

import numpy as np
import pytest

from parts import chi_square, chi_square_limit
from specrt.noise import Noise, Purpose, gumbel, gumbel_argmax, gumbel_best, largest


def test_bits_are_those_of_every_release() -> None:
    noise = Noise(1, 2, vocab_size=8)
    assert noise.row(7)[:3].tolist() == [11933601453384242243, 16031377991651376668, 12637492203337944180]
    assert noise.uniform(Purpose.TOKEN, 7) == 0.28891975112976465


def test_every_key_has_its_own_number() -> None:
    keys = list(itertools.product((0, 1), (0, 1), list(Purpose)[1:], (0, 1, 2, 300), (0, 1, 2)))
    numbers = [Noise(s, t, vocab_size=4).uniform(p, a, b) for s, t, p, a, b in keys]
    rows = [Noise(s, t, vocab_size=4).row(a).tolist() for s in (0, 1) for t in (0, 1) for a in (0, 1, 2, 300)]
    assert len(set(numbers)) == len(keys)
    assert len({value for row in rows for value in row}) == 4 * len(rows)


def test_a_row_is_the_same_for_every_vocabulary_size() -> None:
    np.testing.assert_array_equal(Noise(3, 0, vocab_size=10).row(5), Noise(3, 0, vocab_size=1000).row(5)[:10])


def test_rows_are_kept_until_forgotten() -> None:
    noise = Noise(0, 0, vocab_size=4)
    rows = [noise.row(position) for position in (3, 4, 5)]
    noise.forget(5)
    assert noise.row(5) is rows[2]
    assert noise.row(4) is not rows[1]
    np.testing.assert_array_equal(noise.row(4), rows[1])


def test_gumbel_noise_is_finite_at_the_ends() -> None:
    assert np.isfinite(gumbel(np.array([0, 2**64 - 1], np.uint64))).all()


def test_gumbel_noise_has_the_gumbel_law() -> None:
    values = gumbel(np.concatenate([Noise(0, 0, vocab_size=4096).row(p) for p in range(16)]))
    cdf = np.exp(-np.exp(-values))
    counts = np.histogram(cdf, bins=20, range=(0, 1))[0]
    statistic, degrees = chi_square(counts, [len(values) / 20] * 20)
    assert statistic < chi_square_limit(degrees)


@pytest.mark.parametrize("spread", [0.01, 1.0, 5.0, 40.0])
def test_looking_at_few_tokens_gives_the_full_argmax(spread: float) -> None:
    rng = np.random.default_rng(0)
    size = 2000
    for position in range(300):
        scores = spread * rng.standard_normal(size)
        scores -= scores.max()
        bits = Noise(0, 0, vocab_size=size).row(position)
        full = int(np.argmax(scores + gumbel(bits)))
        assert gumbel_argmax(scores, None, bits) == full
        ordered = np.argsort(-(scores + gumbel(bits)), kind="stable").tolist()
        assert gumbel_best(scores, None, bits, count=7) == ordered[:7]
        assert gumbel_best(scores, np.arange(size), bits, count=1) == [full]
        assert gumbel_argmax(scores, np.arange(size), bits) == full


def test_a_far_token_wins_with_enough_noise() -> None:
    scores = np.array([0.0, -30.0])
    bits = np.array([2**63, 0], np.uint64)  # the largest noise there is, on the far token
    assert gumbel_argmax(scores, None, bits) == 1


def test_ties_go_to_the_lowest_id() -> None:
    bits = np.full(4, 12345, np.uint64)
    assert gumbel_argmax(np.array([-1.0, 0.0, 0.0, -2.0]), None, bits) == 1
    assert gumbel_argmax(np.array([0.0, 0.0]), np.array([5, 9]), np.full(10, 7, np.uint64)) == 5
    assert gumbel_best(np.array([-1.0, 0.0, 0.0, -2.0]), None, bits, count=3) == [1, 2, 0]


def test_the_largest_values_are_finite_and_in_order() -> None:
    values = np.array([1.0, -np.inf, 3.0, 1.0, 3.0, 0.0, -np.inf])
    for count, wanted in ((1, [2]), (2, [2, 4]), (3, [2, 4, 0]), (5, [2, 4, 0, 3, 5]), (9, [2, 4, 0, 3, 5])):
        assert largest(values, count).tolist() == wanted
    assert largest(np.full(3, -np.inf), 2).tolist() == []
