"""Medusa heads in torch (arXiv 2401.10774), what they are trained on, and how well they guess.

Head j reads the target's feature of token i, what the output matrix makes token i + 1 of, and guesses token i + 2 + j:
blocks of x + SiLU(linear(x)), then rows of the target's output matrix. Linear layers begin at zero, so that every head
begins as the target's own.
"""

from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear, log_softmax, silu

from specrt_export.distill.data import Dataset
from specrt_export.distill.loss import Batch
from specrt_export.distill.train import Training, TrainingPlan

RANKS = 10  # guesses of each head that are counted
_CHUNK = 1024  # rows of logits at a time


class MedusaHeads(nn.Module):
    """`num_heads` heads of `num_blocks` blocks each, without their output matrices."""

    def __init__(self, hidden_size: int, *, num_heads: int, num_blocks: int) -> None:
        super().__init__()
        self.num_heads, self.num_blocks = num_heads, num_blocks
        self.blocks = nn.ModuleList(
            nn.ModuleList(nn.Linear(hidden_size, hidden_size) for _ in range(num_blocks)) for _ in range(num_heads)
        )
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def head(self, index: int, features: torch.Tensor) -> torch.Tensor:
        """Return what the output matrix of one head reads, [.., H] for features [.., H]."""
        blocks: Any = self.blocks[index]
        for block in blocks:
            features = features + silu(block(features))
        return features

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Return what the output matrices read, [B, M, H] for features [B, 1, H]."""
        return torch.cat([self.head(index, features) for index in range(self.num_heads)], 1)


def loss(heads: MedusaHeads, batch: Batch, rows: torch.Tensor, *, decay: float) -> torch.Tensor:
    """Return the cross entropy of all heads to the target's distributions over the draft vocabulary.

    rows: [V, H] of the output matrix. Head j counts decay^j (section 2.2.1 of the paper, where it is 0.8).
    """
    counted = (batch.weights > 0) & (batch.following >= 0)
    place = counted.flatten().cumsum(0).view(counted.shape) - 1  # of each row among those that count
    probs = linear(batch.wanted[counted], rows).float().softmax(-1)
    total = torch.zeros(())
    for index in range(min(heads.num_heads, counted.shape[1])):
        use = counted[:, index:]
        given = heads.head(index, batch.features[:, : use.shape[1]][use])
        terms = -(probs[place[:, index:][use]] * log_softmax(linear(given, rows).float(), -1)).sum(-1)
        weights = batch.weights[:, index:][use]
        total = total + decay**index * (terms * weights).sum() / weights.sum().clamp(min=1)
    return total


def ranks(heads: MedusaHeads, batch: Batch, rows: torch.Tensor) -> torch.Tensor:
    """Return which of each head's guesses the text's token is: [heads, n], 0 for the best; V where it is none.

    Of all features that as many tokens that count follow as there are heads.
    """
    length = max(0, batch.weights.shape[1] - heads.num_heads + 1)
    windows = [slice(index, index + length) for index in range(heads.num_heads)]
    whole = torch.stack([batch.weights[:, window] > 0 for window in windows]).all(0)
    features = batch.features[:, :length][whole]
    found = torch.empty(heads.num_heads, len(features), dtype=torch.int64)
    for index, window in enumerate(windows):
        wanted = batch.following[:, window][whole]
        for begin in range(0, len(features), _CHUNK):
            part = slice(begin, begin + _CHUNK)
            logits = linear(heads.head(index, features[part]), rows).float()
            right = logits.gather(1, wanted[part].clamp(min=0)[:, None])
            better = (logits > right).sum(1)
            found[index, part] = torch.where(wanted[part] >= 0, better, len(rows))
    return found


def by_rank(found: torch.Tensor) -> tuple[tuple[float, ...], ...]:
    """Return of each head how often the text's token is each of its first guesses, from `ranks` [heads, n]."""
    if not found.shape[1]:
        return ()
    shares = torch.stack([(found == rank).float().mean(1) for rank in range(RANKS)], 1)
    return tuple(tuple(round(share, 4) for share in head) for head in shares.tolist())


class MedusaTraining(Training):
    """Training of Medusa heads; `rows` [V, H] of the target's output matrix are the tokens that they can guess."""

    def __init__(self, heads: MedusaHeads, dataset: Dataset, rows: torch.Tensor, plan: TrainingPlan) -> None:
        super().__init__(heads, dataset, plan)
        self._heads, self._rows = heads, rows

    def ranks(self, dataset: Dataset) -> torch.Tensor:
        """Return `ranks` of the averaged heads over a dataset."""
        return self.over(dataset, lambda batch: ranks(self._heads, batch, self._rows))

    def _loss(self, batch: Batch, generator: torch.Generator) -> torch.Tensor:
        return loss(self._heads, batch, self._rows, decay=self._plan.decay)

    def _agreement(self, batch: Batch) -> torch.Tensor:
        return ranks(self._heads, batch, self._rows) == 0
