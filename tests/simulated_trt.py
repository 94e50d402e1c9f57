"""TensorRT's run time over a simulated driver: its binding rules enforced, its results computed by ONNX Runtime.

A simulated plan is a JSON file that names the graph it stands for, the widths of its optimization profiles and which
outputs share an input's memory. (In the place of a graph of bfloat16, which the CPU lacks, is one that rounds to it in
fp32.) A broken rule is logged and refused as TensorRT does it; where TensorRT would go on and compute nonsense, it is
refused as well. Obeying it proves nothing about TensorRT's own kernels.
"""

import itertools
import json
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime as ort

from copies import copy_artifact, edit_manifest, refresh
from simulated_cuda import BFLOAT16, SimulatedDriver, load, store
from specrt_profiles.codec import encode
from specrt_profiles.manifest import EngineSpec, read_manifest
from specrt_profiles.plan import PlanSpec, call_shapes, kv_aliases

VERSION = "1.7.1.116"
SCRATCH = 4096  # bytes for the first optimization profile; each further one needs 256 more
_TYPES = {
    "tensor(float)": "FLOAT",
    "tensor(float16)": "HALF",
    "tensor(int64)": "INT64",
    "tensor(int32)": "INT32",
    "tensor(bool)": "BOOL",
}
_ARRAYS = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(bool)": np.bool_,
}


def plan_artifact(source: Path, out: Path, *, with_decode: bool = True, **facts: object) -> Path:
    """Return a copy of an artifact of the TensorRT dialect whose engines are simulated plans of its graphs."""
    copy_artifact(source, out)
    plans = {}
    for name, spec in read_manifest(source).engines.items():
        plan = plan_of(spec, with_decode=with_decode, **facts)
        (out / f"{name}.plan").write_text(json.dumps(simulated_plan(source / spec.file, spec, plan)), "utf-8")
        for file in (spec.file, spec.weights):
            (out / file).unlink()
        plans[name] = plan

    def edit(data: dict[str, Any]) -> None:
        for name, plan in plans.items():
            data["engines"][name] |= {"file": f"{name}.plan", "weights": f"{name}.plan", "plan": encode(plan)}

    edit_manifest(out, edit)
    refresh(out)
    return out


def plan_of(spec: EngineSpec, *, with_decode: bool = True, **facts: Any) -> PlanSpec:
    """Return what the manifest says of a plan that fits."""
    known: dict[str, Any] = {"builder": "tensorrt-rtx", "version": VERSION, "compute_capabilities": ("8.9",)} | facts
    shapes = call_shapes(spec.prefill_width, spec.verify_widths, with_decode=with_decode)
    return PlanSpec(shapes=shapes, aliases=kv_aliases(spec.inputs), output=spec.output, source="0" * 64, **known)


def simulated_plan(graph: Path, spec: EngineSpec, plan: PlanSpec) -> dict[str, Any]:
    """Return the content of a plan file."""
    return {
        "graph": str(graph),
        "shapes": {tensor.name: tensor.shape for tensor in (*spec.inputs, *spec.outputs)},
        "profiles": [(shape.width, shape.rows) for shape in plan.shapes],
        "aliases": {alias.output: alias.input for alias in plan.aliases},
        "bfloat16": [tensor.name for tensor in (*spec.inputs, *spec.outputs) if tensor.dtype == "bfloat16"],
    }


class SimulatedTensorrt:
    """What `import tensorrt_rtx` gives.

    `num_objects` are the runtimes, engines and contexts that exist, `num_strays` those that went while another device
    may have been current.
    """

    __version__ = VERSION
    ExecutionContextAllocationStrategy = SimpleNamespace(STATIC=0, USER_MANAGED=2)
    TensorIOMode = SimpleNamespace(INPUT=1, OUTPUT=2)
    TensorLocation = SimpleNamespace(DEVICE=0, HOST=1)

    class ILogger:
        Severity = SimpleNamespace(INTERNAL_ERROR=0, ERROR=1, WARNING=2, INFO=3, VERBOSE=4)

        def __init__(self) -> None:
            self.is_ready = True  # bindings crash on a logger whose base was not initialised

    def __init__(self, driver: SimulatedDriver) -> None:
        self.driver = driver
        self.num_objects = self.num_strays = 0
        self.refuses_contexts_after = 1000
        self.edit: dict[str, Any] = {}  # what a plan file says otherwise
        self.engines: list[SimulatedEngine] = []

    def Runtime(self, logger: Any) -> Any:
        assert logger.is_ready
        assert self.driver.is_current, "TensorRT takes the device that is current"
        return SimulatedRuntime(self, logger)


