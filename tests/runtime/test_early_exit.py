"""The early-exit drafter on real engines: guesses of torch, no layer run twice, the text of plain decoding, faults."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file

import specrt
import tiny
from specrt.bench import run_bench
from specrt.drafters.early_exit import EarlyExitDrafter
from specrt.engine import open_engine
from specrt.engine_bench import run_engine_bench
from specrt.engine_ort import OrtEngine
from specrt.engine_ort_exit import OrtExitEngine
from specrt.errors import EngineError, ManifestError, RequestError
from specrt.prompts import BenchPrompt
from specrt.sampling import Sampler, SamplingParams
from specrt.speculation import runnable
from specrt.trace import run_trace
from specrt.tune import run_tune
from specrt_profiles.manifest import read_manifest

V, LAYERS, EXIT = tiny.VOCAB_SIZE, 4, 3
GUMBEL = {"temperature": 0.8, "seed": 7}
REJECTION = {"temperature": 1.0, "seed": 7, "coupling": "rejection"}
PARAMS: list[dict[str, Any]] = [{}, GUMBEL, {"repetition_penalty": 1.3}]
FORMS: dict[str, dict[str, Any]] = {
    "fp32": {}, "int8": {"precision": "int8"},
    "int4 trees": {"precision": "int4", "kv_precision": "int8", "trees": True},
}  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_model("llama", tmp_path_factory.mktemp("target"), num_hidden_layers=LAYERS)


@pytest.fixture(scope="module", params=FORMS)
def artifact(request: pytest.FixtureRequest, source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    profile = tiny.profile(**FORMS[request.param])
    return tiny.export_tiny(source, tmp_path_factory.mktemp("exit") / "out", profile=profile, early_exit=EXIT)


@pytest.fixture(scope="module")
def model(artifact: Path, machine_cache: Path) -> Iterator[specrt.LanguageModel]:
    with specrt.load(artifact, cache_dir=machine_cache) as loaded:
        yield loaded


@pytest.fixture
def engine(model: specrt.LanguageModel) -> OrtExitEngine:
    assert isinstance(model.target, OrtExitEngine)
    model.target.rollback(0)
    return model.target


def text(length: int, seed: int = 0) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(5, 300, length).tolist()
    return found


def runs(engine: OrtExitEngine, part: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count runs of a part: one entry per run."""
    session, calls = engine._sessions[part], list[int]()

    class Counting:
        def io_binding(self) -> Any:
            return session.io_binding()

        def run_with_iobinding(self, binding: Any) -> None:
            calls.append(1)
            session.run_with_iobinding(binding)

    monkeypatch.setitem(engine._sessions, part, Counting())
    for bound in ("_calls", "_lower"):  # they are bound to the session once
        monkeypatch.setattr(engine, bound, {})
    return calls


def test_guesses_are_those_of_torch(source: Path, tmp_path: Path) -> None:
    """The state after some layers, through the translator of a file, the last norm and the output matrix."""
    target = transformers.AutoModelForCausalLM.from_pretrained(source).eval()
    size, random = target.config.hidden_size, torch.Generator().manual_seed(0)
    translator, bias = (torch.randn(shape, generator=random) for shape in ((size, size), (size,)))
    tensors = {"translator.weight": translator, "translator.bias": bias}
    save_file(tensors, tmp_path / "exit.safetensors", metadata={"layer": str(EXIT)})
    folder = tiny.export_tiny(source, tmp_path / "out", heads=(tmp_path / "exit.safetensors",))
    engine, tokens = open_engine(folder, read_manifest(folder).target, threads=1), text(50)
    with torch.no_grad():
        states = target(torch.tensor([tokens]), output_hidden_states=True).hidden_states[EXIT][0]
        wanted = target.get_output_embeddings()(target.base_model.norm(states @ translator + bias)).numpy()
    assert engine.exit is not None
    for known in (1, 17, 40):
        engine.rollback(0)
        engine.prefill(tokens[: known - 1])
        engine.exit.begin()
        for place in range(known - 1, known + 4):
            np.testing.assert_allclose(np.asarray(engine.exit.guess(tokens[place])), wanted[place], atol=2e-4)
    engine.close()


