"""What the loop and the drafters need of an inference engine."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

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
    takes_trees: bool

    def prefill(self, token_ids: Sequence[int]) -> None:
        """Feed any number of tokens, in chunks, without computing logits."""
        ...

    def verify(self, token_ids: Sequence[int], parents: Sequence[int] | None = None) -> NDArray[np.float32]:
        """Feed n tokens in one call of the smallest verify width >= n; return their logits [n, V].

        parents: None for a chain; else, for an engine that `takes_trees`, the row that each token follows, -1 for
        the tokens before the call, parents first. A token sees those before the call, its ancestors and itself.
        """
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

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows, rising, of the last `verify` as the tokens that follow those before it; drop the others.

        Moves the KV of rows that are not in their place yet: nothing for the first rows of a call.
        """
        ...

    def close(self) -> None:
        """Release the engine; it cannot be used afterwards."""
        ...


def open_engine(folder: Path, spec: EngineSpec, *, threads: int | None) -> Engine:
    """Open the engine that `spec` describes, with its default verify widths.

    threads: None for one per physical core. Raises `EngineError` or `MissingExtraError`.
    """
    from specrt.engine_ort import OrtEngine

    return OrtEngine(folder, spec, threads=threads)
