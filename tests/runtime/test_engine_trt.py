"""The TensorRT engine on a simulated TensorRT and a simulated GPU: every rule kept, and every broken one seen.

Nothing here ran on a GPU. See `simulated_trt` and `simulated_cuda` for the rules.
"""

import contextlib
import gc
import re
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import specrt
import tiny
from simulated_cuda import SimulatedDriver
from simulated_trt import VERSION, SimulatedTensorrt, plan_artifact, plan_of
from specrt import engine_trt
from specrt.check import check_artifact
from specrt.cuda import Gpu
from specrt.device_buffers import DeviceBuffers, DeviceCall
from specrt.engine import Engine, open_engine
from specrt.engine_ort import OrtEngine
from specrt.engine_trt import TrtEngine
from specrt.errors import EngineError, MissingExtraError, RequestError
from specrt_profiles.manifest import EngineSpec, read_manifest

pytestmark = pytest.mark.usefixtures("frozen_heap")  # what is left open is counted after a collection

WIDTHS = (2, 4, 6, 10, 16)
CAPACITY, PREFILL = 128, 16
TOKENS = [int(token) for token in np.random.default_rng(5).integers(0, tiny.VOCAB_SIZE, CAPACITY)]


@dataclass
class Machine:
    """A simulated GPU with TensorRT."""

    driver: SimulatedDriver
    trt: SimulatedTensorrt

    @property
    def num_open(self) -> int:
        gc.collect()
        assert self.trt.num_strays == 0, "an object went while another device may have been current"
        return self.driver.num_open + self.trt.num_objects


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """The machine that `specrt.load` finds itself on."""
    driver = SimulatedDriver(num_devices=2)
    machine = Machine(driver, SimulatedTensorrt(driver))
    monkeypatch.setattr(engine_trt, "open_gpu", lambda index, extra: Gpu(driver, index))
    monkeypatch.setattr(engine_trt, "import_tensorrt", lambda plan: machine.trt)
    return machine


