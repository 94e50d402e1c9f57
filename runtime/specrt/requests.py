"""Options of a request as a user gives them, and their resolution against the artifact's defaults."""

import operator
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, Literal, TypedDict

from specrt.control import Controller
from specrt.errors import RequestError
from specrt.sampling import Coupling, SamplingParams
from specrt.text import Message, Tokenizer
from specrt_profiles.codec import nearest
from specrt_profiles.generation import GenerationDefaults

Prompt = str | Sequence[int] | Sequence[Message]


class Options(TypedDict, total=False):
    """What `generate` and `stream` accept; what is left out (or None) takes the artifact's default.

    temperature, top_k, top_p, min_p, repetition_penalty, frequency_penalty, presence_penalty, logit_bias ({id:
    value}), bad_words (texts or id lists), min_tokens, max_tokens, stop (a text or several), stop_token_ids,
    ignore_eos, seed (a new one each time if left out), stream (number of the sample or chat turn under one
    seed), logprobs (how many alternatives), coupling: see `SamplingParams`. drafter: `ngram`, `suffix`, `model`,
    `eagle`, `medusa`, `early-exit`, `combined` (in each step whichever of `suffix` and the model or head brings more;
    `ngram+model` names other parts) or `none`. k: most tokens to propose per step, 0 for plain decoding, `auto` (the
    default) for as many as pay by what was measured so far; max_step_ms then bounds the milliseconds of a step.
    controller: an object that decides it instead (`specrt.control.Controller`).
    prompt_lookup_max, prompt_lookup_min: lengths of the n-grams that the `ngram` drafter looks up. suffix_cache:
    whether the `suffix` drafter also looks into the outputs of earlier requests that had it set, and keeps this one's
    for later ones; off unless set, because it lets others find out from the speed alone what was said. draft_budget_ms:
    a drafter that takes longer for a proposal is dropped for the rest of the request. strict: trees have the bits of
    plain decoding too, because accepted paths that other branches cost their last bits are verified once more as
    chains. tree: guess several tokens for one place where the drafter is in doubt; `suffix` and heads can, on artifacts
    that take trees.
    chat_template_kwargs: variables for the chat template (`enable_thinking`, `tools`, ...), with a prompt of messages.
    """

    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    logit_bias: Mapping[int, float] | None
    bad_words: Sequence[str | Sequence[int]] | None
    min_tokens: int | None
    max_tokens: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    seed: int | None
    stream: int | None
    logprobs: int | None
    coupling: Coupling | None
    drafter: str | None
    k: int | Literal["auto"] | None
    max_step_ms: float | None
    controller: Controller | None
    prompt_lookup_max: int | None
    prompt_lookup_min: int | None
    suffix_cache: bool | None
    draft_budget_ms: float | None
    strict: bool | None
    tree: bool | None
    chat_template_kwargs: Mapping[str, Any] | None


_SAMPLING = tuple(SamplingParams.__dataclass_fields__)
_FILTERS = {name: SamplingParams.__dataclass_fields__[name].default for name in ("top_k", "top_p", "min_p")}
_INTEGERS = (
    "top_k",
    "min_tokens",
    "max_tokens",
    "seed",
    "stream",
    "logprobs",
    "k",
    "prompt_lookup_max",
    "prompt_lookup_min",
)
_ELSEWHERE = {  # what other libraries call it
    "num_speculative_tokens": "k", "num_draft_tokens": "k", "num_assistant_tokens": "k",
    "prompt_lookup_num_tokens": "k", "max_matching_ngram_size": "prompt_lookup_max", "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens", "min_new_tokens": "min_tokens", "stop_strings": "stop",
    "eos_token_id": "stop_token_ids", "do_sample": "temperature", "bad_words_ids": "bad_words",
    "top_logprobs": "logprobs", "tools": "chat_template_kwargs", "enable_thinking": "chat_template_kwargs",
}  # fmt: skip
_FLAGS = ("ignore_eos", "suffix_cache", "strict", "tree")
_NUMBERS = (
    "max_step_ms", "temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty",
    "draft_budget_ms",
)  # fmt: skip
_OBJECTS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "controller": (
        lambda value: isinstance(value, Controller) and not isinstance(value, type),
        "an object with the methods limit, keep and learn",
    ),
    "chat_template_kwargs": (
        lambda value: isinstance(value, Mapping) and all(isinstance(name, str) for name in value),
        "a dict from names to values",
    ),
}


