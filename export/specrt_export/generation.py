"""A model's generation config as request defaults, with the values transformers would use."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from specrt_export.errors import CheckpointError
from specrt_profiles.codec import decode
from specrt_profiles.generation import GenerationDefaults

_SAMPLING_DEFAULTS = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0}
_ALWAYS = {"repetition_penalty": "repetition_penalty", "max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}
# Settings that change the text and have no counterpart here, with their neutral values.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1), "no_repeat_ngram_size": (None, 0), "typical_p": (None, 1.0), "epsilon_cutoff": (None, 0.0),
    "eta_cutoff": (None, 0.0), "sequence_bias": (None,), "forced_bos_token_id": (None,), "forced_eos_token_id": (None,),
    "exponential_decay_length_penalty": (None,), "begin_suppress_tokens": (None, []), "guidance_scale": (None, 1.0),
    "penalty_alpha": (None,), "stop_strings": (None, []), "min_length": (None, 0), "top_h": (None,),
}  # fmt: skip


_POSSIBLE: dict[str, Callable[[float], bool]] = {
    "temperature": lambda value: 0 <= value < math.inf, "top_k": lambda value: value >= 0,
    "top_p": lambda value: 0 < value <= 1, "min_p": lambda value: 0 <= value <= 1,
    "repetition_penalty": lambda value: 0 < value < math.inf, "max_tokens": lambda value: value >= 0,
    "min_tokens": lambda value: value >= 0,
}  # fmt: skip


def generation_defaults(config: Any, *, vocab_size: int) -> tuple[GenerationDefaults, list[str]]:
    """Return the defaults, and the settings that would change the text but are not supported or not possible.

    Raises `CheckpointError` for a setting of another type than it should have.
    """
    values: dict[str, Any] = {}
    if config.do_sample:
        for name, default in _SAMPLING_DEFAULTS.items():
            value = getattr(config, name, None)
            values[name] = default if value is None else value
    for ours, theirs in _ALWAYS.items():
        value = getattr(config, theirs)
        if value is not None:
            values[ours] = value
    values["bad_words_ids"] = [*(config.bad_words_ids or []), *([token] for token in config.suppress_tokens or [])]
    ignored = [name for name, neutral in _UNSUPPORTED.items() if getattr(config, name, None) not in neutral]
    found = decode(GenerationDefaults, values, where="generation_config", error=CheckpointError)
    impossible = [name for name, possible in _POSSIBLE.items() if not possible(_number(getattr(found, name)))]
    ignored += [f"{name} {getattr(found, name)}" for name in impossible]
    words = [word for word in found.bad_words_ids if word and all(0 <= token < vocab_size for token in word)]
    ignored += [f"bad word {list(word)}" for word in found.bad_words_ids if word not in words]
    neutral = GenerationDefaults()
    kept = {name: getattr(neutral, name) for name in impossible}
    return replace(found, **kept, bad_words_ids=tuple(words)), ignored


def _number(value: float | None) -> float:
    return 0.0 if value is None else float(value)
