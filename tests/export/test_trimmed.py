"""Drafts that know fewer tokens than they read: the same guesses among those they know, the text of plain decoding."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import specrt
import tiny
from specrt.acceptance import Proposal
from specrt.drafters.model import ModelDrafter
from specrt.errors import ManifestError
from specrt_export.errors import CheckpointError, ExportError
from specrt_export.trimmed import TOKENS
from specrt_profiles.manifest import read_manifest

V, KNOWN = tiny.VOCAB_SIZE, 150
OPTIONS: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True, "logprobs": 1}


def known_tokens() -> np.ndarray:
    """Return tokens in no order."""
    return np.random.default_rng(3).permutation(V)[:KNOWN]


def trimmed(source: Path, folder: Path, tokens: Any) -> Path:
    """Return a copy of a model that says which tokens it may guess."""
    shutil.copytree(source, folder)
    np.save(folder / TOKENS, tokens)
    return folder


FORMS = [("llama", "fp32"), ("qwen2", "fp32"), ("qwen2", "int4"), ("llama", "int8")]


@pytest.fixture(scope="module", params=FORMS, ids=str)
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, machine_cache: Path
) -> Iterator[specrt.LanguageModel]:
    """A model with itself as draft, with output matrices of their own and with the embedding's."""
    (family, precision), folder = request.param, tmp_path_factory.mktemp("trimmed")
    source = tiny.make_model(family, folder / "source")
    draft = trimmed(source, folder / "draft", known_tokens())
    profile = tiny.profile(draft_precision=precision)
    artifact = tiny.export_tiny(source, folder / "out", draft=str(draft), profile=profile)
    with specrt.load(artifact, cache_dir=machine_cache) as loaded:
        yield loaded


def test_it_has_the_logits_of_the_tokens_it_knows(model: specrt.LanguageModel) -> None:
    draft, ids = model.manifest.engines["draft"], known_tokens()
    assert draft.vocab_size == KNOWN
    assert np.array_equal(np.load(model.folder / "draft.tokens.npy"), ids)
    text = list(range(40, 70))
    model.target.rollback(0)
    engine = model._engine("draft")
    engine.rollback(0)
    wanted = np.asarray(model.target.forward(text[:16], 0, 16))[:, ids]
    found = np.asarray(engine.forward(text[:16], 0, 16))
    bound = {"fp32": 1e-4, "int8": 0.5, "int4": 2.0}[draft.precision]
    assert np.abs(found - wanted).max() < bound
    assert np.corrcoef(found.ravel(), wanted.ravel())[0, 1] > 0.9


def test_guesses_are_the_best_of_the_tokens_it_knows(
    model: specrt.LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    if model.manifest.engines["draft"].precision != "fp32":
        pytest.skip("a rounded draft has its own opinion")
    propose, seen = ModelDrafter.propose, list[tuple[list[int], Proposal]]()

    def keep(self: ModelDrafter, tokens: Any, limit: int) -> Proposal:
        seen.append((list(tokens), propose(self, tokens, limit)))
        return seen[-1][1]

    monkeypatch.setattr(ModelDrafter, "propose", keep)
    model.generate([5, 9, 40], k=3, drafter="model", **OPTIONS)
    ids, width = known_tokens(), 16
    assert len(seen) > 5
    for tokens, proposal in seen:
        for guess in proposal.token_ids:
            start = max(0, len(tokens) - width)
            model.target.rollback(0)
            model.target.prefill(tokens[:start])
            row = np.asarray(model.target.forward(tokens[start:], start, width))[-1]
            assert guess == ids[row[ids].argmax()]
            tokens = [*tokens, guess]


@pytest.mark.parametrize("params", [{}, {"temperature": 0.8, "seed": 5}, {"repetition_penalty": 1.3}], ids=str)
@pytest.mark.parametrize("k", [1, 5, "auto"])
def test_the_text_is_that_of_plain_decoding(model: specrt.LanguageModel, params: dict[str, Any], k: Any) -> None:
    for prompt in ([17], list(range(40, 100))):
        plain = model.generate(prompt, k=0, **params, **OPTIONS)
        for drafter in ("model", "combined"):
            result = model.generate(prompt, k=k, drafter=drafter, **params, **OPTIONS)
            assert (result.token_ids, result.logprobs) == (plain.token_ids, plain.logprobs)
            assert result.stats.num_drafter_faults == 0
            if drafter == "model" and k == 5 and "seed" in params:
                assert 0 < result.stats.num_accepted < result.stats.num_proposed


def test_tokens_it_does_not_know_come_from_the_target(model: specrt.LanguageModel) -> None:
    """Where guesses are drawn: a draft that never draws a token must not keep it from the text."""
    options: dict[str, Any] = {"max_tokens": 50, "ignore_eos": True, "temperature": 1.5, "coupling": "rejection"}
    known, others = set(known_tokens().tolist()), 0
    for seed in range(4):
        result = model.generate([5, 9], k=3, drafter="model", seed=seed, **options)
        assert result.stats.num_drafter_faults == 0
        others += sum(token not in known for token in result.token_ids)
    share = 1 - KNOWN / V
    assert 0.7 * share < others / 200 < 1.3 * share


def test_a_damaged_list_is_named(model: specrt.LanguageModel, tmp_path: Path, machine_cache: Path) -> None:
    folder = shutil.copytree(model.folder, tmp_path / "artifact")
    np.save(folder / "draft.tokens.npy", np.zeros(KNOWN, np.int64))
    with specrt.load(folder, cache_dir=machine_cache) as damaged:
        with pytest.raises(ManifestError, match=f"expected {KNOWN} different token ids below {V}"):
            damaged.generate([5], max_tokens=3, drafter="model")
        assert damaged.generate([5], max_tokens=3, drafter="ngram").token_ids
    (folder / "draft.tokens.npy").unlink()
    with pytest.raises(ManifestError, match=r"draft\.tokens\.npy"):
        read_manifest(folder)


def test_tokens_that_the_target_does_not_have_are_refused(tiny_source: Path, tmp_path: Path) -> None:
    larger = tiny.make_model("llama", tmp_path / "larger", vocab_size=V + 8)
    draft = trimmed(larger, tmp_path / "draft", np.array([3, V + 2]))
    with pytest.raises(
        CheckpointError, match=f"expected tokens of the target, ids below \\d+, found {V + 2}: leave it"
    ):
        tiny.export_tiny(tiny_source, tmp_path / "out", draft=str(draft))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (np.array([1, 1, 2]), "expected two or more different token ids"),
        (np.array([1, V]), f"different token ids below {V}"),
        (np.array([0.5, 1]), "expected two or more different token ids"),
        (np.array([3]), "expected two or more different token ids"),
        (b"no array", "not readable as token ids"),
    ],
)
def test_a_list_that_is_none_is_refused(tiny_source: Path, tmp_path: Path, tokens: Any, words: str) -> None:
    draft = trimmed(tiny_source, tmp_path / "draft", np.arange(5))
    (draft / TOKENS).write_bytes(tokens) if isinstance(tokens, bytes) else np.save(draft / TOKENS, tokens)
    with pytest.raises((CheckpointError, ExportError), match=words):
        tiny.export_tiny(tiny_source, tmp_path / "out", draft=str(draft))
    assert not (tmp_path / "out").exists()
