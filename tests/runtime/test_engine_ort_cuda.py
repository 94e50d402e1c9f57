"""The ONNX Runtime engine on GPUs: refused where there is none; its bookkeeping on a simulated one.

Nothing here ran on a GPU. See `simulated_ort` for what is enforced.
"""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

import specrt
import tiny
from copies import copy_artifact
from simulated_cuda import SimulatedDriver
from simulated_ort import SimulatedCudaSession
from specrt import engine_ort_cuda
from specrt.cuda import Gpu, probe_driver
from specrt.device_buffers import DeviceCall
from specrt.engine import Engine, open_engine
from specrt.engine_ort import OrtEngine
from specrt.engine_ort_cuda import OrtCudaEngine
from specrt.errors import EngineError
from specrt_profiles.manifest import read_manifest

pytestmark = pytest.mark.usefixtures("frozen_heap")  # what is left open is counted after a collection

TOKENS = [int(token) for token in np.random.default_rng(5).integers(0, tiny.VOCAB_SIZE, 128)]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> SimulatedDriver:
    """A machine with two simulated GPUs and an ONNX Runtime that uses them."""
    driver = SimulatedDriver(num_devices=2)
    monkeypatch.setattr(engine_ort_cuda, "open_gpu", lambda index, extra: Gpu(driver, index))
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider"])
    monkeypatch.setattr(onnxruntime, "InferenceSession", SimulatedCudaSession)
    monkeypatch.setattr(SimulatedCudaSession, "driver", driver, raising=False)
    return driver