class _Counted:
    def __init__(self, trt: SimulatedTensorrt) -> None:
        self.trt = trt
        trt.num_objects += 1

    def __del__(self) -> None:
        self.trt.num_objects -= 1
        self.trt.num_strays += not self.trt.driver.is_current


class SimulatedRuntime(_Counted):
    def __init__(self, trt: SimulatedTensorrt, logger: Any) -> None:
        super().__init__(trt)
        self._logger = logger

    def deserialize_cuda_engine(self, content: bytes) -> Any:
        try:
            plan = json.loads(content)
        except ValueError:
            self._logger.log(1, "Serialization assertion stdVersionRead == kSERIALIZATION_VERSION failed.")
            return None
        return SimulatedEngine(self.trt, self._logger, plan | self.trt.edit)


@cache
def _session(path: str) -> ort.InferenceSession:
    """Open a graph once per process: its state is in what is bound, and opening is most of a test's time."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


class SimulatedEngine(_Counted):
    """A deserialized plan."""

    def __init__(self, trt: SimulatedTensorrt, logger: Any, plan: dict[str, Any]) -> None:
        super().__init__(trt)
        self.session = _session(plan["graph"])
        self.logger, self.profiles, self.aliases = logger, plan["profiles"], plan["aliases"]
        self._shapes, self._bfloat16 = plan["shapes"], plan["bfloat16"]
        self.locations, self.renamed = plan.get("locations", {}), plan.get("renamed", {})
        self.inputs = {tensor.name: tensor for tensor in self.session.get_inputs()}
        self.outputs = {tensor.name: tensor for tensor in self.session.get_outputs()}
        self.tensors = self.inputs | self.outputs
        self.num_io_tensors, self.num_optimization_profiles = len(self.tensors), len(self.profiles)
        self.num_executed = [0] * len(self.profiles)

    def get_tensor_name(self, index: int) -> str:
        name = list(self.tensors)[index]
        return str(self.renamed.get(name, name))

    def get_tensor_mode(self, name: str) -> int:
        return 1 if name in self.inputs else 2

    def get_tensor_location(self, name: str) -> int:
        return int(self.locations.get(name, 0))

    def get_tensor_dtype(self, name: str) -> Any:
        return SimpleNamespace(name="BF16" if name in self._bfloat16 else _TYPES[self.tensors[name].type])

    def dtype_of(self, name: str) -> Any:
        return BFLOAT16 if name in self._bfloat16 else np.dtype(_ARRAYS[self.tensors[name].type])

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return self.shape_of(name, {"width": -1, "rows": -1})

    def get_tensor_profile_shape(self, name: str, index: int) -> list[tuple[int, ...]]:
        return [self.shape_of(name, self._sizes(index))] * 3

    def get_aliased_input_tensor(self, name: str) -> str | None:
        found = self.aliases.get(name)
        return None if found is None else str(found)

    def get_device_memory_size_for_profile_v2(self, index: int) -> int:
        return SCRATCH + 256 * index

    def create_execution_context(self, strategy: int) -> Any:
        assert strategy == 2, "another strategy allocates scratch memory for each context"
        self.trt.refuses_contexts_after -= 1
        if self.trt.refuses_contexts_after < 0:
            self.logger.log(1, "no memory for a context")
            return None
        return SimulatedContext(self)

    def shape_of(self, name: str, sizes: dict[str, int]) -> tuple[int, ...]:
        return tuple(dim if isinstance(dim, int) else sizes[dim] for dim in self._shapes[name])

    def _sizes(self, index: int) -> dict[str, int]:
        return dict(zip(("width", "rows"), self.profiles[index], strict=True))


class SimulatedContext(_Counted):
    """An execution context: nothing about it is known until it is set."""

    def __init__(self, engine: SimulatedEngine) -> None:
        super().__init__(engine.trt)
        self.engine, self._driver = engine, engine.trt.driver
        self._profile: int | None = None
        self._addresses: dict[str, int] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._scratch = (0, 0)

    def set_optimization_profile_async(self, index: int, stream: int) -> bool:
        if not self._rule(0 <= index < len(self.engine.profiles), f"optimization profile {index} does not exist"):
            return False
        if not self._rule(stream in self._driver.streams, f"stream {stream} is not one"):
            return False
        self._profile, self._shapes = index, {}
        return True

    def set_input_shape(self, name: str, shape: Sequence[int]) -> bool:
        if not self._rule(name in self.engine.inputs, f"{name} is not an input"):
            return False
        if not self._rule(self._profile is not None, "no optimization profile was chosen"):
            return False
        least, _, most = self.engine.get_tensor_profile_shape(name, int(self._profile or 0))
        inside = len(shape) == len(least) and all(a <= n <= b for a, n, b in zip(least, shape, most, strict=True))
        if not self._rule(inside, f"{name}: {tuple(shape)} is not within optimization profile {self._profile}"):
            return False
        self._shapes[name] = tuple(shape)
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        if not self._rule(name in self.engine.tensors, f"{name} is not a tensor"):
            return False
        if not self._rule(address != 0 and address % 256 == 0, f"{name}: address {address:#x} is not aligned"):
            return False
        self._addresses[name] = address
        return True

    def set_device_memory(self, address: int, size: int) -> None:
        self._scratch = (address, size)

    def infer_shapes(self) -> list[str]:
        return [name for name in self.engine.inputs if -1 in self._shape(name)]

    def execute_async_v3(self, stream: int) -> bool:
        problem = self._problem(stream)
        if problem:
            return self._rule(False, problem)
        self._driver.uploads.clear()
        self._driver.streams[stream].append(self._execute)
        return True

    def _problem(self, stream: int) -> str | None:
        """Say which rule of TensorRT a call would break."""
        if stream not in self._driver.streams:
            return f"stream {stream} is the default one, or none"
        if not self._driver.is_current:
            return "no device is current in this thread"
        missing = [*self.infer_shapes(), *(name for name in self.engine.tensors if name not in self._addresses)]
        if self._profile is None or missing:
            return f"not set: {missing[:2] or 'optimization profile'}"
        for output, source in self.engine.aliases.items():
            if self._addresses[output] != self._addresses[source]:
                return f"{output} needs the address of {source}"
        return self._memory_problem() or self._upload_problem()

    def _memory_problem(self) -> str | None:
        needed = self.engine.get_device_memory_size_for_profile_v2(int(self._profile or 0))
        address, size = self._scratch
        if address % 256 or size < needed or self._driver.device_bytes(address, size) is None:
            return f"scratch memory: {needed} bytes needed, {size} set"
        ranges = [(address, address + size, "scratch memory")]
        for name in self.engine.tensors:
            end = self._addresses[name] + self._num_bytes(name)
            if self._driver.device_bytes(self._addresses[name], self._num_bytes(name)) is None:
                return f"{name}: {self._num_bytes(name)} bytes are not allocated there"
            if name not in self.engine.aliases:
                ranges.append((self._addresses[name], end, name))
        ranges.sort()
        for (_, end, name), (start, _, other) in itertools.pairwise(ranges):
            if start < end:
                return f"{name} and {other} overlap"
        return None

    def _upload_problem(self) -> str | None:
        """Every small input has to be on its way before the call that reads it."""
        for name in self.engine.inputs.keys() - set(self.engine.aliases.values()):
            start, end = self._addresses[name], self._addresses[name] + self._num_bytes(name)
            if not any(first <= start and end <= last for first, last in self._driver.uploads):
                return f"{name} was not copied since the last call"
        return None

    def _execute(self) -> None:
        engine, (address, size) = self.engine, self._scratch
        self._view(address, size).fill(0xFF)
        feed = {name: load(self._tensor(name)) for name in engine.inputs}
        for name, value in zip(engine.outputs, engine.session.run(None, feed), strict=True):
            store(self._tensor(name), value)
        engine.num_executed[int(self._profile or 0)] += 1

    def _tensor(self, name: str) -> Any:
        return (
            self._view(self._addresses[name], self._num_bytes(name))
            .view(self.engine.dtype_of(name))
            .reshape(self._shape(name))
        )

    def _view(self, address: int, size: int) -> Any:
        found = self._driver.device_bytes(address, size)
        assert found is not None, "memory was freed before the call was done"
        return found

    def _shape(self, name: str) -> tuple[int, ...]:
        """Return the shape that was set, or for outputs follows; -1 for what is not known."""
        if name in self.engine.inputs:
            return self._shapes.get(name, self.engine.get_tensor_shape(name))
        sizes = {"width": self._shape("input_ids")[1], "rows": self._shape("logits_indices")[0]}
        return self.engine.shape_of(name, sizes)

    def _num_bytes(self, name: str) -> int:
        return math.prod(self._shape(name)) * self.engine.dtype_of(name).itemsize

    def _rule(self, is_kept: bool, message: str) -> bool:
        if not is_kept:
            self.engine.logger.log(1, message)
        return is_kept
