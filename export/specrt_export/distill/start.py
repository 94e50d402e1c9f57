"""A head that a training begins with: one that was trained before, for the same target."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specrt_export.distill.head import Head, Layout
from specrt_export.errors import ExportError
from specrt_export.head_file import EagleFile, read_head


@dataclass(frozen=True, slots=True)
class Start:
    """A head's tensors as its file has them, by parameter of `Head`; the tokens of its rows, ascending.

    digest: SHA-256 of the file.
    """

    tensors: dict[str, torch.Tensor]
    ffn: int
    vocabulary: NDArray[np.int64]
    digest: str

    def load(self, head: Head) -> None:
        """Give a head of the same layout and width these weights."""
        with torch.no_grad():
            for name, parameter in head.named_parameters():
                parameter.copy_(self.tensors[name])


def read_start(path: Path, layout: Layout, model: Any, name: str, *, ffn: int | None) -> Start:
    """Read a head of `layout` for the target `model`; raises `ExportError` for one that a training cannot go on with.

    `name`: of the target, for messages. `ffn`: the width that was asked for, None for the head's.
    """
    vocab_size = len(model.get_output_embeddings().weight)
    found = read_head(path, model.config, vocab_size=vocab_size)
    if not isinstance(found, EagleFile) or found.layout != layout:
        other = found.layout if isinstance(found, EagleFile) else "another"
        raise ExportError(f"{path}: expected a head of layout {layout} to begin with, found {other}: see --drafter")
    found.check_target(model, name)
    if ffn not in (None, found.ffn):
        raise ExportError(f"{path}: expected a head of --ffn {ffn}, found {found.ffn}: leave --ffn out")
    if found.matrix is not None:
        raise ExportError(
            f"{path}: expected a head that reads the target's output matrix, found one with lm_head.weight of its own: "
            "begin without --start"
        )
    ids = np.arange(vocab_size) if found.token_ids is None else np.sort(found.token_ids)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return Start(dict(found.tensors), found.ffn, ids, digest)