@pytest.mark.parametrize("k", [1, 3, 5, 15, "auto"])
@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_the_text_is_that_of_plain_decoding(model: specrt.LanguageModel, params: dict[str, Any], k: Any) -> None:
    for prompt in ([17], [5, 9], list(range(40, 110))):
        options = {"max_tokens": 30, "ignore_eos": True, "logprobs": 1, **params}
        plain = model.generate(prompt, k=0, **options)
        for drafter in ("early-exit", "ngram+early-exit"):
            result = model.generate(prompt, k=k, drafter=drafter, **options)
            assert (result.token_ids, result.logprobs) == (plain.token_ids, plain.logprobs)
            assert result.stats.num_drafter_faults == 0


def test_one_seed_gives_one_text_where_guesses_are_drawn(model: specrt.LanguageModel) -> None:
    options: dict[str, Any] = {"drafter": "early-exit", "k": 3, "max_tokens": 40, "ignore_eos": True, **REJECTION}
    proposed = accepted = 0
    for seed in range(5):
        first, again = (model.generate([5, 9, 40], **{**options, "seed": seed}) for _ in range(2))
        assert first.token_ids == again.token_ids
        proposed += first.stats.num_proposed
        accepted += first.stats.num_accepted
    assert 0 < accepted < proposed
    with pytest.raises(RequestError, match="a seed's text depends on k"):
        model.generate([5, 9], **{**options, "k": "auto"})


def test_a_whole_call_has_the_bits_of_one_graph(model: specrt.LanguageModel, engine: OrtExitEngine) -> None:
    whole = OrtEngine(model.folder, model.manifest.target, threads=1)
    tokens = text(60)
    for target in (engine, whole):
        target.prefill(tokens[:40])
    for width in (1, 3, 5):
        rows = [np.array(target.verify(tokens[40 : 40 + width])) for target in (engine, whole)]
        assert np.array_equal(*rows)
        for target in (engine, whole):
            target.rollback(40)
    whole.close()


@pytest.mark.parametrize("guessed", [1, 2, 5])
@pytest.mark.parametrize("right", [0, 1, 4])
def test_a_verify_call_begins_at_the_exit(
    engine: OrtExitEngine, monkeypatch: pytest.MonkeyPatch, guessed: int, right: int
) -> None:
    """Only tokens that no guess was made from run through the layers below; the rows have the bits of a whole call."""
    tokens = text(60)
    wanted = [*tokens[30 : 31 + min(right, guessed - 1)], *text(3, seed=5)]
    engine.prefill(tokens[:30])
    expected = np.array(engine.verify(wanted))
    slots = [array[:, :, : 30 + len(wanted)].copy() for array in engine._slots()]
    engine.rollback(30)
    below, above = (runs(engine, part, monkeypatch) for part in ("below", "above"))
    engine.begin()
    for token in tokens[30 : 30 + guessed]:
        engine.guess(token)
    assert (len(below), len(above)) == (guessed, 0)
    assert np.array_equal(np.array(engine.verify(wanted)), expected)
    assert (len(below), len(above)) == (guessed + 1, 1)
    for found, array in zip(engine._slots(), slots, strict=True):
        assert np.array_equal(found[:, :, : 30 + len(wanted)], array)
    engine.rollback(30)
    engine.begin()
    for token in wanted:
        engine.guess(token)
    below.clear()
    assert np.array_equal(np.array(engine.verify(wanted[:-1])), expected[:-1]), "all of them known, and one more"
    assert not below


def test_guesses_do_not_outlive_what_they_were_made_behind(engine: OrtExitEngine) -> None:
    first, second = text(30), text(30, seed=1)
    call = text(4, seed=2)
    engine.prefill(second)
    expected = np.array(engine.verify(call))
    for change in ("prefill", "restore", "begin"):
        engine.rollback(0)
        engine.prefill(second if change == "begin" else first)
        block = None
        if change == "restore":
            engine.rollback(0)
            engine.prefill(second)
            block = engine.save(0, 30)
            engine.rollback(0)
            engine.prefill(first)
        engine.begin()
        for token in text(4, seed=3) if change == "begin" else call:
            engine.guess(token)
        if change == "begin":
            engine.begin()
        else:
            engine.rollback(0)
            engine.prefill(second) if block is None else engine.restore(block)
        assert np.array_equal(np.array(engine.verify(call)), expected), change


def test_slots_that_a_guess_wrote_to_are_known_no_more(engine: OrtExitEngine) -> None:
    """A request that is interrupted after a guess must not leave slots behind that seem to hold an earlier text."""
    tokens = text(60)
    engine.prefill(tokens)
    engine.rollback(30)
    assert engine.contents.common(tokens, 60, cold_bits=False) == 60
    engine.begin()
    engine.guess(5)
    assert engine.contents.common(tokens, 60, cold_bits=False) == 30


