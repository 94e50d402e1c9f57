"""Generation configs: the defaults that transformers would use, and what cannot be kept."""

from typing import Any

import pytest
from transformers import GenerationConfig

from specrt_export.errors import CheckpointError
from specrt_export.generation import generation_defaults
from specrt_profiles.generation import GenerationDefaults


def defaults(**settings: Any) -> GenerationDefaults:
    found, ignored = generation_defaults(GenerationConfig(**settings), vocab_size=100)
    assert ignored == []
    return found


def test_a_config_that_does_not_sample_is_greedy() -> None:
    assert defaults() == GenerationDefaults()
    assert defaults(do_sample=False, temperature=0.6, top_k=20, top_p=0.9) == GenerationDefaults()


def test_sampling_settings_are_kept() -> None:
    found = defaults(do_sample=True, temperature=0.6, top_k=20, top_p=0.9, min_p=0.1)
    assert found == GenerationDefaults(temperature=0.6, top_k=20, top_p=0.9, min_p=0.1)


def test_sampling_without_top_k_means_the_50_of_transformers() -> None:
    assert defaults(do_sample=True) == GenerationDefaults(temperature=1.0, top_k=50)


def test_top_k_zero_means_no_limit() -> None:
    assert defaults(do_sample=True, top_k=0).top_k == 0


def test_penalty_and_lengths_are_kept_without_sampling() -> None:
    found = defaults(repetition_penalty=1.2, max_new_tokens=77, min_new_tokens=3)
    assert found == GenerationDefaults(repetition_penalty=1.2, max_tokens=77, min_tokens=3)


def test_bad_words_and_suppressed_tokens_are_banned() -> None:
    found = defaults(bad_words_ids=[[5, 6], [7]], suppress_tokens=[8, 9])
    assert found.bad_words_ids == ((5, 6), (7,), (8,), (9,))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_beams", 4),
        ("no_repeat_ngram_size", 3),
        ("typical_p", 0.9),
        ("epsilon_cutoff", 0.1),
        ("eta_cutoff", 0.1),
        ("sequence_bias", [[[3], -1.0]]),
        ("forced_bos_token_id", 1),
        ("forced_eos_token_id", 1),
        ("exponential_decay_length_penalty", (5, 1.1)),
        ("begin_suppress_tokens", [1]),
        ("guidance_scale", 1.5),
        ("penalty_alpha", 0.6),
    ],
)
def test_a_setting_without_counterpart_is_reported(name: str, value: object) -> None:
    found, ignored = generation_defaults(GenerationConfig(**{name: value}), vocab_size=100)
    assert found == GenerationDefaults()
    assert ignored == [name]


def test_neutral_values_of_such_settings_are_not_reported() -> None:
    settings = {"num_beams": 1, "no_repeat_ngram_size": 0, "typical_p": 1.0, "guidance_scale": 1.0}
    assert generation_defaults(GenerationConfig(**settings), vocab_size=100)[1] == []


@pytest.mark.parametrize(
    ("name", "value"),
    [("top_k", "many"), ("temperature", [1.0]), ("top_p", True), ("min_p", "x")],
)
def test_a_value_of_another_type_is_refused_by_name(name: str, value: object) -> None:
    config = GenerationConfig(do_sample=True)
    setattr(config, name, value)
    with pytest.raises(CheckpointError, match=rf"generation_config\.{name}: expected"):
        generation_defaults(config, vocab_size=100)


@pytest.mark.parametrize(
    ("name", "value"),
    [("top_p", 0.0), ("top_k", -1), ("temperature", -1.0), ("min_p", 2.0), ("repetition_penalty", 0.0)],
)
def test_a_setting_that_no_request_could_have_is_left_out_and_reported(name: str, value: float) -> None:
    config = GenerationConfig(do_sample=True)
    setattr(config, name, value)
    found, ignored = generation_defaults(config, vocab_size=100)
    assert getattr(found, name) == getattr(GenerationDefaults(), name)
    assert ignored == [f"{name} {value}"]


def test_tokens_outside_the_vocabulary_are_left_out_and_reported() -> None:
    config = GenerationConfig(bad_words_ids=[[5, 100], [7]], suppress_tokens=[99, 100])
    found, ignored = generation_defaults(config, vocab_size=100)
    assert found.bad_words_ids == ((7,), (99,))
    assert ignored == ["bad word [5, 100]", "bad word [100]"]
