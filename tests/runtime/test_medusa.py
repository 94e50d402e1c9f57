"""The medusa drafter on real engines: guesses of torch, the text of plain decoding, chains and trees, faults."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import specrt
import tiny
from distilling import TEXTS, card_of, trained_head
from parts import run
from specrt.acceptance import Proposal
from specrt.bench import run_bench
from specrt.drafters.medusa import MedusaDrafter
from specrt.engine import open_engine, open_parallel_heads
from specrt.engine_ort_parallel import OrtParallelHeads
from specrt.errors import EngineError, ManifestError, RequestError
from specrt.prompts import BenchPrompt
from specrt.sampling import Sampler, SamplingParams
from specrt.trace import run_trace
from specrt_export.head_file import read_head
from specrt_export.medusa_engine import heads_module
from specrt_profiles.manifest import read_manifest
from tiny import export_tiny

V, HEADS = tiny.VOCAB_SIZE, 3
GUMBEL = {"temperature": 0.8, "seed": 7}
REJECTION = {"temperature": 1.0, "seed": 7, "coupling": "rejection"}
PARAMS: list[dict[str, Any]] = [{}, GUMBEL, REJECTION, {"repetition_penalty": 1.3}]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_model("llama", tmp_path_factory.mktemp("target"), num_hidden_layers=4)


@pytest.fixture(scope="module")
def head(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads that were trained for their target."""
    return trained_head(source, tmp_path_factory.mktemp("head"), layout="medusa", heads=HEADS)


