"""Written texts and their features as batches to train on."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from specrt_export.distill.features import FeatureShard, in_groups, padded, read_features
from specrt_export.distill.loss import Batch
from specrt_export.distill.rows import GREEDY, SAMPLED, USER
from specrt_export.distill.shards import TextShard, read_shard

_WEIGHTS = {USER: 0.5, GREEDY: 1.0, SAMPLED: 1.0}  # of a row, by where the token that it predicts comes from


@dataclass(frozen=True, slots=True)
class Texts:
    """One shard of texts with its features."""

    text: TextShard
    features: FeatureShard


def load_texts(text: Path, features: Path) -> Texts:
    """Read a shard of texts; its features are mapped, not read."""
    return Texts(read_shard(text), read_features(features))


def draft_vocabulary(texts: Sequence[Texts], size: int, *, num_tokens: int) -> NDArray[np.int64]:
    """Return the `size` token ids, ascending, that are most frequent in what is drafted."""
    counts = np.zeros(num_tokens)
    for part in texts:
        counts += np.bincount(part.text.tokens, _weights(part.text.roles), minlength=num_tokens)[:num_tokens]
    chosen = np.argsort(-counts, kind="stable")[: min(size, num_tokens)]
    return np.sort(chosen).astype(np.int64)


def coverage(texts: Sequence[Texts], vocabulary: NDArray[np.int64]) -> float:
    """Return the share of what is drafted that is in the vocabulary."""
    weights = [_weights(part.text.roles) for part in texts]
    inside = sum(float(w[np.isin(part.text.tokens, vocabulary)].sum()) for part, w in zip(texts, weights, strict=True))
    return inside / max(1e-9, sum(float(w.sum()) for w in weights))


class Dataset:
    """Batches of documents from several shards; the first `held_out` tokens of the first shard are kept apart.

    embed: the target's embedding. measure: to measure on, that is greedy answers in what was held out (to prompts that
    are not trained on, unless all are), instead of to train on.
    """

    def __init__(
        self, texts: Sequence[Texts], embed: nn.Module, vocabulary: NDArray[np.int64], *, held_out: int, measure: bool
    ) -> None:
        self._texts, self._embed = texts[:1] if measure else texts, embed
        self._held_out, self._measure = held_out, measure
        self._unseen = _unseen(texts, self._cut(texts[0].text.offsets)) if measure else np.arange(0)
        self._table = _table({GREEDY: 1.0} if measure else _WEIGHTS)
        self._vocabulary = vocabulary

    def order(self, epoch: int, *, num_tokens: int, seed: int) -> list[tuple[int, NDArray[np.int64]]]:
        """Return an epoch's batches as shard number and documents: at most `num_tokens` with filling, shuffled."""
        rng = np.random.default_rng([seed, epoch])
        batches = []
        for number, part in enumerate(self._texts):
            mixed = rng.permutation(self._documents(number, part.text.offsets))
            lengths = np.diff(part.text.offsets)[mixed]
            batches += [(number, mixed[group]) for group in in_groups(lengths, num_tokens)]
        return [batches[index] for index in rng.permutation(len(batches))]

    def batch(self, number: int, documents: NDArray[np.int64]) -> Batch:
        """Read the documents' tokens and features."""
        part = self._texts[number]
        ids, places = padded(part.text, documents)
        now, then, after = places[:, :-2], places[:, 1:-1], places[:, 2:]
        now, then = np.where(after >= 0, now, 0), np.where(after >= 0, then, 0)
        weights = np.where(after >= 0, self._table[part.text.roles[after]], 0.0)
        following = np.minimum(np.searchsorted(self._vocabulary, ids[:, 2:]), len(self._vocabulary) - 1)
        known = self._vocabulary[following] == ids[:, 2:]
        with torch.no_grad():
            embeddings = self._embed(torch.from_numpy(ids[:, 1:-1]))
        return Batch(
            embeddings=embeddings,
            features=torch.from_numpy(part.features.features[now]).to(embeddings.dtype),
            wanted=torch.from_numpy(part.features.last[then]).to(embeddings.dtype),
            following=torch.from_numpy(np.where(known, following, -1)),
            weights=torch.from_numpy(weights.astype(np.float32)),
        )

    def _documents(self, number: int, offsets: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the numbers of a shard's documents that belong to this dataset."""
        return self._unseen if self._measure else np.arange(self._cut(offsets) if number == 0 else 0, len(offsets) - 1)

    def _cut(self, offsets: NDArray[np.int64]) -> int:
        """Return how many documents of the first shard are held out."""
        return max(1, int(np.searchsorted(offsets, self._held_out, side="right")) - 1)


def _unseen(texts: Sequence[Texts], cut: int) -> NDArray[np.int64]:
    """Return which of the first `cut` documents have a prompt that no later one has; all if none has.

    A user's own prompts are drawn with repetition, and a greedy answer is the same each time.
    """
    prompts = [prompt for part in texts for prompt in _prompts(part.text)]
    seen = set(prompts[cut:])
    found = [number for number, prompt in enumerate(prompts[:cut]) if prompt not in seen]
    return np.array(found or range(cut), np.int64)


def _prompts(text: TextShard) -> Iterator[bytes]:
    """Yield each document's tokens before its first answer."""
    for begin, end in pairwise(text.offsets.tolist()):
        answers = np.flatnonzero(text.roles[begin:end] >= GREEDY)
        yield text.tokens[begin : begin + int(answers[0]) if len(answers) else end].tobytes()


def _weights(roles: NDArray[np.uint8]) -> NDArray[np.float64]:
    found: NDArray[np.float64] = _table(_WEIGHTS)[roles]
    return found


def _table(weights: Mapping[int, float]) -> NDArray[np.float64]:
    table = np.zeros(256)
    table[list(weights)] = list(weights.values())
    return table


def batches(dataset: Dataset, *, num_tokens: int) -> Iterator[Batch]:
    """Yield a dataset's batches once, in a fixed order."""
    for number, documents in dataset.order(0, num_tokens=num_tokens, seed=0):
        yield dataset.batch(number, documents)
