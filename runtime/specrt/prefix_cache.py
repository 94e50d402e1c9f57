"""KV of earlier requests for prompts that begin alike: system prompts, the turns of a chat.

The buffers of an engine hold what it was last fed, and keep it until something else is written: a prompt that begins
with it goes on from there, at no cost at all. What would be overwritten can be copied to host memory first, in blocks
of the prefill width. A block is found by the blocks before it and its own tokens, so that texts share the blocks of
their common beginning; the least recently used go first, a text's later blocks before its earlier ones.
"""

import itertools
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from specrt.engine import KvEngine
from specrt.errors import RequestError
from specrt.kv import KvBlock

_Key = tuple[KvEngine, int, tuple[int, ...]]  # engine, number of the block before, tokens


@dataclass(frozen=True, slots=True)
class _Entry:
    number: int
    block: KvBlock


class Reuse(Protocol):
    """A prefix cache for one engine."""

    def __call__(self, token_ids: Sequence[int], *, cold_bits: bool) -> int:
        """Leave the longest known beginning of a prompt in the KV buffers; return its length."""
        ...


class PrefixCache:
    """Beginnings of earlier texts, for any number of engines; `limit_bytes` bounds the copies (0: none)."""

    def __init__(self, limit_bytes: int) -> None:
        self.num_bytes = 0
        self._limit_bytes = limit_bytes
        self._entries: OrderedDict[_Key, _Entry] = OrderedDict()  # least recently used first
        self._numbers = itertools.count(1)

    def reuse(self, engine: KvEngine, token_ids: Sequence[int], *, cold_bits: bool) -> int:
        """Leave the longest known beginning of `token_ids` in the engine's KV buffers, and nothing else.

        Returns its length. cold_bits: only KV with the bits of a cold start (`specrt.kv`).
        """
        width = engine.contents.prefill_width
        length = engine.contents.common(token_ids, engine.kv_length, cold_bits=cold_bits)
        found = self._find(engine, token_ids, cold_bits=cold_bits)
        self._save(engine, beyond=length, cold_bits=cold_bits)
        if len(found) * width > length:
            engine.rollback(length // width * width)
            for entry in found[length // width :]:
                engine.restore(entry.block)
        else:
            engine.rollback(length)
        return engine.kv_length

    def clear(self) -> None:
        """Drop all copies."""
        self._entries.clear()
        self.num_bytes = 0

    def _find(self, engine: KvEngine, token_ids: Sequence[int], *, cold_bits: bool) -> list[_Entry]:
        """Return the entries of the longest known beginning."""
        width = engine.contents.prefill_width
        found: list[_Entry] = []
        for start in range(0, len(token_ids) - width + 1, width):
            before = found[-1].number if found else 0
            entry = self._entries.get((engine, before, tuple(token_ids[start : start + width])))
            if entry is None or (cold_bits and not entry.block.cold_bits):
                break
            found.append(entry)
        return found

    def _save(self, engine: KvEngine, *, beyond: int, cold_bits: bool) -> None:
        """Copy what the buffers hold, if a whole block of it lies beyond what is going to be kept of it."""
        width = engine.contents.prefill_width
        num_blocks = engine.contents.length(engine.kv_length, cold_bits=cold_bits) // width
        if num_blocks * width <= beyond or not self._limit_bytes:
            return
        keys: list[_Key] = []
        before = 0
        for end in range(width, num_blocks * width + 1, width):
            key = (engine, before, engine.contents.token_ids(end - width, end))
            keys.append(key)
            entry = self._entries.get(key)
            if entry is None:
                entry = _Entry(next(self._numbers), engine.save(end - width, end))
                if not self._make_room(entry.block.num_bytes, keys):
                    break
                self.num_bytes += entry.block.num_bytes
            elif not entry.block.cold_bits and engine.contents.length(end, cold_bits=True) == end:
                entry = replace(entry, block=engine.save(end - width, end))
            self._entries[key] = entry
            before = entry.number
        for key in reversed(keys):  # the first block last: no block goes before those that follow it
            if key in self._entries:
                self._entries.move_to_end(key)

    def _make_room(self, num_bytes: int, keep: Sequence[_Key]) -> bool:
        """Drop entries until so many bytes fit, but none of `keep`; tell whether they do."""
        while self.num_bytes + num_bytes > self._limit_bytes:
            oldest = next(iter(self._entries), None)
            if oldest is None or oldest in keep:
                return False
            self.num_bytes -= self._entries.pop(oldest).block.num_bytes
        return True


def prefix_cache(mib: float | None, device: str) -> PrefixCache | None:
    """Return a cache of so many MiB, None for none; raises `RequestError` for what a device cannot have."""
    if mib is None:
        return None
    if not 0 <= mib < math.inf:
        raise RequestError(f"prefix_cache_mib: expected 0 or more, or None for no reuse, found {mib!r}")
    if mib and device != "cpu":
        raise RequestError(f"prefix_cache_mib: expected 0 or None on a GPU, which keeps no copies, found {mib!r}")
    return PrefixCache(int(mib * 2**20))
