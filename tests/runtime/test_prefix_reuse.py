"""Reuse of KV on real engines: the bits of a cold start, in every dialect and KV precision, after any fault."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import specrt
import tiny
from specrt import LanguageModel, Result, language_model
from specrt.errors import EngineError, RequestError
from specrt.machine import MachineFacts

DRAFTERS = ("none", "ngram", "model", "combined")
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 7}
COUPLINGS: tuple[dict[str, Any], ...] = ({}, SAMPLED, {**SAMPLED, "coupling": "rejection"})
WIDTH = 16


@pytest.fixture(scope="module")
def int8_artifact(tiny_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama with int8 weights and int8 KV, and itself as draft."""
    profile = tiny.profile(precision="int8", kv_precision="int8")
    return tiny.export_tiny(
        tiny_source, tmp_path_factory.mktemp("int8") / "tiny", draft=str(tiny_source), profile=profile
    )


@pytest.fixture(scope="module", params=["fp32", "int8 and int8 KV", "tensorrt"])
def artifact(request: pytest.FixtureRequest, tiny_artifact: Path, int8_artifact: Path, tensorrt_artifact: Path) -> Path:
    return {"fp32": tiny_artifact, "int8 and int8 KV": int8_artifact, "tensorrt": tensorrt_artifact}[request.param]


@pytest.fixture(scope="module")
def cold(artifact: Path, machine_cache: Path) -> Iterator[LanguageModel]:
    """A model that never reuses anything."""
    with specrt.load(artifact, cache_dir=machine_cache, prefix_cache_mib=None) as model:
        yield model


@pytest.fixture
def load(artifact: Path, machine_cache: Path) -> Iterator[Callable[[float | None], LanguageModel]]:
    models: list[LanguageModel] = []

    def load(mib: float | None) -> LanguageModel:
        models.append(specrt.load(artifact, cache_dir=machine_cache, prefix_cache_mib=mib))
        return models[-1]

    yield load
    for model in models:
        model.close()


def output(result: Result) -> tuple[Any, ...]:
    """Return what must not depend on the past; log-probabilities stand for the bits of the logits."""
    return result.text, result.token_ids, result.finish_reason, result.stop, result.logprobs


