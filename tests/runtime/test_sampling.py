"""Rows of logits to tokens: the law, the couplings, and the parameters' limits."""

import dataclasses

import numpy as np
import pytest

from parts import chi_square, chi_square_limit
from specrt.errors import RequestError
from specrt.sampling import Sampler, SamplingParams, log_probabilities

ROW = np.array([2.0, 1.0, 0.5, 0.0, -1.0, -3.0], np.float32)
WIDE = ROW.astype(np.float64)


def sampler(prompt: tuple[int, ...] = (0,), end_ids: tuple[int, ...] = (), size: int = 6, **params: object) -> Sampler:
    return Sampler(SamplingParams(**params), list(prompt), vocab_size=size, end_ids=end_ids)  # type: ignore[arg-type]


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


LAWS: dict[str, tuple[dict[str, object], np.ndarray]] = {
    "plain": ({}, softmax(WIDE)),
    "hot": ({"temperature": 2.5}, softmax(WIDE / 2.5)),
    "cold": ({"temperature": 0.3}, softmax(WIDE / 0.3)),
    "top-k": ({"top_k": 2}, softmax(np.where(WIDE >= 1, WIDE, -np.inf))),
    "top-p": ({"top_p": 0.7}, softmax(np.where(WIDE >= 1, WIDE, -np.inf))),
    "min-p": ({"min_p": 0.3}, softmax(np.where(WIDE >= 1, WIDE, -np.inf))),
    "bias": ({"logit_bias": {5: 4.0}}, softmax(WIDE + 4 * np.eye(6)[5])),
    "banned": ({"bad_words": ((0,),)}, softmax(np.where(WIDE == 2, -np.inf, WIDE))),
    "penalty": ({"repetition_penalty": 2.0}, softmax(WIDE - np.eye(6)[0])),
    "k then p": ({"top_k": 3, "top_p": 0.7, "temperature": 2.0}, softmax(np.where(WIDE >= 1, WIDE, -np.inf) / 2)),
}  # fmt: skip


@pytest.mark.parametrize("name", LAWS)
def test_the_law_is_that_of_the_parameters(name: str) -> None:
    params, expected = LAWS[name]
    law = sampler(**{"temperature": 1.0, **params}).law(ROW)
    full = np.zeros(6)
    full[slice(None) if law.ids is None else law.ids] = law.probs
    np.testing.assert_allclose(full, expected, atol=1e-12)


@pytest.mark.parametrize("coupling", ["gumbel", "rejection"])
@pytest.mark.parametrize("name", LAWS)
def test_picked_tokens_follow_the_law_over_seeds(name: str, coupling: str) -> None:
    params, expected = LAWS[name]
    counts = np.zeros(6)
    for seed in range(3000):
        one = sampler(**{"temperature": 1.0, "seed": seed, "coupling": coupling, **params})
        counts[one.pick(ROW, position=1)] += 1
    assert not counts[expected == 0].any()
    statistic, degrees = chi_square(counts[expected > 0], 3000 * expected[expected > 0])
    assert statistic < chi_square_limit(max(1, degrees))


@pytest.mark.parametrize("coupling", ["gumbel", "rejection"])
def test_two_positions_of_one_seed_are_independent(coupling: str) -> None:
    law = softmax(WIDE)
    counts = np.zeros((6, 6))
    for seed in range(4000):
        one = sampler(temperature=1.0, seed=seed, coupling=coupling)
        counts[one.pick(ROW, position=3), one.pick(ROW, position=4)] += 1
    statistic, degrees = chi_square(counts.ravel(), 4000 * np.outer(law, law).ravel())
    assert statistic < chi_square_limit(degrees)


@pytest.mark.parametrize("coupling", ["gumbel", "rejection"])
def test_seed_and_stream_decide(coupling: str) -> None:
    def text(**key: int) -> list[int]:
        one = sampler(temperature=1.5, coupling=coupling, **key)
        return [one.pick(ROW, position=p) for p in range(40)]

    assert text(seed=1) == text(seed=1)
    assert len({tuple(text(seed=s, stream=t)) for s in range(3) for t in range(3)}) == 9


def test_noise_belongs_to_token_ids_not_to_ranks() -> None:
    whole = sampler(temperature=1.0, seed=3)
    for position in range(50):
        row = np.random.default_rng(position).standard_normal(6).astype(np.float32)
        pick = whole.pick(row, position=position)
        banned = tuple((i,) for i in range(6) if i not in (pick, (pick + 1) % 6))
        assert sampler(temperature=1.0, seed=3, bad_words=banned).pick(row, position=position) == pick


def test_temperature_zero_is_the_lowest_best_id_in_every_coupling() -> None:
    row = np.array([0, 7, 7, 1], np.float32)
    for coupling in ("gumbel", "rejection"):
        one = sampler(size=4, coupling=coupling)
        assert one.pick(row, position=1) == 1
        assert (one.law(row).ids, one.law(row).probs) == (np.array([1]), np.array([1.0]))


def test_a_tiny_temperature_stays_finite() -> None:
    assert sampler(temperature=1e-38).pick(np.array([20, 19], np.float32).repeat(3), position=0) in (0, 1, 2)


