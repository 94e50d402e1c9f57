"""What the calls of a decoder read and write on a GPU: KV buffers, logits, and one block of small inputs per shape."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specrt.cuda import ALIGNMENT, Gpu
from specrt.engine_bound import CallInputs, input_types, kv_tensors
from specrt_profiles.manifest import EngineSpec
from specrt_profiles.tensors import ELEMENT_BYTES


class DeviceBuffers:
    """Device memory that is allocated once, zero-filled, and stays where it is.

    kv: address by name of past_* and present_*, the same for both of a pair.
    """

    def __init__(self, gpu: Gpu, spec: EngineSpec, *, max_rows: int) -> None:
        self._gpu, self._vocab_size = gpu, spec.vocab_size
        self.kv: dict[str, int] = {}
        for past, present, shape, dtype in kv_tensors(spec):
            self.kv[past] = self.kv[present] = gpu.allocate(math.prod(shape) * ELEMENT_BYTES[dtype])
        self._logits = self._allocate_logits(max_rows)

    def call(self, width: int, num_rows: int) -> "DeviceCall":
        """Allocate the inputs of a call shape; logits are shared by all shapes of up to `max_rows` rows."""
        shared, address = self._logits
        if num_rows > len(shared):
            shared, address = self._allocate_logits(num_rows)
        places = dict(_places(width, num_rows))
        size = max(place.end for place in places.values()) + ALIGNMENT  # what is empty has an address within, too
        pinned, block = self._gpu.allocate_pinned(size), self._gpu.allocate(size)
        arrays = {
            name: pinned[place.start : place.end].view(place.dtype).reshape(place.shape)
            for name, place in places.items()
        }
        addresses = {name: block + place.start for name, place in places.items()}
        return DeviceCall(
            self._gpu, CallInputs(arrays), shared[:num_rows], {**self.kv, **addresses, "logits": address}, pinned, block
        )

    def _allocate_logits(self, num_rows: int) -> tuple[NDArray[np.float32], int]:
        """Return pinned rows [num_rows, V] and the address of as many on the device."""
        size = 4 * num_rows * self._vocab_size
        rows = self._gpu.allocate_pinned(size)[:size].view(np.float32).reshape(num_rows, self._vocab_size)
        return rows, self._gpu.allocate(size)


class DeviceCall:
    """One call shape: its inputs and logits on the host, and the address of each of its tensors on the device."""

    def __init__(
        self, gpu: Gpu, inputs: CallInputs, logits: NDArray[np.float32], addresses: Mapping[str, int],
        pinned: NDArray[Any], block: int,
    ) -> None:  # fmt: skip
        self.inputs, self.logits, self.addresses = inputs, logits, addresses
        self._gpu, self._pinned, self._block = gpu, pinned, block

    def upload(self) -> None:
        """Put one copy of all small inputs on the stream."""
        self._gpu.upload(self._block, self._pinned)

    def download(self, num_rows: int) -> None:
        """Put a copy of the first rows of logits on the stream, if this shape has any."""
        rows = self.logits[:num_rows]
        if rows.size:
            self._gpu.download(rows, self.addresses["logits"])


@dataclass(frozen=True, slots=True)
class _Place:
    start: int
    end: int
    shape: tuple[int, ...]
    dtype: str


def _places(width: int, num_rows: int) -> Iterator[tuple[str, _Place]]:
    """Yield where in a block each small input lies, aligned as TensorRT wants addresses."""
    end = 0
    for name, (shape, dtype) in input_types(width, num_rows).items():
        start = -(-end // ALIGNMENT) * ALIGNMENT
        end = start + math.prod(shape) * ELEMENT_BYTES[dtype]
        yield name, _Place(start, end, shape, dtype)
