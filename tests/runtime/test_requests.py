"""Options and prompts: what is accepted, what is refused in which words, and where defaults come from."""

import math
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from specrt import requests
from specrt.errors import RequestError, TextError
from specrt.requests import Options, check_options, prompt_ids, resolve_sampling
from specrt.sampling import SamplingParams
from specrt.speculation import resolve_speculation
from specrt.text import Tokenizer
from specrt_profiles.generation import GenerationDefaults
from specrt_profiles.manifest import read_manifest

V = 384


@pytest.fixture
def tokenizer(tiny_artifact: Path) -> Tokenizer:
    return Tokenizer(tiny_artifact, read_manifest(tiny_artifact).vocabulary, has_template=True)


@pytest.fixture
def resolve(tokenizer: Tokenizer) -> Any:
    """Return a function from options and artifact defaults to parameters."""

    def apply(options: Mapping[str, Any], **defaults: Any) -> SamplingParams:
        return resolve_sampling(check_options(options), GenerationDefaults(**defaults), tokenizer, vocab_size=V)

    return apply


def speculation(
    options: Mapping[str, Any], *, default_k: int = 3, max_k: int = 15, trees: tuple[str, ...] | None = ("model",)
) -> Any:
    return resolve_speculation(
        check_options(options), drafters={"ngram": default_k, "model": 2}, default="ngram", choice=None, max_k=max_k,
        trees=trees,
    )  # fmt: skip


def test_the_options_are_the_parameters_and_how_to_draft() -> None:
    how = {"drafter", "k", "max_step_ms", "draft_budget_ms", "prompt_lookup_max", "prompt_lookup_min", "suffix_cache"}
    how |= {"chat_template_kwargs", "controller", "strict", "tree"}
    assert set(Options.__annotations__) == set(SamplingParams.__dataclass_fields__) | how


@pytest.mark.parametrize(
    ("name", "near"),
    [("temprature", "temperature"), ("top-p", "top_p"), ("stops", "stop")],
)
def test_an_unknown_option_lists_near_names(name: str, near: str) -> None:
    with pytest.raises(RequestError, match=f"unknown option '{name}'.*did you mean.*{near}"):
        check_options({name: 1})


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [("num_speculative_tokens", "k"), ("max_new_tokens", "max_tokens"), ("tools", "chat_template_kwargs")],
)
def test_the_name_of_other_libraries_leads_to_ours(theirs: str, ours: str) -> None:
    with pytest.raises(RequestError, match=rf"^unknown option '{theirs}' \(here: {ours}\)$"):
        check_options({theirs: 1})


def test_every_name_of_other_libraries_leads_to_an_option() -> None:
    assert set(requests._ELSEWHERE.values()) <= set(Options.__annotations__)
    assert not set(requests._ELSEWHERE) & set(Options.__annotations__)


def test_an_option_like_no_other_lists_all_names() -> None:
    with pytest.raises(RequestError, match=r"known: .*temperature") as caught:
        check_options({"xqzw": 1})
    assert all(name in str(caught.value) for name in Options.__annotations__)


