"""Drafts of fewer layers: which ones stay, healing on the target's own text, and the directory that is written."""

import io
import itertools
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from click.testing import CliRunner
from torch.nn.functional import cosine_similarity

import specrt
import tiny
from specrt_export.cli_distill import distill_command
from specrt_export.distill.data import Dataset, load_texts
from specrt_export.distill.features import collect, decoder_layers
from specrt_export.distill.heal import HEALING, HealingTexts, PrunedHealing, chains
from specrt_export.distill.prune import influence, kept_layers, pruned, resolve_layers
from specrt_export.distill.rows import FIXED, GREEDY, SAMPLED, USER
from specrt_export.distill.run import DistillRequest, distill
from specrt_export.distill.shards import TextShard, shard_path, write_shard
from specrt_export.distill.train import TrainingPlan
from specrt_export.distill.writer import BatchSize
from specrt_export.errors import ExportError
from specrt_export.progress import Progress

LAYERS = 6
IDLE = (2, 3)
PLAN = TrainingPlan(epochs=4, batch=512, learning_rate=3e-3, warmup=4)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny.make_model("llama", tmp_path_factory.mktemp("target"), num_hidden_layers=LAYERS)
    prompts = [{"prompt": text} for text in ("the quick brown fox", "def mean(values)", "你好", "over the lazy dog")]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)), "utf-8")
    (folder / "LICENSE").write_text("do what you like", "utf-8")
    return folder


@pytest.fixture
def model(source: Path) -> Any:
    """The target, of which two layers do nothing."""
    model = transformers.AutoModelForCausalLM.from_pretrained(source).eval()
    for number in IDLE:
        layer = decoder_layers(model)[number]
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    return model


def shard(lengths: list[int], seed: int = 0) -> TextShard:
    rng = np.random.default_rng(seed)
    count, offsets = sum(lengths), np.cumsum([0, *lengths])
    roles = rng.choice([FIXED, USER, GREEDY, GREEDY, SAMPLED], count).astype(np.uint8)
    roles[np.add.outer(offsets[:-1], np.arange(3))] = USER  # prompts that differ
    roles[np.add.outer(offsets[:-1], np.arange(10, 20))] = GREEDY
    return TextShard(tokens=rng.integers(0, 300, count).astype(np.int32), roles=roles, offsets=offsets)


def logits(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([ids])).logits
    return found


def test_influence_is_how_far_a_layer_turns_what_it_reads(model: Any) -> None:
    text = shard([5, 40, 17, 30, 300])
    found = influence(model, text, num_tokens=100)
    turns, count = torch.zeros(LAYERS - 1), 0
    for begin, end in zip(text.offsets[:4], text.offsets[1:5], strict=True):  # the fifth document is beyond 100
        with torch.no_grad():
            hidden = model(torch.tensor(text.tokens[None, begin:end]).long(), output_hidden_states=True).hidden_states
        turns += torch.stack(
            [(1 - cosine_similarity(hidden[i], hidden[i + 1], dim=-1)).sum() for i in range(LAYERS - 1)]
        )
        count += int(end - begin)
    np.testing.assert_allclose(found, turns / count, atol=1e-4)
    assert [found[layer] < 1e-5 for layer in range(LAYERS - 1)] == [layer in IDLE for layer in range(LAYERS - 1)]


def test_first_and_last_stay_whatever_they_change() -> None:
    influences = (0.0, 0.3, 0.1, 0.1, 0.2)
    assert kept_layers(influences, 2) == (0, 5)
    assert kept_layers(influences, 4) == (0, 1, 4, 5)
    assert kept_layers(influences, 5) == (0, 1, 2, 4, 5)


def test_how_many_layers_can_stay() -> None:
    assert [resolve_layers(None, count) for count in (3, 8, 30)] == [2, 2, 7]
    assert resolve_layers(5, 6) == 5
    for asked, count in ((1, 6), (6, 6), (None, 2)):
        with pytest.raises(ExportError, match=f"from 2 on and fewer than the model's {count}, found {asked or 2}"):
            resolve_layers(asked, count)


