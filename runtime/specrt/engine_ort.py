"""The ONNX Runtime engine: one session, one IO binding per call shape, KV buffers bound in place.

What a call reads and writes is allocated when its shape is first used and bound once. A step writes a few integers into
bound arrays and runs; KV and logits are never copied, and nothing is allocated on this side of the engine.
"""

from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specrt.errors import EngineError
from specrt.tree import ancestry, depths
from specrt_profiles.extras import require
from specrt_profiles.manifest import EngineSpec

_TYPES = {
    "tensor(float)": "float32", "tensor(int64)": "int64", "tensor(int32)": "int32", "tensor(int8)": "int8",
    "tensor(bool)": "bool",
}  # fmt: skip


class OrtEngine:
    """A decoder on ONNX Runtime's CPU execution provider; see `Engine` for the contract."""

    def __init__(self, folder: Path, spec: EngineSpec, *, threads: int | None) -> None:
        require("cpu", "onnxruntime")
        path = folder / spec.file
        self._session: Any = _open_session(path, threads)
        _check_contract(self._session, spec, path)
        self.vocab_size = spec.vocab_size
        self.capacity = spec.capacity
        self.verify_widths = spec.verify_widths
        self.kv_length = 0
        self._call_start = 0
        self._prefill_width = spec.prefill_width
        self._names = {tensor.name for tensor in spec.inputs}
        self.takes_trees = "tree_mask" in self._names
        self._kv = _allocate_kv(spec)
        self._logits = np.empty((max(spec.verify_widths), spec.vocab_size), np.float32)
        self._calls: dict[tuple[int, int], _Call] = {}

    def prefill(self, token_ids: Sequence[int]) -> None:
        """Feed tokens in chunks of the prefill width, the last one padded."""
        for start in range(0, len(token_ids), self._prefill_width):
            self._run(token_ids[start : start + self._prefill_width], self._prefill_width, num_rows=0)

    def verify(self, token_ids: Sequence[int], parents: Sequence[int] | None = None) -> NDArray[np.float32]:
        """Feed n tokens in the smallest verify width that holds them; return a view of their logits [n, V]."""
        if parents is not None and not self.takes_trees:
            raise EngineError("expected a chain, found a tree: export with --trees for an engine that takes them")
        width = next((w for w in self.verify_widths if w >= len(token_ids)), None)
        if width is None:
            raise EngineError(f"expected at most {self.verify_widths[-1]} tokens to verify, found {len(token_ids)}")
        return self._run(token_ids, width, num_rows=width, parents=parents)[: len(token_ids)]

    def decode(self, token_id: int) -> NDArray[np.float32]:
        """Feed one token in a call of width 1; return a view of its logits [V]."""
        logits: NDArray[np.float32] = self._run((token_id,), 1, num_rows=1)[0]
        return logits

    def forward(self, token_ids: Sequence[int], start: int, width: int) -> NDArray[np.float32]:
        """Feed tokens at positions start, ... in a call of any width; return their logits [n, V] (to measure)."""
        self.rollback(start)
        return self._run(token_ids, width, num_rows=width)[: len(token_ids)]

    def rollback(self, length: int) -> None:
        """Keep the first `length` tokens."""
        if not 0 <= length <= self.kv_length:
            raise EngineError(f"expected to roll back to 0 .. {self.kv_length} tokens, found {length}")
        self.kv_length = length

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows, rising, of the last call; those after the first gap are copied into their places."""
        start, count = self._call_start, self.kv_length - self._call_start
        if not all(a < b for a, b in zip((-1, *rows), (*rows, count), strict=True)):
            raise EngineError(f"expected rising rows of the {count} of the last call, found {tuple(rows)}")
        places = [start + place for place, row in enumerate(rows) if place != row]
        if places:
            found = [start + row for row in rows[-len(places) :]]
            for _, _, value in self._kv:
                slots = value.numpy()  # a view [B, H_kv, S, D]
                slots[:, :, places] = slots[:, :, found]
        self.rollback(start + len(rows))

    def close(self) -> None:
        """Release session and buffers."""
        self._calls.clear()
        self._kv = []
        self._session = None

    def _run(
        self, token_ids: Sequence[int], width: int, *, num_rows: int, parents: Sequence[int] | None = None
    ) -> NDArray[np.float32]:
        if self._session is None:
            raise EngineError("the engine is closed: load the artifact again")
        end = self.kv_length + len(token_ids)
        if end > self.capacity:
            raise EngineError(f"expected at most {self.capacity} tokens in the KV buffers, found {end}")
        call = self._calls.get((width, num_rows))
        if call is None:
            call = self._calls[width, num_rows] = self._bind(width, num_rows)
        call.set(token_ids, self.kv_length, self.capacity - 1, parents)
        self._session.run_with_iobinding(call.binding)
        self._call_start, self.kv_length = self.kv_length, end
        return call.logits

    def _bind(self, width: int, num_rows: int) -> "_Call":
        import onnxruntime as ort

        logits = self._logits[:num_rows]
        if num_rows > len(logits):
            logits = np.empty((num_rows, self.vocab_size), np.float32)
        call = _Call(width, logits)
        call.binding = binding = self._session.io_binding()
        arrays = call.inputs()
        for name in arrays.keys() & self._names:
            binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(arrays[name]))
        binding.bind_ortvalue_output("logits", ort.OrtValue.ortvalue_from_numpy(call.logits[None]))
        for past, present, value in self._kv:
            binding.bind_ortvalue_input(past, value)
            binding.bind_ortvalue_output(present, value)
        return call


class _Call:
    """The bound arrays of one call shape."""

    def __init__(self, width: int, logits: NDArray[np.float32]) -> None:
        self.binding: Any = None
        self.logits = logits
        self._ids = np.zeros((1, width), np.int64)
        self._positions = np.zeros((1, width), np.int64)
        self._seqlens = np.zeros(1, np.int32)
        self._total = np.zeros((), np.int32)
        self._start = np.zeros(1, np.int64)
        self._rows = np.arange(len(logits))
        self._steps = np.arange(width)
        self._tree = np.tri(width, dtype=np.bool_)[None]
        self._is_tree = False

    def inputs(self) -> dict[str, NDArray[Any]]:
        """Return the arrays by input name; a graph has those of its dialect."""
        return {
            "input_ids": self._ids,
            "position_ids": self._positions,
            "seqlens_k": self._seqlens,
            "total_sequence_length": self._total,
            "write_indices": self._start,
            "tree_mask": self._tree,
            "logits_indices": self._rows,
        }

    def set(
        self, token_ids: Sequence[int], start: int, last_position: int, parents: Sequence[int] | None = None
    ) -> None:
        """Describe a call of `token_ids` from `start` on; padded rows keep whatever ids they have."""
        count = len(token_ids)
        self._ids[0, :count] = token_ids
        np.add(self._steps, start, out=self._positions[0])
        if self._is_tree:
            self._tree[0] = np.tri(len(self._steps), dtype=np.bool_)
        self._is_tree = parents is not None
        if parents is not None:
            self._positions[0, :count] = np.add(depths(parents), start)
            self._tree[0, :count, :count] = ancestry(parents)
        np.minimum(self._positions, last_position, out=self._positions)
        self._total[...] = start + len(self._steps)
        self._seqlens[0] = start + len(self._steps) - 1
        self._start[0] = start


def engine_version() -> str:
    """Return name and version of the inference engine, for keys of measured facts."""
    require("cpu", "onnxruntime")
    import onnxruntime as ort

    return f"onnxruntime {ort.__version__}"


def _open_session(path: Path, threads: int | None) -> Any:
    import onnxruntime as ort

    if threads is not None and threads < 1:
        raise EngineError(f"threads: expected 1 or more, or None for one per physical core, found {threads}")
    if _both_installed():
        raise EngineError(
            "onnxruntime and onnxruntime-gpu are both installed and overwrite each other's files: uninstall both, then "
            "install the one you need"
        )
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads or 0
    options.add_session_config_entry("session.force_spinning_stop", "1")  # threads sleep between calls
    try:
        return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        line = str(error).strip().splitlines()[0][:300]
        raise EngineError(f"{path}: ONNX Runtime {ort.__version__} cannot open it: {line}") from None


def _both_installed() -> bool:
    names = {str(dist.metadata["Name"]).lower().replace("_", "-") for dist in metadata.distributions()}
    return {"onnxruntime", "onnxruntime-gpu"} <= names


def _check_contract(session: Any, spec: EngineSpec, path: Path) -> None:
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

    past = [t for t in spec.inputs if t.name.startswith("past_")]
    present = [t for t in spec.outputs if t.name.startswith("present_")]
    return [
        (a.name, b.name, ort.OrtValue.ortvalue_from_numpy(np.zeros([int(d) for d in a.shape], a.dtype)))
        for a, b in zip(past, present, strict=True)
    ]