WRONG: dict[str, list[Any]] = {
    "temperature": ["0.5", True, [1], -0.1, math.inf, math.nan, 10**400, 1j],
    "top_k": [1.5, "5", True, -1, math.inf, math.nan],
    "top_p": ["1", False, 0, -0.1, 1.01, math.nan],
    "min_p": ["0", True, -0.1, 1.1, math.nan],
    "repetition_penalty": ["1", True, 0, -1, math.inf, math.nan],
    "frequency_penalty": ["1", True, math.inf, math.nan],
    "presence_penalty": ["1", True, -math.inf, math.nan],
    "logit_bias": [[1], 5, "x", {"a": 1}, {1.0: 1}, {True: 1}, {V: 1}, {-1: 1}, {1: "x"}, {1: math.inf}, {1: math.nan}],
    "bad_words": ["text", 5, [5], [""], [[]], [[V]], [[-1]], [[1.5]], [[True]], {"a": 1}, [None]],
    "min_tokens": [1.5, "1", True, -1],
    "max_tokens": [1.5, "1", True, -1, math.inf],
    "stop": [5, [5], b"x", "", ["a", ""], {"a": 1}, [["a"]]],
    "stop_token_ids": [5, "5", ["5"], [V], [-1], [True], [1.0], {1: 1}, np.array(5)],
    "ignore_eos": [1, 0, "yes", []],
    "seed": [1.5, "1", True, -1, 2**64, 10**400, math.nan],
    "stream": [1.5, "1", True, -1, 2**64],
    "logprobs": [1.5, "1", True, -1, 65],
    "coupling": ["Gumbel", "", 5, True],
}
RIGHT: dict[str, list[tuple[Any, Any]]] = {
    "temperature": [(0, 0.0), (1, 1.0), (0.7, 0.7), (np.float32(0.5), 0.5), (Fraction(1, 2), 0.5)],
    "top_k": [(0, 0), (5, 5), (5.0, 5), (np.int64(5), 5), (10**6, 10**6)],
    "top_p": [(1, 1.0), (0.5, 0.5), (1e-9, 1e-9)],
    "min_p": [(0, 0.0), (1, 1.0)],
    "repetition_penalty": [(1.2, 1.2), (0.5, 0.5)],
    "frequency_penalty": [(-2, -2.0), (2.0, 2.0)],
    "presence_penalty": [(-2, -2.0), (2.0, 2.0)],
    "logit_bias": [
        ({5: 1}, {5: 1.0}),
        ({np.int64(5): np.float32(2)}, {5: 2.0}),
        (MappingProxyType({5: -math.inf}), {5: -math.inf}),
        ({}, {}),
    ],
    "bad_words": [([[5, 6]], ((5, 6),)), ([(5,), np.array([6])], ((5,), (6,))), ([], ())],
    "min_tokens": [(0, 0), (3, 3)],
    "max_tokens": [(0, 0), (3.0, 3), (np.int32(3), 3)],
    "stop": [("x", ("x",)), (["x", "y"], ("x", "y")), (("x",), ("x",)), ([], ())],
    "stop_token_ids": [([5], (5,)), ((5, 6), (5, 6)), (np.array([5, 6]), (5, 6)), (range(3), (0, 1, 2)), ([], ())],
    "ignore_eos": [(True, True), (False, False)],
    "seed": [(0, 0), (2**64 - 1, 2**64 - 1), (np.uint64(2**64 - 1), 2**64 - 1)],
    "stream": [(0, 0), (2**64 - 1, 2**64 - 1)],
    "logprobs": [(0, 0), (64, 64), (2.0, 2)],
    "coupling": [("gumbel", "gumbel"), ("rejection", "rejection")],
}


def test_every_parameter_has_its_row_in_the_tables() -> None:
    assert set(WRONG) == set(RIGHT) == set(SamplingParams.__dataclass_fields__)


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_a_wrong_value_is_refused_by_name_in_one_line(resolve: Any, name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"^{name}: expected ") as caught:
        resolve({name: value})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "value", "plain"), [(name, *pair) for name, pairs in RIGHT.items() for pair in pairs])
def test_a_right_value_becomes_a_plain_one(resolve: Any, name: str, value: Any, plain: Any) -> None:
    found = getattr(resolve({name: value}), name)
    assert found == plain
    assert type(found) is type(plain)


@pytest.mark.parametrize("name", SamplingParams.__dataclass_fields__)
def test_none_is_the_same_as_leaving_out(resolve: Any, name: str) -> None:
    assert resolve({"seed": 1, **({} if name == "seed" else {name: None})}) == resolve({"seed": 1})


def test_the_parameters_hold_nothing_of_the_callers(resolve: Any) -> None:
    bias, ids = {5: 1.0}, [5]
    params = resolve({"logit_bias": bias, "stop_token_ids": ids})
    bias[6], ids[:] = 1.0, [7]
    assert (params.logit_bias, params.stop_token_ids) == ({5: 1.0}, (5,))


def test_the_message_says_what_was_found(resolve: Any) -> None:
    with pytest.raises(RequestError, match=r"top_p: expected above 0, up to 1 \(off\), found 1.5"):
        resolve({"top_p": 1.5})


def test_a_seed_is_made_and_recorded_when_none_is_given(resolve: Any) -> None:
    seeds = {resolve({}).seed for _ in range(10)}
    assert len(seeds) == 10
    assert all(0 <= seed < 2**63 for seed in seeds)


DEFAULTS = {
    "temperature": 0.6,
    "top_k": 50,
    "top_p": 0.9,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "bad_words_ids": ((5,),),
    "min_tokens": 2,
    "max_tokens": 30,
}


def test_the_artifacts_defaults_apply(resolve: Any) -> None:
    assert set(DEFAULTS) == set(GenerationDefaults.__dataclass_fields__)
    params = resolve({}, **DEFAULTS)
    for name, value in DEFAULTS.items():
        assert getattr(params, {"bad_words_ids": "bad_words"}.get(name, name)) == value


