"""How far a peer's logits and tokens are from the source's."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


def mean_kl(source: Sequence[NDArray[np.float32]], peer: Sequence[NDArray[np.float32]]) -> float:
    """Return the mean over all rows of KL(source || peer) in nats; each array is [n, V].

    Columns beyond the shorter vocabulary are padding and left out. Raises `ValueError` for another number of rows, or
    for logits that are not numbers.
    """
    values: list[float] = []
    for theirs, ours in zip(source, peer, strict=True):
        if len(theirs) != len(ours):
            raise ValueError(f"expected {len(theirs)} rows of logits, found {len(ours)}")
        if not np.isfinite(ours).all():
            raise ValueError("logits that are not numbers")
        width = min(theirs.shape[1], ours.shape[1])
        for p_row, q_row in zip(theirs[:, :width], ours[:, :width], strict=True):  # one at a time: float64 is large
            log_p, log_q = _log_softmax(p_row), _log_softmax(q_row)
            values.append(max(0.0, float(np.exp(log_p) @ (log_p - log_q))))
    return float(np.mean(values))


def equal_share(ids: Sequence[int], reference: Sequence[int]) -> float:
    """Return the share of `reference` before the first token that differs: what follows continues another text."""
    for position, (ours, theirs) in enumerate(zip(ids, reference, strict=False)):
        if ours != theirs:
            return position / len(reference)
    return min(len(ids), len(reference)) / len(reference)


def read_reference(path: Path) -> tuple[list[list[int]], list[NDArray[np.float32]]]:
    """Return the fixed texts as token ids, and the source's logits [n, V] of each."""
    with np.load(path) as file:
        texts: list[list[int]] = json.loads(str(file["texts"]))
        return texts, [file[f"logits.{number}"] for number in range(len(texts))]


def _log_softmax(row: NDArray[np.float32]) -> NDArray[np.float64]:
    shifted = row.astype(np.float64) - float(row.max())
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return result
