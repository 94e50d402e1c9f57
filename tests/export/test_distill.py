"""`specrt distill` from end to end on a small model, and what it writes."""

import io
import multiprocessing
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

import tiny
from distilling import assert_resumes, card_of, distill_request
from specrt_export.catalogue import own_head
from specrt_export.checkpoint import resolve
from specrt_export.cli_distill import distill_command
from specrt_export.distill.call import DistillRequest
from specrt_export.distill.card import fingerprint_of
from specrt_export.distill.rows import WritingPlan
from specrt_export.distill.run import distill
from specrt_export.distill.shards import read_shard, shard_path
from specrt_export.distill.turns import Template
from specrt_export.distill.workers import WritingJob, write_shards
from specrt_export.distill.writer import BatchSize
from specrt_export.errors import ExportError
from specrt_export.progress import Progress

LAYERS = 8
PLAN = WritingPlan(template=Template(before=(), between=(), after=(), ends=frozenset()), starts=[[1]], complete=False)
EAGLE = {
    "d2t", "fc.weight", "fc.bias", "layers.0.self_attn.q_proj.weight", "layers.0.self_attn.k_proj.weight",
    "layers.0.self_attn.v_proj.weight", "layers.0.self_attn.o_proj.weight", "layers.0.mlp.gate_proj.weight",
    "layers.0.mlp.up_proj.weight", "layers.0.mlp.down_proj.weight", "layers.0.post_attention_layernorm.weight",
}  # fmt: skip
EAGLE3 = {
    "d2t", "fc.weight", "norm.weight", "midlayer.self_attn.q_proj.weight", "midlayer.self_attn.k_proj.weight",
    "midlayer.self_attn.v_proj.weight", "midlayer.self_attn.o_proj.weight", "midlayer.mlp.gate_proj.weight",
    "midlayer.mlp.up_proj.weight", "midlayer.mlp.down_proj.weight", "midlayer.post_attention_layernorm.weight",
    "midlayer.input_layernorm.weight", "midlayer.hidden_norm.weight",
}  # fmt: skip

pytestmark = pytest.mark.usefixtures("training_settings")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_model("llama", tmp_path_factory.mktemp("target"), num_hidden_layers=LAYERS)


class Log:
    """What was said."""

    def __init__(self) -> None:
        self.stream = io.StringIO()
        self.progress = Progress(stream=self.stream)