def check_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that are not None, with plain Python values.

    Raises `RequestError` for an unknown name or a wrong type.
    """
    known = Options.__annotations__
    for name in options:
        if name not in known:
            ours = _ELSEWHERE.get(name)
            raise RequestError(f"unknown option {name!r}{f' (here: {ours})' if ours else nearest(name, known)}")
    return {name: _plain(name, value) for name, value in options.items() if value is not None}


def _plain(name: str, value: Any) -> Any:
    if name in _INTEGERS and (name, value) != ("k", "auto"):
        return _whole(name, value)
    if name in _NUMBERS:
        return _number(name, value)
    if name in _FLAGS and not isinstance(value, bool):
        raise RequestError(f"{name}: expected True or False, found {value!r}")
    if name == "stop":
        texts = (value,) if isinstance(value, str) else _items(name, value, "a text or a list of texts")
        if not all(isinstance(text, str) for text in texts):
            raise RequestError(f"{name}: expected a text or a list of texts, found {value!r}")
        return tuple(texts)
    if name == "stop_token_ids":
        return tuple(_token_id(name, item) for item in _items(name, value, "a list of token ids"))
    if name == "logit_bias":
        if not isinstance(value, Mapping):
            raise RequestError(f"{name}: expected a dict from token ids to numbers, found {value!r}")
        return {_token_id(name, token): _number(name, bias) for token, bias in value.items()}
    is_right, wanted = _OBJECTS.get(name, (None, ""))
    if is_right is not None and not is_right(value):
        raise RequestError(f"{name}: expected {wanted}, found {value!r}")
    return value


def _number(name: str, value: Any) -> float:
    try:
        if isinstance(value, Real) and not isinstance(value, bool):
            return float(value)
    except OverflowError:
        pass
    raise RequestError(f"{name}: expected a number, found {value!r}")


def _whole(name: str, value: Any) -> int:
    if isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    raise RequestError(f"{name}: expected a whole number, found {value!r}")


def _items(name: str, value: Any, wanted: str) -> list[Any]:
    if isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping):
        try:
            return list(value)
        except TypeError:  # an array without dimensions
            pass
    raise RequestError(f"{name}: expected {wanted}, found {type(value).__name__}")


def _token_id(name: str, item: Any) -> int:
    try:
        if not isinstance(item, bool):
            return operator.index(item)
    except TypeError:
        pass
    raise RequestError(f"{name}: expected token ids, found {item!r}")


def resolve_sampling(
    given: Mapping[str, Any], defaults: GenerationDefaults, tokenizer: Tokenizer, *, vocab_size: int
) -> SamplingParams:
    """Fill what `given` leaves out from the artifact's defaults.

    A request that sets a filter but no temperature samples at temperature 1 where the default is greedy: a filter would
    have no meaning otherwise.
    """
    values: dict[str, Any] = {
        name: getattr(defaults, name) for name in GenerationDefaults.__dataclass_fields__ if name in _SAMPLING
    }
    values["bad_words"] = defaults.bad_words_ids
    values |= {name: value for name, value in given.items() if name in _SAMPLING}
    filtered = any(given.get(name, neutral) != neutral for name, neutral in _FILTERS.items())
    if values["temperature"] == 0 and "temperature" not in given and filtered:
        values["temperature"] = 1.0
    if "bad_words" in given:
        values["bad_words"] = (*defaults.bad_words_ids, *_bad_words(given["bad_words"], tokenizer))
    values.setdefault("seed", secrets.randbits(63))
    params = SamplingParams(**values)
    ids = {"logit_bias": params.logit_bias, "stop_token_ids": params.stop_token_ids,
           "bad_words": [token for word in params.bad_words for token in word]}  # fmt: skip
    for name, tokens in ids.items():
        check_token_ids(tokens, vocab_size, what=name)
    return params


def prompt_ids(
    prompt: Prompt, tokenizer: Tokenizer, *, vocab_size: int, capacity: int,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:  # fmt: skip
    """Return the token ids of a text, of messages, or of token ids; raises `RequestError` if empty or too long."""
    items = [] if isinstance(prompt, str) else _items("prompt", prompt, "a text, token ids or messages")
    is_chat = bool(items) and all(isinstance(item, Mapping) for item in items)
    if template_kwargs and not is_chat:
        raise RequestError("chat_template_kwargs: expected a prompt of messages, which go through the chat template")
    if isinstance(prompt, str):
        ids = tokenizer.encode(prompt)
    elif is_chat:
        ids = tokenizer.encode(tokenizer.render(items, template_kwargs), add_special_tokens=False)
    else:
        ids = [_token_id("prompt", item) for item in items]
    if not ids:
        raise RequestError("the prompt is empty: expected at least one token")
    if len(ids) > capacity:
        raise RequestError(
            f"the prompt has {len(ids)} tokens, the capacity is {capacity}: shorten it, or export with more --capacity"
        )
    check_token_ids(ids, vocab_size, what="prompt")
    return ids


def check_token_ids(ids: Iterable[int], vocab_size: int, *, what: str) -> None:
    """Raise `RequestError` for an id outside the vocabulary."""
    for token in ids:
        if not 0 <= token < vocab_size:
            raise RequestError(f"{what}: expected token ids from 0 to {vocab_size - 1}, found {token!r}")


def _bad_words(words: Sequence[str | Sequence[int]], tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """Return id sequences; a text is banned at the beginning of a text and after a space."""
    wanted = "a list of texts or of id lists"
    found: list[tuple[int, ...]] = []
    for word in _items("bad_words", words, wanted):
        forms = (
            [tokenizer.encode(lead + word, add_special_tokens=False) for lead in ("", " ")]
            if isinstance(word, str)
            else [[_token_id("bad_words", item) for item in _items("bad_words", word, wanted)]]
        )
        found += [tuple(ids) for ids in forms if tuple(ids) not in found]
    return found
