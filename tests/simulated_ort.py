"""ONNX Runtime's CUDA provider over a simulated driver: sessions whose calls are work on a stream.

Computes with the CPU provider when the stream is synchronized. Fixed addresses are enforced for what is captured, and
nothing may be bound anywhere but in allocated device memory. Obeying it proves nothing about the real provider.
"""

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime as ort
from onnx import TensorProto

from simulated_cuda import BFLOAT16, SimulatedDriver, load, store

_SESSION = ort.InferenceSession
Bound = tuple[np.dtype[Any], tuple[int, ...], int]


class SimulatedCudaSession:
    """What `onnxruntime.InferenceSession` gives where CUDA is there."""

    driver: SimulatedDriver  # set by the test
    num_sessions = 0
    captured: dict[str, "SimulatedBinding"]
    bfloat16: frozenset[str] = frozenset()  # tensors of that type, whose values the CPU's graph has in fp32

    def __init__(self, path: str, options: ort.SessionOptions, providers: Sequence[Any]) -> None:
        ((name, given),) = providers
        assert name == "CUDAExecutionProvider"
        assert options.get_session_config_entry("session.disable_cpu_ep_fallback") == "1"
        assert self.driver.is_current, "the session takes the device that is current"
        self.stream, self.captures = int(given["user_compute_stream"]), given["enable_cuda_graph"] == "1"
        self.device = int(given["device_id"])
        assert self.stream in self.driver.streams
        quiet = ort.SessionOptions()
        quiet.log_severity_level, quiet.intra_op_num_threads = 3, 1
        self.session = _SESSION(path, quiet, providers=["CPUExecutionProvider"])
        self.captured = {}
        type(self).num_sessions += 1

    def __del__(self) -> None:
        if hasattr(self, "captured"):
            type(self).num_sessions -= 1

    def get_providers(self) -> list[str]:
        return ["CUDAExecutionProvider", "CPUExecutionProvider"]

    def get_inputs(self) -> Any:
        return [self._described(tensor) for tensor in self.session.get_inputs()]

    def get_outputs(self) -> Any:
        return [self._described(tensor) for tensor in self.session.get_outputs()]

    def _described(self, tensor: Any) -> Any:
        kind = "tensor(bfloat16)" if tensor.name in self.bfloat16 else tensor.type
        return SimpleNamespace(name=tensor.name, type=kind, shape=tensor.shape)

    def io_binding(self) -> "SimulatedBinding":
        return SimulatedBinding(self)

    def run_with_iobinding(self, binding: "SimulatedBinding", options: ort.RunOptions) -> None:
        assert self.driver.is_current
        assert options.get_run_config_entry("disable_synchronize_execution_providers") == "1"
        if self.captures:
            assert not binding.on_host, "what is read on the host is read once, at the capture"
            graph = options.get_run_config_entry("gpu_graph_id")
            assert self.captured.setdefault(graph, binding) is binding, "another shape was captured under this number"
        binding.check_uploads()
        self.driver.streams[self.stream].append(lambda: binding.execute(self.session))


class SimulatedBinding:
    """Addresses by tensor name."""

    def __init__(self, owner: SimulatedCudaSession) -> None:
        self._owner, self._driver = owner, owner.driver
        self._inputs: dict[str, Bound] = {}
        self._outputs: dict[str, Bound] = {}
        self.on_host: dict[str, Any] = {}

    def bind_input(self, name: str, kind: str, index: int, dtype: Any, shape: list[int], address: int) -> None:
        assert (kind, index) == ("cuda", self._owner.device)
        self._inputs[name] = (_dtype(dtype), tuple(shape), address)

    def bind_output(self, name: str, kind: str, index: int, dtype: Any, shape: list[int], address: int) -> None:
        assert (kind, index) == ("cuda", self._owner.device)
        self._outputs[name] = (_dtype(dtype), tuple(shape), address)

    def bind_ortvalue_input(self, name: str, value: ort.OrtValue) -> None:
        self.on_host[name] = value

    def check_uploads(self) -> None:
        for name, (dtype, shape, address) in self._inputs.items():
            end = address + math.prod(shape) * dtype.itemsize
            copied = any(first <= address and end <= last for first, last in self._driver.uploads)
            assert copied or name.startswith("past_"), f"{name} was not copied since the last call"
        self._driver.uploads.clear()

    def execute(self, session: ort.InferenceSession) -> None:
        feed = {name: load(self._view(bound)) for name, bound in self._inputs.items()}
        feed |= {name: value.numpy().copy() for name, value in self.on_host.items()}
        bound = list(self._outputs)  # the session fetches no others
        for name, value in zip(bound, session.run(bound, feed), strict=True):
            store(self._view(self._outputs[name]), value)

    def _view(self, bound: Bound) -> Any:
        dtype, shape, address = bound
        found = self._driver.device_bytes(address, math.prod(shape) * dtype.itemsize)
        assert found is not None, "bound to memory that is not allocated"
        return found.view(dtype).reshape(shape)


def _dtype(given: Any) -> np.dtype[Any]:
    """Return the type of a bound tensor, given as NumPy's or as ONNX's number."""
    return BFLOAT16 if isinstance(given, int) and given == TensorProto.BFLOAT16 else np.dtype(given)