@pytest.fixture(scope="module")
def artifact(tensorrt_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny artifact as simulated plans, target and draft."""
    return plan_artifact(tensorrt_artifact, tmp_path_factory.mktemp("plan") / "tiny")


@pytest.fixture(scope="module")
def spec(artifact: Path) -> EngineSpec:
    return read_manifest(artifact).target


@pytest.fixture
def engine(artifact: Path, spec: EngineSpec, machine: Machine) -> Iterator[TrtEngine]:
    engine = open_engine(artifact, spec, threads=None)
    assert isinstance(engine, TrtEngine)
    yield engine
    engine.close()
    assert machine.num_open == 0


@pytest.fixture(scope="module")
def on_cpu(tensorrt_artifact: Path) -> Iterator[OrtEngine]:
    """The engine of the graph that the plan stands for."""
    engine = OrtEngine(tensorrt_artifact, read_manifest(tensorrt_artifact).target, threads=1)
    yield engine
    engine.close()


def kv(engine: TrtEngine, machine: Machine) -> list[Any]:
    """Return copies of the KV buffers [H, S, D]."""
    shape, addresses = (2, 144, 16), engine._buffers.kv
    views = [
        machine.driver.device_bytes(addresses[f"past_{part}.{i}"], 4 * 4608)
        for part in ("key", "value")
        for i in (0, 1)
    ]
    return [view.view(np.float32).reshape(shape).copy() for view in views if view is not None]


def run_all_shapes(engine: Engine) -> list[bytes]:
    """Return the bytes of all logits of a session that uses every call shape, with rollbacks."""
    engine.rollback(0)
    engine.prefill(TOKENS[:37])
    rows = []
    for width in (*WIDTHS, 1, 3, 5):
        start = engine.kv_length
        engine.verify(TOKENS[start + 1 : start + 1 + width])
        engine.rollback(start)
        rows.append(engine.verify(TOKENS[start : start + width]).tobytes())
    rows.append(engine.decode(TOKENS[engine.kv_length]).tobytes())
    return rows


# What it computes


def test_every_call_shape_gives_the_bits_of_the_graph(engine: TrtEngine, on_cpu: OrtEngine) -> None:
    assert run_all_shapes(engine) == run_all_shapes(on_cpu)
    assert all(engine._engine.num_executed), "each optimization profile was used"


@pytest.mark.parametrize("drafter", ["none", "ngram", "model"])
def test_a_whole_generation_gives_the_tokens_of_the_cpu(
    artifact: Path, tensorrt_artifact: Path, machine: Machine, tmp_path: Path, drafter: str
) -> None:
    results = []
    for folder in (tensorrt_artifact, artifact):
        with specrt.load(folder, cache_dir=tmp_path) as model:
            for temperature in (0.0, 1.0):
                how: dict[str, Any] = {
                    "max_tokens": 50,
                    "ignore_eos": True,
                    "seed": 3,
                    "temperature": temperature,
                    "k": 5,
                }
                result = model.generate(TOKENS[:23], drafter=drafter, logprobs=3, **how)
                results.append((result.token_ids, result.logprobs, result.stats.num_accepted))
    assert results[:2] == results[2:]
    assert len(results[0][0]) == 50
    assert machine.num_open == 0


def test_speculation_is_lossless_on_it(artifact: Path, machine: Machine, tmp_path: Path) -> None:
    tiny.assert_lossless(artifact, tmp_path)


def test_check_replays_the_reference_on_it(artifact: Path, machine: Machine) -> None:
    report = check_artifact(artifact)
    assert report.problems == []
    assert [engine.groups for engine in report.engines] == [(WIDTHS,), (WIDTHS,)], "prefill has no logits to compare"
    assert machine.num_open == 0


def test_generation_to_the_very_end(artifact: Path, tensorrt_artifact: Path, machine: Machine, tmp_path: Path) -> None:
    texts = []
    for folder in (tensorrt_artifact, artifact):
        with specrt.load(folder, cache_dir=tmp_path) as model:
            result = model.generate(TOKENS[:100], ignore_eos=True, max_tokens=1000, k=15)
            assert result.finish_reason == "capacity"
            texts.append(result.token_ids)
    assert texts[0] == texts[1]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("start", [0, 3, 40])
def test_a_call_writes_its_own_slots_and_nothing_else(
    engine: TrtEngine, machine: Machine, width: int, start: int
) -> None:
    engine.prefill(TOKENS[:start])
    before = kv(engine, machine)
    engine.verify(TOKENS[start : start + width])
    after = kv(engine, machine)
    changed = {int(slot) for a, b in zip(before, after, strict=True) for slot in np.flatnonzero((a != b).any((0, 2)))}
    assert changed == set(range(start, start + width))


def test_a_rollback_leaves_no_trace(engine: TrtEngine) -> None:
    engine.prefill(TOKENS[:20])
    clean = engine.verify(TOKENS[20:24]).tobytes()
    for rejected in (TOKENS[30:46], TOKENS[5:9], TOKENS[40:42]):
        engine.rollback(20)
        engine.verify(rejected)
    engine.rollback(20)
    assert engine.verify(TOKENS[20:24]).tobytes() == clean
    with pytest.raises(EngineError, match=r"expected to roll back to 0 \.\. 24 tokens, found 25"):
        engine.rollback(25)


def test_the_capacity_is_guarded_before_the_call(engine: TrtEngine, machine: Machine) -> None:
    engine.prefill(TOKENS[: CAPACITY - 3])
    before, executed = kv(engine, machine), list(engine._engine.num_executed)
    with pytest.raises(EngineError, match=f"at most {CAPACITY} tokens in the KV buffers, found {CAPACITY + 1}"):
        engine.verify(TOKENS[:4])
    assert engine._engine.num_executed == executed
    assert all(np.array_equal(a, b) for a, b in zip(before, kv(engine, machine), strict=True))
    assert engine.verify(TOKENS[-3:]).shape == (3, tiny.VOCAB_SIZE)


def test_padding_at_the_very_end_changes_nothing(engine: TrtEngine) -> None:
    found = set()
    for width in WIDTHS:
        engine.rollback(0)
        engine.prefill(TOKENS[:-1])
        found.add(engine.forward(TOKENS[-1:], CAPACITY - 1, width).tobytes())
    assert len(found) == 1


def test_a_plan_without_width_one_decodes_in_its_narrowest_call(
    tensorrt_artifact: Path, tmp_path: Path, machine: Machine
) -> None:
    folder = plan_artifact(tensorrt_artifact, tmp_path / "plan", with_decode=False)
    engine = open_engine(folder, read_manifest(folder).target, threads=None)
    engine.prefill(TOKENS[:9])
    row = engine.decode(TOKENS[9]).tobytes()
    engine.rollback(9)
    assert engine.verify(TOKENS[9:10]).tobytes() == row
    engine.close()


@pytest.mark.parametrize(("width", "found"), [(16, "(17, 17)"), (3, "(3, 3)")])
def test_a_shape_that_the_plan_does_not_have_is_refused(engine: TrtEngine, width: int, found: str) -> None:
    width = 17 if width == 16 else width
    with pytest.raises(
        EngineError, match=rf"expected a call of \(tokens, rows\) \[\(16, 0\), .*found {re.escape(found)}"
    ):
        engine.forward(TOKENS[:2], 0, width)


# What it costs


def test_nothing_is_allocated_or_bound_after_opening(engine: TrtEngine, machine: Machine) -> None:
    memory, objects = machine.driver.num_open, machine.trt.num_objects
    machine.driver.failing = {"cuMemAlloc": 0, "cuMemHostAlloc": 0}
    run_all_shapes(engine)
    assert (machine.driver.num_open, machine.trt.num_objects) == (memory, objects)
    assert objects == 2 + len(WIDTHS) + 2, "a runtime, an engine, and a context per call shape"


def test_a_step_is_one_copy_up_and_the_wanted_rows_down(
    engine: TrtEngine, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: list[tuple[str, int]] = []
    for name in ("upload", "download"):
        original = getattr(Gpu, name)

        def count(gpu: Gpu, a: Any, b: Any, name: str = name, original: Any = original) -> None:
            copies.append((name, (b if name == "upload" else a).nbytes))
            original(gpu, a, b)

        monkeypatch.setattr(Gpu, name, count)
    engine.prefill(TOKENS[:16])
    engine.verify(TOKENS[16:19])
    rows = [size for name, size in copies if name == "download"]
    assert [name for name, _ in copies] == ["upload", "upload", "download"]
    assert rows == [3 * tiny.VOCAB_SIZE * 4]
    assert all(size < 4096 for name, size in copies if name == "upload")


def test_logits_are_a_view_of_one_buffer(engine: TrtEngine) -> None:
    assert np.shares_memory(engine.verify([5, 6, 7]), engine.verify([5]))


# Opening and closing


def test_the_device_and_its_versions_are_part_of_measured_facts(engine: TrtEngine) -> None:
    assert engine.platform == (f"tensorrt-rtx {VERSION}, Simulated GPU, compute capability 8.9, driver for CUDA 13.2")


def test_nothing_works_after_close(engine: TrtEngine) -> None:
    engine.close()
    engine.close()
    for call in (lambda: engine.verify([1]), lambda: engine.decode(1), lambda: engine.prefill([1])):
        with pytest.raises(EngineError, match="the engine is closed: load the artifact again"):
            call()


def test_any_thread_may_call_and_close(artifact: Path, machine: Machine, tmp_path: Path) -> None:
    model = specrt.load(artifact, cache_dir=tmp_path)
    here = model.generate(TOKENS[:9], max_tokens=8).token_ids
    found: list[Any] = []

    def elsewhere() -> None:
        found.append(model.generate(TOKENS[:9], max_tokens=8).token_ids)
        model.close()

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found == [here]
    assert machine.num_open == 0


def test_a_device_that_was_current_stays_it(engine: TrtEngine, machine: Machine) -> None:
    machine.driver.cuCtxPushCurrent(77)
    engine.verify(TOKENS[:2])
    with pytest.raises(EngineError, match="to verify"):
        engine.verify(TOKENS[:17])
    assert machine.driver.cuCtxPopCurrent()[1] == 77
    assert not machine.driver.is_current


FAILURES = {
    "cuDevicePrimaryCtxRetain": range(1), "cuStreamCreate": range(1), "cuMemAlloc": range(0, 13, 6),
    "cuMemHostAlloc": (0, 3, 7), "cuMemsetD8Async": (0, 12), "cuStreamSynchronize": (0, 7),
}  # fmt: skip


@pytest.mark.parametrize(("name", "count"), [(name, count) for name, counts in FAILURES.items() for count in counts])
def test_a_failure_halfway_through_opening_frees_everything(
    artifact: Path, spec: EngineSpec, machine: Machine, name: str, count: int
) -> None:
    machine.driver.failing = {name: count}
    with pytest.raises(EngineError, match=rf"^cuda:0: {name}.* gives CUDA_ERROR_OUT_OF_MEMORY: free memory on it, or"):
        open_engine(artifact, spec, threads=None)
    assert machine.num_open == 0
    assert not machine.driver.is_current


@pytest.mark.parametrize("count", [0, 3, 6])
def test_a_context_that_is_not_given_frees_everything(
    artifact: Path, spec: EngineSpec, machine: Machine, count: int
) -> None:
    machine.trt.refuses_contexts_after = count
    with pytest.raises(EngineError, match=r"target\.plan: no execution context for .* tokens: no memory for a context"):
        open_engine(artifact, spec, threads=None)
    assert machine.num_open == 0


@pytest.mark.parametrize("name", ["cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync", "cuStreamSynchronize"])
def test_a_failure_in_a_call_is_one_line_and_leaves_the_length(engine: TrtEngine, machine: Machine, name: str) -> None:
    engine.prefill(TOKENS[:20])
    clean = engine.verify(TOKENS[20:23]).tobytes()
    engine.rollback(20)
    machine.driver.failing = {name: 0}
    with pytest.raises(EngineError, match=rf"^cuda:0: {name} gives CUDA_ERROR_OUT_OF_MEMORY"):
        engine.verify(TOKENS[20:23])
    assert engine.kv_length == 20
    assert engine.verify(TOKENS[20:23]).tobytes() == clean


@pytest.mark.parametrize("device", ["cuda:1", None])
def test_the_device_is_the_one_that_was_asked_for(
    artifact: Path, machine: Machine, tmp_path: Path, device: str | None
) -> None:
    with specrt.load(artifact, device=device, cache_dir=tmp_path) as model:
        assert model.device == (device or "cuda:0")
        assert isinstance(model.target, TrtEngine)
        assert model.target._gpu.index == (1 if device else 0)


def test_measured_facts_of_another_device_are_not_taken(
    artifact: Path, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    specrt.load(artifact, cache_dir=tmp_path).close()
    specrt.load(artifact, cache_dir=tmp_path).close()
    assert len(list(tmp_path.iterdir())) == 1
    monkeypatch.setattr(machine.driver, "cuDeviceGetName", lambda *_: (0, b"Another GPU\0"))
    specrt.load(artifact, cache_dir=tmp_path).close()
    assert len(list(tmp_path.iterdir())) == 2


# What is refused


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("cpu", r"^device: expected cuda:N, found cpu: target\.plan is a TensorRT plan; on the CPU, load the artifact"),
        ("cuda", r"^device: expected cpu or cuda:N \(cuda:0 is the first GPU\), found 'cuda'"),
        ("cuda:-1", "found 'cuda:-1'"),
        ("gpu", "found 'gpu'"),
        ("cuda:01", "found 'cuda:01'"),
        ("cuda:2", "^expected one of the 2 GPUs here, numbered from cuda:0, found cuda:2"),
    ],
)
def test_a_device_that_there_is_not_is_refused(
    artifact: Path, machine: Machine, tmp_path: Path, device: str, message: str
) -> None:
    with pytest.raises(EngineError, match=message):
        specrt.load(artifact, device=device, cache_dir=tmp_path)
    assert machine.num_open == 0


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        (
            {"version": "1.6.0.1"},
            r"target\.plan: built by TensorRT-RTX 1\.6\.0\.1, found TensorRT-RTX 1\.7\.1\.116 here, which opens its "
            r"own plans only: build it again with 'specrt plan' .*, or install tensorrt-rtx==1\.6\.0\.1$",
        ),
        ({"builder": "tensorrt", "version": "11.4"}, r"built by TensorRT 11\.4, .* or install tensorrt==11\.4$"),
        (
            {"compute_capabilities": ("8.0", "9.0")},
            r"target\.plan: built for compute capability 8\.0, 9\.0, found 8\.9 \(Simulated GPU\): build it again with",
        ),
    ],
)
def test_a_plan_for_another_version_or_device_says_which(
    tensorrt_artifact: Path, tmp_path: Path, machine: Machine, facts: dict[str, Any], message: str
) -> None:
    folder = plan_artifact(tensorrt_artifact, tmp_path / "plan", **facts)
    with pytest.raises(EngineError, match=message) as caught:
        specrt.load(folder, cache_dir=tmp_path)
    assert "\n" not in str(caught.value)
    assert machine.num_open == 0


def test_a_plan_for_the_default_devices_is_left_to_tensorrt(
    tensorrt_artifact: Path, tmp_path: Path, machine: Machine
) -> None:
    folder = plan_artifact(tensorrt_artifact, tmp_path / "plan", compute_capabilities=())
    specrt.load(folder, cache_dir=tmp_path).close()


def test_a_plan_that_tensorrt_cannot_read_is_one_line(
    artifact: Path, spec: EngineSpec, machine: Machine, tmp_path: Path
) -> None:
    (tmp_path / "target.plan").write_bytes(b"not a plan")
    with pytest.raises(
        EngineError,
        match=r"target\.plan: TensorRT-RTX 1.* cannot open it \(Serialization assertion .*\): build it again with",
    ):
        open_engine(tmp_path, spec, threads=None)
    assert machine.num_open == 0


MISMATCHES: dict[str, tuple[dict[str, Any], str]] = {
    "no shared memory": ({"aliases": {}}, r"present_key\.0: expected memory shared with past_key\.0, found None"),
    "crossed memory": (
        {"aliases": {"present_key.0": "past_key.1", "present_key.1": "past_key.0"}},
        r"present_key\.0: expected memory shared with past_key\.0, found past_key\.1",
    ),
    "a shape less": ({"profiles": [[16, 0], [2, 2]]}, "expected 7 optimization profiles, found 2"),
    "other shapes": (
        {"profiles": [[16, 0], [2, 2], [6, 6], [4, 4], [10, 10], [16, 16], [1, 1]]},
        r"optimization profile 2: expected 4 tokens, found \(1, 6\) to \(1, 6\)",
    ),
    "an input on the host": ({"locations": {"write_indices": 1}}, "write_indices: expected in device memory, found on"),
    "another name": ({"renamed": {"logits": "scores"}}, r"differs in \['logits', 'scores'\]"),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_a_plan_that_does_not_fit_its_manifest_is_refused(
    artifact: Path, spec: EngineSpec, machine: Machine, name: str
) -> None:
    machine.trt.edit, message = MISMATCHES[name]
    with pytest.raises(EngineError, match=message) as caught:
        open_engine(artifact, spec, threads=None)
    assert "\n" not in str(caught.value)
    assert machine.num_open == 0


def test_a_tensor_of_another_type_or_size_is_refused(artifact: Path, spec: EngineSpec, machine: Machine) -> None:
    other = (replace(spec.inputs[0], dtype="int32"), *spec.inputs[1:])
    with pytest.raises(EngineError, match=r"input_ids: expected input int32 \[1, 'width'\], found int64 \[1, -1\]"):
        open_engine(artifact, replace(spec, inputs=other), threads=None)
    wide = (replace(spec.outputs[0], shape=(1, "rows", 400)), *spec.outputs[1:])
    with pytest.raises(
        EngineError, match=r"logits: expected output float32 \[1, 'rows', 400\], found float32 \[1, -1, 384\]"
    ):
        open_engine(artifact, replace(spec, outputs=wide), threads=None)
    assert machine.num_open == 0


def test_a_runtime_that_does_not_start_is_one_line(
    artifact: Path, spec: EngineSpec, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(_: Any) -> None:
        raise TypeError("pybind11::init(): factory function returned nullptr")

    monkeypatch.setattr(machine.trt, "Runtime", nothing)
    with pytest.raises(EngineError, match=r"^TensorRT-RTX does not start \(pybind11.*nullptr\): check the driver with"):
        open_engine(artifact, spec, threads=None)
    assert machine.num_open == 0


@pytest.mark.parametrize(("builder", "module"), [("tensorrt", "tensorrt"), ("tensorrt-rtx", "tensorrt_rtx")])
def test_the_builder_that_is_missing_is_named(
    spec: EngineSpec, monkeypatch: pytest.MonkeyPatch, builder: Any, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=rf"^{module} not installed: run  pip install 'specrt\[{builder}\]'"):
        engine_trt.import_tensorrt(plan_of(spec, builder=builder))


def test_a_builder_that_does_not_load_is_one_line(
    spec: EngineSpec, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "tensorrt.py").write_text("raise ImportError('libnvonnxparser.so.11: cannot open\\nmore')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "tensorrt", raising=False)
    with pytest.raises(
        EngineError, match=r"^TensorRT is installed but does not load \(libnvonn.*open\): install it again"
    ):
        engine_trt.import_tensorrt(plan_of(spec, builder="tensorrt"))


def test_costs_of_calls_are_measured_on_the_cpu_only(artifact: Path, machine: Machine, tmp_path: Path) -> None:
    from specrt.engine_bench import run_engine_bench

    with (
        specrt.load(artifact, cache_dir=tmp_path) as model,
        pytest.raises(RequestError, match="expected an artifact loaded on the CPU, found cuda:0: floors come from"),
    ):
        run_engine_bench(model, threads=None, context=None, repeats=1, on_round=lambda: None)


# Bugs that were planted in the engine: each is seen

Bug = Callable[[pytest.MonkeyPatch], None]


def patched(owner: Any, name: str, make: Callable[[Any], Any]) -> Bug:
    return lambda monkeypatch: monkeypatch.setattr(owner, name, make(getattr(owner, name)))


def after(edit: Callable[..., None]) -> Callable[[Any], Any]:
    """Return a method that does what the original does, then `edit` its object."""

    def make(original: Any) -> Any:
        def method(self: Any, *arguments: Any, **named: Any) -> Any:
            result = original(self, *arguments, **named)
            edit(self, result)
            return result

        return method

    return make


def separate_output(buffers: DeviceBuffers, _: Any) -> None:
    buffers.kv["present_value.1"] = buffers._gpu.allocate(4 * 4608)


def one_buffer_for_two(buffers: DeviceBuffers, _: Any) -> None:
    buffers.kv["past_value.1"] = buffers.kv["present_value.1"] = buffers.kv["past_key.1"]


def small_logits(buffers: DeviceBuffers, _: Any) -> None:
    buffers._logits.addresses["logits"] = buffers._gpu.allocate(100)


def odd_address(_: DeviceBuffers, call: DeviceCall) -> None:
    call.addresses["position_ids"] += 8  # type: ignore[index]


def freed_early(buffers: DeviceBuffers, _: Any) -> None:
    buffers._gpu._driver.cuMemFree(buffers.kv["past_key.0"])


@contextlib.contextmanager
def not_current(gpu: Gpu) -> Iterator[Gpu]:
    yield gpu


REFUSED: dict[str, tuple[Bug, str]] = {
    "an output that is not its input": (
        patched(DeviceBuffers, "__init__", after(separate_output)),
        r"present_value\.1 needs the address of past_value\.1",
    ),
    "one buffer for key and value": (patched(DeviceBuffers, "__init__", after(one_buffer_for_two)), "overlap"),
    "too little memory for logits": (
        patched(DeviceBuffers, "__init__", after(small_logits)), "logits: 3072 bytes are not allocated"
    ),
    "an address that is not aligned": (
        patched(DeviceBuffers, "call", after(odd_address)), "position_ids: address 0x[0-9a-f]+ is not aligned"
    ),
    "the default stream": (
        patched(Gpu, "__init__", after(lambda gpu, _: setattr(gpu, "stream", 0))), "CUDA_ERROR_INVALID_HANDLE"
    ),
    "no scratch memory": (
        patched(TrtEngine, "_bind", lambda original: without(original, "set_device_memory")),
        "scratch memory: 4.* 0 set",
    ),
    "no addresses": (
        patched(TrtEngine, "_bind", lambda original: without(original, "set_tensor_address")), "not set: "
    ),
    "no shapes": (
        patched(TrtEngine, "_bind", lambda original: without(original, "set_input_shape")),
        "a call of 16 tokens is refused",
    ),
    "nothing copied up": (
        patched(DeviceCall, "upload", lambda _: lambda call: None), "was not copied since the last call"
    ),
    "the device is not current": (patched(Gpu, "current", lambda _: not_current), "CUDA_ERROR_INVALID_CONTEXT"),
}  # fmt: skip


def without(original: Any, name: str) -> Any:
    """Return `_bind` of an engine whose contexts do nothing when `name` is called."""

    def bind(self: Any, width: int, num_rows: int) -> Any:
        make = self._engine.create_execution_context

        def create(strategy: int) -> Any:
            context = make(strategy)
            setattr(context, name, lambda *_: True)
            return context

        self._engine.create_execution_context = create
        try:
            return original(self, width, num_rows)
        finally:
            self._engine.create_execution_context = make

    return bind


@pytest.mark.parametrize("name", REFUSED)
def test_a_broken_rule_is_refused(
    artifact: Path, spec: EngineSpec, machine: Machine, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    bug, message = REFUSED[name]
    bug(monkeypatch)
    with pytest.raises(EngineError, match=message):
        run_all_shapes(open_engine(artifact, spec, threads=None))


def unsynchronized(original: Any) -> Any:
    """Return `synchronize` that works while an engine is opened, and later waits for nothing."""

    def synchronize(gpu: Gpu) -> None:
        if sum(len(work) for work in gpu._driver.streams.values()) != 3:  # copy, call, copy
            original(gpu)

    return synchronize


def dirty(original: Any) -> Any:
    def allocate(gpu: Gpu, num_bytes: int) -> int:
        gpu._driver.cuMemsetD8Async, kept = (lambda *_: (0,)), gpu._driver.cuMemsetD8Async
        try:
            return int(original(gpu, num_bytes))
        finally:
            gpu._driver.cuMemsetD8Async = kept

    return allocate


SEEN: dict[str, Bug] = {
    "logits read before they are there": patched(Gpu, "synchronize", unsynchronized),
    "buffers that do not start as zeros": patched(Gpu, "allocate", dirty),
    "rows that are left behind": patched(
        DeviceCall, "download", lambda original: lambda call, rows: original(call, rows - 1)
    ),
}


@pytest.mark.parametrize("name", SEEN)
def test_a_race_or_a_remnant_changes_what_is_computed(
    artifact: Path, spec: EngineSpec, machine: Machine, on_cpu: OrtEngine, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    SEEN[name](monkeypatch)
    assert run_all_shapes(open_engine(artifact, spec, threads=None)) != run_all_shapes(on_cpu)