def test_end_tokens_are_excluded_until_min_tokens() -> None:
    one = sampler(end_ids=(0, 1), min_tokens=2)
    assert one.pick(ROW, position=1) == 2
    one.push(2)
    assert one.pick(ROW, position=2) == 2
    one.push(2)
    assert one.pick(ROW, position=3) == 0


def test_processors_see_the_rows_own_prefix() -> None:
    one = sampler(bad_words=((4, 0),))
    assert one.pick(ROW, position=1) == 0
    one.push(4)
    assert one.pick(ROW, position=2) == 1
    one.rewind(1)
    assert one.pick(ROW, position=1) == 0


def test_the_logits_are_not_changed() -> None:
    row = ROW.copy()
    for coupling in ("gumbel", "rejection"):
        sampler(temperature=0.7, top_p=0.9, logit_bias={1: 3.0}, coupling=coupling).pick(row, position=1)
    np.testing.assert_array_equal(row, ROW)


@pytest.mark.parametrize("row", [[np.nan] * 6, [np.inf, 0, 0, 0, 0, 0], [-np.inf] * 6])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_a_best_number_are_an_error(row: list[float], temperature: float) -> None:
    with pytest.raises(RequestError, match="no token is left"):
        sampler(temperature=temperature).pick(np.array(row, np.float32), position=1)


def test_forbidding_every_token_is_an_error() -> None:
    with pytest.raises(RequestError, match="no token is left"):
        sampler(bad_words=tuple((i,) for i in range(6))).pick(ROW, position=1)


def test_log_probabilities_are_those_of_the_model() -> None:
    np.testing.assert_allclose(np.exp(log_probabilities(ROW)), softmax(WIDE), rtol=1e-12)


BAD: dict[str, list[object]] = {
    "temperature": [-0.1, float("nan"), float("inf")],
    "top_k": [-1],
    "top_p": [0.0, 1.1, -0.5, float("nan")],
    "min_p": [-0.1, 1.1],
    "repetition_penalty": [0.0, -1.0, float("inf")],
    "frequency_penalty": [float("nan")],
    "presence_penalty": [float("inf")],
    "logit_bias": [{1: float("nan")}, {1: float("inf")}],
    "bad_words": [((),)],
    "min_tokens": [-1],
    "max_tokens": [-1],
    "stop": [("",)],
    "seed": [-1, 2**64],
    "stream": [-1, 2**64],
    "logprobs": [-1, 65],
    "coupling": ["other"],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_impossible_values_are_named(name: str, value: object) -> None:
    with pytest.raises(RequestError, match=f"^{name}: expected"):
        SamplingParams(**{name: value})  # type: ignore[arg-type]


def test_every_parameter_with_a_limit_is_tested() -> None:
    free = {"stop_token_ids", "ignore_eos"}
    assert {field.name for field in dataclasses.fields(SamplingParams)} == set(BAD) | free


RANKED: dict[str, dict[str, object]] = {
    "greedy": {},
    "greedy, penalties": {"repetition_penalty": 1.5, "presence_penalty": 0.4},
    "gumbel": {"temperature": 0.9},
    "gumbel, filters": {"temperature": 1.3, "top_k": 5, "top_p": 0.9},
    "gumbel, penalties": {"temperature": 0.7, "frequency_penalty": 0.8, "logit_bias": {3: 1.0}},
}


@pytest.mark.parametrize("name", RANKED)
def test_ranked_tokens_are_what_pick_takes_once_those_before_are_gone(name: str) -> None:
    rng = np.random.default_rng(0)
    for seed in range(20):
        row = (2 * rng.standard_normal(30)).astype(np.float32)
        subject = sampler((1, 4, 4), size=30, seed=seed, **RANKED[name])
        ids, scores = subject.rank(row, position=3)
        assert len(set(ids.tolist())) == len(ids) == len(scores)
        assert (np.diff(scores) <= 0).all()
        assert ids[0] == subject.pick(row, position=3)
        if "filters" in name:
            continue  # which fill up again
        for index in range(1, min(4, len(ids))):
            row[ids[index - 1]] = -np.inf
            assert ids[index] == subject.pick(row, position=3)


def test_the_draw_of_rejection_has_no_part_in_a_ranking() -> None:
    row = np.random.default_rng(1).standard_normal(30).astype(np.float32)
    expected = np.argsort(-row, kind="stable")
    for seed in range(5):
        subject = sampler(size=30, seed=seed, temperature=0.8, coupling="rejection")
        ids, _ = subject.rank(row, position=seed)
        np.testing.assert_array_equal(ids, expected[: len(ids)])
        assert subject.law(row).of(int(ids[0])) == max(subject.law(row).probs)


def test_ties_are_ranked_by_the_lowest_id_and_far_tokens_are_left_out() -> None:
    row = np.array([1.0, 3.0, 3.0, -9.0, 3.0, -np.inf], np.float32)
    for params in ({}, {"temperature": 1.0, "coupling": "rejection"}):
        ids, _ = sampler(**params).rank(row, position=1)
        assert ids.tolist() == [1, 2, 4, 0]


def test_nothing_is_ranked_where_no_token_is_left() -> None:
    for params in ({}, {"temperature": 1.0}, {"temperature": 1.0, "coupling": "rejection"}):
        with pytest.raises(RequestError, match="no token is left"):
            sampler(**params).rank(np.full(6, -np.inf, np.float32), position=1)
