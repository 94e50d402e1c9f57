"""The eagle drafter: the guesses that torch makes, the text of plain decoding, and its own KV buffers."""

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
from specrt.drafters.eagle import EagleDrafter
from specrt.engine import open_engine, open_head
from specrt.engine_ort_head import OrtHead
from specrt.errors import EngineError, ManifestError, RequestError
from specrt.sampling import Sampler, SamplingParams
from specrt_export.distill.features import taps, watching
from specrt_export.distill.unroll import unrolling
from specrt_export.eagle_engine import head_module
from specrt_export.head_file import read_head
from specrt_profiles.manifest import read_manifest
from tiny import export_tiny, make_head

LAYERS, V = 8, tiny.VOCAB_SIZE
FP32 = tiny.profile(draft_precision="fp32", trees=True)
STRICT: dict[str, Any] = {"tree": True, "strict": True}
GUMBEL = {"temperature": 0.8, "seed": 7}
REJECTION = {"temperature": 0.8, "seed": 7, "coupling": "rejection"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_model("llama", tmp_path_factory.mktemp("target"), num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def trained(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact with a head that was trained for its target."""
    folder = tmp_path_factory.mktemp("trained")
    head = trained_head(source, folder)
    return export_tiny(source, folder / "out", draft=None, heads=(head,), profile=FP32)


@pytest.fixture(scope="module")
def model(trained: Path, machine_cache: Path) -> Iterator[specrt.LanguageModel]:
    with specrt.load(trained, cache_dir=machine_cache) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def target(source: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(source).eval()


def torch_logits(target: Any, head_path: Path, tokens: Sequence[int], steps: int) -> tuple[list[int], np.ndarray]:
    """Return the greedy chain that the head makes in torch, and its logits, from its published weights alone."""
    head = read_head(head_path, target.config, vocab_size=V)
    layers, last = taps(head.layout, LAYERS), len(tokens) - 2
    assert head.token_ids is not None
    rows = target.get_output_embeddings().weight.data[torch.from_numpy(head.token_ids)]
    module, guesses, found = head_module(head, target.config), list[int](), []
    with torch.no_grad(), watching(target, layers, logits=True) as seen:
        target(torch.tensor([list(tokens)]))
        features = torch.cat([seen[str(layer)] for layer in layers] or [seen["last"]], -1)[:, :-1]
    for step in range(steps):
        ids = torch.tensor([[*tokens[1:], *guesses, *[0] * (steps - step)]])
        padded = torch.nn.functional.pad(features, (0, 0, 0, ids.shape[1] - features.shape[1]))
        with torch.no_grad(), unrolling(module) as unroll:
            *_, out = unroll(target.get_input_embeddings()(ids), padded, torch.tensor([last]), steps=step + 1)
            found.append(module.logits(out[0, last if step == 0 else 0], rows).numpy())
        guesses.append(int(head.token_ids[int(found[-1].argmax())]))
    return guesses, np.stack(found)


class Recording(EagleDrafter):
    """Keeps the logits that it picks from."""

    seen: list[np.ndarray]

    def _pick(self, logits: np.ndarray, *, position: int) -> int:
        self.seen.append(logits.copy())
        return super()._pick(logits, position=position)


def drafter_of(folder: Path, model: specrt.LanguageModel, *, tree: bool = False) -> Recording:
    manifest = read_manifest(folder)
    assert model.target.features is not None
    return Recording(
        open_head(folder, manifest.heads["eagle"], threads=1), features=model.target.features,
        token_ids=np.load(folder / "eagle.tokens.npy"), vocab_size=V, tree=tree,
    )  # fmt: skip


@pytest.mark.parametrize("layout", ["eagle", "eagle3"])
def test_guesses_are_those_of_torch_over_several_steps(
    source: Path, target: Any, layout: str, tmp_path: Path, machine_cache: Path
) -> None:
    head = make_head(source, tmp_path / "head.safetensors", layout)
    artifact = export_tiny(source, tmp_path / "out", draft=None, heads=(head,), profile=FP32)
    rng = np.random.default_rng(0)
    with specrt.load(artifact, cache_dir=machine_cache) as loaded:
        drafter = drafter_of(artifact, loaded)
        text: list[int] = rng.integers(5, 300, 90).tolist()
        for prompt, blocks in ((2, (1,)), (40, (1, 3, 2)), (70, (6, 1))):
            tokens = text[:prompt]
            loaded.target.rollback(0)
            loaded.target.prefill(tokens[:-1])
            drafter.start(tokens, greedy(tokens))
            for size in (*blocks, 0):  # committed after the guess, as a verify call does
                drafter.seen = []
                guesses, logits = torch_logits(target, head, tokens, 5)
                assert list(drafter.propose(tokens, 5).token_ids) == guesses
                np.testing.assert_allclose(drafter.seen, logits, atol=2e-3, rtol=1e-3)
                block = text[len(tokens) : len(tokens) + size]
                loaded.target.verify([tokens[-1], *[9] * (size + 1)])
                loaded.target.rollback(len(tokens) - 1)
                if size:
                    loaded.target.verify([tokens[-1], *block[:-1]])
                    tokens = [*tokens, *block]


def greedy(tokens: Sequence[int]) -> Sampler:
    return Sampler(SamplingParams(), list(tokens), vocab_size=V, end_ids=())


@pytest.mark.parametrize("k", [1, 3, 5, 9, "auto"])
@pytest.mark.parametrize("params", [{}, GUMBEL, REJECTION, {"repetition_penalty": 1.3}], ids=str)
@pytest.mark.parametrize("shape", [{}, STRICT, {"tree": True}], ids=["chain", "strict tree", "tree"])
def test_the_text_is_that_of_plain_decoding(
    model: specrt.LanguageModel, shape: dict[str, Any], params: dict[str, Any], k: Any
) -> None:
    for prompt in ([17], [5, 9], list(range(40, 110))):
        options = {"max_tokens": 40, "ignore_eos": True, "logprobs": 1, **params}
        plain = model.generate(prompt, k=0, **options)
        result = model.generate(prompt, k=k, drafter="eagle", **shape, **options)
        assert result.token_ids == plain.token_ids, "no two tokens are near enough for a tree at fp32 here"
        assert result.logprobs == plain.logprobs or shape == {"tree": True}
        assert result.stats.num_drafter_faults == 0


def test_the_first_branch_is_the_chain_and_siblings_are_its_runners_up(model: specrt.LanguageModel) -> None:
    chain, tree = drafter_of(model.folder, model), drafter_of(model.folder, model, tree=True)
    branching = 0
    for text in TEXTS:
        tokens = chat(model, text)
        model.target.rollback(0)
        model.target.prefill(tokens[:-1])
        chain.seen = []
        for drafter in (chain, tree):
            drafter.start(tokens, greedy(tokens))
        guesses, found = chain.propose(tokens, 9).token_ids, tree.propose(tokens, 9)
        if found.parents is None:
            assert found.token_ids == guesses
            continue
        branching += 1
        branch = [-1, *(n for n, parent in enumerate(found.parents) if parent == n - 1 and n < found.num_levels)]
        assert found.token_ids[: len(branch) - 1] == guesses[: len(branch) - 1]
        for level, node in enumerate(branch):
            children = [token for token, parent in zip(found.token_ids, found.parents, strict=True) if parent == node]
            best = chain._token_ids[np.argsort(-chain.seen[level], kind="stable")]
            assert children == best[: len(children)].tolist()
    assert branching > 2


def chat(model: specrt.LanguageModel, text: str) -> list[int]:
    return model.tokenizer.encode(model.tokenizer.render([{"role": "user", "content": text}], None))


def test_a_trained_head_is_right_as_often_as_its_card_says(model: specrt.LanguageModel) -> None:
    card = card_of(model.folder.parent / "head.safetensors")
    drafts = accepted = 0
    for text in TEXTS:
        result = model.generate(chat(model, text), max_tokens=80, k=1, drafter="eagle", ignore_eos=True)
        assert result.stats.drafter == "eagle"
        drafts += result.stats.num_drafts
        accepted += result.stats.num_accepted
    assert card["agreement"][0] > 0.2
    assert accepted / drafts > card["agreement"][0] / 2


@pytest.mark.parametrize("mib", [0, 8])
def test_what_reused_prompts_bring_along(
    trained: Path, machine_cache: Path, monkeypatch: pytest.MonkeyPatch, mib: int
) -> None:
    """A prompt that goes on from an earlier one gives the same guesses as from a cold start, and reads less.

    The earlier one is in the buffers still, or, after another one, in copies.
    """
    first = list(range(40, 110))
    rows: list[int] = []
    read, propose, seen = OrtHead.read, EagleDrafter.propose, list[Proposal]()

    def count(self: Any, token_ids: Sequence[int], features: Any) -> Any:
        rows.append(len(token_ids))
        return read(self, token_ids, features)

    def keep(self: EagleDrafter, tokens: Sequence[int], limit: int) -> Proposal:
        seen.append(propose(self, tokens, limit))
        return seen[-1]

    monkeypatch.setattr(OrtHead, "read", count)
    monkeypatch.setattr(EagleDrafter, "propose", keep)
    results = []
    with specrt.load(trained, cache_dir=machine_cache, prefix_cache_mib=mib) as model:
        for cold in (False, True):
            model.generate([7, 8], max_tokens=3, k=3, drafter="eagle")
            model.generate(first, max_tokens=8, k=3, drafter="eagle", ignore_eos=True)
            if mib:
                model.generate(list(range(200, 270)), max_tokens=8, k=3, drafter="eagle", ignore_eos=True)
            rows.clear()
            seen.clear()
            with model.start(
                [*first, 4, 5, 6], {"max_tokens": 12, "k": 3, "drafter": "eagle", "ignore_eos": True}, cold=cold
            ) as stream:
                ids = [token.id for token in stream]
            results.append((ids, [proposal.token_ids for proposal in seen], sum(rows)))
    (warm_ids, warm, few), (cold_ids, cold_guesses, many) = results
    assert (warm_ids, warm) == (cold_ids, cold_guesses)
    assert few < many - 50


def test_other_drafters_and_plain_steps_between_do_no_harm(model: specrt.LanguageModel, trained: Path) -> None:
    class Sometimes(EagleDrafter):
        def propose(self, tokens: Sequence[int], limit: int) -> Proposal:
            return Proposal() if len(tokens) % 3 else super().propose(tokens, limit)

    manifest = read_manifest(trained)
    target = open_engine(trained, manifest.target, threads=1)
    assert target.features is not None
    drafter = Sometimes(
        open_head(trained, manifest.heads["eagle"], threads=1), features=target.features,
        token_ids=np.load(trained / "eagle.tokens.npy"), vocab_size=V,
    )  # fmt: skip
    prompt = chat(model, TEXTS[0])
    plain, _, _ = run(target, prompt=prompt, max_tokens=70)
    ids, loop, _ = run(target, drafter, prompt=prompt, k=4, max_tokens=70)
    assert ids == plain
    assert loop.stats.num_accepted > 0
    assert loop.stats.num_drafter_faults == 0


@pytest.mark.parametrize("shape", [{}, STRICT], ids=["chain", "tree"])
def test_generation_to_exactly_the_capacity(model: specrt.LanguageModel, shape: dict[str, Any]) -> None:
    prompt = list(range(20, 120))
    plain = model.generate(prompt, k=0, ignore_eos=True)
    result = model.generate(prompt, k=9, drafter="eagle", ignore_eos=True, **shape)
    assert len(prompt) + len(plain.token_ids) == model.target.capacity
    assert (result.token_ids, result.stats.num_drafter_faults) == (plain.token_ids, 0)


@pytest.mark.parametrize("tree", [False, True])
def test_a_failing_head_costs_no_request(
    model: specrt.LanguageModel, monkeypatch: pytest.MonkeyPatch, tree: bool
) -> None:
    plain = model.generate([5, 9], max_tokens=20, k=0, ignore_eos=True)
    calls = []

    def fail(self: Any, token_id: int) -> Any:
        calls.append(token_id)
        raise RuntimeError("no head")

    monkeypatch.setattr(OrtHead, "step", fail)
    result = model.generate([5, 9], max_tokens=20, k=3, drafter="eagle", tree=tree, ignore_eos=True)
    assert (result.token_ids, result.stats.num_drafter_faults, len(calls)) == (plain.token_ids, 1, 1)


@pytest.mark.parametrize("params", [{}, GUMBEL, REJECTION, STRICT], ids=str)
def test_a_combined_drafter_takes_the_head(model: specrt.LanguageModel, params: dict[str, Any]) -> None:
    options = {"max_tokens": 60, "ignore_eos": True, **params}
    plain = model.generate([5, 9, 40, 41], k=0, **options)
    result = model.generate([5, 9, 40, 41], k=3, drafter="combined", **options)
    assert (result.token_ids, result.stats.num_drafter_faults) == (plain.token_ids, 0)
    assert result.stats.parts["eagle"].num_proposed > 0


def test_what_cannot_be_done_is_said(model: specrt.LanguageModel, trained: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="eagle reads what the target computes and cannot be replayed"):
        model.start([1, 2], {"drafter": "eagle"}, target=open_engine(trained, model.manifest.target, threads=1))
    with pytest.raises(EngineError, match="expected cpu for the drafter eagle, found cuda:0"):
        open_head(trained, model.manifest.heads["eagle"], threads=None, device="cuda:0")


@pytest.mark.parametrize("ids", [np.arange(199), np.arange(200) + 300, np.zeros(200, np.int64), np.arange(200.0)])
def test_damaged_token_ids_are_refused(model: specrt.LanguageModel, tmp_path: Path, ids: Any) -> None:
    from specrt_profiles.vocabulary import read_token_ids

    np.save(tmp_path / "ids.npy", ids)
    with pytest.raises(ManifestError, match="expected 200 different token ids below 384"):
        read_token_ids(tmp_path / "ids.npy", size=200, vocab_size=V)
    (tmp_path / "ids.npy").write_bytes(b"no array")
    with pytest.raises(ManifestError, match="not readable as token ids"):
        read_token_ids(tmp_path / "ids.npy", size=200, vocab_size=V)


def test_confidence_is_a_class_of_the_heads_own_probability(model: specrt.LanguageModel) -> None:
    drafter = drafter_of(model.folder, model)
    tokens = [5, 9, 40, 41, 42]
    model.target.rollback(0)
    model.target.prefill(tokens[:-1])
    drafter.seen = []
    drafter.start(tokens, greedy(tokens))
    proposal = drafter.propose(tokens, 1)
    assert model.target.features is not None
    logits = drafter._head.read(tokens[-1:], model.target.features[3:4]).astype(np.float64)
    probability = 1 / np.exp(logits - logits.max()).sum()
    assert abs(drafter._head.confidence - probability) < 1e-5
    assert abs(proposal.confidence - drafter._head.confidence) <= 0.11
