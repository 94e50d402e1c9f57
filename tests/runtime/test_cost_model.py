"""The cost model against steps that are counted out."""

import random

import pytest

from specrt.cost_model import (
    call_seconds,
    expected_tokens,
    popular_speedup,
    seconds_per_step,
    tokens_per_step,
)

CALL_S = {2: 5.0, 4: 6.0, 6: 7.0, 10: 9.0, 16: 12.0}


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("k", [0, 1, 4, 15])
def test_independent_acceptance_gives_the_sum_of_powers(alpha: float, k: int) -> None:
    shares = [alpha ** (j + 1) for j in range(15)]
    assert tokens_per_step(shares, k) == pytest.approx(expected_tokens(alpha, k))


@pytest.mark.parametrize("k", [0, 1, 3, 5, 9, 15])
def test_steps_counted_out_one_by_one(k: int) -> None:
    rng = random.Random(0)
    steps = [(length, rng.randint(0, length)) for length in (rng.choice([0, 1, 3, 5, 9, 15]) for _ in range(500))]
    proposed = [sum(length > j for length, _ in steps) / len(steps) for j in range(15)]
    accepted = [sum(taken > j for _, taken in steps) / len(steps) for j in range(15)]
    tokens = sum(min(taken, k) + 1 for _, taken in steps) / len(steps)
    seconds = sum(0.5 + call_seconds(CALL_S, min(length, k) + 1) for length, _ in steps) / len(steps)
    assert tokens_per_step(accepted, k) == pytest.approx(tokens)
    assert seconds_per_step(proposed, CALL_S, k, 0.5) == pytest.approx(seconds)


def test_a_call_takes_the_narrowest_width_that_holds_its_rows() -> None:
    assert [call_seconds(CALL_S, rows) for rows in (1, 2, 3, 10, 11, 99)] == [5, 5, 6, 9, 12, 12]


def test_the_popular_formula_knows_neither_the_free_token_nor_the_price_of_rows() -> None:
    assert popular_speedup(0.0, 5, 0.0) == 0.0
    assert tokens_per_step([], 5) * 5.0 / seconds_per_step([], CALL_S, 5, 0.0) == 1.0
    assert popular_speedup(1.0, 15, 0.0) == 15.0
    assert tokens_per_step([1.0] * 15, 15) * 5.0 / seconds_per_step([1.0] * 15, CALL_S, 15, 0.0) == pytest.approx(
        80 / 12
    )
