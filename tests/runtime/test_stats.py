"""Statistics: the definitions, at and around zero."""

import json

import pytest

from specrt.stats import Statistics


def stats(*steps: tuple[int, int, int], drafter: str = "ngram") -> Statistics:
    """Return statistics of steps (proposed, accepted, committed)."""
    result = Statistics(drafter=drafter, num_prompt_tokens=3)
    for proposed, accepted, committed in steps:
        result.count(depths=range(proposed), accepted=accepted, committed=committed)
    return result


def test_nothing_done_is_all_zeros_and_no_division_by_zero() -> None:
    empty = stats()
    rates = (empty.acceptance_rate, empty.block_efficiency, empty.mean_accepted, empty.tokens_per_s, empty.decode_s)
    assert rates == (0, 0, 0, 0, 0)
    assert "0 tokens in 0.00 s" in empty.summary()


def test_the_rates_are_what_their_names_say() -> None:
    some = stats((3, 3, 4), (3, 1, 2), (0, 0, 1))
    assert (some.num_tokens, some.num_steps, some.num_proposed, some.num_accepted) == (7, 3, 6, 4)
    assert some.acceptance_rate == pytest.approx(4 / 6)
    assert some.block_efficiency == pytest.approx(7 / 3)
    assert some.mean_accepted == pytest.approx(4 / 3)


def test_positions_count_each_proposed_token_once() -> None:
    some = stats((3, 3, 4), (3, 1, 2), (1, 0, 1))
    assert some.proposed_by_position == [3, 2, 2]
    assert some.accepted_by_position == [2, 1, 1]


def test_plain_decoding_has_a_block_efficiency_of_one() -> None:
    plain = stats(*[(0, 0, 1)] * 5, drafter="none")
    assert (plain.block_efficiency, plain.acceptance_rate, plain.mean_accepted) == (1, 0, 0)


@pytest.mark.parametrize(("committed", "counted"), [(1, 1), (2, 2), (3, 3), (4, 4)])
def test_a_cut_block_counts_up_to_the_cut(committed: int, counted: int) -> None:
    cut = stats((5, 4, committed))
    assert (cut.num_proposed, cut.num_accepted, cut.num_tokens) == (counted, counted, committed)


def test_a_block_that_ends_with_the_targets_own_token_is_not_cut() -> None:
    whole = stats((5, 2, 3))
    assert (whole.num_proposed, whole.num_accepted) == (5, 2)


def test_tokens_per_second_leave_prefill_out() -> None:
    some = stats((1, 1, 2), (1, 1, 2))
    some.prefill_s, some.draft_s, some.verify_s, some.rest_s = 100.0, 0.5, 1.0, 0.5
    assert some.decode_s == 2.0
    assert some.tokens_per_s == 2.0


@pytest.mark.parametrize(
    ("steps", "drafter", "faults", "word"),
    [
        ([(0, 0, 1)] * 5, "none", 0, None),
        ([(3, 3, 4)] * 5, "ngram", 0, None),
        ([(0, 0, 1)] * 5, "ngram", 0, "proposed nothing"),
        ([(0, 0, 1)], "ngram", 0, None),
        ([(5, 0, 1)] * 10, "model", 0, "another drafter than model"),
        ([(5, 0, 1)] * 9, "model", 0, None),
        ([(3, 3, 4)] * 5, "model", 1, "dropped"),
    ],
)
def test_the_hint_names_the_likely_cause(
    steps: list[tuple[int, int, int]], drafter: str, faults: int, word: str | None
) -> None:
    some = stats(*steps, drafter=drafter)
    some.num_drafter_faults = faults
    assert (some.hint is None) if word is None else (word in str(some.hint))
    assert ("hint:" in some.summary()) == (word is not None)


def test_the_summary_is_one_line_with_the_words_of_the_definitions() -> None:
    line = stats((3, 2, 3)).summary()
    assert "\n" not in line
    for words in (
        "3 tokens in",
        "tokens/s",
        "prompt 3 tokens",
        "drafter ngram",
        "block efficiency 3.00",
        "2 of 3 (67%)",
    ):
        assert words in line


def test_the_dict_has_every_field_and_rate_and_is_json() -> None:
    data = json.loads(json.dumps(stats((3, 2, 3)).to_dict()))
    rates = {name for name, value in vars(Statistics).items() if isinstance(value, property) and name[0] != "_"}
    assert set(data) == set(Statistics.__dataclass_fields__) | rates
    assert data["block_efficiency"] == 3.0


def timed(steps: list[tuple[int, int, int]], *, draft: float = 0.0, steep: float = 0.0) -> Statistics:
    """Return a run on calls of 1 s and `steep` s per further row, `draft` s per guess, and 0.1 s of rest per step."""
    some = stats(*steps, drafter="model")
    some.call_s = {width: 1.0 + steep * (width - 2) for width in (2, 4, 6, 10, 16)}
    some.verify_s = sum(some.call_s[min(w for w in some.call_s if w > proposed)] for proposed, _, _ in steps)
    some.draft_s = draft * sum(proposed for proposed, _, _ in steps)
    some.rest_s = 0.1 * len(steps)
    return some


@pytest.mark.parametrize("load", [1.0, 3.0])  # calls take three times what they did when they were timed
def test_the_estimated_speedup_is_what_the_steps_cost_in_plain_steps(load: float) -> None:
    some = timed([(3, 1, 2)] * 20, draft=0.1, steep=0.2)
    some.draft_s, some.verify_s, some.rest_s = load * some.draft_s, load * some.verify_s, load * some.rest_s
    assert some.estimated_speedup == pytest.approx(2 * 1.1 / 1.8)
    assert some.to_dict()["estimated_speedup"] == some.estimated_speedup


def test_without_the_cost_of_calls_there_is_no_estimate() -> None:
    assert stats((3, 1, 2)).estimated_speedup is None
    assert timed([]).estimated_speedup is None


@pytest.mark.parametrize(
    ("accepted", "draft", "steep", "words"),
    [
        (0, 0.0, 0.0, None),  # free guesses cost nothing, so that none of them need be right
        (2, 0.1, 0.2, None),
        (1, 0.6, 0.0, ["the model drafter takes 1.80 plain calls per step", "accepted 33%, 55% would break even"]),
        (1, 0.0, 0.8, ["a call takes 2.60 plain ones: try a smaller k", "accepted 33%, 48% would break even"]),
        (0, 0.2, 0.3, ["few proposals were accepted", "accepted 0%, 36% would break even"]),
        (3, 1.5, 1.5, ["even all of them would not break even"]),
    ],
)
def test_the_hint_of_a_slow_run_names_what_makes_it_slow(
    accepted: int, draft: float, steep: float, words: list[str] | None
) -> None:
    hint = timed([(3, accepted, accepted + 1)] * 20, draft=draft, steep=steep).hint
    if words is None:
        assert hint is None
        return
    assert str(hint).startswith("slower than plain decoding: ")
    assert all(word in str(hint) for word in words), hint


def test_combined_statistics_are_those_of_all_steps() -> None:
    one, two = timed([(3, 1, 2), (0, 0, 1)]), timed([(5, 4, 5)], draft=0.5)
    both = Statistics.combined([one, two])
    whole = timed([(3, 1, 2), (0, 0, 1), (5, 4, 5)])
    whole.draft_s, whole.num_prompt_tokens = 2.5, 6
    assert both == whole
