"""Logit processors against transformers' own, and the history they read."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from specrt.processors import (
    History,
    add_bias,
    ban,
    min_p_ids,
    penalize_counts,
    penalize_repetition,
    top_k_ids,
    top_p_ids,
)

V = 300


def rows(count: int = 20) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.choice([0.5, 3.0, 9.0]) * rng.standard_normal(V).astype(np.float32) for _ in range(count)]


def theirs(processor: Any, row: np.ndarray, tokens: Sequence[int] = (0,)) -> np.ndarray:
    import torch

    scores = processor(torch.tensor([list(tokens)]), torch.tensor(row, dtype=torch.float64)[None])
    return np.asarray(scores[0])


def kept(scores: np.ndarray) -> list[int]:
    return np.flatnonzero(np.isfinite(scores)).tolist()


@pytest.mark.parametrize("k", [1, 2, 50, V - 1, V, V + 5])
def test_top_k_keeps_what_transformers_keeps(k: int) -> None:
    from transformers import TopKLogitsWarper

    for row in rows():
        row[10:20] = row[5]  # ties
        ids = top_k_ids(row.astype(np.float64), k)
        expected = kept(theirs(TopKLogitsWarper(k), row))
        assert (list(range(V)) if ids is None else ids.tolist()) == expected


@pytest.mark.parametrize("p", [0.01, 0.3, 0.9, 0.999])
def test_top_p_keeps_what_transformers_keeps(p: float) -> None:
    from transformers import TopPLogitsWarper

    for row in rows():
        assert top_p_ids(row.astype(np.float64), p).tolist() == kept(theirs(TopPLogitsWarper(p), row))


def test_top_p_looks_beyond_its_first_candidates() -> None:
    scores = np.linspace(0, -1e-6, 5000)
    np.testing.assert_array_equal(top_p_ids(scores, 0.9), np.arange(4500))


@pytest.mark.parametrize("p", [0.001, 0.1, 0.7, 1.0])
def test_min_p_keeps_what_transformers_keeps(p: float) -> None:
    from transformers import MinPLogitsWarper

    for row in rows():
        assert min_p_ids(row.astype(np.float64), p).tolist() == kept(theirs(MinPLogitsWarper(p), row))


@pytest.mark.parametrize("penalty", [0.5, 1.3, 10.0])
def test_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    tokens = [4, 7, 7, 250, 4]
    history = History(tokens[:2])
    for token in tokens[2:]:
        history.push(token)
    for row in rows():
        ours = row.astype(np.float64)
        penalize_repetition(ours, history, penalty)
        np.testing.assert_array_equal(ours, theirs(RepetitionPenaltyLogitsProcessor(penalty), row, tokens))


def test_bad_words_are_those_of_transformers() -> None:
    from transformers import NoBadWordsLogitsProcessor

    words = [[3], [7, 8], [1, 2, 5]]
    for tokens in ([0], [7], [9, 7], [1, 2], [1, 2, 7]):
        for row in rows(3):
            ours = row.astype(np.float64)
            ban(ours, words, History(tokens))
            np.testing.assert_array_equal(
                ours, theirs(NoBadWordsLogitsProcessor(words, eos_token_id=None), row, tokens)
            )


def test_bias_is_that_of_transformers() -> None:
    from transformers import SequenceBiasLogitsProcessor

    bias = {3: 2.5, 9: -4.0, 11: -np.inf}
    for row in rows(3):
        ours = row.astype(np.float64)
        add_bias(ours, bias)
        processor = SequenceBiasLogitsProcessor([[[token], float(value)] for token, value in bias.items()])
        np.testing.assert_allclose(ours, theirs(processor, row), rtol=1e-7)


def test_count_penalties_look_at_the_output_only() -> None:
    history = History([1, 1, 2])
    for token in (2, 5, 5):
        history.push(token)
    scores = np.zeros(8)
    penalize_counts(scores, history, frequency=0.5, presence=2.0)
    assert scores.tolist() == [0, 0, -2.5, 0, 0, -3.0, 0, 0]


def test_history_can_be_taken_back() -> None:
    rng = np.random.default_rng(1)
    history = History([3, 1, 3])
    for _ in range(300):
        before = (history.tokens.copy(), history.seen.tolist(), history.counts.tolist())
        pushed = rng.integers(0, 200, rng.integers(1, 9)).tolist()
        for token in pushed:
            history.push(token)
        for _ in pushed:
            history.pop()
        assert (history.tokens, history.seen.tolist(), history.counts.tolist()) == before
        history.push(int(rng.integers(0, 200)))


def test_history_counts_any_number_of_tokens() -> None:
    rng = np.random.default_rng(2)
    prompt, output = rng.integers(0, 500, 100).tolist(), rng.integers(0, 500, 400).tolist()
    history = History(prompt)
    for token in output:
        history.push(token)
    assert dict(zip(history.seen.tolist(), history.counts.tolist(), strict=True)) == {
        token: output.count(token) for token in {*prompt, *output}
    }
    assert history.num_output == 400
