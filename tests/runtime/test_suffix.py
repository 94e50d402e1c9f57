"""The suffix drafter: where it looks, what it counts, how far it guesses, and the cache of earlier outputs."""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import specrt
from copies import copy_artifact
from parts import run
from specrt import LanguageModel
from specrt.drafters import suffix
from specrt.drafters.suffix import LONGEST, OWN, Occurrences, Smoothing, SuffixCache, SuffixDrafter, estimate
from specrt.sampling import Sampler, SamplingParams
from toy import ToyEngine

WIDTHS = (2, 4, 6, 10, 16)
PROMPT = "the quick brown fox "


def guess(tokens: Sequence[int], limit: int = 15, cache: SuffixCache | None = None, widths: Any = WIDTHS) -> list[int]:
    drafter = SuffixDrafter(widths=widths, cache=cache)
    drafter.start(tokens[:1], Sampler(SamplingParams(), list(tokens), vocab_size=1000, end_ids=()))
    return list(drafter.propose(tokens, limit).token_ids)


def scan(texts: Sequence[Sequence[int]], text: Sequence[int]) -> set[tuple[int, int, int]]:
    """Return (text, index, match) of every place of the last token that has a next one, by looking everywhere."""
    found = set()
    for number, other in enumerate(texts):
        for index in range(len(other) - 1):
            match = 0
            while match < min(LONGEST, index + 1, len(text)) and other[index - match] == text[-1 - match]:
                match += 1
            if match:
                found.add((number, index, match))
    return found


@pytest.mark.parametrize("size", [2, 5, 40])
def test_places_are_those_of_a_scan(size: int) -> None:
    rng = np.random.default_rng(size)
    text: list[int] = []
    known = Occurrences()
    for _ in range(60):
        new = rng.integers(0, size, rng.integers(1, 4)).tolist()
        text += new
        known.extend(new)
        found, expected = known.places(text), {(index, match) for _, index, match in scan([text], text)}
        assert set(found) <= expected
        assert len(set(found)) == len(found) == min(16, len(expected))
        long = sorted((index for index, match in expected if match >= 4), reverse=True)
        assert [index for index, _ in found][: len(long)] == long[:16], "long matches first, the latest before others"


def test_a_match_never_counts_more_tokens_than_there_are() -> None:
    known = Occurrences()
    known.extend([7] * 50)
    assert known.places([7]) == [(index, 1) for index in range(48, 32, -1)]
    assert known.places([7] * 50)[0] == (48, LONGEST)


@pytest.mark.parametrize("limit", [1, 7, 30, 200])
def test_the_cache_holds_the_latest_whole_outputs(limit: int) -> None:
    rng = np.random.default_rng(limit)
    cache = SuffixCache(limit=limit)
    outputs: list[list[int]] = []
    for _ in range(80):
        output = rng.integers(0, 6, rng.integers(0, 12)).tolist()
        cache.add(output)
        if 0 < len(output) <= limit:
            outputs.append(output)
        while sum(map(len, outputs)) > limit:
            outputs.pop(0)
        assert cache.num_tokens == sum(map(len, outputs)) <= limit
        text = rng.integers(0, 6, 9).tolist()
        starts = np.cumsum([0, *(len(output) + 1 for output in outputs)])
        expected = {(int(starts[n]) + i, m) for n, i, m in scan([[*output, -1] for output in outputs], text)}
        found = cache.occurrences.places(text)
        assert set(found) <= expected
        assert len(found) == min(16, len(expected))


def test_what_leaves_the_cache_leaves_nothing_behind() -> None:
    cache = SuffixCache(limit=40)
    sizes = []
    for start in range(0, 3000, 10):
        cache.add(range(start, start + 10))
        known = cache.occurrences
        sizes.append(
            (len(known.tokens), *(len(part) for part in (known._latest_token, known._latest_run, known._before_run)))
        )
    assert len(set(sizes[4:])) == 1, "it grows"
    assert len(cache.occurrences.tokens) == 44
    cache.clear()
    assert (cache.num_tokens, cache.occurrences.tokens) == (0, [])


def recursion(followers: Sequence[tuple[int, int]], prior: dict[int, Fraction], smoothing: Smoothing) -> Any:
    """The estimate by its definition, level by level, in exact fractions."""
    discount, strength = Fraction(smoothing.discount), Fraction(smoothing.strength)
    chances = {token: prior.get(token, Fraction(0)) for token in {*prior, *(token for token, _ in followers)}}
    for level in range(1, max((match for _, match in followers), default=0) + 1):
        seen = [token for token, match in followers if match >= level]
        for token in chances:
            count = max(Fraction(0), seen.count(token) - discount)
            chances[token] = (count + strength * chances[token]) / (len(seen) + strength)
    return chances


