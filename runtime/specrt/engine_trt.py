"""The TensorRT engine: one plan, one execution context per call shape, KV buffers at one address each.

Every context has its own TensorRT optimization profile of a single shape, and all addresses are set when it is made. A
step writes a few integers into pinned memory and puts three things on one stream: their copy, the call, and the copy
of the logits that are wanted. The contexts share one block of scratch memory, because they never run at once.
"""

import contextlib
import logging
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from specrt.cuda import Gpu, open_gpu
from specrt.device_buffers import DeviceBuffers, DeviceCall
from specrt.engine_bound import BoundCall, BoundEngine
from specrt.errors import EngineError
from specrt.rows import Rows
from specrt_profiles.extras import require
from specrt_profiles.manifest import EngineSpec
from specrt_profiles.plan import PlanShape, PlanSpec
from specrt_profiles.tensors import ROWS, WIDTH, TensorSpec

_log = logging.getLogger(__name__)
_REBUILD = "build it again with 'specrt plan' from the artifact it was made of"
_TYPES = {
    "FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16", "INT64": "int64", "INT32": "int32", "INT8": "int8",
    "BOOL": "bool",
}  # fmt: skip
_PRODUCTS = {"tensorrt": "TensorRT", "tensorrt-rtx": "TensorRT-RTX"}


def open_plan(folder: Path, spec: EngineSpec, *, index: int) -> "TrtEngine":
    """Open the plan of `spec` on GPU number `index`.

    Raises `EngineError` without a driver or such a GPU, or for a plan that was built for others; `MissingExtraError`
    without the library that built it.
    """
    assert spec.plan is not None
    gpu = open_gpu(index, extra=spec.plan.builder)  # first: without a driver, TensorRT may crash rather than complain
    try:
        return TrtEngine(folder, spec, gpu=gpu, trt=import_tensorrt(spec.plan))
    except BaseException:
        gpu.close()
        raise


def import_tensorrt(plan: PlanSpec) -> Any:
    """Return the Python module of the plan's builder.

    Raises `MissingExtraError` if it is not installed, `EngineError` if it does not load.
    """
    try:
        if plan.builder == "tensorrt-rtx":
            require(plan.builder, "tensorrt_rtx")
            import tensorrt_rtx as module
        else:
            require(plan.builder, "tensorrt")
            import tensorrt as module
    except (ImportError, OSError) as error:
        raise EngineError(
            f"{_PRODUCTS[plan.builder]} is installed but does not load ({_first_line(error)}): install it again"
        ) from None
    return module