def prompts(seed: int, count: int) -> list[list[int]]:
    """Return prompts that share beginnings of all lengths."""
    rng = random.Random(seed)
    known = [[rng.randrange(5, 380) for _ in range(rng.choice([1, 20, 50]))]]
    for _ in range(count - 1):
        old = rng.choice(known)
        kept = rng.choice([0, 1, WIDTH, len(old) // 2, len(old), len(old)])
        known.append([*old[:kept], *(rng.randrange(5, 380) for _ in range(rng.choice([1, 5, 17])))][:100])
    return known


@pytest.mark.parametrize("mib", [0, 0.05, 10])
def test_requests_are_what_they_are_after_a_cold_start(load: Any, cold: LanguageModel, mib: float) -> None:
    model, rng = load(mib), random.Random(1)
    cached = 0
    for number, prompt in enumerate(prompts(int(mib), 30)):
        options = {**rng.choice(COUPLINGS), "logprobs": 2, "max_tokens": rng.choice([1, 9, 20]), "ignore_eos": True}
        options |= {"drafter": rng.choice(DRAFTERS), "k": rng.choice([1, 3, 7])}
        if number % 5 == 4:  # one that ends early
            with model.stream(prompt, **options) as stream:
                next(stream)
        result = model.generate(prompt, **options)
        assert output(result) == output(cold.generate(prompt, **options)), (number, options)
        cached += result.stats.num_cached_tokens
        assert result.stats.num_cached_tokens < len(prompt)
    assert cached > 100
    assert cold.generate([5] * 20, max_tokens=1).stats.num_cached_tokens == 0


def test_a_chat_reads_only_what_is_new(load: Any, cold: LanguageModel) -> None:
    model = load(0)
    messages = [{"role": "system", "content": "the lazy dog"}]
    for turn, text in enumerate(("the quick", "brown fox", "jumps")):
        messages.append({"role": "user", "content": text})
        result = model.generate(messages, max_tokens=8, logprobs=1, drafter="model", stream=turn)
        again = cold.generate(messages, max_tokens=8, logprobs=1, drafter="none", stream=turn)
        assert output(result) == output(again)
        assert (result.stats.num_cached_tokens > 0) == (turn > 0)
        assert 0 < result.stats.first_token_s <= result.stats.prefill_s + result.stats.decode_s
        messages.append({"role": "assistant", "content": result.text})


def slots(engine: Any) -> list[Any]:
    return [value.numpy() for _, _, value in engine._kv]


def test_kv_has_the_same_bits_however_it_was_written(load: Any) -> None:
    target = load(0).target
    ids = [int(token) for token in np.random.default_rng(0).integers(5, 380, 100)]
    target.rollback(0)
    target.prefill(ids)
    expected = [array[:, :, :100].copy() for array in slots(target)]
    assert target.contents.exact_widths, "on this machine all widths of these models share their bits"
    for sizes in ([37, 63], [5] + [2] * 20 + [16] * 3 + [7], [1] + [10] * 9 + [9], [99, 1]):
        target.rollback(0)
        for size in sizes:
            piece = ids[target.kv_length : target.kv_length + size]
            target.prefill(piece) if size > 16 or size == 5 else target.verify(piece)
        assert target.contents.common(ids, 100, cold_bits=True) == 100
        for found, wanted in zip(slots(target), expected, strict=True):
            assert np.array_equal(found[:, :, :100], wanted)


def test_a_copy_brings_back_the_bits_and_only_its_own_slots(load: Any) -> None:
    target: Any = load(0).target
    target.rollback(0)
    target.prefill(list(range(10, 70)))
    block, before = target.save(16, 48), [array.copy() for array in slots(target)]
    assert block.num_bytes == sum(array[:, :, 16:48].nbytes for array in before)
    for array in slots(target):
        array[:, :, 16:48] = 1
    target.rollback(16)
    target.restore(block)
    assert target.kv_length == 48
    assert target.contents.common(list(range(10, 70)), 60, cold_bits=True) == 48
    for found, wanted in zip(slots(target), before, strict=True):
        assert np.array_equal(found, wanted)
    assert not any(np.shares_memory(array, view) for array in block.arrays for view in slots(target))
    target.rollback(48)
    target.prefill([5] * (128 - 48 - 16))
    with pytest.raises(EngineError, match="expected at most 128 tokens in the KV buffers, found 144"):
        target.restore(block)


class Planted(Exception):
    """A fault in the middle of an engine's call."""


SOUND = 10**9  # calls


class FaultySession:
    """Runs `left` calls, then fails: before it did anything, half-way with rubbish in its slots, or at the end."""

    def __init__(self, engine: Any, *, when: str) -> None:
        self._engine, self._session, self.left, self._when = engine, engine._session, SOUND, when

    def run_with_iobinding(self, binding: Any) -> None:
        self.left -= 1
        if self.left >= 0:
            self._session.run_with_iobinding(binding)
            return
        if self._when == "after":
            self._session.run_with_iobinding(binding)
        if self._when == "half-way":
            for array in slots(self._engine):
                array[:, :, self._engine.kv_length :] = 7
        raise Planted

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


@pytest.mark.parametrize("when", ["before", "half-way", "after"])
@pytest.mark.parametrize("which", ["target", "draft"])
def test_a_call_that_fails_leaves_no_wrong_entry(load: Any, cold: LanguageModel, which: str, when: str) -> None:
    model = load(10)
    options: dict[str, Any] = {"drafter": "model", "k": 3, "max_tokens": 6, "logprobs": 1, "ignore_eos": True}
    one, other = list(range(20, 60)), [*range(20, 40), *range(100, 125)]
    expected = {tuple(prompt): output(cold.generate(prompt, **options)) for prompt in (one, other)}
    model.generate(one, **options)
    engine: Any = model._engine(which)
    faulty = engine._session = FaultySession(engine, when=when)
    engine._calls.clear()  # they are bound to the session once
    for at in range(60):
        faulty.left, reached = at, False
        for prompt in (other, one):
            try:
                reached |= bool(model.generate(prompt, **options).stats.num_drafter_faults)
            except Planted:
                reached = True
        faulty.left = SOUND
        for prompt in (one, other):
            assert output(model.generate(prompt, **options)) == expected[tuple(prompt)]
        if not reached:
            break
    assert 4 < at < 59


def test_a_tree_leaves_its_path_in_other_bits(tiny_source: Path, tmp_path: Path) -> None:
    folder = tiny.export_tiny(tiny_source, tmp_path / "trees", profile=tiny.profile(trees=True))
    with specrt.load(folder, cache_dir=tmp_path) as model:
        engine, prompt = model.target, list(range(20, 50))
        for kept, path in (((0, 2), [7, 9]), ((0, 1, 3), [7, 8, 6]), ((0,), [7])):
            engine.rollback(0)
            engine.prefill(prompt)
            engine.verify((7, 8, 9, 6), (-1, 0, 0, 1))
            assert engine.contents.common([*prompt, 7, 8, 9, 6], engine.kv_length, cold_bits=False) == len(prompt)
            engine.keep(kept)
            text = [*prompt, *path]
            assert engine.contents.common(text, engine.kv_length, cold_bits=False) == len(text)
            first = sum(place == row for place, row in enumerate(kept))  # the first branch's rows are a chain's
            assert engine.contents.common(text, engine.kv_length, cold_bits=True) == len(prompt) + first
            engine.verify([5])  # a chain behind it
            assert engine.contents.common([*text, 5], engine.kv_length, cold_bits=False) == len(text) + 1
        engine.verify([5, 6, 7, 8])
        engine.keep((0, 2))  # rows of a chain out of their order: what they hold is no text's
        assert engine.contents.common([*text, 5, 5, 6, 7, 8], engine.kv_length, cold_bits=False) == len(text) + 2


def test_prefill_of_other_bits_is_reused_by_whole_calls(
    tiny_artifact: Path, tmp_path: Path, machine_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = MachineFacts((2, 4, 6, 10), dict.fromkeys((2, 4, 6, 10), 0.01), exact_prefill=False)
    monkeypatch.setattr(language_model, "measure_facts", lambda *_, **__: facts)
    with specrt.load(tiny_artifact, cache_dir=tmp_path) as model:
        assert model.target.contents.exact_widths == ()
        model.generate([5] * 40, max_tokens=30, ignore_eos=True)
        assert model.generate([5] * 45, max_tokens=1).stats.num_cached_tokens == 2 * WIDTH


def test_calls_of_width_1_end_what_can_be_reused(load: Any, cold: LanguageModel) -> None:
    from specrt.bench import OneRowEngine

    model, prompt = load(0), list(range(20, 40))
    options: Any = {"max_tokens": 20, "ignore_eos": True, "k": 0}
    model.generate(prompt, **options)
    with model.start(prompt, options, target=OneRowEngine(model.target)) as stream:
        text = [*prompt, *(token.id for token in stream)]
        assert stream.result.stats.num_cached_tokens == 0, "another target knows nothing of the model's"
    result = model.generate([*text, 5], logprobs=1, max_tokens=5)
    assert result.stats.num_cached_tokens == len(prompt) - 1
    assert output(result) == output(cold.generate([*text, 5], logprobs=1, max_tokens=5))


def test_a_cold_request_reuses_nothing_in_either_engine(load: Any) -> None:
    model = load(10)
    prompt, options = list(range(20, 60)), {"drafter": "model", "max_tokens": 3}
    model.generate(prompt, **options)
    calls: list[int] = []
    draft: Any = model._engine("draft")
    prefill = draft.prefill
    draft.prefill = lambda ids: (calls.append(len(ids)), prefill(ids))
    for _ in range(2):
        with model.start(prompt, options, cold=True) as stream:
            list(stream)
        assert stream.result.stats.num_cached_tokens == 0
    model.generate(prompt, **options)
    assert calls == [39, 39, 0]


def test_memory_is_given_back_on_closing(load: Any) -> None:
    model = load(10)
    for token in (5, 6, 7):
        model.generate([token] * 40, max_tokens=1)
    assert model._prefixes.num_bytes > 0
    model.close()
    assert model._prefixes.num_bytes == 0


@pytest.mark.parametrize("mib", [-1, float("nan"), float("inf")])
def test_a_limit_that_is_none_is_refused(tiny_artifact: Path, machine_cache: Path, mib: float) -> None:
    with pytest.raises(RequestError, match=r"^prefix_cache_mib: expected 0 or more, or None for no reuse, found"):
        specrt.load(tiny_artifact, cache_dir=machine_cache, prefix_cache_mib=mib)
