"""The ONNX Runtime engine: its contract with the manifest, and KV buffers that only ever change where written."""

import dataclasses
import re
import sys
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import specrt
from copies import copy_artifact, edit_manifest, refresh
from specrt import SpecRTError, engine_ort
from specrt.engine import open_engine
from specrt.engine_bound import CallInputs, input_types
from specrt.engine_ort import OrtEngine
from specrt.errors import EngineError, ManifestError, MissingExtraError
from specrt_profiles.manifest import EngineSpec, read_manifest

WIDTHS = (2, 4, 6, 10, 16)
PREFILL = 16
CAPACITY = 128


@pytest.fixture(scope="module")
def spec(tiny_artifact: Path) -> EngineSpec:
    return read_manifest(tiny_artifact).target


@pytest.fixture(params=["ort", "tensorrt"])
def engine(request: pytest.FixtureRequest, tiny_artifact: Path, tensorrt_artifact: Path) -> Iterator[OrtEngine]:
    """The target of an artifact in either dialect: all that is true of one is true of the other."""
    folder = tiny_artifact if request.param == "ort" else tensorrt_artifact
    engine = OrtEngine(folder, read_manifest(folder).target, threads=1)
    yield engine
    engine.close()


def tokens(count: int, *, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, 384, count)]


def kv(engine: OrtEngine) -> list[Any]:
    """Return views [1, H, S, D] of the KV buffers."""
    return [value.numpy() for _, _, value in engine._kv]


def copy_kv(engine: OrtEngine) -> list[Any]:
    return [array.copy() for array in kv(engine)]


def changed_slots(before: Sequence[Any], after: Sequence[Any]) -> set[int]:
    """Return the slots in which any byte differs."""
    slots: set[int] = set()
    for a, b in zip(before, after, strict=True):
        different = (a.view(np.uint32) != b.view(np.uint32)).any(axis=(0, 1, 3))
        slots |= set(np.flatnonzero(different).tolist())
    return slots


def bits(rows: Any) -> bytes:
    return np.ascontiguousarray(rows).tobytes()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("start", [0, 3, 40])
def test_a_verify_call_writes_its_own_slots_and_nothing_else(engine: OrtEngine, width: int, start: int) -> None:
    engine.prefill(tokens(start))
    before = copy_kv(engine)
    engine.verify(tokens(width, seed=1))
    assert changed_slots(before, kv(engine)) == set(range(start, start + width))


def test_prefill_writes_the_slots_of_its_chunks(engine: OrtEngine) -> None:
    before = copy_kv(engine)
    engine.prefill(tokens(20))
    assert engine.kv_length == 20
    assert changed_slots(before, kv(engine)) == set(range(2 * PREFILL))


def test_the_buffers_stay_where_and_as_large_as_they_are(engine: OrtEngine) -> None:
    where = [(array.__array_interface__["data"], array.shape) for array in kv(engine)]
    engine.prefill(tokens(50))
    for count in (1, 3, 5, 9, 16):
        engine.verify(tokens(count))
        engine.decode(5)
    engine.rollback(7)
    engine.verify([5])
    assert [(array.__array_interface__["data"], array.shape) for array in kv(engine)] == where


def test_logits_are_a_view_of_one_buffer(engine: OrtEngine) -> None:
    first = engine.verify([5, 6, 7])
    again = engine.verify([5, 6, 7])
    assert np.shares_memory(first, again)
    assert first.shape == (3, 384)


@pytest.mark.parametrize("count", range(1, 17))
def test_the_smallest_width_that_fits_is_taken(engine: OrtEngine, count: int) -> None:
    engine.verify(tokens(count))
    assert list(engine._calls) == [(next(width for width in WIDTHS if width >= count),) * 2]


def test_more_tokens_than_the_widest_call_are_refused(engine: OrtEngine) -> None:
    with pytest.raises(EngineError, match="at most 16 tokens to verify, found 17"):
        engine.verify(tokens(17))
    assert engine.kv_length == 0


