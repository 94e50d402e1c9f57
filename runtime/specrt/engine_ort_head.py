"""Heads on ONNX Runtime: calls of one row read the head's own feature, wider ones those of the target."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from specrt.engine_bound import Array
from specrt.engine_ort import OrtEngine
from specrt_profiles.manifest import EngineSpec


class OrtHead(OrtEngine):
    """A head on the CPU; see `HeadEngine` for the contract."""

    def __init__(self, folder: Path, spec: EngineSpec, *, threads: int | None) -> None:
        super().__init__(folder, spec, threads=threads)
        shapes = {tensor.name: tensor.shape for tensor in spec.inputs}
        self._sizes = {name: int(shapes[name][2]) for name in ("features", "hidden")}
        self._hidden = np.zeros((1, 1, self._sizes["hidden"]), np.float32)
        self._confidence = np.zeros((1, 1), np.float32)
        self._widths = sorted({*spec.verify_widths, spec.prefill_width})

    @property
    def confidence(self) -> float:
        """The probability of the best guess of the last call."""
        return float(self._confidence[0, 0])

    def read(self, token_ids: Sequence[int], features: NDArray[np.float32]) -> NDArray[np.float32]:
        """Feed tokens in as few calls as possible."""
        widest = self._widths[-1]
        for start in range(0, len(token_ids), widest):
            piece, rows = token_ids[start : start + widest], features[start : start + widest]
            width = next(width for width in self._widths if width >= len(piece))
            logits = self._feed(piece, width, "features", rows)
        return logits

    def step(self, token_id: int) -> NDArray[np.float32]:
        """Feed one token."""
        return self._feed((token_id,), 1, "hidden", self._hidden[0])

    def _feed(
        self, token_ids: Sequence[int], width: int, name: str, rows: NDArray[np.float32]
    ) -> NDArray[np.float32]:  # fmt: skip
        """Feed tokens with a feature each; return the logits [V] after the last one."""
        call = self._calls.get((width, 1))
        if call is None:
            call = self._calls[width, 1] = self._bind(width, 1)
        call.inputs.arrays[name][0, : len(rows)] = rows
        call.inputs.arrays["logits_indices"][0] = len(token_ids) - 1
        logits: NDArray[np.float32] = self._run(token_ids, width, num_rows=1)[0]
        return logits

    def _more_inputs(self, width: int) -> dict[str, tuple[tuple[int, ...], str]]:
        own = int(width == 1)
        return {
            "features": ((1, 0 if own else width, self._sizes["features"]), "float32"),
            "hidden": ((1, own, self._sizes["hidden"]), "float32"),
        }

    def _more_outputs(self, width: int) -> dict[str, Array]:
        return {"confidence": self._confidence, "next_hidden": self._hidden}
