"""Training early exits: where it begins, the file, and `specrt distill --drafter early-exit` from end to end."""

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import tiny
from distilling import assert_resumes, card_of, distill_request, run
from specrt_export.cli_distill import distill_command
from specrt_export.decoder import decoder_layers
from specrt_export.distill.call import DistillRequest
from specrt_export.distill.card import fingerprint_of
from specrt_export.distill.exit import EXIT_HEALING, ExitTranslator
from specrt_export.distill.features import collect, read_features
from specrt_export.distill.rows import GREEDY
from specrt_export.distill.shards import TextShard, read_shard, shard_path
from specrt_export.distill.train import TrainingPlan
from specrt_export.errors import ExportError, UnsupportedModelError
from specrt_export.exit_file import ExitFile
from specrt_export.exit_fit import ExitHead, ExitMeasure, best_exit, fit_exits
from specrt_export.head_file import read_head
from specrt_export.progress import Progress
from tiny import drop, put

LAYERS = 4
EXIT = 2
H = 64

pytestmark = pytest.mark.usefixtures("training_settings")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_model("llama", tmp_path_factory.mktemp("target"), num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def model(source: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(source).eval()


def request(source: Path, folder: Path, **changes: Any) -> DistillRequest:
    return distill_request(source, folder, **{"layout": "early-exit", "layers": EXIT, "tokens": 6000, **changes})


@pytest.fixture(scope="module")
def trained(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a training that was never interrupted."""
    folder = tmp_path_factory.mktemp("trained")
    written, log = run(request(source, folder))
    assert written == folder / "head.safetensors"
    assert f"exit after {EXIT} of {LAYERS} layers; greedy chains of 5 give" in log
    assert "tokens per target call; predicted speedup" in log
    return folder


def read(path: Path, model: Any) -> ExitFile:
    head = read_head(path, model.config, vocab_size=tiny.VOCAB_SIZE)
    assert isinstance(head, ExitFile)
    return head


def random_exit() -> ExitHead:
    generator = torch.Generator().manual_seed(4)
    return ExitHead(
        layer=EXIT, translator=torch.randn(16, 16, generator=generator), bias=torch.randn(16, generator=generator)
    )


@pytest.mark.parametrize("scale", [1.0, 50.0])
def test_training_begins_as_the_start_and_ends_as_what_it_became(scale: float) -> None:
    start, norm = random_exit(), nn.RMSNorm(16, eps=1e-6)
    norm.weight.data = torch.linspace(0.5, 2, 16)
    states = scale * torch.randn(30, 16, generator=torch.Generator().manual_seed(1))
    translator = ExitTranslator(start, norm, states)
    assert start.translator is not None
    assert start.bias is not None
    assert {name for name, p in translator.named_parameters() if p.requires_grad} == {"turn", "shift"}
    with torch.no_grad():
        expected = norm(states @ start.translator + start.bias)
        torch.testing.assert_close(translator(states), expected, rtol=1e-4, atol=1e-4)
        for parameter in (translator.turn, translator.shift):
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)))
        became = translator.head(dict(translator.named_parameters()))
        assert became.translator is not None
        expected = norm(states @ became.translator + became.bias)
        torch.testing.assert_close(translator(states), expected, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(became.translator, start.translator, atol=0.5)


def test_without_a_translator_it_is_the_norm() -> None:
    norm, states = nn.RMSNorm(16, eps=1e-6), torch.randn(30, 16)
    plain = ExitTranslator(ExitHead(layer=1, translator=None, bias=None), norm, states)
    with torch.no_grad():
        torch.testing.assert_close(plain(states), norm(states), rtol=1e-4, atol=1e-5)


def test_features_are_the_states_that_enter_the_layer(model: Any, tmp_path: Path) -> None:
    tokens = np.random.default_rng(0).integers(0, 300, 30).astype(np.int32)
    shard = TextShard(tokens=tokens, roles=np.full(30, GREEDY, np.uint8), offsets=np.array([0, 30]))
    collect(model, shard, (EXIT,), tmp_path / "features", lambda _: None)
    with torch.no_grad():
        states = model(torch.tensor(tokens[None]).long(), output_hidden_states=True).hidden_states[EXIT][0]
    found = read_features(tmp_path / "features")
    np.testing.assert_allclose(found.features, states, rtol=2e-3, atol=1e-3)
    assert found.last.shape == found.features.shape
    assert np.abs(found.last - found.features).max() > 1


def test_huge_states_stay_finite(source: Path, tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(source).eval()
    decoder_layers(model)[0].register_forward_hook(lambda *given: 1e7 * given[2])
    shard = TextShard(tokens=np.arange(9, dtype=np.int32), roles=np.full(9, GREEDY, np.uint8), offsets=np.array([0, 9]))
    collect(model, shard, (1,), tmp_path / "features", lambda _: None)
    found = read_features(tmp_path / "features").features
    assert np.isfinite(found).all()
    assert np.abs(found).max() == 65504


def test_the_file_is_an_exit_and_the_card_tells_of_it(model: Any, trained: Path) -> None:
    path, card = trained / "head.safetensors", card_of(trained / "head.safetensors")
    tensors = load_file(path)
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()} == {
        "translator.weight": (torch.bfloat16, (H, H)), "translator.bias": (torch.bfloat16, (H,)),
    }  # fmt: skip
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt", "layer": str(EXIT)}
    assert card["target"]["weights"] == fingerprint_of(model)
    assert (card["layout"], card["layer"], card["tokens"] > 5000) == ("early-exit", EXIT, True)
    assert card["updates"] == card["planned_updates"] > 20
    sizes = [sum(parameter.numel() for parameter in layer.parameters()) for layer in decoder_layers(model)]
    matrix = model.lm_head.weight.numel()
    assert card["cost"] == pytest.approx((sum(sizes[:EXIT]) + H * H + matrix) / (sum(sizes) + matrix), abs=1e-4)
    mean = sum(card["agreement"]) / 5
    tokens = sum(mean**n for n in range(card["k"] + 1))
    assert card["speedup"] == pytest.approx(tokens / (1 + card["k"] * card["cost"]), abs=1e-3)
    assert sorted(path.name for path in trained.iterdir()) == ["head.json", "head.safetensors", "work"]
    assert sorted(path.name for path in (trained / "work").iterdir()) == [
        "about.json", "features-exit-2", "start-exit-2.safetensors", "state-exit-2.safetensors", "texts",
    ]  # fmt: skip


def held_out_agreement(head: ExitHead, model: Any, work: Path) -> float:
    """Return how often an exit says the text's next token, on all greedy answers of the documents that are held out."""
    shard = read_shard(shard_path(work / "texts", 0))
    total = sum(len(read_shard(path).tokens) for path in (work / "texts").iterdir())
    cut = int(np.searchsorted(shard.offsets, total // 16, side="right")) - 1
    right: list[bool] = []
    for begin, end in itertools.pairwise(shard.offsets[: cut + 1].tolist()):
        ids, roles = shard.tokens[begin:end], shard.roles[begin:end]
        with torch.no_grad():
            states = model(torch.tensor(ids[None]).long(), output_hidden_states=True).hidden_states[head.layer]
            if head.translator is not None:
                states = states @ head.translator + head.bias
            said = model.lm_head(model.model.norm(states))[0].argmax(-1).numpy()
        right += (said[:-1] == ids[1:])[roles[1:] == GREEDY].tolist()
    return sum(right) / len(right)


def test_the_file_guesses_as_often_right_as_the_card_says(model: Any, trained: Path) -> None:
    """The definition, with what is read back: a transposed or unscaled translator would say something else."""
    head = read(trained / "head.safetensors", model)
    assert (head.layer, head.head.layer, head.token_ids) == (EXIT, EXIT, None)
    head.check_target(model, "tiny")
    card = card_of(trained / "head.safetensors")
    found = held_out_agreement(head.head, model, trained / "work")
    assert found == pytest.approx(sum(card["agreement"]) / 5, abs=0.07)
    kept = load_file(trained / "work" / "start-exit-2.safetensors")
    start = ExitHead(layer=EXIT, translator=kept["translator"], bias=kept["bias"])
    before = held_out_agreement(start, model, trained / "work")
    assert before == pytest.approx(sum(card["agreement_before"]) / 5, abs=0.07)
    plain = held_out_agreement(ExitHead(layer=EXIT, translator=None, bias=None), model, trained / "work")
    assert plain == pytest.approx(sum(card["agreement_plain"]) / 5, abs=0.07)
    assert found > before + 0.05
    assert before > plain


def test_training_begins_at_the_closed_form_of_text_that_is_not_held_out(source: Path, trained: Path) -> None:
    shard = read_shard(shard_path(trained / "work" / "texts", 0))
    documents = itertools.pairwise(shard.offsets.tolist())
    texts = [shard.tokens[begin:end].tolist() for begin, end in documents if begin >= len(shard.tokens) // 2]
    model = transformers.AutoModelForCausalLM.from_pretrained(source).eval().to(torch.bfloat16)
    [head], _ = fit_exits(model, texts, layers=[EXIT])
    kept = load_file(trained / "work" / "start-exit-2.safetensors")
    torch.testing.assert_close(kept, {"translator": head.translator, "bias": head.bias})


def test_going_on_after_interrupts_ends_at_the_same_exit(source: Path, trained: Path, tmp_path: Path) -> None:
    written = assert_resumes(request(source, tmp_path, minutes=0.9), trained)
    ours, theirs = card_of(written), card_of(trained / "head.safetensors")
    assert ours["agreement_before"] == theirs["agreement_before"]


def test_without_layers_the_best_exit_is_taken_and_kept(source: Path, trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained / "work" / "texts", tmp_path / "work" / "texts")
    shutil.copy(trained / "work" / "about.json", tmp_path / "work")
    quick = {"layers": None, "training": TrainingPlan(epochs=1, batch=2048)}
    written, _ = run(request(source, tmp_path, **quick))
    kept = json.loads((tmp_path / "work" / "exits.json").read_text("utf-8"))
    measures = [ExitMeasure(**measure) for measure in kept["measures"]]
    assert [measure.layer for measure in measures] == list(range(1, LAYERS))
    assert written is not None
    assert card_of(written)["layer"] == kept["best"] == best_exit(measures).layer
    other = next(layer for layer in range(1, LAYERS) if layer != kept["best"])
    (tmp_path / "work" / "exits.json").write_text(json.dumps({**kept, "best": other}), "utf-8")
    written, _ = run(request(source, tmp_path, **quick))
    assert written is not None
    assert card_of(written)["layer"] == other


def test_a_checkpoint_of_another_training_is_refused(source: Path, trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained / "work", tmp_path / "work")
    with pytest.raises(ExportError, match=r"of a training with vocabulary 200, not 100: delete it to begin again"):
        run(request(source, tmp_path, vocabulary_size=100))


@pytest.mark.parametrize("layers", [LAYERS, 9])
def test_layers_that_are_no_exit_are_refused_before_text_is_written(source: Path, tmp_path: Path, layers: int) -> None:
    with pytest.raises(ExportError, match=rf"expected an early exit after 1 to 3 of the model's 4 .*, found {layers}"):
        run(request(source, tmp_path, layers=layers))
    assert not (tmp_path / "work").exists()


def test_a_model_of_one_layer_is_refused(tmp_path: Path) -> None:
    small = tiny.make_model("llama", tmp_path / "small", num_hidden_layers=1)
    with pytest.raises(UnsupportedModelError, match="an early exit needs a model of 2 layers or more, found 1"):
        run(request(small, tmp_path, layers=None))


Change = Callable[[dict[str, Any]], None]
UNCHANGED: dict[str, str] = {"format": "pt", "layer": str(EXIT)}
BROKEN: dict[str, tuple[Change, dict[str, str], str]] = {
    "bias missing": (drop("translator.bias"), UNCHANGED, r"expected translator.bias \[64\], found no such tensor"),
    "another size": (
        put("translator.weight", (32, 32)), UNCHANGED,
        r"expected translator.weight \[64, 64\], found \[32, 32\]: made for another target",
    ),
    "something else": (put("d2t", (4,)), UNCHANGED, "expected the translator of an early exit, found d2t as well"),
    "no layer": (drop(""), {"format": "pt"}, "expected the number of layers before the exit as metadata layer"),
    "no number": (drop(""), {"layer": "two"}, "as metadata layer, found 'two'"),
    "another target": (
        drop(""), {"layer": "4"}, "expected an exit after 1 to 3 layers, found 4: made for another target",
    ),
    "another exit": (drop(""), {"layer": "3"}, "an exit after 3 layers, but its card says 2: copy both again"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_files_that_are_no_exit_are_refused(model: Any, trained: Path, tmp_path: Path, case: str) -> None:
    change, meta, text = BROKEN[case]
    tensors: dict[str, Any] = {**load_file(trained / "head.safetensors"), "": torch.zeros(1)}
    change(tensors)
    tensors.pop("", None)
    path = tmp_path / "head.safetensors"
    save_file(tensors, path, metadata=meta)
    shutil.copy(trained / "head.json", tmp_path)
    with pytest.raises(ExportError, match=text) as error:
        read(path, model)
    assert "\n" not in str(error.value)


def test_an_exit_without_a_card_is_enough(model: Any, trained: Path, tmp_path: Path) -> None:
    shutil.copy(trained / "head.safetensors", tmp_path)
    head = read(tmp_path / "head.safetensors", model)
    assert (head.layer, head.card) == (EXIT, None)
    assert head.head.translator is not None
    assert head.head.translator.dtype == torch.float32


def test_the_card_of_another_kind_is_refused(model: Any, trained: Path, tmp_path: Path) -> None:
    medusa = tiny.make_medusa(Path(model.name_or_path), tmp_path / "medusa.safetensors")
    shutil.copy(trained / "head.json", tmp_path / "medusa.json")
    with pytest.raises(ExportError, match="expected the card of a medusa head, found early-exit"):
        read_head(medusa, model.config, vocab_size=tiny.VOCAB_SIZE)


def test_an_exit_of_other_weights_is_refused(trained: Path, tmp_path: Path) -> None:
    other = transformers.AutoModelForCausalLM.from_pretrained(
        tiny.make_model("llama", tmp_path / "other", num_hidden_layers=LAYERS, seed=1)
    )
    with pytest.raises(ExportError, match="with other weights than other has: train one with specrt distill"):
        read(trained / "head.safetensors", other).check_target(other, "other")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--heads", "3"], "--heads needs --drafter medusa"),
        (["--ffn", "64"], "--ffn is of eagle heads: --drafter early-exit has none of its own"),
        (["--layers", "0"], "0 is not in the range"),
        (["--epochs", "0"], "--epochs 0 needs --drafter pruned"),
    ],
)
def test_options_that_do_not_go_together_are_refused(words: list[str], text: str) -> None:
    result = CliRunner().invoke(distill_command, ["model", "-o", "out.safetensors", "--drafter", "early-exit", *words])
    assert result.exit_code == 2
    assert text in result.stderr


@pytest.mark.parametrize(("words", "layers"), [(["--layers", "3"], 3), ([], None)])
def test_the_command_asks_for_an_exit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], layers: int | None
) -> None:
    asked: list[DistillRequest] = []

    def take(wanted: DistillRequest, progress: Progress) -> Path:
        asked.append(wanted)
        return wanted.out

    monkeypatch.setattr("specrt_export.distill.run.distill", take)
    out = str(tmp_path / "head.safetensors")
    result = CliRunner().invoke(distill_command, ["model", "--drafter", "early-exit", "-o", out, *words])
    assert (result.exit_code, result.stdout.strip()) == (0, out)
    assert [(wanted.layout, wanted.layers) for wanted in asked] == [("early-exit", layers)]
    assert asked[0].training == EXIT_HEALING
