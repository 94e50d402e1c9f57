"""Vocabularies: the same ids must mean the same tokens."""

import pytest

from specrt_profiles.errors import VocabularyError
from specrt_profiles.vocabulary import check_draft_vocabulary, fingerprint, tokens_by_id

TARGET = ["<s>", "a", "b", "ab"]


def test_identical_vocabularies_pass() -> None:
    check_draft_vocabulary(TARGET, TARGET, draft_rows=4)


def test_padded_embeddings_need_no_content() -> None:
    check_draft_vocabulary(TARGET, TARGET, draft_rows=128)
    check_draft_vocabulary(TARGET, TARGET[:3], draft_rows=4)


def test_a_draft_may_know_more_tokens() -> None:
    check_draft_vocabulary(TARGET, [*TARGET, "extra"], draft_rows=5)


def test_gaps_on_either_side_are_no_difference() -> None:
    check_draft_vocabulary(["<s>", None, "b", "ab"], TARGET, draft_rows=4)
    check_draft_vocabulary(TARGET, ["<s>", "a", None, "ab"], draft_rows=4)


def test_the_first_token_that_differs_is_shown_with_both_contents() -> None:
    with pytest.raises(VocabularyError, match=r"token 2 is 'X\\n' in the draft and 'b' in the target") as caught:
        check_draft_vocabulary(TARGET, ["<s>", "a", "X\n", "Y"], draft_rows=4)
    assert "\n" not in str(caught.value)


def test_a_token_that_differs_only_in_the_draft_after_a_gap_is_found() -> None:
    with pytest.raises(VocabularyError, match="token 3 is 'ba' in the draft and 'ab' in the target"):
        check_draft_vocabulary(["<s>", None, "b", "ab"], ["<s>", "a", None, "ba"], draft_rows=4)


def test_a_draft_with_too_few_rows_is_refused_with_both_numbers() -> None:
    with pytest.raises(VocabularyError, match="3 embedding rows for the target's 4 tokens"):
        check_draft_vocabulary(TARGET, TARGET[:3], draft_rows=3)


def test_tokens_by_id_leaves_gaps_empty() -> None:
    assert tokens_by_id({"b": 3, "a": 0}) == ["a", None, None, "b"]
    assert tokens_by_id({}) == []


def test_a_fingerprint_changes_with_every_token_and_id() -> None:
    others = [
        ["<s>", "a", "b", "aB"],
        ["<s>", "b", "a", "ab"],
        ["<s>", "a", "b"],
        ["<s>", "a", "b", "ab", "c"],
        ["<s>", "a", None, "b", "ab"],
        ["<s>", "a", "b", None, "ab"],
        [None, "<s>", "a", "b", "ab"],
    ]
    prints = {fingerprint(tokens) for tokens in [TARGET, *others]}
    assert len(prints) == len(others) + 1


def test_a_fingerprint_ignores_gaps_at_the_end() -> None:
    assert fingerprint([*TARGET, None, None]) == fingerprint(TARGET)


def test_a_fingerprint_takes_any_text() -> None:
    assert len(fingerprint(["\ud800", "🙂", "\0", ""])) == 64


def test_a_fingerprint_stays_the_same_between_releases() -> None:
    assert fingerprint(["a", None, "ü"])[:16] == "e4aa8621dcb3dc49"
