"""The promise on the real default model: the same ids and the same bits with speculation on and off."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import specrt
from copies import copy_artifact, draft_with_target, draft_with_target_of
from real import Recorder, exported, random_draft, smollm
from specrt.prompts import load_prompts
from specrt_export.catalogue import own_head
from specrt_profiles.manifest import read_manifest

pytestmark = pytest.mark.slow
KS = (1, 3, 5, 9, 15)
PROMPTS = [prompt.text for prompt in load_prompts(None, limit=1)]  # one of each category
MAX_TOKENS = 20


@pytest.fixture(scope="module")
def artifacts(real_folder: Path) -> dict[str, Path]:
    """SmolLM2-135M at fp32 and int4, each with itself at int4 or random weights as draft; at int8 with its head."""
    folder, source, adversary = real_folder, str(smollm(real_folder)), str(random_draft(real_folder))
    fp32 = exported(folder, "smollm2-fp32", source)
    fp32_random = exported(folder, "smollm2-fp32-random", None, draft=adversary, add_to=fp32)
    int4 = exported(folder, "smollm2-int4", source, precision="int4")
    head = own_head("smollm2-135m")
    assert head is not None
    random = exported(folder, "smollm2-int4-random", None, draft=adversary, add_to=int4)
    if not (folder / "smollm2-int4-self").is_dir():
        copy_artifact(random, folder / "smollm2-int4-self", draft_with_target)
    if not (folder / "smollm2-fp32-self").is_dir():
        draft_with_target_of(int4, copy_artifact(fp32_random, folder / "smollm2-fp32-self"))
    return {
        "fp32": folder / "smollm2-fp32-self",
        "int4": folder / "smollm2-int4-self",
        "int8": exported(folder, "smollm2-int8-head", source, heads=(head,), precision="int8", draft_precision="int8"),
        "fp32, random draft": fp32_random,
        "int4, random draft": random,
        "tensorrt": exported(folder, "smollm2-tensorrt-fp32", source, dialect="tensorrt", capacity=512),
    }


@pytest.fixture(scope="module", params=["fp32", "int8", "int4", "fp32, random draft", "int4, random draft"])
def model(
    request: pytest.FixtureRequest, artifacts: dict[str, Path], machine_cache: Path
) -> Iterator[specrt.LanguageModel]:
    with specrt.load(artifacts[request.param], cache_dir=machine_cache) as loaded:
        yield loaded


def generate(model: specrt.LanguageModel, prompt: str, **options: Any) -> tuple[specrt.Result, dict[int, bytes]]:
    recorder: Any = Recorder(model.target)
    messages = [{"role": "user", "content": prompt}]
    with model.start(messages, {"max_tokens": MAX_TOKENS, **options}, target=recorder) as stream:
        for _ in stream:
            pass
        result = stream.result
    first = result.stats.num_prompt_tokens
    return result, {position: recorder.rows[position] for position in range(first, first + len(result.token_ids))}


def settings(model: specrt.LanguageModel) -> list[tuple[str, int]]:
    """Return drafters and values of k; those of the adversary, whose guesses are all wrong, are fewer."""
    if "draft" not in model.manifest.engines:
        return list(itertools.product(["ngram", "suffix"], KS))
    if "random" in model.manifest.engines["draft"].model.name:
        return [("model", k) for k in (1, 5, 15)]
    return list(itertools.product(["ngram", "suffix", "model"], KS))


def test_the_head_of_the_default_model_changes_nothing_but_the_speed(
    artifacts: dict[str, Path], machine_cache: Path
) -> None:
    stats = []
    with specrt.load(artifacts["int8"], cache_dir=machine_cache) as model:
        for prompt in PROMPTS:
            messages, options = [{"role": "user", "content": prompt}], {"max_tokens": 40, "logprobs": 1}
            for sampling in ({}, {"temperature": 0.8, "seed": 1}):
                plain = model.generate(messages, k=0, **options, **sampling)
                for drafter, k in (("eagle", 3), ("eagle", "auto"), ("combined", "auto")):
                    found = model.generate(messages, k=k, drafter=drafter, **options, **sampling)
                    assert (found.token_ids, found.logprobs) == (plain.token_ids, plain.logprobs)
                    stats += [found.stats] if (drafter, k) == ("eagle", 3) else []
    assert sum(s.num_tokens for s in stats) > 1.4 * sum(s.num_steps for s in stats)


def test_greedy_ids_and_logits_are_bitwise_those_of_plain_decoding(model: specrt.LanguageModel) -> None:
    assert model.target.verify_widths == (2, 4, 6, 10, 16)
    accepted = 0
    for number, prompt in enumerate(PROMPTS):
        plain, rows = generate(model, prompt, k=0)
        for drafter, k in settings(model):
            if drafter == "model" and number % 3:
                continue  # a draft costs as much as all the rest
            result, speculative_rows = generate(model, prompt, k=k, drafter=drafter)
            assert result.token_ids == plain.token_ids
            assert speculative_rows == rows
            assert result.stats.num_proposed > 0 or drafter == "ngram"
            accepted += result.stats.num_accepted
    assert accepted > 0 or len(settings(model)) == 3


def test_one_seed_gives_one_text_at_any_k(model: specrt.LanguageModel) -> None:
    for seed, prompt in enumerate(PROMPTS[:2]):
        options = {"temperature": 0.8, "top_p": 0.95, "seed": seed}
        plain, rows = generate(model, prompt, k=0, **options)
        for drafter, k in settings(model):
            result, speculative_rows = generate(model, prompt, k=k, drafter=drafter, **options)
            assert (result.text, speculative_rows) == (plain.text, rows)


@pytest.mark.parametrize("precision", ["fp32", "int8", "int4"])
def test_kv_has_the_same_bits_however_it_was_written(
    artifacts: dict[str, Path], machine_cache: Path, precision: str
) -> None:
    """Prefill calls from any token on, verify calls of every width, or both: what reuse of earlier texts rests on."""
    with specrt.load(artifacts[precision], cache_dir=machine_cache) as loaded:
        target: Any = loaded.target
        ids = np.random.default_rng(0).integers(5, target.vocab_size, 1000).tolist()
        target.rollback(0)
        target.prefill(ids)
        written = [value.numpy()[:, :, : len(ids)] for _, _, value in target._kv]
        expected = [array.copy() for array in written]
        for sizes in ([37, 600, 363], [2, *[16, 10, 6, 4, 2] * 8], [700, *[2, 6] * 8, 101]):
            target.rollback(0)
            for size in filter(None, [*sizes, len(ids) - sum(sizes)]):
                piece = ids[target.kv_length : target.kv_length + size]
                target.prefill(piece) if size > 16 else target.verify(piece)
            assert all(np.array_equal(a, b) for a, b in zip(written, expected, strict=True))


@pytest.mark.parametrize(("precision", "kl"), [("fp32", 1e-6), ("int8", 0.02), ("int4", 0.01)])
def test_the_artifact_is_close_to_its_source(artifacts: dict[str, Path], precision: str, kl: float) -> None:
    """The source was stored in blocks of 4 bits with minima: the same blocks are stored again."""
    assert read_manifest(artifacts[precision]).target.parity.mean_kl <= kl


def test_both_dialects_say_the_same(artifacts: dict[str, Path], machine_cache: Path) -> None:
    texts = []
    for name in ("fp32", "tensorrt"):
        with specrt.load(artifacts[name], cache_dir=machine_cache) as loaded:
            asked = [[{"role": "user", "content": prompt}] for prompt in PROMPTS[::2]]
            how = {"max_tokens": MAX_TOKENS, "drafter": "ngram"}
            texts.append([loaded.generate(prompt, k=k, **how).token_ids for prompt in asked for k in (0, 5)])
    assert texts[0] == texts[1]
    assert min(map(len, texts[0])) > 1


def test_the_answer_makes_sense(artifacts: dict[str, Path], machine_cache: Path) -> None:
    with specrt.load(artifacts["fp32"], cache_dir=machine_cache) as loaded:
        result = loaded.generate([{"role": "user", "content": "What is the capital of France?"}], max_tokens=30)
    assert "Paris" in result.text
    assert result.finish_reason == "stop"