def test_only_the_allowed_call_shapes_are_used(tiny_model: specrt.LanguageModel) -> None:
    for drafter in ("none", "ngram", "suffix", "model"):
        for k in (1, 2, 3, 7, 15):
            tiny_model.generate("the quick brown fox " * 3, max_tokens=60, k=k, drafter=drafter, ignore_eos=True)
    target: Any = tiny_model.target
    draft: Any = tiny_model._engine("draft")
    ladder = {(width, width) for width in WIDTHS}
    assert set(target._calls) <= ladder | {(PREFILL, 0)}
    assert {(2, 2), (16, 16), (PREFILL, 0)} <= set(target._calls)
    assert set(draft._calls) <= ladder | {(PREFILL, 0), (1, 1)}


@pytest.mark.parametrize("context", [0, 5, 60, CAPACITY - 20])
def test_a_row_has_the_same_bits_at_every_width(engine: OrtEngine, context: int) -> None:
    prompt, token = tokens(context, seed=2), 77
    found = set()
    for width in (*WIDTHS, PREFILL):
        for seed in range(2):
            engine.rollback(0)
            engine.prefill(prompt)
            rows = engine.forward([token, *tokens(width - 1, seed=seed)], context, width)
            found.add(bits(rows[0]))
    assert len(found) == 1


def test_a_row_has_the_same_bits_at_every_place_of_a_call(engine: OrtEngine) -> None:
    sequence = tokens(40, seed=4)
    found = set()
    for place in range(10):
        engine.rollback(0)
        engine.prefill(sequence[: 30 - place])
        found.add(bits(engine.verify(sequence[30 - place : 31])[place]))
    assert len(found) == 1


def test_the_prompts_chunks_do_not_matter(engine: OrtEngine) -> None:
    prompt, found = tokens(50, seed=5), set()
    for cuts in ([50], [16, 50], [1, 2, 3, 50], [31, 33, 50], list(range(1, 51))):
        engine.rollback(0)
        for start, stop in zip([0, *cuts], cuts, strict=False):
            engine.prefill(prompt[start:stop])
        found.add(bits(engine.verify([9, 10])))
    assert len(found) == 1


def test_a_call_wider_than_the_ladder_can_be_measured(tiny_artifact: Path, spec: EngineSpec) -> None:
    engine = OrtEngine(tiny_artifact, dataclasses.replace(spec, verify_widths=(2, 4)), threads=1)
    wide = engine.forward(tokens(16), 0, PREFILL).copy()
    engine.rollback(0)
    assert bits(wide[:4]) == bits(engine.verify(tokens(16)[:4]))
    engine.close()


def test_rollback_and_overwrite_equals_never_written(engine: OrtEngine) -> None:
    engine.prefill(tokens(30))
    clean = bits(engine.verify(tokens(5, seed=1)))
    clean_kv = [array[:, :, :35].copy() for array in kv(engine)]
    for rejected in (tokens(16, seed=2), tokens(3, seed=3), tokens(2, seed=4)):
        engine.rollback(30)
        engine.verify(rejected)
    engine.rollback(30)
    assert bits(engine.verify(tokens(5, seed=1))) == clean
    assert changed_slots(clean_kv, [array[:, :, :35] for array in kv(engine)]) == set()


@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e30])
@pytest.mark.parametrize("length", [1, 30, CAPACITY - 16])
def test_poisoned_slots_beyond_the_length_change_nothing(engine: OrtEngine, length: int, poison: float) -> None:
    if "write_indices" in engine._names and not np.isfinite(poison):
        pytest.skip("in the TensorRT dialect slots out of sight weigh nothing but are multiplied with")
    engine.prefill(tokens(length))
    for count in (1, 3, 9, 16):
        engine.rollback(length)
        clean = bits(engine.verify(tokens(count, seed=1)))
        engine.rollback(length)
        for array in kv(engine):
            array[:, :, length:] = poison
        assert bits(engine.verify(tokens(count, seed=1))) == clean


def test_poison_within_the_length_is_seen(engine: OrtEngine) -> None:
    engine.prefill(tokens(30))
    for array in kv(engine):
        array[:, :, 29] = np.nan
    assert np.isnan(engine.verify([5])).any()