OVERRIDES = {
    "temperature": 0,
    "top_k": 0,
    "top_p": 1,
    "min_p": 0,
    "repetition_penalty": 1,
    "min_tokens": 0,
    "max_tokens": 0,
}


@pytest.mark.parametrize(("name", "value"), OVERRIDES.items())
def test_the_artifacts_defaults_can_be_overridden_by_zero_too(resolve: Any, name: str, value: Any) -> None:
    assert getattr(resolve({name: value}, **DEFAULTS), name) == value


def test_bad_words_are_added_to_the_artifacts(resolve: Any) -> None:
    assert resolve({"bad_words": [[7, 8]]}, **DEFAULTS).bad_words == ((5,), (7, 8))


@pytest.mark.parametrize("options", [{"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_a_filter_alone_samples_at_temperature_1_where_the_default_is_greedy(resolve: Any, options: Any) -> None:
    assert resolve(options).temperature == 1.0
    assert resolve({**options, "temperature": 0}).temperature == 0.0
    assert resolve(options, temperature=0.6).temperature == 0.6


@pytest.mark.parametrize("options", [{"top_k": 0}, {"top_p": 1}, {"top_p": 1.0}, {"min_p": 0}, {"seed": 3}])
def test_a_filter_that_is_off_does_not_make_it_sample(resolve: Any, options: Any) -> None:
    assert resolve(options).temperature == 0.0


def test_a_bad_word_is_banned_at_the_beginning_and_after_a_space(resolve: Any, tokenizer: Tokenizer) -> None:
    words = resolve({"bad_words": ["the"]}).bad_words
    assert {tokenizer.decode(word) for word in words} == {"the", " the"}
    assert set(words) == {tuple(tokenizer.encode("the")), tuple(tokenizer.encode(" the"))}


def test_a_bad_word_given_twice_is_kept_once(resolve: Any) -> None:
    assert len(resolve({"bad_words": ["the", "the", "the"]}).bad_words) == 2


def test_a_bad_word_that_is_not_unicode_is_refused(resolve: Any) -> None:
    with pytest.raises(TextError, match="cannot be tokenized"):
        resolve({"bad_words": ["\ud800"]})


def test_speculation_defaults_come_from_the_artifact() -> None:
    how = speculation({})
    assert (how.drafter, how.k, how.prompt_lookup_max, how.prompt_lookup_min) == ("ngram", 3, 5, 1)
    assert speculation({"drafter": "model"}).k == 2
    assert speculation({"drafter": "none"}).k == 0
    assert speculation({}).suffix_cache is False
    assert speculation({"suffix_cache": True}).suffix_cache is True


def test_trees_are_asked_for_where_there_are_some() -> None:
    assert speculation({}).tree is False
    assert speculation({"tree": True, "drafter": "model"}).tree is True
    for plain in ({"drafter": "none"}, {"k": 0}, {"drafter": "model", "k": 0}):
        assert speculation({"tree": True, **plain}, trees=None).tree is False
    with pytest.raises(RequestError, match=r"^tree: expected a drafter of trees \(model\), found 'ngram'"):
        speculation({"tree": True})
    with pytest.raises(RequestError, match=r"^tree: the artifact takes chains only: export it with --trees"):
        speculation({"tree": True, "drafter": "model"}, trees=None)
    with pytest.raises(RequestError, match=r"^tree: expected True or False, found 1"):
        speculation({"tree": 1})


@pytest.mark.parametrize("value", [1, 0, "yes", []])
def test_a_suffix_cache_is_on_or_off(value: Any) -> None:
    with pytest.raises(RequestError, match="suffix_cache: expected True or False, found"):
        speculation({"suffix_cache": value})


def test_the_default_k_is_clamped_to_what_this_machine_can_verify() -> None:
    assert speculation({}, default_k=5, max_k=3).k == 3


@pytest.mark.parametrize("k", [-1, 16, 1.5, "3", True])
def test_a_k_that_cannot_be_verified_is_refused(k: Any) -> None:
    with pytest.raises(RequestError, match=r"^k: expected"):
        speculation({"k": k})


@pytest.mark.parametrize("k", [0, 1, 15, 3.0, np.int64(3)])
def test_any_k_of_the_ladder_is_taken(k: Any) -> None:
    assert speculation({"k": k}).k == int(k)


@pytest.mark.parametrize("drafter", ["eagle", "", 5, [], True])
def test_an_unknown_drafter_lists_those_there_are(drafter: Any) -> None:
    with pytest.raises(RequestError, match="drafter: the artifact has ngram, model, none, found"):
        speculation({"drafter": drafter})


@pytest.mark.parametrize(
    ("options", "longest", "shortest"),
    [
        ({"prompt_lookup_max": 2}, 2, 1),
        ({"prompt_lookup_min": 2}, 5, 2),
        ({"prompt_lookup_min": 7}, 7, 7),
        ({"prompt_lookup_max": 6, "prompt_lookup_min": 3}, 6, 3),
    ],
)
def test_the_n_gram_lengths_adapt_to_the_one_given(options: Any, longest: int, shortest: int) -> None:
    how = speculation(options)
    assert (how.prompt_lookup_max, how.prompt_lookup_min) == (longest, shortest)


@pytest.mark.parametrize("name", ["prompt_lookup_max", "prompt_lookup_min"])
def test_n_gram_lengths_are_whole_numbers(name: str) -> None:
    with pytest.raises(RequestError, match=f"^{name}: expected a whole number"):
        speculation({name: 1.5})


def test_a_draft_budget_is_in_milliseconds() -> None:
    assert speculation({}).draft_budget_s is None
    assert speculation({"draft_budget_ms": 2}).draft_budget_s == 0.002


@pytest.mark.parametrize("value", [0, -1, math.inf, math.nan, "5", True])
def test_a_draft_budget_that_no_drafter_could_keep_or_break_is_refused(value: Any) -> None:
    with pytest.raises(RequestError, match=r"^draft_budget_ms: expected"):
        speculation({"draft_budget_ms": value})


def ids_of(tokenizer: Tokenizer, prompt: Any, *, capacity: int = 128) -> list[int]:
    return prompt_ids(prompt, tokenizer, vocab_size=V, capacity=capacity)


@pytest.mark.parametrize(
    "ids",
    [
        [5, 6],
        (5, 6),
        np.array([5, 6]),
        np.array([5, 6], np.uint8),
        [np.int64(5), np.int32(6)],
        range(5, 7),
    ],
)
def test_ids_come_in_many_containers(tokenizer: Tokenizer, ids: Any) -> None:
    found = ids_of(tokenizer, ids)
    assert found == ids_of(tokenizer, iter(ids)) == [5, 6]
    assert all(type(token) is int for token in found)


def test_a_text_is_tokenized_with_special_tokens(tokenizer: Tokenizer) -> None:
    assert ids_of(tokenizer, "the <|end|>fox") == tokenizer.encode("the <|end|>fox")


def test_messages_go_through_the_template(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "the fox"}]
    assert ids_of(tokenizer, messages) == tokenizer.encode("<|user|>the fox<|end|><|assistant|>")
    assert ids_of(tokenizer, tuple(MappingProxyType(message) for message in messages)) == ids_of(tokenizer, messages)


@pytest.mark.parametrize("prompt", ["", [], (), np.array([], np.int64)])
def test_an_empty_prompt_is_refused(tokenizer: Tokenizer, prompt: Any) -> None:
    with pytest.raises(RequestError, match="the prompt is empty"):
        ids_of(tokenizer, prompt)


def test_a_prompt_as_long_as_the_capacity_is_taken_and_a_longer_one_refused(tokenizer: Tokenizer) -> None:
    assert ids_of(tokenizer, [5] * 8, capacity=8) == [5] * 8
    with pytest.raises(RequestError, match="the prompt has 9 tokens, the capacity is 8: shorten it"):
        ids_of(tokenizer, [5] * 9, capacity=8)


@pytest.mark.parametrize("token", [-1, V, 10**30])
def test_ids_outside_the_vocabulary_are_refused(tokenizer: Tokenizer, token: int) -> None:
    with pytest.raises(RequestError, match=f"prompt: expected token ids from 0 to 383, found {token}"):
        ids_of(tokenizer, [5, token])


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        5,
        b"bytes",
        {"role": "user", "content": "x"},
        [True],
        [np.True_],
        [1.0],
        np.array([1.5]),
        np.array([[5, 6]]),
        np.array(5),
        ["a", "text"],
        [None],
        [{"role": "user", "content": "x"}, 5],
        [5, {"role": "user", "content": "x"}],
    ],
)
def test_other_prompts_are_refused(tokenizer: Tokenizer, prompt: Any) -> None:
    with pytest.raises(RequestError, match=r"^prompt: expected"):
        ids_of(tokenizer, prompt)
