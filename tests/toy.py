"""A toy engine whose logits depend on the whole content of its KV buffer, and that enforces the rules of real ones."""

import hashlib
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from specrt.kv import KvBlock, KvContents

POISON = -1  # what padding leaves in KV slots


def hashed_logits(prefix: Sequence[int], vocab_size: int, *, salt: int = 0, scale: float = 2.0) -> NDArray[np.float32]:
    """Return logits [V] that change with every token of the prefix."""
    digest = hashlib.blake2b(repr((salt, tuple(prefix))).encode(), digest_size=8).digest()
    rng = np.random.default_rng(int.from_bytes(digest, "little"))
    return (scale * rng.standard_normal(vocab_size)).astype(np.float32)


class ToyEngine:
    """Tokens are its KV content; a row's logits are a function of the slots up to its own position.

    Padding writes POISON into slots, and reading POISON fails: so does any use of stale or padded slots. Call
    shapes are recorded in `widths_used`, slots that `keep` moved in `num_moved`; only the allowed widths are taken.
    """

    takes_trees = True

    def __init__(
        self,
        vocab_size: int = 5,
        *,
        capacity: int = 64,
        verify_widths: tuple[int, ...] = (2, 4, 6, 10, 16),
        prefill_width: int = 8,
        logits: Callable[[Sequence[int]], NDArray[np.float32]] | None = None,
        salt: int = 0,
    ) -> None:
        self.vocab_size, self.capacity, self.verify_widths = vocab_size, capacity, verify_widths
        self.kv_length = 0
        self.widths_used: list[int] = []
        self.num_moved = 0
        self.num_rows_read = 0
        self.contents = KvContents(capacity, prefill_width)
        self.contents.exact_widths = (*verify_widths, prefill_width)
        self._prefill_width = prefill_width
        self._slots = [POISON] * (capacity + max(prefill_width, *verify_widths))
        self._logits = logits or (lambda prefix: hashed_logits(prefix, vocab_size, salt=salt))

    def prefill(self, token_ids: Sequence[int]) -> None:
        for start in range(0, len(token_ids), self._prefill_width):
            self._call(token_ids[start : start + self._prefill_width], self._prefill_width)

    def verify(self, token_ids: Sequence[int], parents: Sequence[int] | None = None) -> NDArray[np.float32]:
        width = next(w for w in self.verify_widths if w >= len(token_ids))
        start = self._start = self.kv_length
        self._call(token_ids, width)
        self._is_tree = parents is not None
        if self._is_tree:  # what it leaves behind is known when its path is
            self.contents.begin(start)
        parents = range(-1, len(token_ids) - 1) if parents is None else parents
        return np.stack([self._row(start, self.seen(row, parents)) for row in range(len(token_ids))])

    def seen(self, row: int, parents: Sequence[int]) -> list[int]:
        """Return the rows of a call that one of them sees, from the root on."""
        return [] if row < 0 else [*self.seen(parents[row], parents), row]

    def keep(self, rows: Sequence[int]) -> None:
        assert list(rows) == sorted(set(rows))
        assert self._start + max(rows) < self.kv_length
        for place, row in enumerate(rows):
            self.num_moved += place != row
            self._slots[self._start + place] = self._slots[self._start + row]
        if self._is_tree:
            self.contents.wrote(self._start, self._slots[self._start : self._start + len(rows)], width=0)
        self.rollback(self._start + len(rows))
        self._slots[self.kv_length :] = [POISON] * (len(self._slots) - self.kv_length)

    def decode(self, token_id: int) -> NDArray[np.float32]:
        self._call((token_id,), 1)
        return self._row(self.kv_length)

    def forward(self, token_ids: Sequence[int], start: int, width: int) -> NDArray[np.float32]:
        self.rollback(start)
        self._call(token_ids, width)
        return np.stack([self._row(start, range(row + 1)) for row in range(len(token_ids))])

    def rollback(self, length: int) -> None:
        assert 0 <= length <= self.kv_length
        self.kv_length = length

    def save(self, start: int, end: int) -> KvBlock:
        cold_bits = self.contents.length(end, cold_bits=True) == end
        return KvBlock(self.contents.token_ids(start, end), (np.array(self._slots[start:end]),), cold_bits)

    def restore(self, block: KvBlock) -> None:
        start, end = self.kv_length, self.kv_length + len(block.token_ids)
        assert end <= self.capacity
        self.contents.begin(start)
        self._slots[start:end] = block.arrays[0].tolist()
        self.contents.restored(start, block)
        self.kv_length = end

    def close(self) -> None:
        self._slots = []

    def _call(self, token_ids: Sequence[int], width: int) -> None:
        assert 0 < len(token_ids) <= width
        assert self.kv_length + len(token_ids) <= self.capacity, "a real engine would write beyond its capacity"
        assert all(0 <= token < self.vocab_size for token in token_ids)
        self.widths_used.append(width)
        start = self.kv_length
        self.contents.begin(start)
        padded = [*token_ids, *[POISON] * (width - len(token_ids))]
        self._slots[self.kv_length : self.kv_length + width] = padded
        self.kv_length += len(token_ids)
        self.contents.wrote(start, token_ids, width)

    def _row(self, start: int, rows: Sequence[int] = ()) -> NDArray[np.float32]:
        """Return the logits [V] after `start` slots and these rows behind them."""
        prefix = [*self._slots[:start], *(self._slots[start + row] for row in rows)]
        assert POISON not in prefix, "a padded or stale slot was read"
        return self._logits(prefix)


