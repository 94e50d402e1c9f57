"""What all engines share that run one graph in calls of fixed shapes: which call, which positions, how much fits.

A call of `width` tokens with logits of `num_rows` of them is bound once, to arrays that a step writes a few integers
into; see `specrt_profiles.tensors` for what they are.
"""

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specrt.engine import EarlyExit
from specrt.errors import EngineError
from specrt.kv import KvBlock, KvContents
from specrt.rows import Row, Rows
from specrt.tree import ancestry, depths
from specrt_profiles.manifest import EngineSpec

Array = NDArray[Any]


def input_types(width: int, num_rows: int) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return shape and element type of a call's small inputs by name; a graph has those of its dialect."""
    return {
        "input_ids": ((1, width), "int64"),
        "position_ids": ((1, width), "int64"),
        "seqlens_k": ((1,), "int32"),
        "total_sequence_length": ((), "int32"),
        "write_indices": ((1,), "int64"),
        "tree_mask": ((1, width, width), "bool"),
        "logits_indices": ((num_rows,), "int64"),
    }


class CallInputs:
    """The small inputs of one call shape, in arrays of `input_types` that whoever runs the call has made and bound."""

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        self.arrays = arrays
        self._steps = np.arange(arrays["input_ids"].shape[1])
        for array in arrays.values():
            array[...] = 0
        arrays["logits_indices"][:] = np.arange(len(arrays["logits_indices"]))
        arrays["tree_mask"][0] = self._chain = np.tri(len(self._steps), dtype=np.bool_)
        self._is_tree = False

    def set(
        self, token_ids: Sequence[int], start: int, last_position: int, parents: Sequence[int] | None = None
    ) -> None:
        """Describe a call of `token_ids` from `start` on; padded rows keep whatever ids they have."""
        arrays, end, count = self.arrays, start + len(self._steps), len(token_ids)
        arrays["input_ids"][0, :count] = token_ids
        positions = arrays["position_ids"]
        np.add(self._steps, start, out=positions[0])
        if self._is_tree:
            arrays["tree_mask"][0] = self._chain
        self._is_tree = parents is not None
        if parents is not None:
            positions[0, :count] = np.add(depths(parents), start)
            arrays["tree_mask"][0, :count, :count] = ancestry(parents)
        np.minimum(positions, last_position, out=positions)
        arrays["total_sequence_length"][...] = end
        arrays["seqlens_k"][0] = end - 1
        arrays["write_indices"][0] = start


@dataclass(frozen=True, slots=True)
class BoundCall:
    """A call shape that is ready to run.

    `run(n)` reads the inputs and returns the first n rows of logits [n, V], or as many as the shape has.
    """

    inputs: CallInputs
    run: Callable[[int], Rows]


