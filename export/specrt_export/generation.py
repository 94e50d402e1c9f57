"""A model's generation config as request defaults, with the values transformers would use."""

from typing import Any

from specrt_profiles.generation import GenerationDefaults

_SAMPLING_DEFAULTS = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0}
# Settings that change the text and have no counterpart here, with their neutral values.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1), "no_repeat_ngram_size": (None, 0), "typical_p": (None, 1.0), "epsilon_cutoff": (None, 0.0),
    "eta_cutoff": (None, 0.0), "sequence_bias": (None,), "forced_bos_token_id": (None,), "forced_eos_token_id": (None,),
    "exponential_decay_length_penalty": (None,), "begin_suppress_tokens": (None, []), "guidance_scale": (None, 1.0),
    "penalty_alpha": (None,),
}  # fmt: skip


def generation_defaults(config: Any) -> tuple[GenerationDefaults, list[str]]:
    """Return the defaults, and the names of settings that would change the text but are not supported."""
    values: dict[str, Any] = {}
    if config.do_sample:
        for name, default in _SAMPLING_DEFAULTS.items():
            value = getattr(config, name, None)
            values[name] = default if value is None else value
    if config.repetition_penalty is not None:
        values["repetition_penalty"] = float(config.repetition_penalty)
    if config.max_new_tokens is not None:
        values["max_tokens"] = int(config.max_new_tokens)
    if config.min_new_tokens is not None:
        values["min_tokens"] = int(config.min_new_tokens)
    banned = [tuple(ids) for ids in config.bad_words_ids or []]
    banned += [(token,) for token in config.suppress_tokens or []]
    ignored = [name for name, neutral in _UNSUPPORTED.items() if getattr(config, name, None) not in neutral]
    return GenerationDefaults(bad_words_ids=tuple(banned), **values), ignored