@pytest.mark.parametrize("smoothing", [OWN, suffix.OTHERS, Smoothing(0.5, 1.0)])
def test_estimates_are_those_of_the_definition(smoothing: Smoothing) -> None:
    rng = np.random.default_rng(1)
    for _ in range(60):
        pairs = rng.integers(1, 12, (rng.integers(0, 9), 2))
        followers = [(int(token % 4), int(match)) for token, match in pairs]
        prior = {int(token): Fraction(1, 8) for token in rng.integers(0, 6, rng.integers(0, 4))}
        found = estimate(followers, {token: float(chance) for token, chance in prior.items()}, smoothing)
        expected = recursion(followers, prior, smoothing)
        assert found.keys() == expected.keys()
        assert all(found[token] == pytest.approx(float(expected[token]), abs=1e-12) for token in found)
        assert sum(found.values()) <= 1


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 5, 1, 5, 1, 6, 1], [5]),  # the most frequent, though not the latest
        ([1, 5, 2, 1, 6, 3, 1, 6, 4, 1, 5, 9, 1], [5]),  # the latest of two that are as frequent
        ([2, 1, 5, 1, 6, 1, 6, 2, 1], [5]),  # a longer match outweighs two shorter ones
        ([8, 9, 7, 7], [7]),  # nothing longer than one token: no more than is free
        ([8, 8, 9, 7], [8]),  # never seen before: the commonest token
        ([8], [8]),
    ],
)
def test_one_token_is_guessed(tokens: list[int], expected: list[int]) -> None:
    assert guess(tokens) == expected


def test_the_longer_the_match_the_longer_the_guess() -> None:
    lengths = []
    for match in range(1, 33):
        shared = list(range(100, 100 + match))
        tokens = [1, *shared, *range(200, 220), 2, *shared]
        found = guess(tokens)
        assert found == list(range(200, 200 + len(found)))
        lengths.append(len(found))
    assert lengths == sorted(lengths)
    assert (lengths[0], lengths[-1]) == (1, 15)
    assert set(lengths) <= {width - 1 for width in WIDTHS}


def test_the_less_the_places_agree_the_shorter_the_guess() -> None:
    shared = list(range(100, 106))
    alike = [*shared, *range(200, 220)]
    agreed = [1, *alike, 2, *alike, 3, *shared]
    split = [1, *alike, 2, *shared, *range(300, 320), 3, *shared]
    assert len(guess(agreed)) > len(guess([1, *alike, 3, *shared])) > len(guess(split))


def test_a_guess_goes_on_over_itself() -> None:
    assert guess([1, 2, 3] * 6, 15) == [1, 2, 3] * 5


@pytest.mark.parametrize("limit", range(1, 16))
def test_no_more_than_the_limit(limit: int) -> None:
    assert guess([1, 2, 3] * 6, limit) == ([1, 2, 3] * 5)[:limit]


def test_rows_that_are_there_anyway_are_filled() -> None:
    tokens = [1, 5, 9, 9, 1, 6, 9, 9, 1, 7, 9, 9, 1]
    assert len(guess(tokens)) == 1
    assert len(guess(tokens, widths=(6, 10))) == 5


def test_a_proposal_says_how_sure_it_is() -> None:
    drafter = SuffixDrafter(widths=WIDTHS)
    found = []
    for tokens in ([5, 6], [5, 6, 5], [1, 2, 3] * 12):
        drafter.start(tokens, Sampler(SamplingParams(), tokens, vocab_size=10, end_ids=()))
        found.append(drafter.propose(tokens, 15).confidence)
    assert found == [0.0, 0.3, 1.0]


def test_a_new_request_forgets_the_last() -> None:
    drafter = SuffixDrafter(widths=WIDTHS)
    drafter.start([1, 2, 3, 1], Sampler(SamplingParams(), [1], vocab_size=10, end_ids=()))
    assert drafter.propose([1, 2, 3, 1], 1).token_ids == (2,)
    drafter.start([3, 1], Sampler(SamplingParams(), [1], vocab_size=10, end_ids=()))
    assert drafter.propose([3, 1], 1).token_ids == (1,)


def test_guesses_do_not_become_text() -> None:
    drafter = SuffixDrafter(widths=WIDTHS)
    tokens = [1, 2, 3] * 4
    drafter.start(tokens, Sampler(SamplingParams(), tokens, vocab_size=10, end_ids=()))
    first = drafter.propose(tokens, 9)
    assert drafter.propose(tokens, 9) == first
    assert drafter.propose([*tokens, 9, 9, 1, 2], 1).token_ids == (3,)


def test_other_texts_help_and_the_own_text_comes_first() -> None:
    cache = SuffixCache()
    cache.add(range(50, 80))
    start = list(range(50, 70))
    assert guess([1, *start], cache=cache)[:3] == [70, 71, 72]
    assert guess([1, *start]) == [69]
    assert guess([*start, 9, 9, *start], 1, cache=cache) == [9]
    assert guess([8, 79], 3, cache=cache) == [79], "nothing follows the end of an output"


class CountingList(list[int]):
    """Counts how often it is looked into."""

    num_reads = 0

    def __getitem__(self, index: Any) -> Any:
        CountingList.num_reads += 1
        return super().__getitem__(index)


