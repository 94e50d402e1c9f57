"""What the calls of a decoder read and write on a GPU: KV buffers, logits, and one block of small inputs per shape."""

import math
from collections.abc import Mapping, Sequence

from specrt.cuda import Gpu, PinnedBlock
from specrt.device_rows import DeviceLogits
from specrt.engine_bound import CallInputs, input_types, kv_tensors
from specrt.rows import Rows
from specrt_profiles.manifest import EngineSpec
from specrt_profiles.tensors import ELEMENT_BYTES


class DeviceBuffers:
    """Device memory that is allocated once, zero-filled, and stays where it is.

    kv: address by name of past_* and present_*, the same for both of a pair.
    """

    def __init__(self, gpu: Gpu, spec: EngineSpec, *, max_rows: int) -> None:
        self._gpu, self._spec = gpu, spec
        self.kv: dict[str, int] = {}
        for past, present, shape, dtype in kv_tensors(spec):
            self.kv[past] = self.kv[present] = gpu.allocate(math.prod(shape) * ELEMENT_BYTES[dtype])
        self._logits = DeviceLogits(gpu, spec, max_rows)

    def call(self, width: int, num_rows: int) -> "DeviceCall":
        """Allocate the inputs of a call shape; logits are shared by all shapes of up to `max_rows` rows."""
        logits = self._logits
        if num_rows > logits.num_rows:
            logits = DeviceLogits(self._gpu, self._spec, num_rows)
        block = PinnedBlock(self._gpu, input_types(width, num_rows))
        return DeviceCall(block, logits, num_rows, {**self.kv, **block.addresses, **logits.addresses})

    def move(self, slots: Sequence[int], places: Sequence[int]) -> None:
        """Put on the stream copies of the KV of rising slots to rising places, none of them behind its slot.

        Every head of a layer has its slots apart: a copy each, of a single slot, because longer ones could overlap.
        """
        for past, _, (batch, heads, length, size), dtype in kv_tensors(self._spec):
            num_bytes = size * ELEMENT_BYTES[dtype]
            for slot, place in zip(slots, places, strict=True):
                for head in range(batch * heads):
                    first = self.kv[past] + head * length * num_bytes
                    self._gpu.copy(first + place * num_bytes, first + slot * num_bytes, num_bytes)


class DeviceCall:
    """One call shape: its inputs on the host, its rows of logits, and the address of each of its tensors."""

    def __init__(self, block: PinnedBlock, logits: DeviceLogits, num_rows: int, addresses: Mapping[str, int]) -> None:
        self.inputs, self.num_rows, self.addresses = CallInputs(block.arrays), num_rows, addresses
        self._block, self._logits = block, logits

    def upload(self) -> None:
        """Put one copy of all small inputs on the stream."""
        self._block.upload()

    def download(self, num_rows: int) -> None:
        """Put a copy of what a step needs of the first rows on the stream, if this shape has any."""
        self._logits.download(min(num_rows, self.num_rows))

    def rows(self, num_rows: int) -> Rows:
        """Return the first rows of logits once the call is done; none if this shape has none."""
        return self._logits.rows(min(num_rows, self.num_rows))