def test_poison_before_a_request_changes_nothing(tiny_model: specrt.LanguageModel) -> None:
    options: Any = {"max_tokens": 60, "ignore_eos": True, "logprobs": 2, "k": 5, "drafter": "model"}

    def generate() -> specrt.Result:
        with tiny_model.start("the quick", options, cold=True) as stream:  # nothing is reused that was known
            list(stream)
            return stream.result

    clean = generate()
    for engine in tiny_model._engines.values():
        for array in kv(engine):  # type: ignore[arg-type]
            array[:] = np.nan
    again = generate()
    assert (again.token_ids, again.logprobs) == (clean.token_ids, clean.logprobs)
    assert again.stats.num_accepted == clean.stats.num_accepted


def test_the_capacity_is_guarded_before_the_call(engine: OrtEngine) -> None:
    engine.prefill(tokens(CAPACITY - 3))
    before = copy_kv(engine)
    with pytest.raises(EngineError, match=f"at most {CAPACITY} tokens in the KV buffers, found {CAPACITY + 1}"):
        engine.verify(tokens(4))
    assert (engine.kv_length, changed_slots(before, kv(engine))) == (CAPACITY - 3, set())
    assert engine.verify(tokens(3)).shape == (3, 384)
    for call in (lambda: engine.decode(5), lambda: engine.verify([5]), lambda: engine.prefill([5])):
        with pytest.raises(EngineError, match="KV buffers"):
            call()


@pytest.mark.parametrize(
    ("start", "positions"), [(0, [0, 1, 2, 3]), (60, [60, 61, 62, 63]), (126, [126, 127, 127, 127])]
)
def test_a_call_is_described_by_a_few_integers(start: int, positions: list[int]) -> None:
    call = CallInputs({name: np.ones(shape, dtype) for name, (shape, dtype) in input_types(4, 4).items()})
    call.set([7, 8], start, CAPACITY - 1)
    inputs = call.arrays
    assert inputs["input_ids"].tolist() == [[7, 8, 0, 0]]
    assert inputs["position_ids"].tolist() == [positions]
    assert inputs["seqlens_k"].tolist() == [start + 3]
    assert int(inputs["total_sequence_length"]) == start + 4
    assert inputs["write_indices"].tolist() == [start]
    assert inputs["logits_indices"].tolist() == [0, 1, 2, 3]


def test_padding_at_the_very_end_changes_nothing(engine: OrtEngine) -> None:
    sequence, found = tokens(CAPACITY, seed=6), set()
    for width in (*WIDTHS, PREFILL):
        engine.rollback(0)
        engine.prefill(sequence[:-1])
        found.add(bits(engine.forward(sequence[-1:], CAPACITY - 1, width)))
        assert engine.kv_length == CAPACITY
    assert len(found) == 1


@pytest.mark.parametrize("length", [-1, 6, 1000])
def test_rollback_only_goes_back(engine: OrtEngine, length: int) -> None:
    engine.prefill(tokens(5))
    with pytest.raises(EngineError, match=rf"roll back to 0 \.\. 5 tokens, found {length}"):
        engine.rollback(length)
    engine.rollback(5)
    engine.rollback(3)
    engine.rollback(3)
    assert engine.kv_length == 3


def test_kept_rows_are_moved_together_and_nothing_else_is_touched(engine: OrtEngine) -> None:
    engine.prefill(tokens(7))
    engine.verify(tokens(6, seed=1))
    before = copy_kv(engine)
    engine.keep((0, 1, 3, 5))
    assert engine.kv_length == 11
    assert changed_slots(before, kv(engine)) == {7 + 2, 7 + 3}
    for old, new in zip(before, kv(engine), strict=True):
        np.testing.assert_array_equal(new[:, :, 7:11], old[:, :, [7, 8, 10, 12]])


def test_keeping_the_first_rows_moves_nothing(engine: OrtEngine) -> None:
    engine.prefill(tokens(7))
    engine.verify(tokens(6, seed=1))
    before = copy_kv(engine)
    for count in (6, 3, 1):
        engine.keep(range(count))
        assert (engine.kv_length, changed_slots(before, kv(engine))) == (7 + count, set())
    engine.keep(())
    assert engine.kv_length == 7


@pytest.mark.parametrize("rows", [(0, 6), (-1, 0), (1, 0), (2, 2)])
def test_rows_that_are_none_of_the_last_call_are_not_kept(engine: OrtEngine, rows: tuple[int, ...]) -> None:
    engine.prefill(tokens(7))
    engine.verify(tokens(6, seed=1))
    with pytest.raises(EngineError, match=r"expected rising rows of the 6 of the last call, found"):
        engine.keep(rows)


