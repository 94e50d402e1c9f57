"""Healing: a part of a model learns to say what the target says, from the text that the target wrote.

What is learned from is what the target's output matrix read after each token, the same that heads learn from. The draft
shares that matrix, so that it has to reproduce this vector: the loss is the cross entropy to the target's distribution
over its most frequent tokens and some others, drawn anew for each update, and the distance between the two vectors.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.functional import linear, log_softmax, smooth_l1_loss

from specrt_export.distill.data import Dataset, Texts, draft_vocabulary
from specrt_export.distill.features import padded
from specrt_export.distill.loss import Batch
from specrt_export.distill.train import EVALUATED, Training, TrainingPlan

HEALING = TrainingPlan(epochs=3, learning_rate=5e-4)
_OTHERS = 1024  # tokens of the vocabulary beside the frequent ones
_CHUNK = 1024  # rows of logits at a time


class HealingTexts(Dataset):
    """The same texts, read as an ordinary language model does: row i reads token i and predicts token i + 1."""

    def batch(self, number: int, documents: NDArray[np.int64]) -> Batch:
        """Read the documents' tokens; `embeddings` and `features` are the tokens' own and `following` their ids."""
        part = self._texts[number]
        ids, places = padded(part.text, documents)
        now, after = places[:, :-1], places[:, 1:]
        weights = np.where(after >= 0, self._table[part.text.roles[after]], 0.0)
        with torch.no_grad():
            embeddings = self._embed(torch.from_numpy(ids[:, :-1]))
        now = np.where(after >= 0, now, 0)
        features, last = (
            torch.from_numpy(array[now]).to(embeddings.dtype) for array in (part.features.features, part.features.last)
        )
        return Batch(
            embeddings=embeddings, features=features, wanted=last, following=torch.from_numpy(ids[:, 1:]),
            weights=torch.from_numpy(weights.astype(np.float32)),
        )  # fmt: skip


def healing_texts(
    model: Any, texts: Sequence[Texts], vocabulary_size: int, *, held_out: int
) -> tuple[HealingTexts, HealingTexts, NDArray[np.int64]]:
    """Return texts to learn from and to be measured on, and the ids of the `vocabulary_size` most frequent tokens."""
    embed = model.get_input_embeddings()
    vocabulary = draft_vocabulary(texts, vocabulary_size, num_tokens=len(model.get_output_embeddings().weight))
    learn = HealingTexts(texts, embed, vocabulary, held_out=held_out, measure=False)
    held = HealingTexts(texts, embed, vocabulary, held_out=held_out, measure=True)
    return learn, held, vocabulary


class Healing(Training):
    """Training of what ends in the target's output matrix `matrix` [V, H]; `vocabulary` are the frequent ids."""

    def __init__(
        self, drafter: nn.Module, dataset: Dataset, matrix: torch.Tensor, vocabulary: NDArray[np.int64],
        plan: TrainingPlan,
    ) -> None:  # fmt: skip
        super().__init__(drafter, dataset, plan)
        self._matrix = matrix
        self._vocabulary = torch.from_numpy(vocabulary)
        others = torch.ones(len(matrix), dtype=torch.bool)
        others[self._vocabulary] = False
        self._others = others.nonzero()[:, 0]

    def _loss(self, batch: Batch, generator: torch.Generator) -> torch.Tensor:
        drawn = self._others[torch.randperm(len(self._others), generator=generator)[:_OTHERS]]
        rows = self._matrix[torch.cat([self._vocabulary, drawn])]
        use = batch.weights > 0
        weights, wanted, given = batch.weights[use], batch.wanted[use], self._read(batch)[use]
        probs = linear(wanted, rows).float().softmax(-1)
        term = -(probs * log_softmax(linear(given, rows).float(), -1)).sum(-1)
        gap = smooth_l1_loss(given.float(), wanted.float(), reduction="none").mean(-1)
        return ((term + self._plan.regression * gap) * weights).sum() / weights.sum().clamp(min=1)

    def _agreement(self, batch: Batch) -> torch.Tensor:
        out = self._read(batch)
        flat = out.reshape(-1, out.shape[-1]).to(self._matrix.dtype)
        parts = [flat[begin : begin + _CHUNK] for begin in range(0, len(flat), _CHUNK)]
        picked = torch.cat([linear(part, self._matrix).argmax(-1) for part in parts])
        return chains(picked.view(out.shape[:2]) == batch.following, batch.weights > 0, steps=EVALUATED)

    @abstractmethod
    def _read(self, batch: Batch) -> torch.Tensor:
        """Return what the output matrix reads, [B, T, H]."""


class PrunedHealing(Healing):
    """Training of a pruned model."""

    def _read(self, batch: Batch) -> torch.Tensor:
        decoder: Any = self._drafter.base_model
        found: torch.Tensor = decoder(inputs_embeds=batch.embeddings.float(), use_cache=False).last_hidden_state
        return found


def chains(right: torch.Tensor, counts: torch.Tensor, *, steps: int) -> torch.Tensor:
    """Return for every chain of `steps` rows that all count whether each is right: bool [steps, n].

    right, counts: [B, T]. A greedy draft says a text's next tokens up to its first wrong one, so what it says after the
    text itself tells how long its chains are.
    """
    length = max(0, right.shape[1] - steps + 1)
    windows = [slice(step, step + length) for step in range(steps)]
    whole = torch.stack([counts[:, window] for window in windows]).all(0)
    return torch.stack([right[:, window][whole] for window in windows])