def test_trees_and_chains_between_guesses_keep_their_bits(model: specrt.LanguageModel, engine: OrtExitEngine) -> None:
    if not engine.takes_trees:
        pytest.skip("this target takes chains alone")
    tokens, parents = text(40), [-1, 0, 0, 1]
    engine.prefill(tokens[:20])
    expected = np.array(engine.verify(tokens[20:24], parents))
    engine.rollback(20)
    engine.begin()
    for token in tokens[20:24]:
        engine.guess(token)
    assert np.array_equal(np.array(engine.verify(tokens[20:24], parents)), expected)
    engine.keep([0, 2])
    options: dict[str, Any] = {"max_tokens": 30, "ignore_eos": True}
    plain = model.generate([5, 9, 5, 9, 5], k=0, **options)
    result = model.generate([5, 9, 5, 9, 5], k=5, drafter="combined", tree=True, strict=True, **options)
    assert result.token_ids == plain.token_ids


def test_guesses_have_no_trace_in_what_a_later_prompt_reuses(artifact: Path, machine_cache: Path) -> None:
    options: dict[str, Any] = {"k": 5, "drafter": "early-exit", "ignore_eos": True, "logprobs": 1}
    with specrt.load(artifact, cache_dir=machine_cache, prefix_cache_mib=8) as model:
        first = model.generate(text(70), max_tokens=12, **options)
        longer = [*text(70), *first.token_ids, 7]
        results = []
        for cold in (False, True):
            with model.start(longer, {"max_tokens": 12, **options}, cold=cold) as stream:
                results.append([(token.id, token.logprob) for token in stream])
                assert (stream.result.stats.num_cached_tokens > 60) != cold
    assert results[0] == results[1]


def test_generation_to_exactly_the_capacity(model: specrt.LanguageModel) -> None:
    prompt = list(range(20, 120))
    plain = model.generate(prompt, k=0, ignore_eos=True)
    result = model.generate(prompt, k=9, drafter="early-exit", ignore_eos=True)
    assert len(prompt) + len(plain.token_ids) == model.target.capacity
    assert (result.token_ids, result.stats.num_drafter_faults) == (plain.token_ids, 0)


def test_there_is_room_for_as_many_guesses_as_a_call_verifies(engine: OrtExitEngine) -> None:
    engine.prefill(text(20))
    assert engine.room == 16
    for token in text(16):
        engine.guess(token)
    with pytest.raises(EngineError, match="expected at most 16 guesses before a verify call, found more"):
        engine.guess(5)
    engine.begin()
    engine.rollback(0)
    engine.prefill(text(engine.capacity - 2))
    drafter = EarlyExitDrafter(engine, vocab_size=V)
    sampler = Sampler(SamplingParams(), [1], vocab_size=V, end_ids=())
    drafter.start([1], sampler)
    tokens = text(engine.capacity - 1)
    assert len(drafter.propose(tokens, 9).token_ids) == engine.room == 2