@pytest.fixture(scope="module")
def trained(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a training that was never interrupted."""
    folder = tmp_path_factory.mktemp("trained")
    log = Log()
    assert distill(distill_request(source, folder), log.progress) == folder / "head.safetensors"
    assert "tokens per target call on held-out answers" in log.stream.getvalue()
    return folder


def test_the_head_has_the_published_layout(source: Path, trained: Path) -> None:
    tensors, card = load_file(trained / "head.safetensors"), card_of(trained / "head.safetensors")
    assert set(tensors) == EAGLE
    assert tensors["fc.weight"].shape == (64, 128)
    assert {tensor.dtype for name, tensor in tensors.items() if name != "d2t"} == {torch.bfloat16}
    ids = tensors["d2t"] + torch.arange(200)
    assert ids.tolist() == sorted(set(ids.tolist()))
    assert 0 <= int(ids.min()) <= int(ids.max()) < tiny.VOCAB_SIZE
    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    assert card["target"]["weights"] == fingerprint_of(model)
    assert (card["layout"], card["layers"], card["ffn"], card["vocabulary_size"]) == ("eagle", [], 96, 200)
    assert card["updates"] == card["planned_updates"] > 20
    assert len(card["agreement"]) == 5
    assert sorted(path.name for path in trained.iterdir()) == ["head.json", "head.safetensors", "work"]


def test_the_head_learns_to_guess(trained: Path) -> None:
    card = card_of(trained / "head.safetensors")
    assert card["agreement"][0] > 0.3
    assert card["block_efficiency"] > 1.4


def test_an_eagle3_head_from_the_same_text(source: Path, trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained / "work" / "texts", tmp_path / "work" / "texts")
    shutil.copy(trained / "work" / "about.json", tmp_path / "work")
    head = distill(distill_request(source, tmp_path, layout="eagle3", ffn=64), Log().progress)
    assert head is not None
    tensors, card = load_file(head), card_of(head)
    assert set(tensors) == EAGLE3
    assert tensors["fc.weight"].shape == (64, 192)
    assert tensors["midlayer.self_attn.q_proj.weight"].shape == (64, 128)
    assert tensors["midlayer.mlp.gate_proj.weight"].shape == (64, 64)
    assert card["layers"] == [2, 4, 5]
    assert card["agreement"][0] > 0.2


def test_training_begins_with_a_head(source: Path, trained: Path, tmp_path: Path) -> None:
    start, text, plan = trained / "head.safetensors", trained / "work" / "texts", {"epochs": 1, "learning_rate": 0.0}
    shutil.copytree(text, tmp_path / "work" / "texts")
    shutil.copy(trained / "work" / "about.json", tmp_path / "work")
    frozen = distill_request(source, tmp_path)
    frozen = replace(frozen, start=start, vocabulary_size=50, training=replace(frozen.training, **plan))
    log = Log()
    same = distill(frozen, log.progress)
    assert same is not None
    before, after = load_file(start), load_file(same)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert f"{start}: {card_of(start)['block_efficiency']:.2f} tokens per target call" in log.stream.getvalue()
    assert card_of(same)["agreement"] == pytest.approx(card_of(start)["agreement"], abs=0.02)  # of rounded weights
    with pytest.raises(ExportError, match=r"of a training with start '.*', not None: delete it to begin again"):
        distill(replace(frozen, start=None), Log().progress)


def test_training_may_begin_with_the_head_of_a_built_in_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[DistillRequest] = []
    monkeypatch.setattr("specrt_export.distill.run.distill", lambda request, progress: asked.append(request))
    words = ["smollm2-135m", "--start", "own", "-o", str(tmp_path / "head.safetensors")]
    result = CliRunner().invoke(distill_command, words)
    assert result.exit_code == 0, result.output
    assert asked[0].start == own_head("smollm2-135m")
    assert asked[0].start.is_file()


def test_heads_that_no_training_can_begin_with(source: Path, trained: Path, tmp_path: Path) -> None:
    start = trained / "head.safetensors"
    other = tiny.make_model("llama", tmp_path / "other", seed=5, num_hidden_layers=LAYERS)
    own = tmp_path / "own.safetensors"
    tensors = load_file(start)
    save_file({**tensors, "lm_head.weight": torch.zeros(len(tensors["d2t"]), tensors["fc.bias"].numel())}, own)
    for changes, text in (
        ({"start": tmp_path / "none.safetensors"}, "not readable as safetensors"),
        ({"start": start, "layout": "eagle3"}, "expected a head of layout eagle3 to begin with, found eagle"),
        ({"start": start, "ffn": 7}, "expected a head of --ffn 7, found .*: leave --ffn out"),
        ({"start": start, "model": str(other)}, "with other weights than other has"),
        ({"start": own}, "found one with lm_head.weight of its own: begin without --start"),
    ):
        with pytest.raises(ExportError, match=text):
            distill(distill_request(source, tmp_path, **changes), Log().progress)
    assert not (tmp_path / "work").exists()


def test_going_on_after_interrupts_ends_at_the_same_head(source: Path, trained: Path, tmp_path: Path) -> None:
    assert_resumes(distill_request(source, tmp_path, minutes=1.0), trained)


def test_only_text_that_is_missing_is_written(source: Path, trained: Path, tmp_path: Path) -> None:
    texts = shutil.copytree(trained / "work" / "texts", tmp_path / "work" / "texts")
    shutil.copy(trained / "work" / "about.json", tmp_path / "work")
    kept, gone = shard_path(texts, 0), shard_path(texts, 1)
    before = kept.stat().st_mtime_ns
    gone.unlink()
    (texts / f".{gone.name}.1").write_bytes(b"half")
    assert distill(distill_request(source, tmp_path, minutes=0), Log().progress) is None
    assert not gone.exists()
    log = Log()
    assert distill(distill_request(source, tmp_path), log.progress) is not None
    assert kept.stat().st_mtime_ns == before
    assert read_shard(gone).tokens.tolist() == read_shard(shard_path(trained / "work" / "texts", 1)).tokens.tolist()
    assert sorted(path.name for path in texts.iterdir()) == [kept.name, gone.name]


def test_text_is_written_by_several_processes(source: Path, trained: Path, tmp_path: Path) -> None:
    few = replace(distill_request(source, tmp_path).training, epochs=1)
    assert distill(distill_request(source, tmp_path, threads=2, training=few), Log().progress) is not None
    ours, theirs = (sorted((folder / "work" / "texts").iterdir()) for folder in (tmp_path, trained))
    assert [path.name for path in ours] == ["text-00000.npz", "text-00001.npz"]
    for mine, other in zip(ours, theirs, strict=True):
        assert read_shard(mine).tokens.tolist() == read_shard(other).tokens.tolist()
    assert not multiprocessing.active_children()


def test_what_is_refused(source: Path, trained: Path, tmp_path: Path) -> None:
    other = tiny.make_model("llama", tmp_path / "other", seed=5, num_hidden_layers=LAYERS)
    for changes, text in (
        ({"out": tmp_path / "head.bin"}, "expected a name that ends in .safetensors"),
        ({"out": tmp_path / "none" / "head.safetensors"}, "there is no folder"),
        ({"model": str(other), "work": trained / "work"}, "has weights '.*', expected '.*': choose another --work"),
        ({"work": source}, "expected the folder of an earlier training or a new one"),
        ({"prompts": tmp_path / "none"}, "cannot be read as UTF-8"),
    ):
        with pytest.raises(ExportError, match=text):
            distill(distill_request(source, tmp_path, **changes), Log().progress)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other"]


def test_a_process_that_fails_is_told(source: Path, tmp_path: Path) -> None:
    shell = shutil.copytree(source, tmp_path / "model")
    (tmp_path / "work" / "texts").mkdir(parents=True)
    checkpoint = resolve(str(shell), revision=None, cache_dir=tmp_path, on_bytes=lambda _: None)
    (shell / "model.safetensors").unlink()
    size = BatchSize(rows=8, length=192)
    job = WritingJob(checkpoint=checkpoint, plan=PLAN, size=size, folder=tmp_path / "work" / "texts", seed=0)
    with pytest.raises(ExportError, match="a process that writes text ended with 1"):
        write_shards(job, [0], processes=1, out_of_time=lambda: False, on_tokens=lambda _: None)
    assert not list((tmp_path / "work" / "texts").iterdir())


def test_the_command(source: Path, trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "head.safetensors"
    words = ["--tokens", 500, "--epochs", 1, "--threads", 1, "--vocabulary", 100, "--minutes", 0, "-o", out]
    result: Result = CliRunner().invoke(distill_command, [str(word) for word in (source, *words)])
    assert result.exit_code == 0, result.output
    assert result.stdout == ""
    assert f"the same command goes on from {tmp_path / 'head.work'}" in result.stderr
    assert capfd.readouterr().out == ""
