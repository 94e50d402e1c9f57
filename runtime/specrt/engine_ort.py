"""The ONNX Runtime engine: one session, one IO binding per call shape, KV buffers bound in place.

What a call reads and writes is allocated when its shape is first used and bound once. A step writes a few integers into
bound arrays and runs; KV and logits are never copied, and nothing is allocated on this side of the engine.
"""

from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from specrt.engine_bound import Array, BoundCall, BoundEngine, CallInputs, input_types, kv_tensors
from specrt.errors import EngineError
from specrt.kv import KvBlock
from specrt.rows import Rows
from specrt_profiles.extras import require
from specrt_profiles.manifest import EngineSpec
from specrt_profiles.tensors import TensorSpec

_TYPES = {
    "tensor(float)": "float32", "tensor(float16)": "float16", "tensor(bfloat16)": "bfloat16", "tensor(int64)": "int64",
    "tensor(int32)": "int32", "tensor(int8)": "int8", "tensor(bool)": "bool",
}  # fmt: skip


class OrtEngine(BoundEngine):
    """A decoder on ONNX Runtime's CPU execution provider; see `KvEngine` for the contract."""

    def __init__(self, folder: Path, spec: EngineSpec, *, threads: int | None) -> None:
        require("cpu", "onnxruntime")
        super().__init__(spec, platform=engine_version())
        self._open(folder, spec, threads)
        self._names = {tensor.name for tensor in spec.inputs}
        self._kv = _allocate_kv(spec)
        size = next((int(tensor.shape[2]) for tensor in spec.outputs if tensor.name == "features"), 0)
        self.features = np.zeros((spec.slots, size), np.float32) if size else None
        self._logits = np.empty((max(spec.verify_widths), spec.vocab_size), np.float32)

    def _open(self, folder: Path, spec: EngineSpec, threads: int | None) -> None:
        """Open what the calls will run."""
        self._session: Any = open_checked(folder / spec.file, spec, threads)

    def save(self, start: int, end: int) -> KvBlock:
        """Copy slots to memory of their own."""
        arrays = tuple(slots[:, :, start:end].copy() for slots in self._slots())
        return KvBlock(self.contents.token_ids(start, end), arrays, self.contents.length(end, cold_bits=True) == end)

    def restore(self, block: KvBlock) -> None:
        """Copy a block's slots back behind the tokens in the buffers."""
        start, end = self.kv_length, self._end(len(block.token_ids))
        self.contents.begin(start)
        for slots, array in zip(self._slots(), block.arrays, strict=True):
            slots[:, :, start:end] = array
        self.contents.restored(start, block)
        self.kv_length = end

    def _slots(self) -> list[Array]:
        """Return views [B, .., S, ..] of what is kept of each token: the KV buffers, and the features."""
        buffers = [value.numpy() for _, _, value in self._kv]
        return buffers if self.features is None else [*buffers, self.features[None, None]]

    def _bind(self, width: int, num_rows: int) -> BoundCall:
        import onnxruntime as ort

        logits = self._rows_of_logits(num_rows)
        types = input_types(width, num_rows) | self._more_inputs(width)
        arrays = {name: np.zeros(shape, dtype) for name, (shape, dtype) in types.items()}
        outputs = {"logits": logits[None]} | self._more_outputs(width)
        binding = self._session.io_binding()
        for name in arrays.keys() & self._names:
            binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(arrays[name]))
        for name, array in outputs.items():
            binding.bind_ortvalue_output(name, ort.OrtValue.ortvalue_from_numpy(array))
        for past, present, value in self._kv:
            binding.bind_ortvalue_input(past, value)
            binding.bind_ortvalue_output(present, value)
        session = self._session
        return BoundCall(CallInputs(arrays), self._runner(lambda _: session.run_with_iobinding(binding), outputs))

    def _rows_of_logits(self, num_rows: int) -> NDArray[np.float32]:
        """Return an array [num_rows, V], which calls of verify widths share."""
        enough = num_rows <= len(self._logits)
        return self._logits[:num_rows] if enough else np.empty((num_rows, self.vocab_size), np.float32)

    def _more_inputs(self, width: int) -> dict[str, tuple[tuple[int, ...], str]]:
        """Return what a call reads besides `input_types`."""
        return {}

    def _more_outputs(self, width: int) -> dict[str, Array]:
        """Return arrays for what a call leaves besides logits and KV."""
        return {} if self.features is None else {"features": np.empty((1, width, self.features.shape[1]), np.float32)}

    def _runner(self, go: Callable[[int], None], outputs: Mapping[str, Array]) -> Callable[[int], Rows]:
        """Return what runs a call of so many tokens with `go`, and what it leaves behind."""
        features, rows = self.features, outputs.get("features")
        logits: NDArray[np.float32] = outputs["logits"][0]

        def run(count: int) -> Rows:
            go(count)
            if features is not None and rows is not None:
                features[self.kv_length : self.kv_length + count] = rows[0, :count]  # the call began there
            return logits[:count]

        return run

    def _move(self, slots: Sequence[int], places: Sequence[int]) -> None:
        for buffer in self._slots():
            buffer[:, :, places] = buffer[:, :, slots]

    def _release(self) -> None:
        self._calls.clear()
        self._kv, self.features = [], None
        self._session = None


