"""A machine with a simulated GPU, for tests that compare it with the CPU."""

from pathlib import Path

import onnxruntime
import pytest

from simulated_cuda import SimulatedDriver
from simulated_ort import SimulatedCudaSession
from simulated_trt import SimulatedTensorrt
from specrt import engine_ort_cuda, engine_trt
from specrt.cuda import Gpu
from specrt.engine import open_engine
from specrt.engine_bound import BoundEngine
from specrt_profiles.manifest import read_manifest


def add_gpu(monkeypatch: pytest.MonkeyPatch) -> SimulatedDriver:
    """Give the machine a GPU with TensorRT; ONNX Runtime still computes on the CPU."""
    driver = SimulatedDriver()
    trt = SimulatedTensorrt(driver)
    monkeypatch.setattr(engine_trt, "import_tensorrt", lambda plan: trt)
    for module in (engine_trt, engine_ort_cuda):
        monkeypatch.setattr(module, "open_gpu", lambda index, extra: Gpu(driver, index))
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider"])
    monkeypatch.setattr(SimulatedCudaSession, "driver", driver, raising=False)
    return driver


def add_cuda_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every session that ONNX Runtime opens from now on compute on the GPU."""
    monkeypatch.setattr(onnxruntime, "InferenceSession", SimulatedCudaSession)


def open_on_gpu(folder: Path) -> BoundEngine:
    """Open an artifact's target on the GPU."""
    engine = open_engine(folder, read_manifest(folder).target, threads=None, device="cuda:0")
    assert isinstance(engine, BoundEngine)
    return engine
