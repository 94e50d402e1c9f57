"""The ONNX Runtime engine on a GPU: what the CPU's does, over device memory, and nothing of it on the CPU.

Session, copies and logits share one stream. Where a graph reads none of its inputs on the host, each call shape is
captured as a CUDA graph at its first use and replayed afterwards; all addresses stay what they were.
"""

import contextlib
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specrt.cuda import Gpu, open_gpu
from specrt.device_buffers import DeviceBuffers, DeviceCall
from specrt.engine_bound import BoundCall, BoundEngine, kv_tensors
from specrt.engine_ort import check_contract, engine_version, refuse_both_builds, session_options
from specrt.errors import EngineError
from specrt.rows import Rows
from specrt_profiles.extras import require
from specrt_profiles.manifest import EngineSpec

_PROVIDER = "CUDAExecutionProvider"
_ON_HOST = frozenset({"total_sequence_length"})  # GroupQueryAttention reads it on the host: a capture would freeze it
_BFLOAT16 = 16  # ONNX's number for what NumPy does not have
_INSTALL = "run  pip uninstall onnxruntime onnxruntime-gpu  and  pip install 'specrt[gpu]'"


def open_on_cuda(folder: Path, spec: EngineSpec, *, index: int) -> "OrtCudaEngine":
    """Open an engine's graph on GPU number `index`.

    Raises `EngineError` for what has no CUDA kernel, without a driver or such a GPU, or if any part of the graph would
    run on the CPU; `MissingExtraError` without ONNX Runtime.
    """
    if spec.dialect == "ort":
        _check_attention(folder / spec.file, spec, index=index)
    gpu = open_gpu(index, extra="gpu")
    try:
        return OrtCudaEngine(folder, spec, gpu=gpu)
    except BaseException:
        gpu.close()
        raise


class OrtCudaEngine(BoundEngine):
    """A decoder on ONNX Runtime's CUDA execution provider; see `Engine` for the contract.

    Takes over `gpu` when it is made: closing the engine closes it.
    """

    def __init__(self, folder: Path, spec: EngineSpec, *, gpu: Gpu) -> None:
        require("gpu", "onnxruntime")
        super().__init__(spec, platform=f"{engine_version()} CUDA, {gpu.platform}")
        self._gpu, self._path = gpu, folder / spec.file
        self._tensors = {tensor.name: tensor for tensor in (*spec.inputs, *spec.outputs)}
        self._rows = [  # no head runs here: what is not bound is not fetched
            tensor for tensor in spec.outputs if not tensor.name.startswith("present_") and tensor.name != "features"
        ]
        self._captures = not self._tensors.keys() & _ON_HOST
        with gpu.current():
            self._session: Any = _open_session(self._path, gpu, captures=self._captures)
            try:
                check_contract(self._session, spec, self._path)
                self._buffers = DeviceBuffers(gpu, spec, max_rows=max(spec.verify_widths))
                self._kv = kv_tensors(spec)
                gpu.synchronize()
            except BaseException:
                self._session = None
                raise

    def _bind(self, width: int, num_rows: int) -> BoundCall:
        import onnxruntime as ort

        with self._gpu.current():
            call = self._buffers.call(width, num_rows)
        binding, device = self._session.io_binding(), ("cuda", self._gpu.index)
        for name in call.inputs.arrays.keys() & self._tensors.keys():
            array = call.inputs.arrays[name]
            if name in _ON_HOST:
                binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array))
            else:
                binding.bind_input(name, *device, array.dtype, list(array.shape), call.addresses[name])
        for past, present, shape, dtype in self._kv:
            element = _BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype)
            binding.bind_input(past, *device, element, list(shape), call.addresses[past])
            binding.bind_output(present, *device, element, list(shape), call.addresses[present])
        for tensor in self._rows:
            dims = [dim if isinstance(dim, int) else num_rows for dim in tensor.shape]
            binding.bind_output(tensor.name, *device, np.dtype(tensor.dtype), dims, call.addresses[tensor.name])
        return BoundCall(call.inputs, self._runner(binding, call, graph_id=len(self._calls) + 1))

    def _runner(self, binding: Any, call: DeviceCall, *, graph_id: int) -> Callable[[int], Rows]:
        import onnxruntime as ort

        gpu, session, path = self._gpu, self._session, self._path
        options = ort.RunOptions()
        options.add_run_config_entry("disable_synchronize_execution_providers", "1")  # what follows is on its stream
        if self._captures:
            options.add_run_config_entry("gpu_graph_id", str(graph_id))

        def run(num_rows: int) -> Rows:
            with gpu.current():
                call.upload()
                try:
                    session.run_with_iobinding(binding, options)
                except Exception as error:  # its errors have no base of their own
                    raise EngineError(f"{path}: a call failed on cuda:{gpu.index}: {_first_line(error)}") from None
                call.download(num_rows)
                gpu.synchronize()  # the next call writes into the block that was copied
            return call.rows(num_rows)

        return run

    def _move(self, slots: Sequence[int], places: Sequence[int]) -> None:
        with self._gpu.current():
            self._buffers.move(slots, places)

    def _release(self) -> None:
        with contextlib.suppress(EngineError), self._gpu.current():
            self._calls.clear()
            self._session = None
        self._gpu.close()


def _check_attention(path: Path, spec: EngineSpec, *, index: int) -> None:
    """Refuse forms of GroupQueryAttention that ONNX Runtime's CUDA provider lacks; some it refuses in a call alone."""
    if spec.precision != "fp16":
        raise EngineError(
            f"{path}: expected fp16 on cuda:{index}, found {spec.precision}, which computes in fp32: ONNX Runtime's "
            "CUDA provider has no GroupQueryAttention for that: export with --precision fp16 or --dialect tensorrt, or "
            "load it with device cpu"
        )
    takes_trees = any(tensor.name == "tree_mask" for tensor in spec.inputs)
    if takes_trees and any(dtype == "int8" for _, _, _, dtype in kv_tensors(spec)):
        raise EngineError(
            f"{path}: expected trees or KV buffers in int8 on cuda:{index}, found both: ONNX Runtime's CUDA provider "
            "has no GroupQueryAttention for that: export without --trees or with --kv-precision same, or load it with "
            "device cpu"
        )


def _open_session(path: Path, gpu: Gpu, *, captures: bool) -> Any:
    import onnxruntime as ort

    refuse_both_builds()
    version = f"ONNX Runtime {ort.__version__}"
    if _PROVIDER not in ort.get_available_providers():
        raise EngineError(f"{version} is installed without CUDA: {_INSTALL}")
    with contextlib.redirect_stdout(io.StringIO()):  # it prints what it does not find
        ort.preload_dlls()
    options = session_options(None)
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    provider = {
        "device_id": str(gpu.index), "user_compute_stream": str(gpu.stream), "enable_cuda_graph": str(int(captures)),
    }  # fmt: skip
    try:
        session = ort.InferenceSession(str(path), options, providers=[(_PROVIDER, provider)])
    except Exception as error:
        reason = _first_line(error)
    else:
        if session.get_providers()[0] == _PROVIDER:
            return session
        reason = f"it fell back to {session.get_providers()[0]}"
    raise EngineError(
        f"{path}: {version} cannot run all of it on cuda:{gpu.index} ({reason}): check that CUDA 13 and cuDNN 9 are "
        "installed (pip install 'specrt[gpu]'); operators that have no CUDA kernel at this precision need an export "
        "with another --dialect or --precision"
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