def test_layers_that_do_nothing_can_go_without_a_trace(model: Any) -> None:
    draft = pruned(model, kept_layers(influence(model, shard([40, 40]), num_tokens=80), 4))
    ids = [5, 17, 200, 9, 9, 80, 3]
    torch.testing.assert_close(logits(draft, ids), logits(model, ids), atol=0, rtol=0)
    assert draft.config.num_hidden_layers == 4
    assert [layer.self_attn.layer_idx for layer in decoder_layers(draft)] == [0, 1, 2, 3]
    assert not torch.equal(logits(pruned(model, (0, 2, 4, 5)), ids), logits(model, ids))
    free = {name.split(".")[1] for name, p in draft.named_parameters() if p.requires_grad}
    assert free == {"layers", "norm"}


def test_each_layer_keeps_its_kind_of_attention(tmp_path: Path) -> None:
    source = tiny.make_model("gemma3", tmp_path, num_hidden_layers=6, layer_types=None)
    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    kinds = model.config.layer_types
    assert len(set(kinds)) == 2
    assert pruned(model, (0, 4, 5)).config.layer_types == [kinds[0], kinds[4], kinds[5]]


def test_chains_are_cut_at_rows_that_do_not_count() -> None:
    rng = np.random.default_rng(0)
    right, counts = (torch.from_numpy(rng.random((3, 9)) < share) for share in (0.6, 0.8))
    expected = [
        [bool(right[text, start + step]) for step in range(3)]
        for text, start in itertools.product(range(3), range(7))
        if counts[text, start : start + 3].all()
    ]
    assert len(expected) > 4
    assert sorted(chains(right, counts, steps=3).T.tolist()) == sorted(expected)
    assert chains(right[:, :2], counts[:, :2], steps=3).shape == (3, 0)


def healing(
    model: Any, folder: Path, plan: TrainingPlan, *, layers: tuple[int, ...]
) -> tuple[PrunedHealing, HealingTexts]:
    text = shard([40, 30, 40, 50])
    folder.mkdir(exist_ok=True)
    write_shard(shard_path(folder, 0), text)
    collect(model, text, (), folder / "features", lambda _: None)
    parts = [load_texts(shard_path(folder, 0), folder / "features")]
    embed, matrix = model.get_input_embeddings(), model.get_output_embeddings().weight.detach()
    vocabulary = np.arange(0, 384, 2)
    learn, held = (HealingTexts(parts, embed, vocabulary, held_out=70, measure=measure) for measure in (False, True))
    return PrunedHealing(pruned(model, layers), learn, matrix, vocabulary, plan), held


def test_agreement_is_that_of_the_drafts_own_words(model: Any, tmp_path: Path) -> None:
    training, held = healing(model, tmp_path, PLAN, layers=(0, 1, 5))
    found = training.measure(held)
    draft, text = pruned(model, (0, 1, 5)), shard([40, 30, 40, 50])
    expected = []
    for begin, end in zip(text.offsets[:2], text.offsets[1:3], strict=True):
        ids, roles = text.tokens[begin:end], text.roles[begin:end]
        with torch.autocast("cpu", torch.bfloat16):
            said = logits(draft, ids.tolist())[0].argmax(-1).numpy()
        right, counts = said[:-1] == ids[1:], roles[1:] == GREEDY
        expected += [right[i : i + 5].tolist() for i in range(len(right) - 4) if counts[i : i + 5].all()]
    assert found.shape == (5, len(expected))
    assert len(expected) >= 12
    assert np.abs(found.T.numpy().astype(int) - np.array(expected)).mean() < 0.05  # rounding turns near ties


def test_a_draft_that_is_the_target_has_nothing_to_learn(model: Any, tmp_path: Path) -> None:
    """What is left of the loss is the target's entropy; the distance is that of bfloat16 and float16."""
    training, _ = healing(model, tmp_path / "with", replace(PLAN, regression=1.0), layers=tuple(range(LAYERS)))
    other, _ = healing(model, tmp_path / "without", replace(PLAN, regression=0.0), layers=tuple(range(LAYERS)))
    batch = training._dataset.batch(0, np.array([2]))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found = float(training._loss(batch, generator))
        plain = float(other._loss(batch, torch.Generator().manual_seed(0)))
    matrix = model.get_output_embeddings().weight.detach()
    use = batch.weights > 0
    probs = torch.softmax(batch.wanted[use] @ matrix.T, -1)
    entropy = -(probs * probs.log()).sum(-1)
    expected = float((entropy * batch.weights[use]).sum() / batch.weights[use].sum())
    assert plain == pytest.approx(expected, rel=0.02)
    assert 0 <= found - plain < 0.02


