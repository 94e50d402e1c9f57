"""Parallel heads on ONNX Runtime: one call, bound once."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specrt.engine_ort import open_checked
from specrt_profiles.extras import require
from specrt_profiles.manifest import EngineSpec


class OrtParallelHeads:
    """Heads on the CPU; see `ParallelHeads` for the contract."""

    def __init__(self, folder: Path, spec: EngineSpec, *, threads: int | None) -> None:
        require("cpu", "onnxruntime")
        import onnxruntime as ort

        self._session: Any = open_checked(folder / spec.file, spec, threads)
        arrays = {
            tensor.name: np.zeros([int(size) for size in tensor.shape], tensor.dtype)
            for tensor in (*spec.inputs, *spec.outputs)
        }
        self._features, self._logits, self._confidence = (
            arrays[name] for name in ("features", "logits", "confidence")
        )  # fmt: skip
        _, self.num_heads, self.vocab_size = self._logits.shape
        self._binding: Any = self._session.io_binding()
        for tensor in spec.inputs:
            self._binding.bind_ortvalue_input(tensor.name, ort.OrtValue.ortvalue_from_numpy(arrays[tensor.name]))
        for tensor in spec.outputs:
            self._binding.bind_ortvalue_output(tensor.name, ort.OrtValue.ortvalue_from_numpy(arrays[tensor.name]))

    @property
    def confidence(self) -> NDArray[np.float32]:
        """The probability of each head's best guess in the last call [M]."""
        row: NDArray[np.float32] = self._confidence[0]
        return row

    def guess(self, feature: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the logits of all heads [M, V]."""
        self._features[0, 0] = feature
        self._session.run_with_iobinding(self._binding)
        rows: NDArray[np.float32] = self._logits[0]
        return rows

    def close(self) -> None:
        """Release the session."""
        self._binding = self._session = None