@pytest.fixture(scope="module", params=[False, True], ids=["chain", "tree"])
def artifact(
    request: pytest.FixtureRequest, source: Path, head: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:  # fmt: skip
    profile = tiny.profile(draft_precision="fp32", trees=request.param)
    return export_tiny(source, tmp_path_factory.mktemp("medusa") / "out", draft=None, heads=(head,), profile=profile)


@pytest.fixture(scope="module")
def model(artifact: Path, machine_cache: Path) -> Iterator[specrt.LanguageModel]:
    with specrt.load(artifact, cache_dir=machine_cache) as loaded:
        yield loaded


def greedy(tokens: Sequence[int]) -> Sampler:
    return Sampler(SamplingParams(), list(tokens), vocab_size=V, end_ids=())


def drafter_of(model: specrt.LanguageModel, *, tree: Any = None) -> MedusaDrafter:
    assert model.target.features is not None
    return MedusaDrafter(
        open_parallel_heads(model.folder, model.manifest.heads["medusa"], threads=1), features=model.target.features,
        token_ids=np.load(model.folder / "medusa.tokens.npy"), vocab_size=V, tree=tree,
    )  # fmt: skip


def ranked_by_torch(source: Path, head_path: Path, tokens: Sequence[int]) -> list[list[int]]:
    """Return of each head all tokens that it can guess, the best first, from the text and the file alone."""
    target = transformers.AutoModelForCausalLM.from_pretrained(source).eval()
    head = read_head(head_path, target.config, vocab_size=V)
    assert head.token_ids is not None
    rows = target.get_output_embeddings().weight.data[torch.from_numpy(head.token_ids)]
    with torch.no_grad():
        states = target(torch.tensor([list(tokens)]), output_hidden_states=True).hidden_states[-1]
        said_from = states[:, len(tokens) - 2 : len(tokens) - 1]  # what the last token was said from
        logits = heads_module(head)(said_from)[0] @ rows.T  # type: ignore[arg-type]
    return [head.token_ids[np.argsort(-row, kind="stable")].tolist() for row in logits.numpy()]


def test_guesses_are_those_of_torch_after_commits_of_any_size(
    source: Path, head: Path, model: specrt.LanguageModel
) -> None:
    text: list[int] = np.random.default_rng(0).integers(5, 300, 90).tolist()
    tree = [(0,), (0, 0), (1,), (0, 0, 0), (2,), (1, 0), (0, 0, 1)]
    drafters = [drafter_of(model), *([drafter_of(model, tree=tree)] if model.target.takes_trees else [])]
    for prompt, blocks in ((2, (1,)), (40, (1, 3, 2)), (70, (6, 1))):
        tokens = text[:prompt]
        model.target.rollback(0)
        model.target.prefill(tokens[:-1])
        for size in (*blocks, 0):  # committed after the guess, as a verify call does
            ranked = ranked_by_torch(source, head, tokens)
            for drafter in drafters:
                drafter.start(tokens, greedy(tokens))
                proposal = drafter.propose(tokens, 7)
                if drafter is drafters[0]:
                    assert proposal.token_ids == tuple(row[0] for row in ranked)
                else:
                    wanted = [ranked[len(node) - 1][node[-1]] for node in sorted(tree)]
                    assert list(proposal.token_ids) == wanted
                    assert proposal.parents == (-1, 0, 1, 1, -1, 4, -1)
            block = text[len(tokens) : len(tokens) + size]
            model.target.verify([tokens[-1], *[9] * (size + 1)])
            model.target.rollback(len(tokens) - 1)
            if size:
                model.target.verify([tokens[-1], *block[:-1]])
                tokens = [*tokens, *block]


@pytest.mark.parametrize("k", [1, 3, 5, 15, "auto"])
@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_the_text_is_that_of_plain_decoding(model: specrt.LanguageModel, params: dict[str, Any], k: Any) -> None:
    """To the bit for chains and strict trees; other trees have the ids."""
    for prompt in ([17], [5, 9], list(range(40, 110))):
        options = {"max_tokens": 30, "ignore_eos": True, "logprobs": 1, **params}
        plain = model.generate(prompt, k=0, **options)
        for strict in (True, False):
            result = model.generate(prompt, k=k, drafter="medusa", strict=strict, **tree(model), **options)
            assert result.token_ids == plain.token_ids
            assert result.stats.num_drafter_faults == 0
            if strict or not model.target.takes_trees:
                assert result.logprobs == plain.logprobs


def tree(model: specrt.LanguageModel) -> dict[str, bool]:
    return {"tree": model.target.takes_trees}


def chat(model: specrt.LanguageModel, text: str) -> list[int]:
    return model.tokenizer.encode(model.tokenizer.render([{"role": "user", "content": text}], None))


def test_trained_heads_are_right_as_often_as_their_card_says(model: specrt.LanguageModel, head: Path) -> None:
    card = card_of(head)
    drafts = accepted = 0
    for text in TEXTS:
        result = model.generate(chat(model, text), max_tokens=40, k=1, drafter="medusa")
        assert result.stats.drafter == "medusa"
        drafts += result.stats.num_drafts
        accepted += result.stats.num_accepted
    assert card["agreement"][0] > 0.2
    assert accepted / drafts > card["agreement"][0] / 3  # a step that fails is one more draft, one that does not is not


def test_a_larger_tree_takes_fewer_calls(model: specrt.LanguageModel) -> None:
    if not model.target.takes_trees:
        pytest.skip("this target takes chains alone")
    steps: dict[int, int] = {}
    for k in (1, 5, 15):
        results = [
            model.generate(
                chat(model, text), max_tokens=80, k=k, drafter="medusa", ignore_eos=True, **tree(model), **params
            )
            for text in TEXTS
            for params in ({}, {"temperature": 1.0, "seed": 3})
        ]
        steps[k] = sum(result.stats.num_steps for result in results)
        assert max(max(result.stats.calls_by_rows) for result in results) == k + 1
    assert steps[1] > steps[5] > steps[15]


@pytest.mark.parametrize("params", [{}, GUMBEL, REJECTION], ids=str)
def test_a_combined_drafter_takes_the_heads(model: specrt.LanguageModel, params: dict[str, Any]) -> None:
    assert model.manifest.drafter_names == ("ngram", "suffix", "medusa", "combined")
    assert model.manifest.default_drafter == "combined"
    options = {"max_tokens": 60, "ignore_eos": True, **params}
    plain = model.generate([5, 9, 40, 41], k=0, **options)
    result = model.generate([5, 9, 40, 41], k=3, drafter="combined", **options)
    assert (result.token_ids, result.stats.num_drafter_faults) == (plain.token_ids, 0)
    assert result.stats.parts["medusa"].num_proposed > 0


def test_generation_to_exactly_the_capacity(model: specrt.LanguageModel) -> None:
    prompt = list(range(20, 120))
    plain = model.generate(prompt, k=0, ignore_eos=True)
    result = model.generate(prompt, k=9, drafter="medusa", ignore_eos=True)
    assert len(prompt) + len(plain.token_ids) == model.target.capacity
    assert (result.token_ids, result.stats.num_drafter_faults) == (plain.token_ids, 0)


def test_failing_heads_cost_no_request(model: specrt.LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = model.generate([5, 9], max_tokens=20, k=0, ignore_eos=True)
    calls = []

    def fail(self: Any, feature: Any) -> Any:
        calls.append(feature)
        raise RuntimeError("no heads")

    monkeypatch.setattr(OrtParallelHeads, "guess", fail)
    for drafter in ("medusa", "ngram+medusa"):
        calls.clear()
        result = model.generate([5, 9], max_tokens=20, k=3, drafter=drafter, ignore_eos=True)
        assert (result.token_ids, result.stats.num_drafter_faults, len(calls)) == (plain.token_ids, 1, 1)


def test_one_call_of_the_heads_per_proposal(model: specrt.LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    guess = OrtParallelHeads.guess

    def count(self: Any, feature: Any) -> Any:
        calls.append(feature)
        return guess(self, feature)

    monkeypatch.setattr(OrtParallelHeads, "guess", count)
    result = model.generate([5, 9, 40], max_tokens=30, k=3, drafter="medusa", ignore_eos=True)
    assert len(calls) == result.stats.num_drafts


@pytest.mark.parametrize("mib", [0, 8])
def test_a_reused_prompt_gives_the_guesses_of_a_cold_start(
    artifact: Path, machine_cache: Path, monkeypatch: pytest.MonkeyPatch, mib: int
) -> None:
    """Features come with the KV, whether it is in the buffers still or, after another prompt, in copies."""
    propose, seen = MedusaDrafter.propose, list[Proposal]()

    def keep(self: MedusaDrafter, tokens: Sequence[int], limit: int) -> Proposal:
        seen.append(propose(self, tokens, limit))
        return seen[-1]

    monkeypatch.setattr(MedusaDrafter, "propose", keep)
    options: dict[str, Any] = {"k": 3, "drafter": "medusa", "ignore_eos": True, "strict": True}
    results = []
    with specrt.load(artifact, cache_dir=machine_cache, prefix_cache_mib=mib) as model:
        for cold in (False, True):
            first = list(range(40, 110))
            model.generate(first, max_tokens=8, **options)
            if mib:
                model.generate(list(range(200, 270)), max_tokens=8, **options)
            seen.clear()
            with model.start([*first, 4], {"max_tokens": 12, **options}, cold=cold) as stream:
                ids = [token.id for token in stream]
                assert (stream.result.stats.num_cached_tokens > 50) != cold
            results.append((ids, [(proposal.token_ids, proposal.parents) for proposal in seen]))
    assert results[0] == results[1]


def test_plain_steps_between_do_no_harm(model: specrt.LanguageModel) -> None:
    class Sometimes(MedusaDrafter):
        def propose(self, tokens: Sequence[int], limit: int) -> Proposal:
            return Proposal() if len(tokens) % 3 else super().propose(tokens, limit)

    target = open_engine(model.folder, model.manifest.target, threads=1)
    assert target.features is not None
    drafter = Sometimes(
        open_parallel_heads(model.folder, model.manifest.heads["medusa"], threads=1), features=target.features,
        token_ids=np.load(model.folder / "medusa.tokens.npy"), vocab_size=V,
    )  # fmt: skip
    prompt = chat(model, TEXTS[0])
    plain, _, _ = run(target, prompt=prompt, max_tokens=70)
    ids, loop, _ = run(target, drafter, prompt=prompt, k=4, max_tokens=70)
    assert ids == plain
    assert loop.stats.num_accepted > 0
    assert loop.stats.num_drafter_faults == 0


def test_traces_and_benchmarks_take_the_heads(model: specrt.LanguageModel) -> None:
    trace = run_trace(model, [5, 9, 40], {"max_tokens": 20, "ignore_eos": True, "drafter": "medusa", "k": 5})
    stats = trace.result.stats
    assert sum(len(step.proposed) for step in trace.steps) >= stats.num_proposed > 0
    assert sum(step.origins.count("accepted") for step in trace.steps) == stats.num_accepted
    prompts = [BenchPrompt("all", "the quick brown")]
    rows = run_bench(
        model, prompts, ks=[3], drafters=["medusa"], repeats=1, options={"max_tokens": 20, "ignore_eos": True},
        chat=False, on_run=lambda: None,
    )  # fmt: skip
    assert [(row.drafter, row.num_tokens) for row in rows if row.k == 3] == [("medusa", 20)]


def test_what_cannot_be_done_is_said(model: specrt.LanguageModel) -> None:
    with pytest.raises(RequestError, match="medusa reads what the target computes and cannot be replayed"):
        model.start([1, 2], {"drafter": "medusa"}, target=open_engine(model.folder, model.manifest.target, threads=1))
    with pytest.raises(EngineError, match="expected cpu for the drafter medusa, found cuda:0"):
        open_parallel_heads(model.folder, model.manifest.heads["medusa"], threads=None, device="cuda:0")


def test_damaged_files_are_named(artifact: Path, machine_cache: Path, tmp_path: Path) -> None:
    import shutil

    from specrt_profiles.files import check_hashes

    folder = shutil.copytree(artifact, tmp_path / "artifact")
    np.save(folder / "medusa.tokens.npy", np.zeros(200, np.int64))
    with specrt.load(folder, cache_dir=machine_cache) as model:
        assert model.generate([5, 9], max_tokens=3, drafter="ngram").token_ids
        with pytest.raises(ManifestError, match="expected 200 different token ids below 384"):
            model.generate([5, 9], max_tokens=3, drafter="medusa")
        assert model.generate([5, 9], max_tokens=3, drafter="ngram").token_ids
    with pytest.raises(ManifestError, match=r"medusa\.tokens\.npy"):
        check_hashes(folder, read_manifest(folder).files)
    (folder / "medusa.onnx.data").write_bytes((folder / "medusa.onnx.data").read_bytes()[:-64])
    with pytest.raises(ManifestError, match=r"medusa\.onnx\.data"):
        specrt.load(folder, cache_dir=machine_cache)


def test_confidence_is_a_class_of_the_heads_own_probability(model: specrt.LanguageModel) -> None:
    drafter = drafter_of(model)
    tokens = [5, 9, 40, 41, 42]
    model.target.rollback(0)
    model.target.prefill(tokens[:-1])
    drafter.start(tokens, greedy(tokens))
    for limit in (1, 2, 3, 9):
        proposal = drafter.propose(tokens, limit)
        probability = float(np.prod(drafter._heads.confidence[:limit], dtype=np.float64)) ** (1 / min(limit, HEADS))
        assert abs(proposal.confidence - probability) <= 0.1 + 1e-6