def test_a_failing_exit_costs_no_request(model: specrt.LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = model.generate([5, 9], max_tokens=20, k=0, ignore_eos=True)
    guess, calls = OrtExitEngine.guess, list[int]()

    def fail(self: Any, token_id: int) -> Any:
        calls.append(token_id)
        if len(calls) % 3:
            return guess(self, token_id)
        raise RuntimeError("no exit")

    monkeypatch.setattr(OrtExitEngine, "guess", fail)
    for drafter in ("early-exit", "ngram+early-exit"):
        calls.clear()
        result = model.generate([5, 9], max_tokens=20, k=5, drafter=drafter, ignore_eos=True)
        assert (result.token_ids, result.stats.num_drafter_faults, len(calls)) == (plain.token_ids, 1, 3)


def test_no_weight_is_stored_twice(artifact: Path) -> None:
    import onnx

    places: dict[str, list[tuple[str, int]]] = {}  # of the model's weights; tables of positions are read on both sides
    for name in ("target", "target.below", "target.above", "target.output"):
        graph = onnx.load(artifact / f"{name}.onnx", load_external_data=False).graph
        places[name] = [
            (entry["location"], int(entry["offset"]))
            for tensor in graph.initializer
            if tensor.name.startswith(("decoder.", "exit.")) and "rotary" not in tensor.name
            if (entry := {e.key: e.value for e in tensor.external_data})
        ]
    own = {place for place in places["target.below"] if place[0] == "target.below.onnx.data"}
    below, above, output = (set(places[f"target.{name}"]) for name in ("below", "above", "output"))
    assert (below | above | output) - own == set(places["target"])
    assert not (below & above) | (above & output)
    hidden = read_manifest(artifact).target.exit.hidden_size  # type: ignore[union-attr]
    size = (artifact / "target.below.onnx.data").stat().st_size
    assert 4 * hidden * hidden <= size <= 4 * hidden * hidden + 8192, "the translator, and nothing else"


def test_traces_and_benchmarks_take_it(model: specrt.LanguageModel) -> None:
    trace = run_trace(model, [5, 9, 40], {"max_tokens": 20, "ignore_eos": True, "drafter": "early-exit", "k": 5})
    assert sum(len(step.proposed) for step in trace.steps) >= trace.result.stats.num_proposed > 0
    rows = run_bench(
        model, [BenchPrompt("all", "the quick brown")], ks=[3], drafters=["early-exit"], repeats=1,
        options={"max_tokens": 20, "ignore_eos": True}, chat=False, on_run=lambda: None,
    )  # fmt: skip
    assert [(row.drafter, row.num_tokens) for row in rows if row.k == 3] == [("early-exit", 20)]


def test_the_tuner_tries_it_where_it_runs(model: specrt.LanguageModel) -> None:
    assert model.target.features is None
    assert runnable(model.manifest, model.target) == ("ngram", "suffix", "early-exit", "combined")
    whole = OrtEngine(model.folder, model.manifest.target, threads=1)
    assert runnable(model.manifest, whole) == ("ngram", "suffix")
    whole.close()
    found = run_tune(
        model, [BenchPrompt("all", "the quick brown")], drafters=["ngram", "early-exit"], repeats=1,
        options={"max_tokens": 8, "temperature": 0.0}, chat=False, on_run=lambda: None,
    )  # fmt: skip
    assert any(row.setting.drafter == "early-exit" and row.measured is not None for row in found.rows)


def test_costs_of_calls_leave_it_out(model: specrt.LanguageModel) -> None:
    """It has no engine of its own whose calls could be timed, and is not free."""
    report = run_engine_bench(model, threads=1, context=8, repeats=1, on_round=lambda: None)
    assert {entry.drafter for entry in report.break_even} == {"ngram", "suffix"}


def test_what_cannot_be_done_is_said(model: specrt.LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match="early-exit reads what the target computes and cannot be replayed"):
        model.start([1], {"drafter": "early-exit"}, target=open_engine(model.folder, model.manifest.target, threads=1))
    whole = OrtEngine(model.folder, model.manifest.target, threads=1)
    monkeypatch.setattr(model, "target", whole)
    monkeypatch.setattr(model, "device", "cuda:0")
    whole.verify_widths = (2, 4, 6, 10, 16)
    with pytest.raises(EngineError, match="expected cpu for the drafter early-exit, found cuda:0"):
        model.generate([1], drafter="early-exit")
    assert model.generate([1], max_tokens=3, drafter="ngram", ignore_eos=True).token_ids
    whole.close()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layer": LAYERS}, rf"exit\.layer: expected 1 to {LAYERS - 1}, found {LAYERS}"),
        ({"below": "gone.onnx"}, r"exit\.'gone\.onnx' is not among the listed files"),
        (None, "early-exit: the target has no early exit"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(
    artifact: Path, tmp_path: Path, change: dict[str, Any] | None, words: str
) -> None:
    folder = shutil.copytree(artifact, tmp_path / "artifact")
    path = folder / "manifest.json"
    data = json.loads(path.read_text("utf-8"))
    if change is None:
        del data["engines"]["target"]["exit"]
    else:
        data["engines"]["target"]["exit"] |= change
    path.write_text(json.dumps(data), "utf-8")
    with pytest.raises(ManifestError, match=words):
        specrt.load(folder)


def test_parts_that_are_not_those_of_the_manifest_are_refused(
    artifact: Path, machine_cache: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(artifact, tmp_path / "artifact")
    above, below = folder / "target.above.onnx", folder / "target.below.onnx"
    data = json.loads((folder / "manifest.json").read_text("utf-8"))
    exit_entry = data["engines"]["target"]["exit"]
    exit_entry["above"], exit_entry["below"] = below.name, above.name
    (folder / "manifest.json").write_text(json.dumps(data), "utf-8")
    with pytest.raises(EngineError, match=r"target\.above\.onnx: expected the inputs"):
        specrt.load(folder, cache_dir=machine_cache)
