"""Heads and their training: layouts, unrolled steps, the loss, checkpoints."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import AttentionInterface
from transformers.cache_utils import Cache

import tiny
from specrt_export.distill.data import Dataset, Texts, batches, coverage, draft_vocabulary, load_texts
from specrt_export.distill.features import check_output, collect, in_groups, read_features, taps
from specrt_export.distill.head import Layout, head_for
from specrt_export.distill.linear import begin_linear
from specrt_export.distill.loss import Batch, LossOptions, agreement, block_efficiency, loss
from specrt_export.distill.rows import FIXED, GREEDY, SAMPLED, USER
from specrt_export.distill.shards import TextShard, shard_path, write_shard
from specrt_export.distill.train import Trainer, TrainingPlan, schedule
from specrt_export.distill.unroll import unrolling
from specrt_export.errors import ExportError, UnsupportedModelError

LAYOUTS: tuple[Layout, ...] = ("eagle", "eagle3")
LAYERS = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tiny.make_model("llama", tmp_path_factory.mktemp("target"), num_hidden_layers=LAYERS)
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


def text_of(lengths: list[int], seed: int = 0) -> TextShard:
    rng = np.random.default_rng(seed)
    count = sum(lengths)
    return TextShard(
        tokens=rng.integers(0, 100, count).astype(np.int32),
        roles=rng.choice([FIXED, USER, GREEDY, GREEDY, SAMPLED], count).astype(np.uint8),
        offsets=np.cumsum([0, *lengths]),
    )


def texts(model: Any, folder: Path, layout: Layout, lengths: list[int], seed: int = 0) -> Texts:
    path = shard_path(folder, seed)
    write_shard(path, text_of(lengths, seed))
    features = folder / f"features-{seed}"
    collect(model, text_of(lengths, seed), taps(layout, LAYERS), features, lambda _: None)
    return load_texts(path, features)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_features_are_what_the_model_computes_over_each_text(model: Any, layout: Layout, tmp_path: Path) -> None:
    shard = text_of([5, 40, 17, 40, 3])
    counts: list[int] = []
    layers = taps(layout, LAYERS)
    collect(model, shard, layers, tmp_path / "features", counts.append)
    assert sum(counts) == 105
    write_shard(shard_path(tmp_path, 0), shard)
    found = load_texts(shard_path(tmp_path, 0), tmp_path / "features").features
    for begin, end in zip(shard.offsets, shard.offsets[1:], strict=False):
        with torch.no_grad():
            out = model(torch.tensor(shard.tokens[None, begin:end]).long(), output_hidden_states=True)
        last = out.hidden_states[-1][0]
        wanted = torch.cat([out.hidden_states[layer][0] for layer in layers], -1) if layers else last
        np.testing.assert_allclose(found.last[begin:end], last, atol=2e-2, rtol=2e-3)
        np.testing.assert_allclose(found.features[begin:end], wanted, atol=2e-2, rtol=2e-3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["features", "text-00000.npz"]


def test_which_layers_eagle3_reads() -> None:
    assert taps("eagle", 4) == ()
    assert taps("eagle3", 32) == (2, 16, 29)
    with pytest.raises(UnsupportedModelError, match="needs a target of 7 layers or more, found 6"):
        taps("eagle3", 6)


def test_a_model_that_changes_its_logits_is_refused(model: Any, tmp_path: Path) -> None:
    check_output(model, [1, 2, 3])
    capped = transformers.AutoModelForCausalLM.from_pretrained(tiny.make_model("gemma2", tmp_path))
    with pytest.raises(UnsupportedModelError, match="changes its logits after the output matrix"):
        check_output(capped, [1, 2, 3])


def test_layers_that_heads_are_not_made_for_are_refused(tmp_path: Path) -> None:
    other = transformers.AutoModelForCausalLM.from_pretrained(tiny.make_model("gpt2", tmp_path))
    with pytest.raises(UnsupportedModelError, match="heads are not made for"):
        head_for(other, "eagle", ffn=None, seed=0)


class Buffers(Cache):  # type: ignore[misc]
    """What an engine keeps: one key and value per slot; a call writes at `start` and sees what is before."""

    is_compileable = False

    def __init__(self) -> None:
        self.layers: list[Any] = []
        self.start = 0
        self.keys = self.values = torch.empty(0)

    def update(self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        if not self.keys.numel():
            self.keys, self.values = key[:, :, :0], value[:, :, :0]
        self.keys = torch.cat([self.keys[:, :, : self.start], key], 2)
        self.values = torch.cat([self.values[:, :, : self.start], value], 2)
        return self.keys, self.values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


@pytest.fixture
def causal() -> Iterator[str]:
    """Attention of a call over the buffers: row i sees all slots up to its own."""

    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **_: Any) -> Any:
        new, all_slots = query.shape[2], key.shape[2]
        seen = torch.arange(all_slots) <= torch.arange(all_slots - new, all_slots)[:, None]
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=seen, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2), None

    AttentionInterface.register("test_buffers", attend)
    yield "test_buffers"
    AttentionInterface._global_mapping.pop("test_buffers")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_unrolled_steps_are_what_a_chain_over_kv_buffers_gives(model: Any, layout: Layout, causal: str) -> None:
    head = head_for(model, layout, ffn=None, seed=1).eval()
    length, steps, width = 12, 4, 64 if layout == "eagle" else 192
    generator = torch.Generator().manual_seed(0)
    embeddings = torch.randn(1, length, 64, generator=generator)
    features = torch.randn(1, length, width, generator=generator)
    starts = torch.tensor([0, 3, 4, length - steps])
    with torch.no_grad(), unrolling(head) as unroll:
        unrolled = list(unroll(embeddings, features, starts, steps=steps))
    head.decoder.set_attn_implementation(causal)
    with torch.no_grad():
        for index, last in enumerate(starts.tolist()):
            cache = Buffers()
            rows = slice(0, last + 1)
            out = head(embeddings[:, rows], head.begin(features[:, rows]), torch.arange(last + 1)[None], cache)
            for step in range(steps):
                row = last + step
                ours = unrolled[step][:, row if step == 0 else index]
                torch.testing.assert_close(out[:, -1], ours, atol=1e-5, rtol=1e-4)
                cache.start = row + 1
                if step + 1 < steps:
                    out = head(embeddings[:, row + 1 : row + 2], out[:, -1:], torch.tensor([[row + 1]]), cache)


def test_the_vocabulary_and_what_it_covers(model: Any, tmp_path: Path) -> None:
    part = texts(model, tmp_path, "eagle", [60, 60])
    tokens, roles = part.text.tokens, part.text.roles
    counts = np.bincount(tokens, np.where(roles == FIXED, 0.0, np.where(roles == USER, 0.5, 1.0)), minlength=384)
    vocabulary = draft_vocabulary([part], 20, num_tokens=384)
    assert vocabulary.tolist() == sorted(set(vocabulary.tolist()))
    assert counts[vocabulary].sum() == np.sort(counts)[-20:].sum()
    assert coverage([part], vocabulary) == pytest.approx(counts[vocabulary].sum() / counts.sum())
    assert coverage([part], np.arange(384)) == 1.0


def test_a_batch_lines_tokens_and_features_up(model: Any, tmp_path: Path) -> None:
    part = texts(model, tmp_path, "eagle", [9, 4])
    vocabulary = np.arange(0, 100, 2)
    data = Dataset([part], model.get_input_embeddings(), vocabulary, held_out=0, measure=False)
    batch = Dataset.batch(data, 0, np.array([0, 1]))
    tokens, roles = part.text.tokens, part.text.roles
    table = {FIXED: 0.0, USER: 0.5, GREEDY: 1.0, SAMPLED: 1.0}
    for row, (begin, count) in enumerate([(0, 9), (9, 4)]):
        for i in range(7):
            real = i < count - 2
            place = begin + i
            if not real:
                assert batch.weights[row, i] == 0
                continue
            assert batch.weights[row, i] == table[int(roles[place + 2])]
            wanted = int(tokens[place + 2])
            assert int(batch.following[row, i]) == (wanted // 2 if wanted % 2 == 0 else -1)
            embedded = model.get_input_embeddings().weight[int(tokens[place + 1])]
            torch.testing.assert_close(batch.embeddings[row, i], embedded)
            np.testing.assert_array_equal(batch.features[row, i], part.features.features[place].astype(np.float32))
            np.testing.assert_array_equal(batch.wanted[row, i], part.features.last[place + 1].astype(np.float32))


def test_what_is_held_out_is_not_trained_on(model: Any, tmp_path: Path) -> None:
    parts = [texts(model, tmp_path, "eagle", [30] * 8, seed) for seed in (0, 1)]
    for part in parts:
        part.text.roles[np.add.outer(part.text.offsets[:-1], np.arange(4))] = USER  # prompts that differ
    embed, vocabulary = model.get_input_embeddings(), np.arange(384)
    learn = Dataset(parts, embed, vocabulary, held_out=95, measure=False)
    held = Dataset(parts, embed, vocabulary, held_out=95, measure=True)

    def seen(data: Dataset, epoch: int) -> list[tuple[int, int]]:
        found = data.order(epoch, num_tokens=64, seed=0)
        return [(number, int(document)) for number, group in found for document in group]

    assert sorted(seen(held, 0)) == [(0, 0), (0, 1), (0, 2)]
    assert sorted(seen(learn, 0)) == sorted([(0, d) for d in range(3, 8)] + [(1, d) for d in range(8)])
    assert seen(learn, 0) == seen(learn, 0) != seen(learn, 1)
    assert all(set(batch.weights.unique().tolist()) <= {0.0, 1.0} for batch in batches(held, num_tokens=64))


def test_what_is_measured_has_prompts_that_are_not_trained_on(model: Any, tmp_path: Path) -> None:
    def shard(prompts: list[int]) -> TextShard:
        tokens = np.array([[prompt, 7, 5, 6, 7, 8] for prompt in prompts]).ravel()
        roles = np.array([[USER, FIXED, GREEDY, GREEDY, USER, GREEDY]] * len(prompts)).ravel()
        return TextShard(
            tokens=tokens.astype(np.int32), roles=roles.astype(np.uint8), offsets=np.arange(len(prompts) + 1) * 6
        )

    def measured(first: list[int], second: list[int]) -> list[int]:
        parts = []
        for number, prompts in enumerate((first, second)):
            features = tmp_path / f"{first}{number}"
            collect(model, shard(prompts), (), features, lambda _: None)
            parts.append(Texts(shard(prompts), read_features(features)))
        data = Dataset(parts, model.get_input_embeddings(), np.arange(384), held_out=18, measure=True)
        assert {number for number, _ in data.order(0, num_tokens=64, seed=0)} == {0}
        return sorted(int(document) for _, group in data.order(0, num_tokens=64, seed=0) for document in group)

    assert measured([1, 2, 3, 2], [4, 5]) == [0, 2]  # in the same shard
    assert measured([1, 2, 3, 4], [3, 5]) == [0, 1]  # in another
    assert measured([1, 1, 3, 4], [3, 5]) == [0, 1]  # held out as well
    assert measured([1, 2, 3, 1], [3, 2]) == [0, 1, 2]  # nothing is left


def test_a_new_head_begins_at_the_best_linear_guess_of_the_next_feature(model: Any, tmp_path: Path) -> None:
    part = texts(model, tmp_path, "eagle", [60] * 20)
    embed = model.get_input_embeddings()
    head = head_for(model, "eagle", ffn=None, seed=0)
    begin_linear(head, Dataset([part], embed, np.arange(384), held_out=0, measure=False))

    rows = np.concatenate([np.arange(begin, begin + 58) for begin in range(60, 1200, 60)])  # one is always held out
    rows = rows[part.text.roles[rows + 2] != FIXED]
    given = np.concatenate(
        [
            embed.weight.detach().numpy()[part.text.tokens[rows + 1]],
            part.features.features[rows].astype(np.float64),
            np.ones((len(rows), 1)),
        ],
        axis=1,
    )
    wanted = part.features.last[rows + 1].astype(np.float64)
    best = given @ np.linalg.lstsq(given, wanted)[0]
    ours = given[:, :-1] @ head.fc.weight.detach().numpy().T + head.fc.bias.detach().numpy()
    assert len(rows) > 2 * given.shape[1]
    assert ((ours - wanted) ** 2).mean() < 1.01 * ((best - wanted) ** 2).mean() < 0.5 * wanted.var()


def test_groups_of_documents_stay_small() -> None:
    lengths = np.array([5, 100, 6, 7, 30, 31])
    groups = [group.tolist() for group in in_groups(lengths, 40)]
    assert groups == [[0, 2, 3], [4], [5], [1]]


class Told:
    """Stands for an unrolled head: step 1 of all rows, then the other steps of chains from each row; 1 is right."""

    class head:  # noqa: N801
        @staticmethod
        def logits(out: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
            return torch.cat([0.5 - out, out - 0.5], -1)

    def __init__(self, *right: list[int]) -> None:
        self._right = right

    def __call__(self, *_: object, steps: int) -> Iterator[torch.Tensor]:
        assert steps == len(self._right)
        yield from (torch.tensor(row, dtype=torch.float32)[None, :, None] for row in self._right)


def test_agreement_follows_chains() -> None:
    told: Any = Told([1, 1, 0, 1, 1, 1], [1, 1, 1, 0], [1, 0, 1, 1])
    following = torch.ones(1, 6, dtype=torch.long)
    nothing = torch.empty(0)
    batch = Batch(nothing, nothing, nothing, following, torch.tensor([[1.0, 1, 1, 1, 1, 0]]))
    found = agreement(told, batch, nothing, steps=3)  # three chains: the fourth ends in a row that does not count
    assert found.tolist() == [[True, True, False], [True, True, True], [True, False, True]]
    following[0, 1] = -1  # not in the vocabulary: never right
    found = agreement(told, batch, nothing, steps=3)
    assert found.tolist() == [[True, False, False], [False, True, True], [True, False, True]]
    short = Batch(nothing, nothing, nothing, following[:, :2], torch.ones(1, 2))
    assert agreement(told, short, nothing, steps=3).shape == (3, 0)


def test_tokens_per_call_are_those_of_chains_one_after_the_other() -> None:
    right = [3, 2, 1, 0, 0, 2, 1, 0]  # tokens of a chain of three from each row: the mean over rows would be 1 + 9 / 8
    agreed = torch.tensor([[count > step for count in right] for step in range(3)])
    assert block_efficiency(agreed) == (4 + 1 + 3) / 3  # from rows 0, 4 and 5
    assert block_efficiency(torch.ones(3, 4, dtype=torch.bool)) == 4.0
    assert block_efficiency(torch.zeros(3, 5)) == 1.0
    assert block_efficiency(torch.zeros(3, 0)) == 1.0


def test_the_loss_is_the_cross_entropy_of_each_step(model: Any) -> None:
    head = head_for(model, "eagle", ffn=None, seed=0).eval()
    generator = torch.Generator().manual_seed(0)
    embeddings, features, wanted = torch.randn(3, 2, 7, 64, generator=generator)
    matrix = torch.randn(11, 64, generator=generator)
    weights = torch.tensor([[1.0, 1, 0.5, 0, 1, 1, 1], [1, 0, 1, 1, 1, 0, 0]])
    following = torch.zeros(2, 7, dtype=torch.long)
    following[0, 4] = -1
    batch = Batch(embeddings, features, wanted, following, weights)
    starts = torch.tensor([1, 3, 5])
    options = LossOptions(steps=2, regression=0.3, decay=0.5)
    with torch.no_grad(), unrolling(head) as unroll:
        found = float(loss(unroll, batch, matrix, starts, options))
        outs = list(unroll(embeddings, features, starts, steps=2))
    expected = 0.0
    for step, out in enumerate(outs):
        total, mass = 0.0, 0.0
        for text in range(2):
            for index, row in enumerate([2, 4, 6] if step else range(7)):
                weight = float(weights[text, row])
                if weight and following[text, row] >= 0:
                    probs = torch.softmax(matrix @ wanted[text, row], -1)
                    value = -float((probs * torch.log_softmax(matrix @ out[text, index], -1)).sum())
                    gap = (out[text, index] - wanted[text, row]).abs()
                    value += 0.3 * float(torch.where(gap < 1, 0.5 * gap**2, gap - 0.5).mean())
                    total, mass = total + weight * value, mass + weight
        expected += 0.5**step * total / mass
    assert found == pytest.approx(expected, rel=1e-4)


PLAN = TrainingPlan(epochs=3, batch=128, learning_rate=3e-3, warmup=4)


def trainer(model: Any, parts: list[Texts], layout: Layout, plan: TrainingPlan = PLAN) -> Trainer:
    matrix = model.get_output_embeddings().weight.detach()
    vocabulary = draft_vocabulary(parts, 100, num_tokens=len(matrix))
    data = Dataset(parts, model.get_input_embeddings(), vocabulary, held_out=40, measure=False)
    return Trainer(head_for(model, layout, ffn=None, seed=0), data, matrix[torch.from_numpy(vocabulary)], plan)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_goes_on_from_a_checkpoint_as_if_nothing_had_been(model: Any, layout: Layout, tmp_path: Path) -> None:
    parts = [texts(model, tmp_path, layout, [40] * 9)]
    straight, first, second = (trainer(model, parts, layout) for _ in range(3))
    assert straight.state.updates > 8
    while straight.state.update < straight.state.updates:
        straight.update()
    for _ in range(4):
        first.update()
    first.save(tmp_path / "state.safetensors", {"tokens": 9})
    second.restore(tmp_path / "state.safetensors", {"tokens": 9})
    assert second.state.update == 4
    while second.state.update < second.state.updates:
        second.update()
    assert second.state == straight.state
    for name, value in straight.average.items():
        torch.testing.assert_close(second.average[name], value, atol=0, rtol=0)
    assert sorted(path.suffix for path in tmp_path.iterdir()) == ["", ".npz", ".safetensors"]


def test_a_checkpoint_of_another_training_is_refused(model: Any, tmp_path: Path) -> None:
    parts = [texts(model, tmp_path, "eagle", [40] * 3)]
    path = tmp_path / "state.safetensors"
    one = trainer(model, parts, "eagle")
    one.update()
    one.save(path, {"tokens": 9, "ffn": 96})
    with pytest.raises(ExportError, match="of a training with tokens 9, not 10: delete it to begin again"):
        trainer(model, parts, "eagle").restore(path, {"tokens": 10, "ffn": 96})
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ExportError, match="not a readable checkpoint"):
        trainer(model, parts, "eagle").restore(path, {"tokens": 9, "ffn": 96})


def test_the_average_is_what_is_measured(model: Any, tmp_path: Path) -> None:
    parts = [texts(model, tmp_path, "eagle", [40] * 3)]
    one = trainer(model, parts, "eagle", replace(PLAN, epochs=20))
    held = Dataset(parts, model.get_input_embeddings(), np.arange(384), held_out=40, measure=True)
    for _ in range(10):
        one.update()
    before = one.measure(held)
    for value in one.average.values():
        value.zero_()
    assert one.measure(held).shape == before.shape
    assert not one.measure(held)[0].equal(before[0]) or not before.any()
    one.update()  # the head itself was put back


def test_the_learning_rate_rises_and_falls() -> None:
    values = [schedule(update, 100, 10) for update in range(100)]
    assert values[0] == pytest.approx(0.1)
    assert max(values) == values[10] == 1.0
    assert values[10:] == sorted(values[10:], reverse=True)
    assert values[-1] == pytest.approx(0.05, abs=0.01)