def test_the_distance_to_the_target_counts(model: Any, tmp_path: Path) -> None:
    found = []
    for regression in (0.0, 0.5):
        training, _ = healing(model, tmp_path / str(regression), replace(PLAN, regression=regression), layers=(0, 5))
        batch = training._dataset.batch(0, np.array([2, 3]))
        with torch.no_grad():
            found.append(float(training._loss(batch, torch.Generator().manual_seed(0))))
            given = training._read(batch)
    use = batch.weights > 0
    gap = (given[use] - batch.wanted[use]).abs()
    each = torch.where(gap < 1, 0.5 * gap**2, gap - 0.5).mean(-1)
    expected = 0.5 * float((each * batch.weights[use]).sum() / batch.weights[use].sum())
    assert expected > 0.01
    assert found[1] - found[0] == pytest.approx(expected, rel=1e-3)


def test_each_row_learns_what_the_target_said_there(model: Any, tmp_path: Path) -> None:
    training, _ = healing(model, tmp_path, PLAN, layers=(0, 5))
    text = shard([40, 30, 40, 50])
    batch = training._dataset.batch(0, np.array([2, 3]))
    begin, end = text.offsets[2], text.offsets[3]
    with torch.no_grad():
        hidden = model(torch.tensor(text.tokens[None, begin:end]).long(), output_hidden_states=True).hidden_states[-1]
    np.testing.assert_allclose(batch.wanted[0, : end - begin - 1], hidden[0, :-1], atol=2e-2, rtol=2e-3)
    assert batch.following[0, : end - begin - 1].tolist() == text.tokens[begin + 1 : end].tolist()
    table = {FIXED: 0.0, USER: 0.5, GREEDY: 1.0, SAMPLED: 1.0}
    assert batch.weights[0].tolist() == [*(table[role] for role in text.roles[begin + 1 : end].tolist()), *[0.0] * 10]
    assert isinstance(training._dataset, Dataset)


def request(source: Path, folder: Path, **changes: Any) -> DistillRequest:
    settings: dict[str, Any] = {
        "model": str(source), "layout": "pruned", "layers": 3, "out": folder / "draft", "work": folder / "work",
        "tokens": 3000, "cache_dir": folder, "vocabulary_size": 200, "training": PLAN,
        "size": BatchSize(rows=8, length=192), "prompts": source / "prompts.jsonl", "command": "specrt distill",
    }  # fmt: skip
    return DistillRequest(**{**settings, **changes})


def silent() -> Progress:
    return Progress(stream=io.StringIO())


def card_of(draft: Path | None) -> dict[str, Any]:
    assert draft is not None
    found: dict[str, Any] = json.loads((draft / "draft.json").read_text("utf-8"))
    return found


