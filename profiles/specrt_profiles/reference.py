"""Reference logits of a source model, kept with the artifact so that any machine can replay them without torch.

One .npz per engine, text t holding
  ids.t        int64 [n]        the tokens
  full_rows.t  int64 [f]        rows kept whole, full.t float32 [f, V] their logits
  top_ids.t    int64 [n, m]     the m = min(64, V) largest logits of every row, top.t float32 [n, m] their values
  logsumexp.t  float64 [n]      of every row
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from specrt_profiles.errors import ManifestError

_TOP = 64
_FULL_ROWS = 3  # per text
# what NumPy and zipfile raise for damaged files
_DAMAGE = (OSError, ValueError, KeyError, TypeError, EOFError, RuntimeError, MemoryError, BadZipFile, zlib.error)


@dataclass(frozen=True, slots=True)
class ReferenceText:
    """The reference of one text; see the module's docstring for shapes."""

    ids: NDArray[np.int64]
    full_rows: NDArray[np.int64]
    full: NDArray[np.float32]
    top_ids: NDArray[np.int64]
    top: NDArray[np.float32]
    logsumexp: NDArray[np.float64]


_FIELDS = ("ids", "full_rows", "full", "top_ids", "top", "logsumexp")


def write_reference(path: Path, texts: Sequence[Sequence[int]], logits: Sequence[NDArray[np.float32]]) -> None:
    """Write the reference of token ids and their logits [n, V]."""
    arrays: dict[str, NDArray[np.generic]] = {}
    for number, (ids, rows) in enumerate(zip(texts, logits, strict=True)):
        text = _summarise(np.asarray(ids, np.int64), rows)
        arrays |= {f"{name}.{number}": getattr(text, name) for name in _FIELDS}
    np.savez_compressed(path, **arrays)  # type: ignore[arg-type]


def read_reference(path: Path) -> list[ReferenceText]:
    """Read a reference; raises `ManifestError` when the file is damaged."""
    try:
        with np.load(path, allow_pickle=False) as file:
            count = sum(name.startswith("ids.") for name in file.files)
            return [ReferenceText(*(file[f"{name}.{number}"] for name in _FIELDS)) for number in range(count)]
    except _DAMAGE as error:
        raise ManifestError(f"{path}: not a readable reference ({error}): copy the artifact again") from None


def _summarise(ids: NDArray[np.int64], rows: NDArray[np.float32]) -> ReferenceText:
    count = min(_TOP, rows.shape[1])
    top_ids = np.stack([np.sort(np.argpartition(row, -count)[-count:]) for row in rows])
    sums = [logsumexp(row) for row in rows]  # one at a time: all of them may be gigabytes
    full_rows = np.unique(np.linspace(0, len(ids) - 1, _FULL_ROWS).astype(np.int64))
    return ReferenceText(
        ids=ids,
        full_rows=full_rows,
        full=rows[full_rows],
        top_ids=top_ids.astype(np.int64),
        top=np.take_along_axis(rows, top_ids, -1),
        logsumexp=np.array(sums),
    )


def logsumexp(rows: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return log sum exp over the last axis of logits, in float64."""
    wide = rows.astype(np.float64)
    peak = wide.max(-1, keepdims=True)
    result: NDArray[np.float64] = (peak + np.log(np.exp(wide - peak).sum(-1, keepdims=True)))[..., 0]
    return result