def engine_version() -> str:
    """Return name and version of the inference engine, for keys of measured facts."""
    require("cpu", "onnxruntime")
    import onnxruntime as ort

    return f"onnxruntime {ort.__version__}"


def session_options(threads: int | None) -> Any:
    """Return how sessions are set up on every device."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads or 0
    options.add_session_config_entry("session.force_spinning_stop", "1")  # threads sleep between calls
    return options


def refuse_both_builds() -> None:
    """Raise `EngineError` if the packages for CPU and GPU are both installed."""
    if _both_installed():
        raise EngineError(
            "onnxruntime and onnxruntime-gpu are both installed and overwrite each other's files: uninstall both, then "
            "install the one you need"
        )


def open_session(path: Path, threads: int | None) -> Any:
    """Open a graph on the CPU; raises `EngineError` with the engine's reason where it cannot be."""
    import onnxruntime as ort

    if threads is not None and threads < 1:
        raise EngineError(f"threads: expected 1 or more, or None for one per physical core, found {threads}")
    refuse_both_builds()
    try:
        return ort.InferenceSession(str(path), session_options(threads), providers=["CPUExecutionProvider"])
    except Exception as error:
        line = str(error).strip().splitlines()[0][:300]
        raise EngineError(f"{path}: ONNX Runtime {ort.__version__} cannot open it: {line}") from None


def _both_installed() -> bool:
    names = {str(dist.metadata["Name"]).lower().replace("_", "-") for dist in metadata.distributions()}
    return {"onnxruntime", "onnxruntime-gpu"} <= names


class Tensors(Protocol):
    """The inputs and outputs of a graph, in its order."""

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """What it reads."""
        ...

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """What it gives."""
        ...


def open_checked(path: Path, spec: Tensors, threads: int | None) -> Any:
    """Open a graph on the CPU; raises `EngineError` where it cannot be, or is not the one of the manifest."""
    session = open_session(path, threads)
    check_contract(session, spec, path)
    return session


def check_contract(session: Any, spec: Tensors, path: Path) -> None:
    """Raise `EngineError` where a session's inputs and outputs are not those of the manifest."""
    for what, found, wanted in (
        ("input", session.get_inputs(), spec.inputs),
        ("output", session.get_outputs(), spec.outputs),
    ):
        names, expected = [t.name for t in found], [t.name for t in wanted]
        if names != expected:
            raise EngineError(f"{path}: expected the {what}s {expected[:6]} of the manifest, found {names[:6]}")
        for tensor, entry in zip(found, wanted, strict=True):
            fixed = all(not isinstance(b, int) or a == b for a, b in zip(tensor.shape, entry.shape, strict=False))
            if _TYPES.get(tensor.type) != entry.dtype or len(tensor.shape) != len(entry.shape) or not fixed:
                raise EngineError(
                    f"{path}: {what} {entry.name}: expected {entry.dtype} {list(entry.shape)}, "
                    f"found {tensor.type} {tensor.shape}"
                )


def _allocate_kv(spec: EngineSpec) -> list[tuple[str, str, Any]]:
    """Return (past name, present name, buffer) of every KV tensor; memory is taken up as slots are written."""
    import onnxruntime as ort

    return [
        (past, present, ort.OrtValue.ortvalue_from_numpy(np.zeros(shape, dtype)))
        for past, present, shape, dtype in kv_tensors(spec)
    ]