class ToyHead:
    """A head whose logits are a function of the tokens it read, and that is given a feature for each of the text's."""

    def __init__(self, vocab_size: int = 5, *, capacity: int = 64, salt: int = 9) -> None:
        self.vocab_size, self.capacity, self._salt = vocab_size, capacity, salt
        self.num_steps = 0
        self._rows: list[int] = []

    @property
    def kv_length(self) -> int:
        return len(self._rows)

    @property
    def confidence(self) -> float:
        weights = np.exp(self._logits - self._logits.max())
        return float(weights.max() / weights.sum())

    def read(self, token_ids: Sequence[int], features: NDArray[np.float32]) -> NDArray[np.float32]:
        assert 0 < len(token_ids) == len(features)
        self._rows += token_ids
        assert self.kv_length <= self.capacity, "a real engine would refuse this"
        self._logits = hashed_logits(self._rows, self.vocab_size, salt=self._salt)
        return self._logits

    def step(self, token_id: int) -> NDArray[np.float32]:
        self.num_steps += 1
        return self.read((token_id,), np.zeros((1, 1), np.float32))

    def rollback(self, length: int) -> None:
        assert 0 <= length <= self.kv_length
        del self._rows[length:]


class ToyParallelHeads:
    """Heads that know a text, as far as `tokens` goes, and what the toy engine says to it greedily.

    Head j gives the logits of an engine (with a salt, of another one) j + 1 tokens behind the text; features are
    numbers of positions.
    """

    def __init__(self, vocab_size: int, *, num_heads: int = 4, salt: int = 0, ids: Sequence[int] | None = None) -> None:
        self._size, self._salt, self.token_ids = vocab_size, salt, list(range(vocab_size) if ids is None else ids)
        self.vocab_size, self.num_heads = len(self.token_ids), num_heads
        self.confidence = np.full(num_heads, 0.5, np.float32)
        self.tokens: list[int] = []

    def guess(self, feature: NDArray[np.float32]) -> NDArray[np.float32]:
        assert feature.tolist() == [len(self.tokens) - 2], "not what the latest token was said from"
        path, rows = list(self.tokens), []
        for _ in range(self.num_heads):
            rows.append(hashed_logits(path, self._size, salt=self._salt)[self.token_ids])
            path.append(int(hashed_logits(path, self._size).argmax()))
        return np.stack(rows)

    def close(self) -> None:
        self.tokens = []


class DriftingEngine(ToyEngine):
    """Trees that show: rows behind another branch of their call are off, and so is whatever follows them once kept."""

    _drifted = False

    def verify(self, token_ids: Sequence[int], parents: Sequence[int] | None = None) -> NDArray[np.float32]:
        rows = super().verify(token_ids, parents)
        for row in range(len(rows)):
            if self._drifted or (parents is not None and self.seen(row, parents) != list(range(row + 1))):
                rows[row] = np.roll(rows[row], 1)
        return rows

    def keep(self, rows: Sequence[int]) -> None:
        self._drifted = self._drifted or list(rows) != list(range(len(rows)))
        super().keep(rows)


class RowDependentEngine(ToyEngine):
    """Breaks the promise: its rows depend on the last token of the call, as per-tensor dynamic scales make them."""

    def verify(self, token_ids: Sequence[int], parents: Sequence[int] | None = None) -> NDArray[np.float32]:
        return self._shifted(super().verify(token_ids, parents), token_ids)

    def forward(self, token_ids: Sequence[int], start: int, width: int) -> NDArray[np.float32]:
        return self._shifted(super().forward(token_ids, start, width), token_ids)

    def _shifted(self, rows: NDArray[np.float32], token_ids: Sequence[int]) -> NDArray[np.float32]:
        rows[:, 0] += np.float32(token_ids[-1])
        return rows
