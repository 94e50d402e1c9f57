"""Logits that stay on the GPU: the same tokens as on the CPU, and only what is used is copied.

Everything here runs on simulated GPUs. See `simulated_cuda`, `simulated_trt` and `simulated_ort` for the rules.
"""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import specrt
import tiny
from copies import copy_artifact, refresh
from simulated_gpu import add_cuda_sessions, add_gpu, open_on_gpu
from simulated_ort import SimulatedCudaSession
from simulated_trt import plan_artifact
from specrt.check import check_artifact
from specrt.device_rows import DeviceLogits, DeviceRow, DeviceRows
from specrt.drafters.model import ModelDrafter, guess_chain
from specrt.engine_bound import BoundEngine
from specrt.engine_ort import OrtEngine
from specrt.errors import EngineError, ManifestError, RequestError
from specrt.machine import time_calls
from specrt.sampling import Sampler, SamplingParams
from specrt_profiles.manifest import read_manifest

V = tiny.VOCAB_SIZE
ROW = 4 * V  # bytes
SMALL = {"argmax": 576, "top-k": 13120}  # bytes of what comes with a call of up to 16 rows
TOKENS = [int(token) for token in np.random.default_rng(5).integers(0, V, 128)]
KINDS = {"TensorRT": "tensorrt", "ONNX Runtime": "tensorrt", "ONNX Runtime fp16": "ort", "top-k": "top-k"}
HOW: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}


