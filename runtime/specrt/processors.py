"""Logit processors as functions over one row of scores, in the order and with the formulas of transformers.

All work on float64 scores [V], in place; those that need the tokens before the row take a `History`.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Scores = NDArray[np.float64]
Ids = NDArray[np.int64]
_CANDIDATES = 1024  # top-p looks among so many of the best tokens first, and among all if they do not suffice


class History:
    """The tokens before a row: prompt, committed tokens and, while drafting, the proposal so far."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.tokens: list[int] = []
        self._slots: dict[int, int] = {}
        self._ids = np.empty(64, np.int64)
        self._counts = np.zeros(64, np.int64)
        for token in prompt:
            self.tokens.append(token)
            self._slot(token)
        self.num_prompt = len(self.tokens)
        self._num_prompt_slots = len(self._slots)

    @property
    def seen(self) -> Ids:
        """The distinct tokens of prompt and output, in order of appearance."""
        return self._ids[: len(self._slots)]

    @property
    def counts(self) -> Ids:
        """How often each of `seen` occurs in the output; 0 for those of the prompt alone."""
        return self._counts[: len(self._slots)]

    @property
    def num_output(self) -> int:
        """Number of tokens after the prompt."""
        return len(self.tokens) - self.num_prompt

    def push(self, token: int) -> None:
        """Append a token to the output."""
        self.tokens.append(token)
        slot = self._slot(token)
        self._counts[slot] += 1

    def pop(self) -> None:
        """Take back the token pushed last."""
        token = self.tokens.pop()
        slot = self._slots[token]
        self._counts[slot] -= 1
        if self._counts[slot] == 0 and slot >= self._num_prompt_slots:
            del self._slots[token]  # first seen by the push now undone, so it is the newest slot

    def _slot(self, token: int) -> int:
        slot = self._slots.setdefault(token, len(self._slots))
        if slot == len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[slot] = token
        return slot


def add_bias(scores: Scores, bias: Mapping[int, float]) -> None:
    """Add a value to the scores of some tokens."""
    for token, value in bias.items():
        scores[token] += value


def penalize_repetition(scores: Scores, history: History, penalty: float) -> None:
    """Divide positive and multiply negative scores of all tokens seen so far (Keskar et al. 2019, CTRL)."""
    seen = history.seen
    values = scores[seen]
    scores[seen] = np.where(values < 0, values * penalty, values / penalty)


def penalize_counts(scores: Scores, history: History, *, frequency: float, presence: float) -> None:
    """Subtract `frequency` per occurrence in the output, and `presence` once, as the OpenAI API defines them."""
    counts = history.counts
    scores[history.seen] -= frequency * counts + presence * (counts > 0)


def ban(scores: Scores, words: Sequence[Sequence[int]], history: History) -> None:
    """Forbid the last token of every word whose other tokens end the history."""
    for word in words:
        prefix = list(word[:-1])
        if not prefix or history.tokens[-len(prefix) :] == prefix:
            scores[word[-1]] = -np.inf


def top_k_ids(scores: Scores, k: int) -> Ids | None:
    """Return the ascending ids of the k best tokens and of all that tie with the last of them."""
    if k >= len(scores):
        return None
    kth = np.partition(scores, len(scores) - k)[len(scores) - k]
    return np.flatnonzero(scores >= kth)


def top_p_ids(scores: Scores, p: float) -> Ids:
    """Return the ascending ids of the fewest best tokens with probability p or more together (Holtzman et al. 2020)."""
    probs = np.exp(scores - scores.max())
    target = p * probs.sum()
    for count in (_CANDIDATES, len(scores)):
        best = np.flatnonzero(scores >= _kth_best(scores, count))
        order = np.lexsort((best, -scores[best]))
        mass = np.cumsum(probs[best][order])
        if mass[-1] >= target or len(best) == len(scores):
            break
    kept = int(np.searchsorted(mass, target, side="left")) + 1
    return np.sort(best[order[:kept]])


def min_p_ids(scores: Scores, p: float) -> Ids:
    """Return the ascending ids of tokens at least p times as probable as the best one (Nguyen et al. 2024)."""
    return np.flatnonzero(scores >= scores.max() + np.log(p))


def _kth_best(scores: Scores, count: int) -> float:
    if count >= len(scores):
        return -np.inf
    return float(np.partition(scores, len(scores) - count)[len(scores) - count])