@pytest.fixture(scope="module")
def artifacts(
    tiny_source: Path, half_artifact: Path, tensorrt_artifact: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    profile = tiny.profile(precision="fp16", kv_precision="int8", draft_precision="fp16")
    out = tmp_path_factory.mktemp("integers") / "tiny"
    integers = tiny.export_tiny(tiny_source, out, draft=str(tiny_source), profile=profile)
    return {"ort": half_artifact, "ort, int8 buffers": integers, "tensorrt": tensorrt_artifact}


@pytest.fixture(params=["ort", "ort, int8 buffers", "tensorrt"])
def folder(request: pytest.FixtureRequest, artifacts: dict[str, Path]) -> Path:
    return artifacts[request.param]


@pytest.fixture
def on_cpu(folder: Path) -> Iterator[OrtEngine]:
    """Asked for before `driver`, which replaces ONNX Runtime's sessions."""
    engine = OrtEngine(folder, read_manifest(folder).target, threads=1)
    yield engine
    engine.close()


def num_open(driver: SimulatedDriver) -> int:
    gc.collect()
    return driver.num_open + SimulatedCudaSession.num_sessions


def run_all_shapes(engine: Engine) -> list[bytes]:
    """Return the bytes of all logits of a session that uses many call shapes, with rollbacks."""
    engine.prefill(TOKENS[:37])
    rows = []
    for width in (2, 4, 6, 10, 16, 1, 3, 5):
        start = engine.kv_length
        engine.verify(TOKENS[start + 1 : start + 1 + width])
        engine.rollback(start)
        rows.append(engine.verify(TOKENS[start : start + width]).tobytes())
    rows.append(engine.decode(TOKENS[engine.kv_length]).tobytes())
    rows.append(engine.forward(TOKENS[:30], 0, 32).tobytes())
    return rows


def test_every_call_shape_gives_the_bits_of_the_cpu(folder: Path, on_cpu: OrtEngine, driver: SimulatedDriver) -> None:
    engine = open_engine(folder, read_manifest(folder).target, threads=None, device="cuda:1")
    assert isinstance(engine, OrtCudaEngine)
    assert run_all_shapes(engine) == run_all_shapes(on_cpu)
    captured = engine._session.captured
    assert len(captured) == (8 if engine._captures else 0), "one CUDA graph per call shape"
    assert engine._captures == ("write_indices" in engine._tensors)
    engine.close()
    engine.close()
    del captured
    assert num_open(driver) == 0
    with pytest.raises(EngineError, match="the engine is closed"):
        engine.verify([1])


def test_a_whole_generation_gives_the_tokens_of_the_cpu(
    folder: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    found = []
    for device in ("cpu", "cuda:0"):
        if device != "cpu":
            driver = request.getfixturevalue("driver")
        with specrt.load(folder, device=device, cache_dir=tmp_path) as model:
            assert model.device == device
            how: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True, "logprobs": 2}
            results = [model.generate(TOKENS[:19], drafter=name, **how) for name in ("none", "ngram", "model")]
            found.append([(result.token_ids, result.logprobs) for result in results])
    assert found[0] == found[1]
    assert len(list(tmp_path.iterdir())) == 2, "facts of CPU and GPU are kept apart"
    assert num_open(driver) == 0


def test_the_platform_names_provider_and_device(tensorrt_artifact: Path, driver: SimulatedDriver) -> None:
    engine = open_engine(tensorrt_artifact, read_manifest(tensorrt_artifact).target, threads=None, device="cuda:0")
    assert engine.platform == (
        f"onnxruntime {onnxruntime.__version__} CUDA, Simulated GPU, compute capability 8.9, driver for CUDA 13.2"
    )
    engine.close()


@pytest.mark.parametrize(
    ("name", "count"), [("cuMemAlloc", 0), ("cuMemAlloc", 3), ("cuMemHostAlloc", 0), ("cuStreamSynchronize", 0)]
)
def test_a_failure_halfway_through_opening_frees_everything(
    tensorrt_artifact: Path, driver: SimulatedDriver, name: str, count: int
) -> None:
    driver.failing = {name: count}
    with pytest.raises(EngineError, match=f"^cuda:0: {name}"):
        open_engine(tensorrt_artifact, read_manifest(tensorrt_artifact).target, threads=None, device="cuda:0")
    assert num_open(driver) == 0


def test_a_call_that_fails_is_one_line_and_leaves_the_length(tensorrt_artifact: Path, driver: SimulatedDriver) -> None:
    engine = open_engine(tensorrt_artifact, read_manifest(tensorrt_artifact).target, threads=None, device="cuda:0")
    engine.prefill(TOKENS[:5])

    def fail(*_: Any) -> None:
        raise onnxruntime.capi.onnxruntime_pybind11_state.Fail("the first line\nthe second")

    engine._session.run_with_iobinding = fail  # type: ignore[attr-defined]
    with pytest.raises(EngineError, match=r"target\.onnx: a call failed on cuda:0: the first line$"):
        engine.verify([1, 2])
    assert engine.kv_length == 5
    engine.close()


@pytest.mark.parametrize("bug", ["nothing copied up", "one number for all shapes"])
def test_a_planted_bug_is_seen(
    tensorrt_artifact: Path, driver: SimulatedDriver, monkeypatch: pytest.MonkeyPatch, bug: str
) -> None:
    if bug == "nothing copied up":
        monkeypatch.setattr(DeviceCall, "upload", lambda call: None)
    else:
        monkeypatch.setattr(engine_ort_cuda, "len", lambda _: 0, raising=False)
    engine = open_engine(tensorrt_artifact, read_manifest(tensorrt_artifact).target, threads=None, device="cuda:0")
    with pytest.raises((EngineError, AssertionError), match=r"was not copied since|captured under this number"):
        run_all_shapes(engine)


# Where there is no GPU, or no CUDA


def test_without_a_driver_it_is_refused_first(tensorrt_artifact: Path, tmp_path: Path) -> None:
    try:
        probe_driver()
    except EngineError:
        with pytest.raises(
            EngineError, match=r"^no CUDA driver here \(libcuda\.so\.1: .*\): run it on a machine with an"
        ):
            specrt.load(tensorrt_artifact, device="cuda:0", cache_dir=tmp_path)
    else:
        pytest.skip("there is a driver")


@pytest.mark.parametrize("precision", ["fp32", "int8", "int4"])
def test_what_computes_in_fp32_is_refused_before_anything_is_opened(
    tiny_artifact: Path, tmp_path: Path, precision: str
) -> None:
    """Its GroupQueryAttention has no CUDA kernel in fp32; int8 and int4 are weights of graphs that compute in that."""
    folder = copy_artifact(
        tiny_artifact, tmp_path / "copy", lambda data: data["engines"]["target"].update(precision=precision)
    )
    with pytest.raises(
        EngineError,
        match=rf"target\.onnx: expected fp16 on cuda:0, found {precision}, which .*: export with --precision fp16",
    ) as found:
        specrt.load(folder, device="cuda:0", cache_dir=tmp_path)
    assert "\n" not in str(found.value)


def test_trees_with_buffers_of_integers_are_refused_before_anything_is_opened(
    tiny_source: Path, tmp_path: Path
) -> None:
    """ONNX Runtime 1.31.1 has "attention_bias with quantized KV cache is not implemented" for the first call."""
    profile = tiny.profile(precision="fp16", kv_precision="int8", trees=True)
    folder = tiny.export_tiny(tiny_source, tmp_path / "out", profile=profile)
    with pytest.raises(
        EngineError,
        match=r"target\.onnx: expected trees or KV buffers in int8 on cuda:0, found both: .*: export without --trees",
    ) as found:
        specrt.load(folder, device="cuda:0", cache_dir=tmp_path)
    assert "\n" not in str(found.value)


def test_a_build_without_cuda_is_said(tensorrt_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = SimulatedDriver()
    monkeypatch.setattr(engine_ort_cuda, "open_gpu", lambda index, extra: Gpu(driver, index))
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    with pytest.raises(EngineError, match=r"^ONNX Runtime [\d.]+ is installed without CUDA: run  pip uninstall"):
        open_engine(tensorrt_artifact, read_manifest(tensorrt_artifact).target, threads=None, device="cuda:0")
    assert num_open(driver) == 0


@pytest.mark.filterwarnings("ignore:Specified provider:UserWarning")
@pytest.mark.parametrize("is_strict", [True, False])
def test_a_provider_that_falls_back_to_the_cpu_is_refused(
    tensorrt_artifact: Path, monkeypatch: pytest.MonkeyPatch, is_strict: bool
) -> None:
    """With real sessions: by ONNX Runtime's own check of nodes on the CPU, and by the provider that it ends up with."""
    driver = SimulatedDriver()
    monkeypatch.setattr(engine_ort_cuda, "open_gpu", lambda index, extra: Gpu(driver, index))
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider"])
    if not is_strict:
        monkeypatch.setattr(onnxruntime.SessionOptions, "add_session_config_entry", lambda *_: None)
    spec = read_manifest(tensorrt_artifact).target
    reason = "assigned to the default CPU EP" if is_strict else r"it fell back to CPUExecutionProvider\)"
    with pytest.raises(EngineError, match=rf"cannot run all of it on cuda:0 \(.*{reason}.*check that CUDA 13"):
        OrtCudaEngine(tensorrt_artifact, spec, gpu=Gpu(driver, 0))