class TrtEngine(BoundEngine):
    """A decoder as a TensorRT plan; see `Engine` for the contract. Calls have the shapes of the plan and no others.

    Takes over `gpu` when it is made: closing the engine closes it. trt: the module `tensorrt` or `tensorrt_rtx`.
    """

    def __init__(self, folder: Path, spec: EngineSpec, *, gpu: Gpu, trt: Any) -> None:
        assert spec.plan is not None
        self._plan, self._path, self._gpu, self._trt = spec.plan, folder / spec.file, gpu, trt
        _check_version(self._path, self._plan, trt.__version__)
        _check_device(self._path, self._plan, gpu)
        super().__init__(
            spec, platform=f"{self._plan.builder} {trt.__version__}, {gpu.platform}",
            decode_width=min(shape.width for shape in self._plan.shapes if shape.rows),
        )  # fmt: skip
        self._tensors = (*spec.inputs, *spec.outputs)
        self._lines: list[str] = []
        with gpu.current():
            try:
                self._open(spec)
            except BaseException as error:
                traceback.clear_frames(error.__traceback__)  # they hold objects of TensorRT, which have to go now
                self._drop()
                raise

    def _open(self, spec: EngineSpec) -> None:
        self._runtime, self._engine = _deserialize(self._trt, self._path, self._plan, self._lines)
        self._check_contract(spec)
        self._buffers = DeviceBuffers(self._gpu, spec, max_rows=max(spec.verify_widths))
        indices = range(len(self._plan.shapes))
        self._scratch_bytes = max(self._engine.get_device_memory_size_for_profile_v2(index) for index in indices)
        self._scratch = self._gpu.allocate(self._scratch_bytes)
        for shape in self._plan.shapes:
            self._calls[shape.width, shape.rows] = self._bind(shape.width, shape.rows)
        self._gpu.synchronize()

    def _bind(self, width: int, num_rows: int) -> BoundCall:
        shapes = [(shape.width, shape.rows) for shape in self._plan.shapes]
        if (width, num_rows) not in shapes:
            raise EngineError(f"{self._path}: expected a call of (tokens, rows) {shapes}, found {(width, num_rows)}")
        call = self._buffers.call(width, num_rows)
        context = self._engine.create_execution_context(self._trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        if context is None:
            raise EngineError(f"{self._path}: no execution context for {width} tokens: {self._reason()}")
        context.set_device_memory(self._scratch, self._scratch_bytes)
        ready = context.set_optimization_profile_async(shapes.index((width, num_rows)), self._gpu.stream)
        self._gpu.synchronize()
        sizes = {WIDTH: width, ROWS: num_rows}
        for tensor in self._tensors:
            if tensor.name in call.inputs.arrays and any(isinstance(dim, str) for dim in tensor.shape):
                shape = tuple(sizes[dim] if isinstance(dim, str) else dim for dim in tensor.shape)
                ready = ready and context.set_input_shape(tensor.name, shape)
            ready = ready and context.set_tensor_address(tensor.name, call.addresses[tensor.name])
        missing = context.infer_shapes() if ready else []
        if not ready or missing:
            unset = f", {', '.join(missing)} not set" if missing else ""
            raise EngineError(f"{self._path}: a call of {width} tokens is refused{unset}: {self._reason()}")
        return BoundCall(call.inputs, self._runner(context, call))

    def _runner(self, context: Any, call: DeviceCall) -> Callable[[int], Rows]:
        gpu = self._gpu

        def run(num_rows: int) -> Rows:
            with gpu.current():
                call.upload()
                done = context.execute_async_v3(gpu.stream)
                if done:
                    call.download(num_rows)
                gpu.synchronize()  # the next call writes into the block that was copied
            if not done:
                raise EngineError(f"{self._path}: a call failed: {self._reason()}")
            return call.rows(num_rows)

        return run

    def _move(self, slots: Sequence[int], places: Sequence[int]) -> None:
        with self._gpu.current():
            self._buffers.move(slots, places)

    def _release(self) -> None:
        with contextlib.suppress(EngineError), self._gpu.current():
            self._gpu.synchronize()
        with contextlib.suppress(EngineError), self._gpu.current():
            self._drop()
        self._gpu.close()

    def _drop(self) -> None:
        """Let go of TensorRT's objects, in the order that it asks for."""
        self._calls.clear()
        self._engine = None
        self._runtime = None

    def _reason(self) -> str:
        return self._lines[-1] if self._lines else "no reason given"

    def _check_contract(self, spec: EngineSpec) -> None:
        engine, path = self._engine, self._path
        found = {engine.get_tensor_name(i) for i in range(engine.num_io_tensors)}
        if found != (expected := {tensor.name for tensor in self._tensors}):
            raise EngineError(f"{path}: expected the manifest's tensors, differs in {sorted(found ^ expected)[:6]}")
        for tensor in self._tensors:
            self._check_tensor(tensor, is_input=tensor in spec.inputs)
        aliases = {alias.output: alias.input for alias in self._plan.aliases}
        for tensor in spec.outputs:
            shared = engine.get_aliased_input_tensor(tensor.name)
            if shared != aliases.get(tensor.name):
                wanted = aliases.get(tensor.name)
                raise EngineError(
                    f"{path}: {tensor.name}: expected memory shared with {wanted}, found {shared}: {_REBUILD}"
                )
        if engine.num_optimization_profiles != len(self._plan.shapes):
            raise EngineError(
                f"{path}: expected {len(self._plan.shapes)} optimization profiles, found "
                f"{engine.num_optimization_profiles}: {_REBUILD}"
            )
        for index, shape in enumerate(self._plan.shapes):
            self._check_profile(index, shape)

    def _check_tensor(self, tensor: TensorSpec, *, is_input: bool) -> None:
        engine, trt, name = self._engine, self._trt, tensor.name
        mode = trt.TensorIOMode.INPUT if is_input else trt.TensorIOMode.OUTPUT
        dims = tuple(engine.get_tensor_shape(name))
        dtype = _TYPES.get(engine.get_tensor_dtype(name).name, "another type")
        fixed = all(isinstance(dim, str) or dim == size for dim, size in zip(tensor.shape, dims, strict=False))
        right = engine.get_tensor_mode(name) == mode and dtype == tensor.dtype
        if not (right and fixed and len(dims) == len(tensor.shape)):
            raise EngineError(
                f"{self._path}: {name}: expected {'input' if is_input else 'output'} {tensor.dtype} "
                f"{list(tensor.shape)}, found {dtype} {list(dims)}: {_REBUILD}"
            )
        if engine.get_tensor_location(name) != trt.TensorLocation.DEVICE:
            raise EngineError(f"{self._path}: {name}: expected in device memory, found on the host: {_REBUILD}")

    def _check_profile(self, index: int, shape: PlanShape) -> None:
        least, _, most = (tuple(dims) for dims in self._engine.get_tensor_profile_shape("input_ids", index))
        if not least == most == (1, shape.width):
            raise EngineError(
                f"{self._path}: optimization profile {index}: expected {shape.width} tokens, found {least} to {most}: "
                f"{_REBUILD}"
            )


def _deserialize(trt: Any, path: Path, plan: PlanSpec, lines: list[str]) -> tuple[Any, Any]:
    """Return TensorRT's runtime and the engine; `lines` gets what TensorRT says is wrong, then and later."""

    class Log(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if int(severity) <= int(trt.ILogger.Severity.ERROR):
                lines[:] = [" ".join(message.split())[:300]]
            if int(severity) <= int(trt.ILogger.Severity.WARNING):
                _log.info("TensorRT: %s", message)  # what leads to a failure is in its `EngineError`

    product = _PRODUCTS[plan.builder]
    try:
        runtime = trt.Runtime(Log())
    except (TypeError, RuntimeError) as error:  # what the bindings raise when TensorRT returns nothing
        reason = lines[-1] if lines else _first_line(error)
        raise EngineError(f"{product} does not start ({reason}): check the driver with nvidia-smi") from None
    engine = runtime.deserialize_cuda_engine(path.read_bytes())
    if engine is None:
        reason = lines[-1] if lines else "no reason given"
        raise EngineError(f"{path}: {product} {trt.__version__} cannot open it ({reason}): {_REBUILD}")
    return runtime, engine


def _check_version(path: Path, plan: PlanSpec, installed: str) -> None:
    if installed != plan.version:
        product = _PRODUCTS[plan.builder]
        raise EngineError(
            f"{path}: built by {product} {plan.version}, found {product} {installed} here, which opens its own plans "
            f"only: {_REBUILD}, or install {plan.builder}=={plan.version}"
        )


def _check_device(path: Path, plan: PlanSpec, gpu: Gpu) -> None:
    """Refuse a GPU that the plan was not built for, as far as the plan says."""
    built = plan.compute_capabilities
    if built and gpu.compute_capability not in built:
        raise EngineError(
            f"{path}: built for compute capability {', '.join(built)}, found {gpu.compute_capability} ({gpu.name}): "
            f"{_REBUILD}, for this one"
        )


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
