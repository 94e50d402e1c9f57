"""Drafts that guess fewer tokens than they read: an output matrix of frequent tokens (FR-Spec, arXiv 2502.14856).

A draft's directory says which tokens in `draft_tokens.npy`, int64 [n], in any order.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from specrt_export.errors import CheckpointError, UnsupportedModelError

TOKENS = "draft_tokens.npy"


def read_draft_tokens(directory: Path, *, vocab_size: int) -> NDArray[np.int64] | None:
    """Return the tokens that the draft in a directory may guess, None for all of them.

    Raises `CheckpointError` for a file with anything else than different ids below `vocab_size`.
    """
    path = directory / TOKENS
    if not path.is_file():
        return None
    try:
        found = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise CheckpointError(f"{path}: not readable as token ids ({error}): write it again, or delete it") from None
    is_list = isinstance(found, np.ndarray) and found.ndim == 1 and found.dtype.kind in "iu" and len(found) > 1
    if not is_list or not 0 <= int(found.min()) <= int(found.max()) < vocab_size or len(np.unique(found)) < len(found):
        raise CheckpointError(f"{path}: expected two or more different token ids below {vocab_size}, found others")
    ids: NDArray[np.int64] = found.astype(np.int64)
    return ids


def check_draft_tokens(token_ids: NDArray[np.int64] | None, directory: Path, *, num_tokens: int) -> None:
    """Raise `CheckpointError` for a draft that may guess what a target of `num_tokens` tokens does not have."""
    if token_ids is not None and int(token_ids.max()) >= num_tokens:
        raise CheckpointError(
            f"{directory / TOKENS}: expected tokens of the target, ids below {num_tokens}, found {token_ids.max()}: "
            "leave it out"
        )


def trim_output(model: Any, token_ids: NDArray[np.int64]) -> None:
    """Give a model an output matrix of its own, with the rows of these tokens."""
    matrix = model.get_output_embeddings()
    if type(matrix) is not nn.Linear:
        raise UnsupportedModelError(f"{type(model).__name__} has an output matrix that cannot be cut: delete {TOKENS}")
    rows = torch.from_numpy(token_ids)
    small = nn.Linear(matrix.in_features, len(rows), bias=matrix.bias is not None, device="meta")
    small.weight = nn.Parameter(matrix.weight.data[rows], requires_grad=False)
    if matrix.bias is not None:
        small.bias = nn.Parameter(matrix.bias.data[rows], requires_grad=False)
    model.set_output_embeddings(small)
    model.config.tie_word_embeddings = False
