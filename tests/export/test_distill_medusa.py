"""Training Medusa heads: the loss, ranks, checkpoints, and `specrt distill --drafter medusa` from end to end."""

import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from click.testing import CliRunner
from safetensors.torch import load_file

import tiny
from distilling import assert_resumes, card_of, distill_request, run
from specrt_export.cli_distill import distill_command
from specrt_export.distill.call import DistillRequest
from specrt_export.distill.card import fingerprint_of
from specrt_export.distill.loss import Batch
from specrt_export.distill.medusa import MedusaHeads, by_rank, loss, ranks
from specrt_export.distill.train import TrainingPlan
from specrt_export.errors import ExportError
from specrt_export.head_file import read_head
from specrt_export.medusa_engine import heads_module
from specrt_export.progress import Progress

LAYERS = 4
HEADS = 3

pytestmark = pytest.mark.usefixtures("training_settings")


def random_heads(*, num_heads: int = 3, num_blocks: int = 2) -> MedusaHeads:
    heads = MedusaHeads(16, num_heads=num_heads, num_blocks=num_blocks)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    return heads.eval()


def random_batch() -> tuple[Batch, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    embeddings, features, wanted = torch.randn(3, 2, 7, 16, generator=generator)
    weights = torch.tensor([[1.0, 1, 0.5, 0, 1, 1, 1], [1, 0, 1, 1, 1, 1, 0]])
    following = torch.randint(0, 11, (2, 7), generator=generator)
    following[0, 4] = -1
    return Batch(embeddings, features, wanted, following, weights), torch.randn(11, 16, generator=generator)


def by_definition(heads: MedusaHeads, index: int, feature: torch.Tensor) -> torch.Tensor:
    named = {name: p.detach() for name, p in heads.named_parameters()}
    for block in range(heads.num_blocks):
        z = named[f"blocks.{index}.{block}.weight"] @ feature + named[f"blocks.{index}.{block}.bias"]
        feature = feature + z * torch.sigmoid(z)
    return feature


def test_new_heads_say_what_the_target_says() -> None:
    heads, features = MedusaHeads(16, num_heads=3, num_blocks=2), torch.randn(4, 1, 16)
    torch.testing.assert_close(heads(features), features.expand(4, 3, 16))


def test_the_loss_is_the_cross_entropy_of_each_head_to_the_targets_law_at_its_place() -> None:
    heads, (batch, rows) = random_heads(), random_batch()
    expected = 0.0
    for index in range(3):
        total, mass = 0.0, 0.0
        for text in range(2):
            for row in range(7 - index):
                place = row + index  # of the token that is guessed
                weight = float(batch.weights[text, place])
                if weight and batch.following[text, place] >= 0:
                    law = torch.softmax(rows @ batch.wanted[text, place], -1)
                    given = by_definition(heads, index, batch.features[text, row])
                    total -= weight * float((law * torch.log_softmax(rows @ given, -1)).sum())
                    mass += weight
        expected += 0.7**index * total / mass
    with torch.no_grad():
        found = float(loss(heads, batch, rows, decay=0.7))
    assert found == pytest.approx(expected, rel=1e-4)


def test_texts_shorter_than_the_heads_reach_count_as_far_as_they_go() -> None:
    heads, (batch, rows) = random_heads(num_heads=3), random_batch()
    short = Batch(*(tensor[:, :2] for tensor in (
        batch.embeddings, batch.features, batch.wanted, batch.following, batch.weights
    )))  # fmt: skip
    found = loss(heads, short, rows, decay=0.7)
    assert torch.isfinite(found)
    found.backward()  # type: ignore[no-untyped-call]
    assert heads.blocks[1][0].weight.grad.any()  # type: ignore[index, union-attr]
    assert ranks(heads, short, rows).shape == (3, 0)
    assert by_rank(torch.empty(3, 0)) == ()


def test_ranks_are_places_in_the_order_of_each_heads_guesses() -> None:
    heads, (batch, rows) = random_heads(), random_batch()
    wanted: list[list[int]] = [[], [], []]
    for text, row in itertools.product(range(2), range(5)):
        if all(batch.weights[text, row + index] > 0 for index in range(3)):
            for index in range(3):
                logits = rows @ by_definition(heads, index, batch.features[text, row])
                order = torch.argsort(logits, descending=True).tolist()
                token = int(batch.following[text, row + index])
                wanted[index].append(order.index(token) if token >= 0 else len(rows))
    with torch.no_grad():
        found = ranks(heads, batch, rows)
    assert found.tolist() == wanted
    assert found.shape[1] >= 3
    shares = by_rank(found)
    assert shares[1][2] == pytest.approx(wanted[1].count(2) / len(wanted[1]), abs=1e-4)
    assert len(shares) == 3
    assert all(len(head) == 10 for head in shares)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_model("llama", tmp_path_factory.mktemp("target"), num_hidden_layers=LAYERS)


def request(source: Path, folder: Path, **changes: Any) -> DistillRequest:
    return distill_request(source, folder, **{"layout": "medusa", "heads": HEADS, **changes})


@pytest.fixture(scope="module")
def trained(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a training that was never interrupted."""
    folder = tmp_path_factory.mktemp("trained")
    written, log = run(request(source, folder))
    assert written == folder / "head.safetensors"
    assert f"chains of {HEADS} give" in log
    return folder


def test_the_heads_have_the_published_names_and_no_output_matrix(source: Path, trained: Path) -> None:
    path = trained / "head.safetensors"
    tensors, card = load_file(path), card_of(path)
    assert set(tensors) == {"d2t"} | {f"{i}.0.linear.{kind}" for i in range(HEADS) for kind in ("weight", "bias")}
    assert {tensor.dtype for name, tensor in tensors.items() if name != "d2t"} == {torch.bfloat16}
    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    assert card["target"]["weights"] == fingerprint_of(model)
    assert (card["layout"], card["heads"], card["blocks"], card["vocabulary_size"]) == ("medusa", HEADS, 1, 200)
    assert card["updates"] == card["planned_updates"] > 20
    assert len(card["agreement"]) == len(card["ranks"]) == HEADS
    assert [head[0] for head in card["ranks"]] == card["agreement"]
    assert all(sum(head) <= 1.001 for head in card["ranks"])
    head = read_head(path, model.config, vocab_size=tiny.VOCAB_SIZE)
    assert not any(name.endswith("state-eagle.safetensors") for name in map(str, (trained / "work").iterdir()))
    assert torch.equal(heads_module(head).blocks[2][0].weight, tensors["2.0.linear.weight"].float())  # type: ignore[arg-type, index]


def test_the_heads_learn_to_guess(trained: Path) -> None:
    card = card_of(trained / "head.safetensors")
    assert card["agreement"][0] > 0.3
    assert card["block_efficiency"] > 1.35


def test_going_on_after_interrupts_ends_at_the_same_heads(source: Path, trained: Path, tmp_path: Path) -> None:
    assert_resumes(request(source, tmp_path, minutes=1.0), trained)


def test_a_checkpoint_of_other_heads_is_refused(source: Path, trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained / "work", tmp_path / "work")
    with pytest.raises(ExportError, match=r"of a training with heads 3, not 2: delete it to begin again"):
        run(request(source, tmp_path, heads=2))


def test_eagle_and_medusa_learn_from_the_same_features(source: Path, trained: Path, tmp_path: Path) -> None:
    work = shutil.copytree(trained / "work", tmp_path / "work")
    features = work / "features-eagle" / "00000" / "last.npy"
    before = features.stat().st_mtime_ns
    plan = TrainingPlan(epochs=1, batch=512)
    assert run(request(source, tmp_path, layout="eagle", training=plan))[0] is not None
    assert features.stat().st_mtime_ns == before
    assert sorted(path.name for path in work.iterdir()) == [
        "about.json", "features-eagle", "state-eagle.safetensors", "state-medusa.safetensors", "texts",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--heads", "3"], "--heads needs --drafter medusa"),
        (["--drafter", "medusa", "--ffn", "64"], "--ffn is of eagle heads: --drafter medusa has none of its own"),
        (["--drafter", "medusa", "--layers", "3"], "--layers needs --drafter early-exit or pruned"),
        (["--drafter", "medusa", "--heads", "0"], "0 is not in the range"),
    ],
)
def test_options_that_do_not_go_together_are_refused(words: list[str], text: str) -> None:
    result = CliRunner().invoke(distill_command, ["model", "-o", "out.safetensors", *words])
    assert result.exit_code == 2
    assert text in result.stderr


@pytest.mark.parametrize(("words", "heads"), [(["--heads", "2"], 2), ([], 4)])
def test_the_command_asks_for_heads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], heads: int
) -> None:
    asked: list[DistillRequest] = []

    def take(wanted: DistillRequest, progress: Progress) -> Path:
        asked.append(wanted)
        return wanted.out

    monkeypatch.setattr("specrt_export.distill.run.distill", take)
    out = str(tmp_path / "head.safetensors")
    result = CliRunner().invoke(distill_command, ["model", "--drafter", "medusa", "-o", out, *words])
    assert (result.exit_code, result.stdout.strip()) == (0, out)
    assert [(wanted.layout, wanted.heads, wanted.blocks) for wanted in asked] == [("medusa", heads, 1)]