class BoundEngine(abc.ABC):
    """An engine whose calls are bound once; see `KvEngine` for the contract.

    decode_width: 1, or the narrowest there is.
    """

    features: NDArray[np.float32] | None = None

    @property
    def exit(self) -> EarlyExit | None:
        """None: there is no early exit."""
        return None

    def __init__(self, spec: EngineSpec, *, platform: str, decode_width: int = 1) -> None:
        self.platform = platform
        self.vocab_size = spec.vocab_size
        self.capacity = spec.capacity
        self.verify_widths = spec.verify_widths
        self.kv_length = 0
        self.contents = KvContents(spec.capacity, spec.prefill_width)
        self.takes_trees = any(tensor.name == "tree_mask" for tensor in spec.inputs)
        self._call_start = 0
        self._tree_ids: tuple[int, ...] = ()  # of the last call, if it was a tree
        self._prefill_width, self._decode_width = spec.prefill_width, decode_width
        self._calls: dict[tuple[int, int], BoundCall] = {}
        self._closed = False

    def prefill(self, token_ids: Sequence[int]) -> None:
        """Feed tokens in chunks of the prefill width, the last one padded."""
        for start in range(0, len(token_ids), self._prefill_width):
            self._run(token_ids[start : start + self._prefill_width], self._prefill_width, num_rows=0)

    def verify(self, token_ids: Sequence[int], parents: Sequence[int] | None = None) -> Rows:
        """Feed n tokens in the smallest verify width that holds them; return their logits [n, V]."""
        if parents is not None and not self.takes_trees:
            raise EngineError("expected a chain, found a tree: export with --trees for an engine that takes them")
        width = self._width(len(token_ids))
        return self._run(token_ids, width, num_rows=width, parents=parents)

    def decode(self, token_id: int) -> Row:
        """Feed one token in a call of the decode width; return its logits [V]."""
        row: Row = self._run((token_id,), self._decode_width, num_rows=self._decode_width)[0]
        return row

    def forward(self, token_ids: Sequence[int], start: int, width: int) -> NDArray[np.float32]:
        """Feed tokens at positions start, ... in a call of `width`; return their logits [n, V] (to measure)."""
        self.rollback(start)
        return np.asarray(self._run(token_ids, width, num_rows=width))

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
        first = sum(place == row for place, row in enumerate(rows))  # have the bits of a chain, the others of none
        if first < len(rows):
            self.contents.begin(start + first)
            self._move([start + row for row in rows[first:]], range(start + first, start + len(rows)))
        if self._tree_ids:
            ids = [self._tree_ids[row] for row in rows]
            self.contents.wrote(start, ids[:first], self._width(count))
            self.contents.wrote(start + first, ids[first:], width=0)
        self.rollback(start + len(rows))

    def save(self, start: int, end: int) -> KvBlock:
        """Raise `EngineError`: only buffers in host memory are copied."""
        raise EngineError("expected KV buffers in host memory to copy, found them on a GPU")

    def restore(self, block: KvBlock) -> None:
        """Raise `EngineError`: only buffers in host memory are copied."""
        raise EngineError("expected KV buffers in host memory to copy to, found them on a GPU")

    def close(self) -> None:
        """Release everything. Safe to call again."""
        if not self._closed:
            self._closed = True
            self._release()

    def _run(
        self, token_ids: Sequence[int], width: int, *, num_rows: int, parents: Sequence[int] | None = None
    ) -> Rows:
        """Feed tokens behind `kv_length`; return their logits, of as many as there are rows."""
        start, end = self.kv_length, self._end(len(token_ids))
        call = self._calls.get((width, num_rows))
        if call is None:
            call = self._calls[width, num_rows] = self._bind(width, num_rows)
        call.inputs.set(token_ids, start, self.capacity - 1, parents)
        self.contents.begin(start)
        rows = call.run(len(token_ids))
        self._tree_ids = () if parents is None else tuple(token_ids)
        if parents is None:  # what a tree leaves behind is known when its path is
            self.contents.wrote(start, token_ids, width)
        self._call_start, self.kv_length = start, end
        return rows

    def _width(self, num_tokens: int) -> int:
        width = next((w for w in self.verify_widths if w >= num_tokens), None)
        if width is None:
            raise EngineError(f"expected at most {self.verify_widths[-1]} tokens to verify, found {num_tokens}")
        return width

    def _end(self, num_tokens: int) -> int:
        """Return the KV length with so many tokens more; raises `EngineError` where there is no room for them."""
        if self._closed:
            raise EngineError("the engine is closed: load the artifact again")
        end = self.kv_length + num_tokens
        if end > self.capacity:
            raise EngineError(f"expected at most {self.capacity} tokens in the KV buffers, found {end}")
        return end

    @abc.abstractmethod
    def _bind(self, width: int, num_rows: int) -> BoundCall:
        """Prepare a call shape; raises `EngineError` for one that there is not."""

    @abc.abstractmethod
    def _move(self, slots: Sequence[int], places: Sequence[int]) -> None:
        """Copy the KV of rising slots to rising places, none of them behind its slot."""

    @abc.abstractmethod
    def _release(self) -> None:
        """Release what the engine and its calls hold."""


def kv_tensors(spec: EngineSpec) -> list[tuple[str, str, tuple[int, ...], str]]:
    """Return past name, present name, shape and element type of every KV buffer."""
    past = [tensor for tensor in spec.inputs if tensor.name.startswith("past_")]
    present = [tensor for tensor in spec.outputs if tensor.name.startswith("present_")]
    return [(a.name, b.name, tuple(int(dim) for dim in a.shape), a.dtype) for a, b in zip(past, present, strict=True)]
