"""What the loop and the drafters need of an inference engine."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specrt.errors import EngineError
from specrt.kv import KvBlock, KvContents
from specrt.rows import Row, Rows
from specrt_profiles.manifest import EngineSpec


class Engine(Protocol):
    """A model with KV buffers for one sequence.

    `kv_length` tokens are in the buffers; every call feeds tokens behind them. Logits belong to the engine,
    valid until its next call; those of `verify` and `decode` may still be on a device. `platform` names engine, version
    and device, for keys of measured facts.
    """

    platform: str
    vocab_size: int
    capacity: int
    kv_length: int
    verify_widths: tuple[int, ...]
    takes_trees: bool

    def prefill(self, token_ids: Sequence[int]) -> None:
        """Feed any number of tokens, in chunks, without computing logits."""
        ...

    def verify(self, token_ids: Sequence[int], parents: Sequence[int] | None = None) -> Rows:
        """Feed n tokens in one call of the smallest verify width >= n; return their logits [n, V].

        parents: None for a chain; else, for an engine that `takes_trees`, the row that each token follows, -1 for
        the tokens before the call, parents first. A token sees those before the call, its ancestors and itself.
        """
        ...

    def decode(self, token_id: int) -> Row:
        """Feed one token in a call of width 1, which may round differently from verify; return its logits [V].

        A plan without a call of width 1 takes its narrowest.
        """
        ...

    def forward(self, token_ids: Sequence[int], start: int, width: int) -> NDArray[np.float32]:
        """Feed tokens at positions start, ... in a call of any width; return their logits [n, V] (to measure).

        A plan has the widths it was built with.
        """
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


class KvEngine(Engine, Protocol):
    """An engine that knows what its KV slots hold, and can copy them.

    features: what the model computed of the token in each slot [S, F], kept, moved and copied with its KV; None for an
    engine without. exit: runs its first layers alone; None for an engine that cannot.
    """

    contents: KvContents
    features: NDArray[np.float32] | None

    @property
    def exit(self) -> "EarlyExit | None":
        """See above."""
        ...

    def save(self, start: int, end: int) -> KvBlock:
        """Return a copy of the slots start .. end - 1 <= kv_length, whose content is known."""
        ...

    def restore(self, block: KvBlock) -> None:
        """Put a copy of its own slots back behind the `kv_length` tokens that preceded them when it was saved."""
        ...


class EarlyExit(Protocol):
    """The layers of an engine below an early exit, which run ahead of it over the same KV buffers.

    The verify call that follows finds their KV and states there for as many of its first tokens as were fed here.
    """

    @property
    def room(self) -> int:
        """How many tokens can be guessed now."""
        ...

    def begin(self) -> None:
        """Begin behind the tokens in the engine's KV buffers; what was fed before is forgotten."""
        ...

    def guess(self, token_id: int) -> Row:
        """Feed a token; return the exit's logits [V] after it, valid until the next call."""
        ...


class HeadEngine(KvEngine, Protocol):
    """A head, whose row i stands for token i + 1 of the text and a feature of token i.

    `vocab_size` is the number of tokens that it can guess. Logits [V] are a view of its own buffer, valid until the
    next call.
    """

    @property
    def confidence(self) -> float:
        """The probability of the best guess of the last call."""
        ...

    def read(self, token_ids: Sequence[int], features: NDArray[np.float32]) -> NDArray[np.float32]:
        """Feed n >= 1 tokens with the target's features [n, F] of those before them; return logits after the last."""
        ...

    def step(self, token_id: int) -> NDArray[np.float32]:
        """Feed a token with the head's own feature, which the last call left; return logits after it."""
        ...


class ParallelHeads(Protocol):
    """Heads that guess side by side: head j the token j + 2 places after the one whose feature they read.

    `vocab_size` is the number of tokens that they can guess. Arrays are views of its own buffers, valid until the next
    call.
    """

    vocab_size: int
    num_heads: int

    @property
    def confidence(self) -> NDArray[np.float32]:
        """The probability of each head's best guess in the last call [M]."""
        ...

    def guess(self, feature: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the logits of all heads [M, V] for a feature of the target [F]."""
        ...

    def close(self) -> None:
        """Release the heads; they cannot be used afterwards."""
        ...


def open_head(folder: Path, spec: EngineSpec, *, threads: int | None, device: str | None = None) -> HeadEngine:
    """Open a head; raises `EngineError` for a GPU, where none runs yet."""
    _refuse_gpu(spec, device, "eagle")
    from specrt.engine_ort_head import OrtHead

    return OrtHead(folder, spec, threads=threads)


def open_parallel_heads(
    folder: Path, spec: EngineSpec, *, threads: int | None, device: str | None = None
) -> ParallelHeads:
    """Open parallel heads; raises `EngineError` for a GPU, where none run yet."""
    _refuse_gpu(spec, device, "medusa")
    from specrt.engine_ort_parallel import OrtParallelHeads

    return OrtParallelHeads(folder, spec, threads=threads)


def open_engine(folder: Path, spec: EngineSpec, *, threads: int | None, device: str | None = None) -> KvEngine:
    """Open the engine that `spec` describes on a device, with its default verify widths.

    threads: of the CPU, None for one per physical core. device: see `resolve_device`. Raises `EngineError` or
    `MissingExtraError`.
    """
    index = _gpu_index(resolve_device(spec, device))
    if spec.plan is not None:
        from specrt.engine_trt import open_plan

        assert index is not None
        return open_plan(folder, spec, index=index)
    if index is not None:
        from specrt.engine_ort_cuda import open_on_cuda

        return open_on_cuda(folder, spec, index=index)
    if spec.exit is not None:
        from specrt.engine_ort_exit import OrtExitEngine

        return OrtExitEngine(folder, spec, threads=threads)
    from specrt.engine_ort import OrtEngine

    return OrtEngine(folder, spec, threads=threads)


def resolve_device(spec: EngineSpec, device: str | None) -> str:
    """Return where an engine runs: `cpu` or `cuda:N`; None stands for `cuda:0` for a TensorRT plan, else for `cpu`."""
    if device is None:
        return "cpu" if spec.plan is None else "cuda:0"
    if device != "cpu" and _gpu_index(device) is None:
        raise EngineError(f"device: expected cpu or cuda:N (cuda:0 is the first GPU), found {device!r}")
    if device == "cpu" and spec.plan is not None:
        raise EngineError(
            f"device: expected cuda:N, found cpu: {spec.file} is a TensorRT plan; on the CPU, load the artifact it was "
            "made of"
        )
    return device


def measurable_widths(spec: EngineSpec) -> list[int]:
    """Return the call widths of which every row's logits can be had: a plan's prefill gives none."""
    return sorted({*spec.verify_widths, *([spec.prefill_width] if spec.plan is None else [])})


def _refuse_gpu(spec: EngineSpec, device: str | None, drafter: str) -> None:
    if _gpu_index(resolve_device(spec, device)) is not None:
        raise EngineError(
            f"device: expected cpu for the drafter {drafter}, found {device}: choose another drafter there"
        )


def _gpu_index(device: str) -> int | None:
    number = re.fullmatch(r"cuda:(0|[1-9][0-9]{0,3})", device)
    return int(number[1]) if number else None