@pytest.mark.parametrize("pattern", [[7], [7, 8], [1, 2, 3, 1, 2, 4], list(range(50))], ids=str)
def test_the_work_per_token_does_not_grow_with_a_repetitive_text(pattern: list[int]) -> None:
    reads = []
    for length in (1000, 8000):
        tokens = (pattern * length)[:length]
        cache = SuffixCache()
        cache.add(tokens)
        drafter = SuffixDrafter(widths=WIDTHS, cache=cache)
        drafter.start(tokens, Sampler(SamplingParams(), [1], vocab_size=100, end_ids=()))
        drafter._own.tokens = CountingList(drafter._own.tokens)
        cache.occurrences.tokens = CountingList(cache.occurrences.tokens)
        CountingList.num_reads = 0
        for step in range(20):
            drafter.propose([*tokens, *(pattern * 20)[: step + 1]], 15)
        reads.append(CountingList.num_reads)
    assert reads[0] > 100
    assert reads[1] <= 1.1 * reads[0]


@pytest.fixture
def model(tiny_artifact: Path, machine_cache: Path) -> Iterator[LanguageModel]:
    with specrt.load(tiny_artifact, cache_dir=machine_cache) as loaded:
        yield loaded


def speculate(model: LanguageModel, **options: Any) -> specrt.Result:
    common: dict[str, Any] = {"drafter": "suffix", "k": 15, "max_tokens": 40, "ignore_eos": True}
    return model.generate(PROMPT, **{**common, **options})


def test_a_second_time_is_drafted_from_the_first(model: LanguageModel) -> None:
    plain = speculate(model, k=0)
    first, second = (speculate(model, suffix_cache=True) for _ in range(2))
    assert first.token_ids == second.token_ids == plain.token_ids
    assert second.stats.num_steps < first.stats.num_steps
    assert model.suffix_cache.num_tokens == 80
    model.suffix_cache.clear()
    assert speculate(model, suffix_cache=True).stats.num_steps == first.stats.num_steps


@pytest.mark.parametrize("options", [{"temperature": 0.9, "seed": 3}, {"temperature": 0.9, "seed": 3, "top_k": 5}])
@pytest.mark.parametrize("coupling", ["gumbel", "rejection"])
def test_a_warm_cache_changes_no_token(model: LanguageModel, coupling: str, options: dict[str, Any]) -> None:
    plain = speculate(model, k=0, coupling=coupling, **options)
    for _ in range(3):
        assert speculate(model, suffix_cache=True, coupling=coupling, **options).token_ids == plain.token_ids


def test_without_the_option_nothing_is_read_or_kept(model: LanguageModel) -> None:
    alone = speculate(model)
    assert model.suffix_cache.num_tokens == 0
    speculate(model, suffix_cache=True)
    kept = model.suffix_cache.num_tokens
    again = speculate(model)
    assert again.stats.proposed_by_position == alone.stats.proposed_by_position
    assert again.stats.num_steps == alone.stats.num_steps
    assert model.suffix_cache.num_tokens == kept


def test_a_closed_model_forgets(model: LanguageModel) -> None:
    speculate(model, suffix_cache=True)
    model.close()
    assert model.suffix_cache.num_tokens == 0


def test_a_request_that_ends_early_leaves_what_it_said(model: LanguageModel) -> None:
    with model.stream(PROMPT, suffix_cache=True, k=0, ignore_eos=True) as stream:
        ids = [next(stream).id for _ in range(5)]
    assert model.suffix_cache.occurrences.tokens == [*ids, -1]
    speculate(model, k=0, suffix_cache=True, max_tokens=0)
    assert model.suffix_cache.num_tokens == 5


def test_a_drafter_that_fails_costs_no_token(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = speculate(model, k=0)
    monkeypatch.setattr(suffix, "estimate", lambda *_: 1 / 0)
    result = speculate(model)
    assert result.token_ids == plain.token_ids
    assert result.stats.num_drafter_faults == 1


def test_an_artifact_that_lists_only_ngram_can_be_drafted_by_suffix(
    tiny_artifact: Path, machine_cache: Path, tmp_path: Path
) -> None:
    def old(data: dict[str, Any]) -> None:
        data["drafters"] = {"ngram": {"kind": "ngram", "engine": None, "vocabulary": None}, **data["drafters"]}
        data["default_drafter"] = "ngram"

    with specrt.load(copy_artifact(tiny_artifact, tmp_path / "old", old), cache_dir=machine_cache) as model:
        assert speculate(model).stats.drafter == "suffix"
        assert speculate(model, drafter=None).stats.drafter == "ngram"


def test_two_runs_propose_the_same() -> None:
    found = set()
    for _ in range(2):
        _, loop, _ = run(ToyEngine(5), SuffixDrafter(widths=WIDTHS), k=15, max_tokens=50, temperature=0.5, seed=1)
        found.add((tuple(loop.stats.proposed_by_position), loop.stats.num_accepted))
    assert len(found) == 1
