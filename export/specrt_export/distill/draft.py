"""Pruned drafts on disk: an ordinary transformers directory, and a card that says what it is and how it came to be."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specrt_export.distill.card import TrainedCard
from specrt_export.errors import ExportError
from specrt_export.staging import staging
from specrt_export.trimmed import TOKENS
from specrt_profiles.codec import encode

CARD = "draft.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCard(TrainedCard):
    """What a pruned draft is, and how good it was before healing.

    vocabulary_size: how many tokens it may guess. coverage: of the text it learned from, the share that are among them.
    layers: of the target, that it has. influence: of each layer of the target but the last (`prune.influence`).
    """

    vocabulary_size: int
    coverage: float
    layers: tuple[int, ...]
    influence: tuple[float, ...]
    agreement_before: tuple[float, ...]
    block_efficiency_before: float


def check_draft_path(path: Path) -> None:
    """Raise `ExportError` for a path that no draft can be written to; a draft that is there may be replaced."""
    if path.exists() and not (path / CARD).is_file():
        raise ExportError(f"{path}: expected the folder of an earlier pruned draft or a new one, found other things")
    if not path.absolute().parent.is_dir():
        raise ExportError(f"{path}: there is no folder {path.parent}")


def write_draft(
    path: Path, draft: Any, weights: Mapping[str, torch.Tensor], card: DraftCard, *, tokenizer: Any,
    token_ids: NDArray[np.int64], documents: Mapping[str, str],
) -> None:  # fmt: skip
    """Write a draft with `weights` in the place of what it was trained from, in bfloat16; it appears when complete.

    token_ids: those that it may guess. documents: licence and the like of the target, which travel with the draft.
    """
    parameters = dict(draft.named_parameters())
    with torch.no_grad():
        for name, value in weights.items():
            parameters[name].copy_(value)
    draft.to(torch.bfloat16)
    with staging(path) as folder:
        draft.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        np.save(folder / TOKENS, token_ids, allow_pickle=False)
        for name, text in documents.items():
            (folder / name).write_text(text, "utf-8")
        (folder / CARD).write_text(json.dumps(encode(card), indent=2) + "\n", "utf-8")
