"""The loop over toy engines: the same output with speculation on and off, bookkeeping, edges, faults."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from parts import TREE, ListDrafter, chi_square, chi_square_limit, make_loop, medusa, run
from specrt.drafters import Drafter
from specrt.drafters.combined import CombinedDrafter, SureController
from specrt.drafters.model import ModelDrafter
from specrt.drafters.ngram import NgramDrafter
from specrt.drafters.suffix import SuffixCache, SuffixDrafter
from specrt.errors import RequestError
from specrt.sampling import Sampler
from toy import RowDependentEngine, ToyEngine, hashed_logits

V = 5
KS = (1, 3, 5, 9, 15)


def good(tokens: Sequence[int], limit: int) -> list[int]:
    """What the target would say, greedily."""
    guess: list[int] = []
    for _ in range(limit):
        guess.append(int(np.argmax(hashed_logits([*tokens, *guess], V))))
    return guess


def bad(tokens: Sequence[int], limit: int) -> list[int]:
    """Never what the target would say, greedily."""
    return [(token + 1) % V for token in good(tokens, limit)]


def half(tokens: Sequence[int], limit: int) -> list[int]:
    """Right at first, wrong later."""
    guess = good(tokens, limit)
    return [token if i < len(tokens) % 4 else (token + 2) % V for i, token in enumerate(guess)]


def ragged(tokens: Sequence[int], limit: int) -> list[int]:
    """As many tokens as it likes, sometimes none."""
    return good(tokens, limit)[: len(tokens) % (limit + 1)]


def smaller_engine() -> ToyEngine:
    return ToyEngine(V - 1, logits=lambda prefix: hashed_logits(prefix, V)[: V - 1])


def suffix(*, warm: bool = False) -> SuffixDrafter:
    """Return a suffix drafter; a warm one knows what the target says to some prompts."""
    cache = SuffixCache()
    for prompt in ([0, 1], [2], [1, 2, 3]) if warm else ():
        cache.add([*prompt, *good(prompt, 20)])
    return SuffixDrafter(widths=(2, 4, 6, 10, 16), cache=cache)


def combined(*, salt: int, size: int = V) -> CombinedDrafter:
    return CombinedDrafter(
        suffix(warm=size == V), ModelDrafter(ToyEngine(size, salt=salt), vocab_size=size), SureController(15)
    )


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "good": lambda: ListDrafter(good),
    "bad": lambda: ListDrafter(bad),
    "half": lambda: ListDrafter(half),
    "ragged": lambda: ListDrafter(ragged),
    "ngram": NgramDrafter,
    "suffix": suffix,
    "warm suffix": lambda: suffix(warm=True),
    "same model": lambda: ModelDrafter(ToyEngine(V), vocab_size=V),
    "other model": lambda: ModelDrafter(ToyEngine(V, salt=9), vocab_size=V),
    "smaller vocabulary": lambda: ModelDrafter(smaller_engine(), vocab_size=V),
    "larger vocabulary": lambda: ModelDrafter(ToyEngine(V + 3), vocab_size=V),
    "combined": lambda: combined(salt=9),
    "combined, same model": lambda: combined(salt=0),
    "medusa": lambda: medusa(V),
    "medusa, a tree": lambda: medusa(V, tree=TREE),
    "medusa, another model": lambda: medusa(V, tree=TREE, salt=9),
    "short context": lambda: ModelDrafter(ToyEngine(V, capacity=12), vocab_size=V),
}


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("name", DRAFTERS)
def test_greedy_output_does_not_depend_on_the_drafter(name: str, k: int) -> None:
    plain, _, _ = run(ToyEngine(V), max_tokens=40)
    speculative, loop, _ = run(ToyEngine(V), DRAFTERS[name](), k=k, max_tokens=40)
    assert speculative == plain
    assert not loop.stats.num_drafter_faults or name == "smaller vocabulary"


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("name", DRAFTERS)
def test_one_seed_gives_one_text(name: str, k: int) -> None:
    sampled = {"temperature": 0.9, "top_k": 4, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "max_tokens": 30}
    for seed in range(12):
        plain, _, _ = run(ToyEngine(V), seed=seed, **sampled)
        assert run(ToyEngine(V), DRAFTERS[name](), k=k, seed=seed, **sampled)[0] == plain


@pytest.mark.parametrize(
    "name",
    ["good", "bad", "half", "ragged", "ngram", "suffix", "warm suffix", "medusa", "medusa, a tree"],
)
def test_rejection_with_drafts_that_are_not_sampled_gives_one_text(name: str) -> None:
    sampled = {"temperature": 0.9, "coupling": "rejection", "max_tokens": 30}
    for seed in range(12):
        texts = {tuple(run(ToyEngine(V), DRAFTERS[name](), k=k, seed=seed, **sampled)[0]) for k in (0, *KS)}
        assert len(texts) == 1


def joint_law(size: int, length: int, temperature: float) -> np.ndarray:
    """Return the exact law of the first tokens after the prompt (0, 1)."""
    law = np.zeros([size] * length)
    for text in np.ndindex(*law.shape):
        p = 1.0
        for i, token in enumerate(text):
            scores = hashed_logits([0, 1, *text[:i]], size).astype(np.float64) / temperature
            weights = np.exp(scores - scores.max())
            p *= weights[token] / weights.sum()
        law[text] = p
    return law


@pytest.mark.parametrize("coupling", ["gumbel", "rejection"])
@pytest.mark.parametrize("k", [0, 1, 2, 5])
@pytest.mark.parametrize("name", ["same model", "other model", "suffix", "warm suffix", "combined", "medusa"])
def test_the_joint_law_of_three_tokens_is_the_targets(coupling: str, k: int, name: str) -> None:
    size, runs = 3, 2500
    law = joint_law(size, 3, 0.8)
    counts = np.zeros(law.shape)
    cache = SuffixCache(limit=60)
    makers: dict[str, Callable[[], Drafter]] = {
        "same model": lambda: ModelDrafter(ToyEngine(size), vocab_size=size),
        "other model": lambda: ModelDrafter(ToyEngine(size, salt=9), vocab_size=size),
        "suffix": lambda: SuffixDrafter(widths=(2, 4, 6)),
        "warm suffix": lambda: SuffixDrafter(widths=(2, 4, 6), cache=cache),
        "combined": lambda: combined(salt=9, size=size),
        "medusa": lambda: medusa(size, tree=TREE),
    }
    for seed in range(runs):
        drafter = makers[name]()
        ids, _, _ = run(ToyEngine(size), drafter, k=k, seed=seed, coupling=coupling, temperature=0.8, max_tokens=3)
        counts[tuple(ids)] += 1
        cache.add(ids)
    statistic, degrees = chi_square(counts.ravel(), runs * law.ravel())
    assert statistic < chi_square_limit(degrees)


def test_an_engine_whose_rows_depend_on_each_other_is_noticed() -> None:
    plain, _, _ = run(RowDependentEngine(V), max_tokens=60)
    assert all(run(RowDependentEngine(V), ListDrafter(bad), k=k, max_tokens=60)[0] != plain for k in KS)


@pytest.mark.parametrize("k", KS)
def test_a_draft_that_is_the_target_is_accepted_in_full(k: int) -> None:
    for params in ({}, {"temperature": 1.0, "seed": 4}, {"temperature": 1.0, "coupling": "rejection", "seed": 4}):
        engine = ToyEngine(V)
        draft = ToyEngine(V)
        _, loop, _ = run(engine, ModelDrafter(draft, vocab_size=V), k=k, max_tokens=(k + 1) * 3, **params)
        assert loop.stats.num_accepted == loop.stats.num_proposed == 3 * k
        assert loop.stats.num_steps == 3
        assert loop.stats.block_efficiency == k + 1


def test_call_shapes_are_only_the_allowed_ones() -> None:
    engine, draft = ToyEngine(V), ToyEngine(V)
    run(engine, ModelDrafter(draft, vocab_size=V), prompt=[0] * 11, k=9, max_tokens=40)
    assert set(engine.widths_used) <= {8, *engine.verify_widths}
    assert set(draft.widths_used) <= {1, 8, *draft.verify_widths}
    assert engine.widths_used[:2] == [8, 8]


@pytest.mark.parametrize(
    "name", ["good", "ngram", "suffix", "warm suffix", "same model", "other model", "combined", "medusa, a tree"]
)
def test_an_engine_serves_one_request_after_the_other(name: str) -> None:
    engine, drafter = ToyEngine(V), DRAFTERS[name]()
    for prompt in ([3, 1, 4], [1], [2, 2, 2, 2, 2, 2, 2, 2, 2, 2], [3, 1, 4]):
        plain, _, _ = run(ToyEngine(V), prompt=prompt, max_tokens=15)
        ids, loop, _ = run(engine, drafter, prompt=prompt, max_tokens=15)
        assert ids == plain
        assert not loop.stats.num_drafter_faults


@pytest.mark.parametrize(("k", "width"), [(0, 2), (1, 2), (2, 4), (3, 4), (4, 6), (5, 6), (8, 10), (15, 16)])
def test_the_smallest_width_that_fits_is_taken(k: int, width: int) -> None:
    engine = ToyEngine(V)
    run(engine, ListDrafter(good), k=k, max_tokens=k + 1)
    assert engine.widths_used == [8, width]


def test_the_last_token_is_not_in_the_buffers_between_steps() -> None:
    engine = ToyEngine(V)
    loop = make_loop(engine, ListDrafter(half), k=3, max_tokens=30)
    for _ in loop.run():
        if loop.finish_reason is None:
            assert engine.kv_length == len(loop.tokens) - 1


@pytest.mark.parametrize("max_tokens", [0, 1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("k", [0, 1, 3, 5])
def test_never_more_than_max_tokens(max_tokens: int, k: int) -> None:
    ids, loop, _ = run(ToyEngine(V), ListDrafter(good), k=k, max_tokens=max_tokens)
    assert len(ids) == max_tokens
    assert loop.finish_reason == "length"
    assert loop.stats.num_tokens == max_tokens


@pytest.mark.parametrize("k", [0, 3, 15])
@pytest.mark.parametrize("name", ["good", "ngram", "suffix", "same model", "short context", "combined", "medusa"])
def test_generation_reaches_exactly_the_capacity(name: str, k: int) -> None:
    ids, loop, _ = run(ToyEngine(V, capacity=40), DRAFTERS[name](), k=k, prompt=[1, 2, 3])
    assert len(ids) == 37
    assert loop.finish_reason == "capacity"


def test_a_prompt_that_fills_the_capacity_generates_nothing() -> None:
    ids, loop, _ = run(ToyEngine(V, capacity=4), prompt=[1, 2, 3, 4])
    assert (ids, loop.finish_reason) == ([], "capacity")


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_one_token_prompt_works(name: str) -> None:
    plain, _, _ = run(ToyEngine(V), prompt=[2], max_tokens=10)
    assert run(ToyEngine(V), DRAFTERS[name](), prompt=[2], max_tokens=10)[0] == plain


@pytest.mark.parametrize("k", [0, 1, 2, 3, 5])
def test_an_end_token_inside_a_block_ends_the_text_there(k: int) -> None:
    plain, _, _ = run(ToyEngine(V), max_tokens=30)
    for end in set(plain):
        expected = plain[: plain.index(end) + 1]
        ids, loop, tokens = run(ToyEngine(V), ListDrafter(good), k=k, max_tokens=30, eos=(end,))
        assert ids == expected
        assert loop.finish_reason == "stop"
        assert loop.stats.num_tokens == len(tokens) == len(expected)
        assert loop.tokens == [0, 1, *expected]
        assert loop._target.kv_length == len(loop.tokens) - 1


@pytest.mark.parametrize("k", [0, 1, 2, 3, 5])
def test_a_stop_string_across_a_block_ends_the_text_there(k: int) -> None:
    plain, _, _ = run(ToyEngine(V), max_tokens=30)
    letters = "".join(chr(ord("a") + token) for token in plain)
    for start in (0, 3, 7):
        stop = letters[start : start + 3]
        ids, loop, tokens = run(ToyEngine(V), ListDrafter(good), k=k, max_tokens=30, stop=(stop,))
        at = letters.index(stop)
        assert "".join(token.text for token in tokens) == letters[:at]
        assert ids == plain[: at + 3]
        assert loop.finish_reason == "stop"


def test_an_end_token_at_the_length_limit_is_a_stop() -> None:
    plain, _, _ = run(ToyEngine(V), max_tokens=6)
    at = plain.index(plain[5]) + 1
    _, loop, _ = run(ToyEngine(V), ListDrafter(good), max_tokens=at, eos=(plain[5],))
    assert loop.finish_reason == "stop"


def test_cut_blocks_count_only_what_was_kept() -> None:
    plain, _, _ = run(ToyEngine(V), max_tokens=30)
    end = plain[1]
    kept = plain.index(end) + 1
    _, loop, _ = run(ToyEngine(V), ListDrafter(good), k=5, max_tokens=30, eos=(end,))
    assert loop.stats.num_proposed == loop.stats.num_accepted == kept
    assert sum(loop.stats.proposed_by_position) == kept


def test_an_error_of_the_target_is_not_swallowed() -> None:
    def broken(prefix: Sequence[int]) -> np.ndarray:
        return np.full(V, np.nan, np.float32)

    with pytest.raises(RequestError, match="no token is left"):
        run(ToyEngine(V, logits=broken), max_tokens=3)


@pytest.mark.parametrize("k", [0, 1, 3, 9])
def test_statistics_add_up(k: int) -> None:
    for make in DRAFTERS.values():
        _, loop, _ = run(ToyEngine(V), make(), k=k, max_tokens=25, temperature=0.7, seed=k)
        stats = loop.stats
        assert stats.num_accepted + stats.num_steps == stats.num_tokens
        assert 0 <= stats.num_accepted <= stats.num_proposed <= k * stats.num_steps
        assert sum(stats.proposed_by_position) == stats.num_proposed
        assert sum(stats.accepted_by_position) == stats.num_accepted
        assert all(a <= p for a, p in zip(stats.accepted_by_position, stats.proposed_by_position, strict=True))
        assert stats.accepted_by_position == sorted(stats.accepted_by_position, reverse=True)
        assert 0 <= stats.acceptance_rate <= 1
        assert 0 <= stats.num_drafts <= min(stats.num_steps, stats.num_proposed)
        assert (stats.num_drafts > 0) == (stats.num_proposed > 0)
        assert stats.accepted_by_position[:1] <= [stats.num_drafts]
        assert 0 < stats.first_token_s <= stats.prefill_s + stats.decode_s
        assert stats.num_steps + 1 == len(loop._target.widths_used)  # type: ignore[attr-defined]


def test_what_the_drafter_does_with_the_prompt_is_draft_time() -> None:
    seconds = [0.0]

    class Reader(ListDrafter):
        def start(self, tokens: Sequence[int], sampler: Sampler) -> None:
            seconds[0] += 100.0
            super().start(tokens, sampler)

    _, loop, _ = run(ToyEngine(V), Reader(good), k=3, max_tokens=5, clock=lambda: seconds[0])
    assert (loop.stats.prefill_s, loop.stats.draft_s, loop.stats.decode_s) == (0.0, 100.0, 100.0)


def test_log_probabilities_do_not_depend_on_speculation() -> None:
    params: dict[str, Any] = {"max_tokens": 20, "logprobs": 2, "temperature": 0.7, "seed": 3}
    plain = [token.logprob for token in run(ToyEngine(V), **params)[2]]
    for k in KS:
        assert [token.logprob for token in run(ToyEngine(V), ListDrafter(good), k=k, **params)[2]] == plain
    first = plain[0]
    assert first is not None
    assert first.top[0][1] >= first.top[1][1]
    assert first.logprob < 0


def test_cancelling_ends_after_the_step() -> None:
    loop = make_loop(ToyEngine(V), ListDrafter(good), k=3, max_tokens=40)
    seen = []
    for token in loop.run():
        seen.append(token)
        loop.cancel()
    assert len(seen) == 4
    assert loop.finish_reason == "cancelled"
