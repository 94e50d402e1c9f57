"""Parameters of a request, and how a row of logits becomes a token under them.

Speculative and plain decoding go through the same functions, one row at a time, each row with its own prefix.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from specrt import processors
from specrt.acceptance import Chooser, Law
from specrt.best import is_decided, num_of_top_k, survivors, totals
from specrt.errors import RequestError
from specrt.noise import WINDOW, Noise, Purpose, gumbel_argmax, gumbel_contenders, inverse_cdf
from specrt.processors import History
from specrt.rows import Row, top_of

Coupling = Literal["gumbel", "rejection"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Everything that decides the text of a request, resolved: no field is left to a default elsewhere.

    temperature 0 takes the best token, the lowest id on ties. top_k 0, top_p 1, min_p 0 and penalties of 1, 0,
    0 are neutral. `bad_words` are token id sequences that must not occur. `coupling` says how sampled tokens
    and drafts share randomness: with `gumbel` one (seed, stream) gives one text whatever the drafter and k;
    `rejection` accepts more sampled drafts and keeps the law.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int = 0
    stream: int = 0
    logprobs: int | None = None
    coupling: Coupling = "gumbel"

    def __post_init__(self) -> None:
        problem = self._problem()
        if problem:
            raise RequestError(problem)

    def _problem(self) -> str | None:
        limits = (
            ("temperature", 0 <= self.temperature < math.inf, "0 (greedy) or more"),
            ("top_k", self.top_k >= 0, "0 (off) or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0, up to 1 (off)"),
            ("min_p", 0 <= self.min_p <= 1, "0 (off) to 1"),
            ("repetition_penalty", 0 < self.repetition_penalty < math.inf, "above 0"),
            ("frequency_penalty", math.isfinite(self.frequency_penalty), "a finite number"),
            ("presence_penalty", math.isfinite(self.presence_penalty), "a finite number"),
            ("min_tokens", self.min_tokens >= 0, "0 or more"),
            ("max_tokens", self.max_tokens is None or self.max_tokens >= 0, "0 or more"),
            ("seed", 0 <= self.seed < 2**64, "0 to 2**64 - 1"),
            ("stream", 0 <= self.stream < 2**64, "0 to 2**64 - 1"),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= 64, "0 to 64"),
            ("coupling", self.coupling in ("gumbel", "rejection"), "gumbel or rejection"),
            ("stop", "" not in self.stop, "no empty string"),
            ("bad_words", () not in self.bad_words, "no empty word"),
            (
                "logit_bias",
                not any(math.isnan(v) or v == math.inf for v in self.logit_bias.values()),
                "finite values or -inf",
            ),
        )
        bad = next(((name, wanted) for name, fine, wanted in limits if not fine), None)
        return f"{bad[0]}: expected {bad[1]}, found {getattr(self, bad[0])}" if bad else None


class KeyedChooser:
    """Random decisions from keyed uniform numbers: draft and accept by (length, node), the final token by position."""

    def __init__(self, noise: Noise) -> None:
        self._noise = noise

    def accepts(self, target_prob: float, draft_prob: float, *, start: int, node: int) -> bool:
        """Accept if u * draft < target: no division, and never where the target has nothing."""
        return self._noise.uniform(Purpose.ACCEPT, start, node) * draft_prob < target_prob

    def token(self, weights: NDArray[np.float64], *, position: int) -> int:
        """Draw an index for a position by inverse CDF."""
        return inverse_cdf(weights, self._noise.uniform(Purpose.TOKEN, position))

    def draft(self, weights: NDArray[np.float64], *, start: int, node: int) -> int:
        """Draw an index for a proposal by inverse CDF."""
        return inverse_cdf(weights, self._noise.uniform(Purpose.DRAFT, start, node))


class Sampler:
    """Turns rows of logits into tokens for one request; keeps the history that the processors need."""

    def __init__(self, params: SamplingParams, prompt: list[int], *, vocab_size: int, end_ids: tuple[int, ...]) -> None:
        self.params = params
        self.history = History(prompt)
        self._noise = Noise(params.seed, params.stream, vocab_size=vocab_size)
        self.chooser: Chooser = KeyedChooser(self._noise)
        self._end_words = tuple((token,) for token in end_ids)
        self._scratch = np.empty(vocab_size)
        p = params
        self._counts = bool(p.frequency_penalty or p.presence_penalty)
        self._adjusts = bool(
            p.logit_bias or p.bad_words or p.min_tokens or self._counts or p.repetition_penalty != 1.0
        )  # fmt: skip

    def push(self, token: int) -> None:
        """Take a token as part of the prefix of the rows to come."""
        self.history.push(token)

    def rewind(self, length: int) -> None:
        """Take back the tokens pushed beyond `length`."""
        while len(self.history.tokens) > length:
            self.history.pop()

    def pick(self, logits: Row, *, position: int) -> int:
        """Return the token for a position from its row of logits [V]."""
        if self.params.temperature == 0:
            row: Row = self._adjusted(logits) if self._adjusts else logits
            best = int(row.argmax())
            _check_peak(float(row[best]))
            return best
        bits = self._noise.row(position) if self.params.coupling == "gumbel" else None
        ids, scores = self._scores(logits, bits)
        if bits is not None:
            return gumbel_argmax(scores, ids, bits)
        index = self.chooser.token(np.exp(scores), position=position)
        return index if ids is None else int(ids[index])

    def rank(self, logits: Row, *, position: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return the tokens [m] that `pick` would take, best first, and what ranks them [m]: scores, `gumbel` + noise.

        Only tokens that come near the best. With coupling `rejection` the law alone ranks them: no one may know the
        draw.
        """
        sampled = self.params.temperature > 0
        ids, scores = self._scores(logits) if sampled else (None, self._adjusted(logits))
        if sampled and self.params.coupling == "gumbel":
            ids, scores = gumbel_contenders(scores, ids, self._noise.row(position), within=WINDOW)
        best = float(scores.max())
        _check_peak(best)
        near = np.flatnonzero(scores >= best - WINDOW)
        near = near[np.argsort(-scores[near], kind="stable")]
        return near if ids is None else ids[near], scores[near]

    def law(self, logits: Row) -> Law:
        """Return the law that a row of logits [V] stands for; all mass on one token at temperature 0."""
        if self.params.temperature == 0:
            return Law(np.array([self.pick(logits, position=0)]), np.ones(1))
        ids, scores = self._scores(logits)
        weights = np.exp(scores)
        return Law(ids, weights / weights.sum())

    def forget(self, position: int) -> None:
        """Let go of random numbers kept for positions before `position`."""
        self._noise.forget(position)

    def _scores(
        self, logits: Row, bits: NDArray[np.uint64] | None = None
    ) -> tuple[NDArray[np.int64] | None, NDArray[np.float64]]:
        """Return surviving ids (None: all) and their scores (l - max l) / temperature, valid until the next row.

        With the random `bits` [V] of the noise perhaps only some of them, the one with the largest score + noise among
        them.
        """
        return self._top_scores(logits, bits) or self._filtered(*self._all_scores(logits))

    def _filtered(
        self, ids: NDArray[np.int64] | None, scores: NDArray[np.float64]
    ) -> tuple[NDArray[np.int64] | None, NDArray[np.float64]]:
        """Return what top-p and min-p leave of the ids (None: all) and scores of all tokens that top-k leaves."""
        p = self.params
        for limit, keep, off in ((p.top_p, processors.top_p_ids, 1.0), (p.min_p, processors.min_p_ids, 0.0)):
            if limit != off:
                kept = keep(scores, limit)
                ids, scores = kept if ids is None else ids[kept], scores[kept]
        return ids, scores

    def _all_scores(self, logits: Row) -> tuple[NDArray[np.int64] | None, NDArray[np.float64]]:
        """Return ids and scores of a whole row that survive top-k."""
        scores = self._adjusted(logits)
        peak = float(scores.max())
        _check_peak(peak)
        scores -= peak
        scores /= self.params.temperature
        ids = processors.top_k_ids(scores, self.params.top_k) if self.params.top_k else None
        return ids, scores if ids is None else scores[ids]

    def _top_scores(
        self, logits: Row, bits: NDArray[np.uint64] | None
    ) -> tuple[NDArray[np.int64] | None, NDArray[np.float64]] | None:
        """Return the same as `_scores` from what is known of a row without its values, if that suffices; see `best`."""
        p = self.params
        top = None if self._adjusts else top_of(logits)
        if top is None or not math.isfinite(top.logsumexp):
            return None
        scores = top.logits.astype(np.float64)
        scores -= scores[0]
        scores /= p.temperature
        order = np.lexsort((top.ids, -scores))
        ids, scores = top.ids[order], scores[order]
        count = num_of_top_k(scores, p.top_k)
        if count is not None:
            return self._filtered(*_by_id(ids[:count], scores[:count]))
        bounds = None
        if p.top_p < 1:
            bounds = totals(top, scores, size=len(logits), temperature=p.temperature, cut=p.top_k > 0)
        sure, possible = survivors(scores, bounds, top_p=p.top_p, min_p=p.min_p)
        if sure < possible and (bits is None or not is_decided(ids, scores, bits, sure=sure, possible=possible)):
            return None
        return _by_id(ids[:sure], scores[:sure])

    def _adjusted(self, logits: Row) -> NDArray[np.float64]:
        p, scores = self.params, self._scratch
        scores[:] = np.asarray(logits)
        if not self._adjusts:
            return scores
        processors.add_bias(scores, p.logit_bias)
        if p.repetition_penalty != 1.0:
            processors.penalize_repetition(scores, self.history, p.repetition_penalty)
        if self._counts:
            processors.penalize_counts(scores, self.history, frequency=p.frequency_penalty, presence=p.presence_penalty)
        processors.ban(scores, p.bad_words, self.history)
        if self.history.num_output < p.min_tokens:
            processors.ban(scores, self._end_words, self.history)
        return scores


def _by_id(
    ids: NDArray[np.int64], scores: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:  # fmt: skip
    order = np.argsort(ids)
    return ids[order], scores[order]


def log_probabilities(logits: Row) -> NDArray[np.float64]:
    """Return log-softmax [V] of a row as the model gave it, before any processor."""
    wide: Any = np.array(logits, np.float64)
    wide -= wide.max()
    result: NDArray[np.float64] = wide - np.log(np.exp(wide).sum())
    return result


def _check_peak(peak: float) -> None:
    if not math.isfinite(peak):
        raise RequestError(
            f"no token is left to choose (best score {peak}): logit_bias and bad_words forbid all, or the model failed"
        )
