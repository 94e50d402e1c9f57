"""What an engine's KV slots hold: which tokens, and whether with the bits that a cold start would give them.

The KV of a token depends on the tokens before it, so what is known is always a beginning: slots 0 .. n - 1. A cold
start writes a prompt in prefill calls that begin at multiples of their width. KV has the same bits as that

* if it was written by calls of `exact_widths`, which give equal bits wherever a token stands in a call
  (`specrt_profiles.exactness`); the prefill width is one of them;
* else, if it was written by those very calls: full ones, each at a multiple of its width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class KvBlock:
    """A copy of consecutive slots: their tokens, one array [B, H_kv, n, D] per KV tensor, and what kind of bits."""

    token_ids: tuple[int, ...]
    arrays: tuple[NDArray[Any], ...]
    cold_bits: bool

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in self.arrays)


class KvContents:
    """The engine's own account of its slots, kept call by call.

    A call first takes the slots it will write out of the account and enters them when it has returned: what fails or is
    interrupted leaves nothing that could be taken for the KV of some tokens.
    """

    def __init__(self, capacity: int, prefill_width: int) -> None:
        self.prefill_width = prefill_width
        self.exact_widths: tuple[int, ...] = ()
        self._ids = np.full(capacity, -1, np.int64)
        self._known = self._cold = 0  # so many slots from the first on

    def begin(self, start: int) -> None:
        """Forget the slots from `start` on: they are about to be written."""
        self._known, self._cold = min(self._known, start), min(self._cold, start)

    def wrote(self, start: int, token_ids: Sequence[int], width: int) -> None:
        """Enter the tokens of a call of a width that has returned."""
        whole = width == self.prefill_width == len(token_ids) and start % width == 0
        self._enter(start, token_ids, cold_bits=whole or width in self.exact_widths)

    def restored(self, start: int, block: KvBlock) -> None:
        """Enter the tokens of a copy that is complete."""
        self._enter(start, block.token_ids, cold_bits=block.cold_bits)

    def token_ids(self, start: int, end: int) -> tuple[int, ...]:
        """Return the tokens of slots start .. end - 1, which must be known."""
        assert 0 <= start <= end <= self._known
        return tuple(self._ids[start:end].tolist())

    def length(self, limit: int, *, cold_bits: bool) -> int:
        """Return how many of the first `limit` slots are known, or known to have the bits of a cold start."""
        if not cold_bits:
            return min(limit, self._known)
        length = min(limit, self._cold)
        return length if self.exact_widths else length // self.prefill_width * self.prefill_width

    def common(self, token_ids: Sequence[int], limit: int, *, cold_bits: bool) -> int:
        """Return how many of `token_ids`, from the first on, are in the first `limit` slots; see `length`."""
        length = min(limit, len(token_ids), self._known)
        differs = np.flatnonzero(self._ids[:length] != np.asarray(token_ids[:length], np.int64))
        return self.length(int(differs[0]) if len(differs) else length, cold_bits=cold_bits)

    def _enter(self, start: int, token_ids: Sequence[int], *, cold_bits: bool) -> None:
        if self._known == start:
            self._known = start + len(token_ids)
            self._ids[start : self._known] = token_ids
            if cold_bits and self._cold == start:
                self._cold = self._known