def test_nothing_works_after_close(engine: OrtEngine) -> None:
    engine.close()
    engine.close()
    for call in (lambda: engine.verify([1]), lambda: engine.decode(1), lambda: engine.prefill([1])):
        with pytest.raises(EngineError, match="the engine is closed: load the artifact again"):
            call()


def peak(action: Callable[[], object]) -> int:
    """Return the bytes that Python and NumPy had allocated at most during an action, the least of several runs."""
    peaks = []
    for _ in range(5):
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        action()
        peaks.append(tracemalloc.get_traced_memory()[1] - before)
        tracemalloc.stop()
    return min(peaks)


def test_a_call_allocates_nothing_in_proportion_to_context_or_vocabulary(engine: OrtEngine) -> None:
    peaks = {}
    call = tokens(16)
    for context in (4, CAPACITY - 16):
        engine.rollback(0)
        engine.prefill(tokens(context))

        def step(length: int = context) -> None:
            engine.verify(call)
            engine.rollback(length)

        step()
        peaks[context] = peak(step)
    short, long = peaks.values()
    assert abs(long - short) < 64
    assert long < 4096 < 16 * 384 * 4, "a call allocates as much as its logits"


def test_sessions_are_opened_once(tiny_artifact: Path, machine_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import onnxruntime

    opened = []
    session = onnxruntime.InferenceSession

    def record(path: str, *rest: Any, **named: Any) -> Any:
        opened.append(path)
        return session(path, *rest, **named)

    monkeypatch.setattr(onnxruntime, "InferenceSession", record)
    with specrt.load(tiny_artifact, cache_dir=machine_cache) as model:
        for drafter in ("none", "ngram", "suffix", "model", "model"):
            model.generate("the", drafter=drafter, max_tokens=5)
    assert [Path(path).name for path in opened] == ["target.onnx", "draft.onnx"]


def test_open_engine_opens_this_one(tiny_artifact: Path, spec: EngineSpec) -> None:
    engine = open_engine(tiny_artifact, spec, threads=1)
    assert isinstance(engine, OrtEngine)
    assert (engine.vocab_size, engine.capacity, engine.verify_widths) == (384, CAPACITY, WIDTHS)
    engine.close()


@pytest.mark.parametrize("threads", [0, -1])
def test_a_number_of_threads_below_one_is_refused(tiny_artifact: Path, spec: EngineSpec, threads: int) -> None:
    with pytest.raises(EngineError, match=f"threads: expected 1 or more.*found {threads}"):
        OrtEngine(tiny_artifact, spec, threads=threads)


Edit = Callable[[dict[str, Any]], None]


def tensor(target: dict[str, Any], kind: str, name: str) -> dict[str, Any]:
    return next(entry for entry in target[kind] if entry["name"] == name)


MISMATCHES: dict[str, tuple[Edit, str]] = {
    "an input less": (lambda t: t["inputs"].pop(), "the inputs .* of the manifest"),
    "an output less": (lambda t: t["outputs"].pop(), "the outputs .* of the manifest"),
    "another name": (lambda t: t["inputs"][0].update(name="ids"), "expected the inputs .*'ids'"),
    "another order": (lambda t: t["inputs"].reverse(), "expected the inputs"),
    "another type": (lambda t: t["inputs"][0].update(dtype="int32"), "input input_ids: expected int32"),
    "another size": (
        lambda t: tensor(t, "inputs", "past_key.0").update(shape=[1, 4, 144, 16]),
        r"input past_key\.0: expected float32 \[1, 4, 144, 16\], found tensor\(float\) \[1, 2, 144, 16\]",
    ),
    "another rank": (lambda t: t["inputs"][2].update(shape=[1, 1]), r"input seqlens_k: expected int32 \[1, 1\], found"),
    "another vocabulary": (lambda t: t.update(vocab_size=400), "logits: expected 400"),
    "more capacity": (lambda t: t.update(capacity=4096), "slots: expected 4112"),
    "a wider call": (lambda t: t.update(verify_widths=[2, 64]), "slots: expected 192"),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_a_graph_that_does_not_fit_its_manifest_is_refused(tiny_artifact: Path, tmp_path: Path, name: str) -> None:
    edit, message = MISMATCHES[name]
    folder = copy_artifact(tiny_artifact, tmp_path / "copy", lambda data: edit(data["engines"]["target"]))
    with pytest.raises(SpecRTError, match=message) as caught:
        specrt.load(folder, cache_dir=tmp_path)
    assert "\n" not in str(caught.value)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("file", ["target.onnx", "target.onnx.data"])
def test_a_truncated_file_is_named_with_its_sizes(tiny_artifact: Path, tmp_path: Path, file: str) -> None:
    folder = copy_artifact(tiny_artifact, tmp_path / "copy")
    size = (folder / file).stat().st_size
    truncate(folder / file)
    with pytest.raises(ManifestError, match=rf"{re.escape(file)}: expected {size} bytes, found {size // 2}"):
        specrt.load(folder, cache_dir=tmp_path)


def garbage(path: Path) -> None:
    path.write_bytes(b"not a graph" * 50)


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [truncate, garbage, empty])
@pytest.mark.parametrize("file", ["target.onnx", "target.onnx.data"])
def test_a_file_that_onnx_runtime_cannot_read_is_one_line(
    tiny_artifact: Path, tmp_path: Path, file: str, damage: Callable[[Path], None]
) -> None:
    folder = copy_artifact(tiny_artifact, tmp_path / "copy")
    damage(folder / file)
    refresh(folder)
    with pytest.raises(EngineError, match=r"target\.onnx: ONNX Runtime [\d.]+ cannot open it") as caught:
        specrt.load(folder, cache_dir=tmp_path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


def test_a_long_complaint_of_onnx_runtime_is_cut_to_one_line(
    tiny_artifact: Path, machine_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError(f"\nthe first line {'x' * 1000}\nthe second")

    monkeypatch.setattr("onnxruntime.InferenceSession", fail)
    with pytest.raises(EngineError, match=r"cannot open it: the first line x+$") as caught:
        specrt.load(tiny_artifact, cache_dir=machine_cache)
    assert len(str(caught.value)) < 600


def test_a_missing_onnx_runtime_names_the_line_that_installs_it(
    tiny_artifact: Path, machine_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MissingExtraError, match=re.escape("pip install 'specrt[cpu]'")):
        specrt.load(tiny_artifact, cache_dir=machine_cache)


@pytest.mark.parametrize("names", [["onnxruntime", "onnxruntime-gpu"], ["onnxruntime_gpu", "onnxruntime"]])
def test_both_builds_of_onnx_runtime_at_once_are_said(
    tiny_artifact: Path, machine_cache: Path, monkeypatch: pytest.MonkeyPatch, names: list[str]
) -> None:
    installed = [SimpleNamespace(metadata={"Name": name}) for name in [*names, "numpy", None]]
    monkeypatch.setattr("specrt.engine_ort.metadata.distributions", lambda: installed)
    with pytest.raises(EngineError, match="both installed and overwrite each other's files: uninstall both"):
        specrt.load(tiny_artifact, cache_dir=machine_cache)


def test_one_build_of_onnx_runtime_is_fine(
    tiny_artifact: Path, spec: EngineSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = [SimpleNamespace(metadata={"Name": "onnxruntime-gpu"})]
    monkeypatch.setattr("specrt.engine_ort.metadata.distributions", lambda: installed)
    OrtEngine(tiny_artifact, spec, threads=1).close()


def test_the_version_is_part_of_measured_facts() -> None:
    import onnxruntime

    assert engine_ort.engine_version() == f"onnxruntime {onnxruntime.__version__}"


def test_the_manifest_is_not_needed_twice(tiny_artifact: Path, spec: EngineSpec, tmp_path: Path) -> None:
    folder = copy_artifact(tiny_artifact, tmp_path / "copy")
    edit_manifest(folder, lambda data: data.clear())
    narrow = dataclasses.replace(spec, verify_widths=(4,))
    engine = OrtEngine(folder, narrow, threads=1)
    assert engine.verify([1]).shape == (1, 384)
    assert list(engine._calls) == [(4, 4)]
    engine.close()