def make_tied(folder: Path) -> Path:
    """Save a model whose tokens from V / 2 on have the logits of those before: every best logit is two tokens'."""
    import torch
    import transformers

    tiny.make_model("llama", folder, tie_word_embeddings=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.lm_head.weight[V // 2 :] = model.lm_head.weight[: V // 2]
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Artifacts that say the best tokens, target and draft, by dialect."""
    folder = tmp_path_factory.mktemp("outputs")
    source = make_tied(folder / "source")
    made = {}
    for dialect, precision in (("tensorrt", "fp32"), ("ort", "fp16")):
        profile = tiny.profile(dialect=dialect, precision=precision, draft_precision=precision, output="argmax")
        made[dialect] = tiny.export_tiny(source, folder / dialect, draft=str(source), profile=profile)
    profile = tiny.profile(dialect="tensorrt", draft_precision="fp32", output="top-k")
    made["top-k"] = tiny.export_tiny(source, folder / "top-k", draft=str(source), profile=profile)
    for name, out in (("tensorrt", "plan"), ("top-k", "top-k plan")):
        made[out] = plan_artifact(made[name], folder / out)
    return made


def on_gpu(kind: str, graphs: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the artifact that a kind of engine opens on the GPU; after this ONNX Runtime may have no CPU."""
    if kind in ("TensorRT", "top-k"):
        return graphs["plan" if kind == "TensorRT" else "top-k plan"]
    add_cuda_sessions(monkeypatch)
    return graphs[KINDS[kind]]


@pytest.fixture
def engine(
    graphs: dict[str, Path], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[BoundEngine]:
    """An engine of the kind that a test names, on the GPU; TensorRT if it names none."""
    add_gpu(monkeypatch)
    engine = open_on_gpu(on_gpu(getattr(request, "param", "TensorRT"), graphs, monkeypatch))
    yield engine
    engine.close()


def copies_down(engine: BoundEngine) -> list[int]:
    """Return the bytes of each copy to the host since the last time."""
    copies = engine._gpu._driver.copies  # type: ignore[attr-defined]
    found = [size for direction, size in copies if direction == "down"]
    copies.clear()
    return found


REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy with logprobs": {"logprobs": 3},
    "greedy with a penalty": {"repetition_penalty": 1.3},
    "gumbel": {"temperature": 1.0, "seed": 3, "top_p": 0.9},
    "rejection": {"temperature": 1.0, "seed": 3, "coupling": "rejection", "top_k": 20},
    "top-k": {"temperature": 1.0, "seed": 3, "top_k": 5, "top_p": 0.9},
    "min-p": {"temperature": 1.0, "seed": 4, "min_p": 0.2},
    "top-p": {"temperature": 0.05, "seed": 4, "top_p": 0.6},
    "top-p, rejection": {"temperature": 0.05, "seed": 4, "top_p": 0.6, "coupling": "rejection"},
    "unfiltered": {"temperature": 0.05, "seed": 5},
}


@pytest.mark.parametrize("kind", KINDS)
def test_generations_have_the_tokens_of_the_cpu(
    kind: str, graphs: dict[str, Path], monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    found: list[list[Any]] = []
    for device in ("cpu", "cuda:0"):
        if device == "cuda:0":
            driver = add_gpu(monkeypatch)
        folder = graphs[KINDS[kind]] if device == "cpu" else on_gpu(kind, graphs, monkeypatch)
        with specrt.load(folder, device=device, cache_dir=tmp_path) as model:
            results = [
                model.generate(TOKENS[:19], drafter=drafter, k=3, **HOW, **params)
                for params in REQUESTS.values()
                for drafter in ("none", "ngram", "model")
            ]
        found.append([(result.token_ids, result.logprobs, result.stats.num_accepted) for result in results])
    assert found[0] == found[1]
    assert max(max(ids) for ids, _, _ in found[0][:3]) < V // 2, "each best logit is two tokens': the lower id wins"
    assert driver.num_open == 0


@pytest.mark.parametrize("engine", KINDS, indirect=True)
def test_only_best_tokens_are_copied_until_a_row_is_used(engine: BoundEngine) -> None:
    engine.prefill(TOKENS[:16])
    copies_down(engine)
    rows = engine.verify(TOKENS[16:20])
    best = [int(rows[i].argmax()) for i in range(4)]
    peaks = [float(rows[i][best[i]]) for i in range(4)]
    (small,) = copies_down(engine)
    assert small in SMALL.values()
    third = np.asarray(rows[2]).copy()
    assert np.asarray(rows[2]) is not third
    assert copies_down(engine) == [ROW], "one row, once"
    whole = np.array(rows)
    assert copies_down(engine) == [4 * ROW]
    np.testing.assert_array_equal(whole[2], third)
    assert (whole.argmax(-1).tolist(), whole.max(-1).tolist()) == (best, peaks)
    engine.prefill(TOKENS[20:36])
    assert copies_down(engine) == []


def test_a_greedy_request_copies_no_row_and_others_those_they_look_at(
    graphs: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    driver = add_gpu(monkeypatch)
    with specrt.load(graphs["plan"], cache_dir=tmp_path) as model:
        for drafter in ("none", "ngram", "model"):
            driver.copies.clear()
            result = model.generate(TOKENS[:19], drafter=drafter, k=3, **HOW)
            assert {size for way, size in driver.copies if way == "down"} == {SMALL["argmax"]}
            assert sum(way == "down" for way, _ in driver.copies) >= result.stats.num_steps
        for params in ({"temperature": 1.0, "seed": 3}, {"logprobs": 1}, {"logit_bias": {5: 1.0}}):
            driver.copies.clear()
            result = model.generate(TOKENS[:19], drafter="ngram", k=3, **HOW, **params)
            rows = [size for way, size in driver.copies if way == "down" and size != SMALL["argmax"]]
            assert rows == [ROW] * 40, "one for each token of the text, however many were verified"


COLD = {"temperature": 0.02}
NARROW: tuple[dict[str, Any], ...] = (
    {"top_k": 5},
    {"top_k": 20, "top_p": 0.8},
    {"min_p": 0.9},
    {"top_k": 20, "coupling": "rejection"},
    COLD,
    {"top_p": 0.7, **COLD},
    {"top_k": 64, **COLD},
)
WIDE: tuple[dict[str, Any], ...] = (
    {"top_p": 0.999, "coupling": "rejection"},
    {"top_k": 64, "coupling": "rejection"},
    {"coupling": "rejection", **COLD},
    {"top_k": 5, "repetition_penalty": 1.1},
    {"logprobs": 1, **COLD},
)


SOME: tuple[dict[str, Any], ...] = ({}, {"top_p": 0.8})
ALL_ROWS = [
    *((how, {0}) for how in NARROW),
    *((how, {40}) for how in WIDE),
    *((how, set(range(1, 40))) for how in SOME),
]


@pytest.mark.parametrize(("params", "num_rows"), ALL_ROWS)
def test_where_the_best_tokens_decide_no_row_is_needed(
    graphs: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    machine_cache: Path,
    params: dict[str, Any],
    num_rows: set[int],
) -> None:
    driver = add_gpu(monkeypatch)
    with specrt.load(graphs["top-k plan"], cache_dir=machine_cache) as model:
        driver.copies.clear()
        model.generate(TOKENS[:19], drafter="ngram", k=3, **{"temperature": 1.0, "seed": 3, **HOW, **params})
        rows = [size for way, size in driver.copies if way == "down" and size != SMALL["top-k"]]
    assert set(rows) <= {ROW}
    assert len(rows) in num_rows


def test_best_tokens_cost_a_cpu_engine_nothing_to_copy(graphs: dict[str, Path]) -> None:
    engine = OrtEngine(graphs["tensorrt"], read_manifest(graphs["tensorrt"]).target, threads=1)
    rows = engine.verify(TOKENS[:4])
    assert isinstance(rows, np.ndarray)
    assert np.shares_memory(rows, engine.verify(TOKENS[:4]))
    engine.close()


def test_calls_are_timed_as_steps_make_them(engine: BoundEngine) -> None:
    copies_down(engine)
    assert time_calls(engine, context=20, calls=2, clock=time.perf_counter).keys() == {2, 4, 6, 10, 16}
    assert copies_down(engine) == [SMALL["argmax"]] * 15, "five widths, three times: no row"


def test_rows_of_an_earlier_call_are_not_there_any_more(engine: BoundEngine) -> None:
    old = engine.verify(TOKENS[:4])
    best = old[1].argmax()
    engine.verify(TOKENS[4:8])
    for use in (lambda: np.asarray(old[1]), lambda: np.asarray(old), lambda: old[1][(best + 1) % V]):
        with pytest.raises(AssertionError, match="these rows went with the engine's next call"):
            use()
    assert old[1].argmax() == best
    with pytest.raises(IndexError):
        old[4]


def test_a_row_without_a_best_token_ends_the_request(engine: BoundEngine) -> None:
    rows = engine.verify(TOKENS[:2])
    assert isinstance(rows, DeviceRows)
    sampler = Sampler(SamplingParams(), [1], vocab_size=V, end_ids=())
    bad = DeviceRow(DeviceRows(rows._logits, [V], [float("nan")]), 0)
    with pytest.raises(RequestError, match=r"no token is left to choose \(best score nan\)"):
        sampler.pick(bad, position=0)


def test_a_draft_of_another_vocabulary_is_asked_for_its_row(engine: BoundEngine) -> None:
    row = engine.verify(TOKENS[:2])[1]
    logits = np.asarray(row)
    for vocab_size, wanted in ((V + 8, [*logits, *[-np.inf] * 8]), (V - 8, logits[:-8]), (V, [-np.inf] * V)):
        drafter = ModelDrafter(engine, vocab_size=vocab_size)
        sampler = Sampler(SamplingParams(), [1], vocab_size=vocab_size, end_ids=())
        buffer = np.full(vocab_size, -np.inf, np.float32)
        proposal = guess_chain(
            row, engine.decode, sampler, start=2, limit=1, row=buffer, token_ids=drafter._token_ids
        )  # fmt: skip
        np.testing.assert_array_equal(buffer, wanted)
        assert proposal.token_ids == (int(logits[:vocab_size].argmax()),)


def test_a_device_that_finds_other_tokens_is_refused_when_it_is_first_used(
    graphs: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    add_gpu(monkeypatch)
    original = DeviceLogits.rows

    def highest_id(logits: DeviceLogits, count: int) -> Any:
        rows: Any = original(logits, count)
        return DeviceRows(logits, [token + V // 2 for token in rows.best_ids], rows.best_logits)

    monkeypatch.setattr(DeviceLogits, "rows", highest_id)
    with pytest.raises(
        EngineError, match="the best tokens or the sums that the device finds are not those of its logits"
    ):
        specrt.load(graphs["plan"], cache_dir=tmp_path)


@pytest.mark.parametrize("wrong", [0, 1, 2, 3])
def test_a_device_whose_best_tokens_or_sums_are_wrong_is_refused(
    graphs: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wrong: int
) -> None:
    add_gpu(monkeypatch)
    original = DeviceLogits.rows

    def others(logits: DeviceLogits, count: int) -> Any:
        rows: Any = original(logits, count)
        top = [array.copy() for array in rows.top]
        top[wrong % 3][-1:] += {0: 1, 1: 1e-3, 2: 1e-4, 3: 0}[wrong]
        return DeviceRows(logits, rows.best_ids, rows.best_logits, tuple(top))  # type: ignore[arg-type]

    monkeypatch.setattr(DeviceLogits, "rows", others)
    if wrong == 3:
        specrt.load(graphs["top-k plan"], cache_dir=tmp_path).close()
        return
    with pytest.raises(EngineError) as caught:
        specrt.load(graphs["top-k plan"], cache_dir=tmp_path)
    assert str(caught.value) == (
        "the best tokens or the sums that the device finds are not those of its logits: export with --output logits"
    )
    with pytest.raises(EngineError, match="the best tokens or the sums"):
        check_artifact(graphs["top-k plan"], device="cuda:0")


def test_a_plan_that_says_another_output_is_refused(graphs: dict[str, Path], tmp_path: Path) -> None:
    def edit(data: dict[str, Any]) -> None:
        data["engines"]["target"]["plan"]["output"] = "logits"

    folder = copy_artifact(graphs["plan"], tmp_path / "other", edit)
    with pytest.raises(
        ManifestError, match=r"plan\.output: expected argmax, as the engine's outputs say, found logits"
    ):
        read_manifest(folder)


# Types that NumPy does not have


@pytest.fixture(scope="module")
def in_bfloat16(tiny_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact at bf16 that takes trees and says the best tokens, its graph replaced by one that rounds in fp32."""
    from specrt_export.graph import save_in_fp32_arithmetic

    out = tmp_path_factory.mktemp("bf16") / "tiny"
    profile = tiny.profile(dialect="tensorrt", precision="bf16", trees=True, output="argmax")
    tiny.export_tiny(tiny_source, out, profile=profile)
    save_in_fp32_arithmetic(out / "target.onnx", out / "twin.onnx", rounded=True)
    (out / "twin.onnx").replace(out / "target.onnx")
    refresh(out)
    return out


def run_with_trees(engine: BoundEngine) -> list[bytes]:
    """Return the bytes of rows of chains and trees, with prefill, rollbacks and rows that have to be moved."""
    engine.prefill(TOKENS[:37])
    found = [np.array(engine.verify(TOKENS[40:46])).tobytes()]
    engine.rollback(37)
    found.append(np.array(engine.verify(TOKENS[50:56], (-1, 0, 0, 2, 2, 1))).tobytes())
    engine.keep((0, 2, 4))
    found.append(np.array(engine.verify(TOKENS[60:64])).tobytes())
    return found


@pytest.mark.parametrize("kind", ["TensorRT", "ONNX Runtime"])
def test_buffers_of_bfloat16_hold_what_the_graph_computes(
    in_bfloat16: Path, kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    spec = read_manifest(in_bfloat16).target
    past = [tensor.name for tensor in (*spec.inputs, *spec.outputs) if tensor.dtype == "bfloat16"]
    assert len(past) == 8
    wide = [
        tuple(replace(tensor, dtype="float32") if tensor.name in past else tensor for tensor in tensors)
        for tensors in (spec.inputs, spec.outputs)
    ]
    on_cpu = OrtEngine(in_bfloat16, replace(spec, inputs=wide[0], outputs=wide[1]), threads=1)
    wanted = run_with_trees(on_cpu)
    driver = add_gpu(monkeypatch)
    if kind == "ONNX Runtime":
        add_cuda_sessions(monkeypatch)
        monkeypatch.setattr(SimulatedCudaSession, "bfloat16", frozenset(past))
    folder = plan_artifact(in_bfloat16, tmp_path / "plan") if kind == "TensorRT" else in_bfloat16
    engine = open_on_gpu(folder)
    assert run_with_trees(engine) == wanted
    assert driver.copies.count(("across", 32)) == 2 * 8, "two slots, two layers, two heads, keys and values"
    buffer = 2 * 2 * 16 * spec.slots  # heads, bytes, values, slots
    assert sorted(map(len, driver.device.values())).count(buffer) == 4
    engine.close()
    on_cpu.close()


def test_requests_do_without_a_head_that_the_gpu_does_not_run(
    tmp_path: Path, machine_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny.make_model("llama", tmp_path / "source", num_hidden_layers=8)
    head = tiny.make_head(source, tmp_path / "head.safetensors", "eagle")
    profile = tiny.profile(precision="fp16", draft_precision="fp16")
    folder = tiny.export_tiny(source, tmp_path / "out", draft=None, heads=(head,), profile=profile)
    with specrt.load(folder, cache_dir=machine_cache) as model:
        assert model.generate(TOKENS[:20], **HOW).stats.drafter == "combined"
    add_gpu(monkeypatch)
    add_cuda_sessions(monkeypatch)
    with specrt.load(folder, device="cuda:0", cache_dir=machine_cache) as model:
        assert model.generate(TOKENS[:20], **HOW).stats.drafter == "suffix"
        with pytest.raises(EngineError, match="choose another drafter"):
            model.generate(TOKENS[:20], drafter="eagle", **HOW)