@pytest.fixture(scope="module")
def healed(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a healing that was never interrupted."""
    folder = tmp_path_factory.mktemp("healed")
    assert distill(request(source, folder), silent()) == folder / "draft"
    return folder


def state_of(draft: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = transformers.AutoModelForCausalLM.from_pretrained(draft).state_dict()
    return state


def test_healing_helps_and_leaves_what_is_shared(source: Path, healed: Path) -> None:
    card = card_of(healed / "draft")
    assert card["agreement"][0] > card["agreement_before"][0] + 0.05
    assert card["block_efficiency"] > card["block_efficiency_before"]
    assert (card["layers"][0], card["layers"][-1], len(card["layers"])) == (0, LAYERS - 1, 3)
    assert card["updates"] == card["planned_updates"] > 10
    target, draft = state_of(source), state_of(healed / "draft")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert draft[name].equal(target[name].bfloat16())
    name = "model.layers.0.mlp.up_proj.weight"
    assert not draft[name].equal(target[name].bfloat16())
    assert (healed / "draft" / "LICENSE").read_text("utf-8") == "do what you like"
    assert sorted(path.name for path in healed.iterdir()) == ["draft", "work"]


def test_going_on_after_interrupts_ends_at_the_same_draft(source: Path, healed: Path, tmp_path: Path) -> None:
    shutil.copytree(healed / "work" / "texts", tmp_path / "work" / "texts")
    shutil.copytree(healed / "work" / "features-eagle", tmp_path / "work" / "features-eagle")
    shutil.copy(healed / "work" / "about.json", tmp_path / "work")
    updates: list[int] = []
    while not updates or updates[-1] < card_of(healed / "draft")["updates"]:
        ticks = itertools.count()
        written = distill(request(source, tmp_path, minutes=0.5), silent(), clock=lambda ticks=ticks: 1.5 * next(ticks))
        updates.append(card_of(written)["updates"])
        assert len(updates) < 12
    assert len(updates) > 1
    assert card_of(written)["agreement_before"] == card_of(healed / "draft")["agreement_before"]
    expected = state_of(healed / "draft")
    for name, tensor in state_of(tmp_path / "draft").items():
        assert tensor.equal(expected[name]), name


def test_without_epochs_layers_are_only_dropped(source: Path, healed: Path, tmp_path: Path) -> None:
    out = tmp_path / "cut"
    wanted = request(source, tmp_path, out=out, work=healed / "work", training=replace(PLAN, epochs=0))
    assert distill(wanted, silent()) == out
    card, target, draft = card_of(out), state_of(source), state_of(out)
    assert (card["updates"], card["loss"], card["agreement"]) == (0, None, card["agreement_before"])
    for new, old in enumerate(card["layers"]):
        inside = "self_attn.q_proj.weight"
        assert draft[f"model.layers.{new}.{inside}"].equal(target[f"model.layers.{old}.{inside}"].bfloat16())


def test_the_draft_is_one_that_export_takes(source: Path, healed: Path, tmp_path: Path, machine_cache: Path) -> None:
    artifact = tiny.export_tiny(source, tmp_path / "artifact", draft=str(healed / "draft"))
    tiny.assert_lossless(artifact, machine_cache)
    with specrt.load(artifact, cache_dir=machine_cache) as model:
        stats = model.generate([{"role": "user", "content": "the quick brown fox"}], max_tokens=60, k=3).stats
        assert stats.drafter == "model"
        assert stats.num_accepted > 0
        assert model.manifest.engines["draft"].model.name == "draft"


def test_what_is_refused(source: Path, healed: Path, tmp_path: Path) -> None:
    work = {"work": healed / "work"}
    for changes, text in (
        ({"out": source}, "expected the folder of an earlier pruned draft or a new one, found other things"),
        ({"out": tmp_path / "none" / "draft"}, "there is no folder"),
        ({"layers": 6}, "expected --layers from 2 on and fewer than the model's 6, found 6"),
        ({"training": replace(PLAN, epochs=9), **work}, "of a training with epochs 4, not 9"),
    ):
        with pytest.raises(ExportError, match=text):
            distill(request(source, tmp_path, **changes), silent())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--drafter", "pruned", "--ffn", "64"], "--ffn is of eagle heads"),
        (["--drafter", "pruned", "--start", "head.safetensors"], "--start is a head of eagle or eagle3"),
        (["--start", "head.safetensors", "--vocabulary", "9"], "--vocabulary has no effect with --start"),
        (["--start", "own"], "--start own needs a built-in model that a head comes with, found model"),
        (["--layers", "4"], "--layers needs --drafter early-exit or pruned"),
        (["--epochs", "0"], "--epochs 0 needs --drafter pruned"),
    ],
)
def test_options_of_the_other_kind_are_refused(words: list[str], text: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(distill_command, ["model", "-o", str(tmp_path / "out"), *words])
    assert (result.exit_code, text in result.stderr) == (2, True), result.stderr


def test_the_command(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "draft"
    words = ["--drafter", "pruned", "--tokens", 500, "--threads", 1, "--vocabulary", 100, "--minutes", 0, "-o", out]
    result = CliRunner().invoke(distill_command, [str(word) for word in (source, *words)])
    assert result.exit_code == 0, result.output
    assert f"the same command goes on from {tmp_path / 'draft.work'}" in result.stderr
    assert HEALING.epochs == 3
