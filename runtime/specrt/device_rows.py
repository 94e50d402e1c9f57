"""Rows of logits on a GPU: copied with every call, or left there until they are asked for.

A row is far larger than everything else that a step moves. Where the graph finds each row's best tokens by itself
(`specrt_profiles.profile.Profile.output`), only those come with a call, and a row when its values are used.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specrt.cuda import Gpu, PinnedBlock
from specrt.rows import Rows, Top
from specrt_profiles.manifest import EngineSpec
from specrt_profiles.tensors import BEST_IDS, BEST_LOGITS, TOP_IDS, TOP_LOGITS, TOP_LOGSUMEXP

_TOP = (TOP_IDS, TOP_LOGITS, TOP_LOGSUMEXP)
_SMALL = (BEST_IDS, BEST_LOGITS, *_TOP)


class DeviceLogits:
    """Memory for up to `num_rows` rows of logits, on the device and pinned; shared by calls that never run at once.

    addresses: of the outputs that hold logits and best tokens, by name. Made and used with the GPU `current`.
    """

    def __init__(self, gpu: Gpu, spec: EngineSpec, num_rows: int) -> None:
        self._gpu, self.num_rows, self.num_calls = gpu, num_rows, 0
        size = 4 * num_rows * spec.vocab_size
        self.host = gpu.allocate_pinned(size)[:size].view(np.float32).reshape(num_rows, spec.vocab_size)
        self.addresses = {"logits": gpu.allocate(size)}
        self._best: PinnedBlock | None = None
        small = {
            tensor.name: ((num_rows, *(int(size) for size in tensor.shape[2:])), tensor.dtype)
            for tensor in spec.outputs
            if tensor.name in _SMALL
        }
        if small:
            self._best = PinnedBlock(gpu, small)
            self.addresses |= self._best.addresses

    def download(self, num_rows: int) -> None:
        """Put on the stream the copy of what every step needs of the first rows of a call that is under way."""
        self.num_calls += 1
        if not num_rows:
            return
        if self._best is not None:
            self._best.download()
        else:
            self._gpu.download(self.host[:num_rows], self.addresses["logits"])

    def rows(self, num_rows: int) -> Rows:
        """Return the first rows of a call that is done."""
        if self._best is None:
            return self.host[:num_rows]
        arrays = {name: array[:num_rows] for name, array in self._best.arrays.items()}
        best_ids, best_logits = (arrays[name].tolist() for name in (BEST_IDS, BEST_LOGITS))
        if TOP_IDS not in arrays:
            return DeviceRows(self, best_ids, best_logits)
        ids, logits, logsumexps = (arrays[name].copy() for name in _TOP)
        return DeviceRows(self, best_ids, best_logits, (ids, logits, logsumexps))

    def fetch(self, start: int, end: int) -> NDArray[np.float32]:
        """Copy rows to the host and return a view of them [n, V]; call it with any device current."""
        wanted = self.host[start:end]
        with self._gpu.current():
            self._gpu.download(wanted, self.addresses["logits"] + start * self.host.strides[0])
            self._gpu.synchronize()
        return wanted


class DeviceRows:
    """Rows of logits [n, V] that stay on the device; see `specrt.rows.Rows`.

    best_ids, best_logits: each row's best token and its logit; an id of V stands for a row without any (NaNs). top: ids
    and logits [n, K] of the best ones and logsumexp [n], if the graph says them.
    """

    def __init__(
        self, logits: DeviceLogits, best_ids: Sequence[int], best_logits: Sequence[float],
        top: tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.float32]] | None = None,
    ) -> None:  # fmt: skip
        self._logits, self._number = logits, logits.num_calls
        self.best_ids, self.best_logits, self.top = best_ids, best_logits, top
        self._fetched: dict[int, NDArray[np.float32]] = {}
        self.vocab_size = logits.host.shape[1]

    def __len__(self) -> int:
        return len(self.best_ids)

    def __getitem__(self, row: int, /) -> "DeviceRow":
        return DeviceRow(self, range(len(self))[row])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        self._check()
        return _as_array(self._logits.fetch(0, len(self)), dtype, copy)

    def fetch(self, row: int) -> NDArray[np.float32]:
        """Return a row [V], copied from the device when it is first asked for."""
        self._check()
        if row not in self._fetched:
            self._fetched[row] = self._logits.fetch(row, row + 1)[0]
        return self._fetched[row]

    def _check(self) -> None:
        assert self._number == self._logits.num_calls, "these rows went with the engine's next call"


class DeviceRow:
    """One of these rows; see `specrt.rows.Row`."""

    def __init__(self, rows: DeviceRows, row: int) -> None:
        self._rows, self._row = rows, row

    def __len__(self) -> int:
        return self._rows.vocab_size

    def argmax(self) -> int:
        """Return the lowest id among those of the largest logit, which the device found."""
        return self._rows.best_ids[self._row]

    @property
    def top(self) -> Top | None:
        """Return the row's best tokens if the graph says them."""
        if self._rows.top is None:
            return None
        ids, logits, logsumexps = self._rows.top
        return Top(ids[self._row], logits[self._row], float(logsumexps[self._row]))

    def __getitem__(self, token: int, /) -> float:
        if token == self.argmax():
            return self._rows.best_logits[self._row]
        return float(self._rows.fetch(self._row)[token])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return _as_array(self._rows.fetch(self._row), dtype, copy)


def _as_array(view: NDArray[np.float32], dtype: Any, copy: bool | None) -> NDArray[Any]:
    array: NDArray[Any] = np.array(view, dtype) if copy else np.asarray(view, dtype)
    return array
