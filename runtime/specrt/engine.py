"""What the loop and the drafters need of an inference engine."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specrt.kv import KvBlock, KvContents
from specrt_profiles.manifest import EngineSpec


class Engine(Protocol):
    """A model with KV buffers for one sequence.

    `kv_length` tokens are in the buffers; every call feeds tokens behind them. Logits are views of the engine's
    own output buffer, valid until its next call.
    """

    vocab_size: int
    capacity: int
    kv_length: int
    verify_widths: tuple[int, ...]

    def prefill(self, token_ids: Sequence[int]) -> None:
        """Feed any number of tokens, in chunks, without computing logits."""
        ...

    def verify(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Feed n tokens in one call of the smallest verify width >= n; return their logits [n, V]."""
        ...

    def decode(self, token_id: int) -> NDArray[np.float32]:
        """Feed one token in a call of width 1, which may round differently from verify; return its logits [V]."""
        ...

    def forward(self, token_ids: Sequence[int], start: int, width: int) -> NDArray[np.float32]:
        """Feed tokens at positions start, ... in a call of any width; return their logits [n, V] (to measure)."""
        ...

    def rollback(self, length: int) -> None:
        """Keep the first `length` <= kv_length tokens; later calls overwrite the others."""
        ...

    def close(self) -> None:
        """Release the engine; it cannot be used afterwards."""
        ...


class KvEngine(Engine, Protocol):
    """An engine that knows what its KV slots hold, and can copy them."""

    contents: KvContents

    def save(self, start: int, end: int) -> KvBlock:
        """Return a copy of the slots start .. end - 1 <= kv_length, whose content is known."""
        ...

    def restore(self, block: KvBlock) -> None:
        """Put a copy of its own slots back behind the `kv_length` tokens that preceded them when it was saved."""
        ...


def open_engine(folder: Path, spec: EngineSpec, *, threads: int | None) -> KvEngine:
    """Open the engine that `spec` describes, with its default verify widths.

    threads: None for one per physical core. Raises `EngineError` or `MissingExtraError`.
    """
    from specrt.engine_ort import OrtEngine

    return OrtEngine(folder, spec, threads=threads)
