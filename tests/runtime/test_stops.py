"""Stop rules on committed tokens: the earliest wins, and text, ids and reasons agree."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import parts
from specrt.sampling import SamplingParams
from specrt.stops import StopRules
from toy import ToyEngine

EOS = 9


class Words:
    """Token i is the i-th text; None is half a character, which the next token completes."""

    def __init__(self, texts: Sequence[str | None]) -> None:
        self._texts, self._half = texts, False

    def push(self, token_id: int) -> str:
        text = self._texts[token_id] if token_id < len(self._texts) else ""
        if not text:
            self._half = self._half or text is None
            return ""
        before, self._half = "é" if self._half else "", False
        return before + text

    def flush(self) -> str:
        half, self._half = self._half, False
        return "\ufffd" if half else ""


def rules(texts: Sequence[str | None] = (), *, room: int = 100, end_ids: tuple[int, ...] = (), **params: Any) -> Any:
    return StopRules(SamplingParams(**params), end_ids=end_ids, room=room, detokenizer=Words(texts))


def feed(stops: StopRules, ids: Sequence[int]) -> tuple[list[str], str | None]:
    """Push ids until one ends the text; return the released texts and the reason."""
    texts = []
    for token in ids:
        text, reason = stops.push(token)
        texts.append(text)
        if reason is not None:
            return texts, reason
    return texts, None


def test_a_stop_string_inside_a_token_cuts_the_text_before_it() -> None:
    stops = rules(["one END two"], stop=("END",))
    assert feed(stops, [0]) == (["one "], "stop")
    assert (stops.cause, stops.num_tokens) == ("END", 1)


def test_a_stop_string_across_tokens_is_held_back_and_cut() -> None:
    stops = rules(["x", "<e", "n", "d> y"], stop=("<end>",))
    assert feed(stops, [0, 1, 2, 3]) == (["x", "", "", ""], "stop")
    assert (stops.cause, stops.num_tokens) == ("<end>", 4)


def test_what_only_began_like_a_stop_string_is_released() -> None:
    stops = rules(["<e", "n", "x", "<"], stop=("<end>",))
    assert feed(stops, [0, 1, 2, 3]) == (["", "", "<enx", ""], None)


def test_overlapping_beginnings_keep_only_the_longest_that_can_still_match() -> None:
    stops = rules(["a", "b"], stop=("aab",))
    assert feed(stops, [0, 0, 0, 0, 1]) == (["", "", "a", "a", ""], "stop")


def test_the_earliest_of_several_stop_strings_wins() -> None:
    stops = rules(["p THREE q TWO r"], stop=("TWO", "THREE"))
    assert feed(stops, [0]) == (["p "], "stop")
    assert stops.cause == "THREE"


def test_of_stop_strings_at_one_place_the_first_given_is_named() -> None:
    stops = rules(["xab"], stop=("ab", "a"))
    assert feed(stops, [0]) == (["x"], "stop")
    assert stops.cause == "ab"


@pytest.mark.parametrize("stop", [("a",), ("zz", "a"), ("a", "abc")])
def test_a_single_character_stops(stop: tuple[str, ...]) -> None:
    assert feed(rules(["x", "a"], stop=stop), [0, 1]) == (["x", ""], "stop")


def test_held_back_text_is_released_when_another_rule_ends_the_text() -> None:
    assert feed(rules(["<e"], stop=("<end>",), max_tokens=1), [0]) == (["<e"], "length")
    assert feed(rules(["<e"], stop=("<end>",), end_ids=(EOS,)), [0, EOS]) == (["", "<e"], "stop")


def test_an_end_token_at_the_length_limit_is_a_stop() -> None:
    stops = rules(["a"], end_ids=(EOS,), max_tokens=2)
    assert feed(stops, [0, EOS]) == (["a", ""], "stop")
    assert stops.cause == EOS


def test_a_stop_string_at_the_length_limit_is_a_stop() -> None:
    stops = rules(["a", "b"], stop=("b",), max_tokens=2)
    assert feed(stops, [0, 1]) == (["a", ""], "stop")


def test_length_wins_over_capacity() -> None:
    assert feed(rules(["a"], max_tokens=2, room=2), [0, 0]) == (["a", "a"], "length")


def test_capacity_ends_a_text_without_limit() -> None:
    assert feed(rules(["a"], room=3), [0] * 5) == (["a", "a", "a"], "capacity")


def test_nothing_may_be_generated_with_max_tokens_0_or_without_room() -> None:
    assert rules(max_tokens=0).exhausted() == "length"
    assert rules(max_tokens=0, room=0).exhausted() == "length"
    assert rules(room=0).exhausted() == "capacity"
    assert rules(room=1).exhausted() is None


@pytest.mark.parametrize(("max_tokens", "room", "left"), [(5, 9, 4), (None, 9, 8), (9, 5, 4), (1, 9, 0)])
def test_remaining_is_the_smaller_limit(max_tokens: int | None, room: int, left: int) -> None:
    stops = rules(["a"], max_tokens=max_tokens, room=room)
    stops.push(0)
    assert stops.remaining() == left


def test_no_end_token_counts_before_min_tokens() -> None:
    stops = rules(["a"], end_ids=(EOS,), min_tokens=3)
    assert feed(stops, [EOS, EOS, EOS, 0]) == (["", "", ""], "stop")
    assert stops.num_tokens == 3


def test_no_stop_string_counts_before_min_tokens() -> None:
    assert feed(rules(["a", "b"], stop=("a",), min_tokens=3), [0, 0, 1, 0]) == (["a", "a", "b", ""], "stop")


def test_a_stop_string_that_ends_after_min_tokens_counts() -> None:
    assert feed(rules(["a", "b"], stop=("ab",), min_tokens=2), [0, 1]) == (["", ""], "stop")


def test_a_stop_string_held_back_before_min_tokens_does_not_count_later() -> None:
    assert feed(rules(["a", "x"], stop=("a", "abc"), min_tokens=2), [0, 1]) == (["", "ax"], None)


def test_min_tokens_does_not_lift_the_length_limit() -> None:
    assert feed(rules(["a"], min_tokens=9, max_tokens=2), [0, 0]) == (["a", "a"], "length")


def test_half_a_character_is_flushed_at_the_end() -> None:
    assert feed(rules(["a", None], max_tokens=2), [0, 1]) == (["a", "\ufffd"], "length")
    assert feed(rules(["a", None], end_ids=(EOS,)), [0, 1, EOS]) == (["a", "", "\ufffd"], "stop")


def test_half_a_character_before_a_stop_string_is_whole() -> None:
    assert feed(rules([None, "END"], stop=("END",)), [0, 1]) == (["", "é"], "stop")


@pytest.mark.parametrize("seed", range(40))
def test_any_tokens_and_stop_strings_agree_with_looking_at_the_whole_text(seed: int) -> None:
    rng = random.Random(seed)
    texts = ["a", "b", "ab", "ba", "c", "", "bca"]
    for _ in range(50):
        stop = tuple({"".join(rng.choices("abc", k=rng.randint(1, 4))) for _ in range(rng.randint(0, 3))})
        ids = rng.choices(range(len(texts)), k=rng.randint(1, 12))
        min_tokens, max_tokens = rng.choice([0, 0, 3]), rng.choice([None, 5])
        stops = rules(texts, stop=stop, min_tokens=min_tokens, max_tokens=max_tokens)
        pieces, reason = feed(stops, ids)
        wanted, wanted_reason = by_the_whole_text([texts[i] for i in ids], stop, min_tokens, max_tokens)
        assert reason == wanted_reason
        assert "".join(pieces) == (wanted if reason else wanted[: len("".join(pieces))])
        if not reason:
            held = wanted[len("".join(pieces)) :]
            assert not held or any(s.startswith(held) for s in stop)


def by_the_whole_text(
    texts: Sequence[str], stop: Sequence[str], min_tokens: int, max_tokens: int | None
) -> tuple[str, str | None]:
    """Return the text and reason by searching the whole text after every token."""
    ignored = sum(len(text) for text in texts[: max(0, min_tokens - 1)])
    for count in range(1, len(texts) + 1):
        whole = "".join(texts[:count])
        found = [at for s in stop if count >= min_tokens and (at := whole.find(s, max(0, ignored + 1 - len(s)))) >= 0]
        if found:
            return whole[: min(found)], "stop"
        if count == max_tokens:
            return whole, "length"
    return "".join(texts), None


@pytest.mark.parametrize("k", [1, 3, 7, 15])
@pytest.mark.parametrize(
    "options",
    [
        {"stop": ("cd",)},
        {"stop": ("dab", "cdc")},
        {"stop_token_ids": (3,)},
        {"max_tokens": 6},
        {"min_tokens": 5, "stop_token_ids": (2, 3), "max_tokens": 30},
    ],
)
def test_rules_that_strike_inside_a_block_end_it_there(k: int, options: dict[str, Any]) -> None:
    pattern = [0, 1, 2, 3, 0, 1, 2, 2, 3, 3]

    def logits(prefix: Sequence[int]) -> Any:
        row = np.zeros(5, np.float32)
        row[pattern[len(prefix) % len(pattern)]] = 3.0
        return row

    right = parts.ListDrafter(lambda tokens, limit: [pattern[(len(tokens) + i) % 10] for i in range(limit)])
    plain, plain_loop, plain_tokens = parts.run(ToyEngine(logits=logits), **options)
    ids, loop, tokens = parts.run(ToyEngine(logits=logits), right, k=k, **options)
    assert (ids, loop.finish_reason) == (plain, plain_loop.finish_reason)
    assert [token.text for token in tokens] == [token.text for token in plain_tokens]
    assert loop.stats.num_tokens == len(ids)
