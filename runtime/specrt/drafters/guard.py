"""What stands between the loop and a drafter: whatever a drafter does, the request goes on."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Self, TypeVar

import numpy as np

from specrt.acceptance import Proposal
from specrt.drafters import Drafter, NoDrafter
from specrt.drafters.combined import CombinedDrafter
from specrt.sampling import Sampler
from specrt.stats import Statistics
from specrt.tree import check_tree

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_TOLERANCE = 1e-4  # of the sum of a law; single precision stays far below, a law that is not normalised far above


class GuardedDrafter:
    """A drafter that is dropped for the rest of the request at its first fault: one log line, one count.

    A fault is an exception, a proposal that cannot be verified (see `check_proposal`), or one that took longer than
    `budget_s` seconds of `clock`. A proposal that is only late has been paid for and is still used.
    """

    def __init__(
        self, drafter: Drafter, stats: Statistics, *, vocab_size: int, takes_trees: bool, budget_s: float | None,
        clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self.name = drafter.name
        self._drafter, self._stats, self._vocab_size, self._takes_trees = drafter, stats, vocab_size, takes_trees
        self._budget_s, self._clock = budget_s, clock

    @classmethod
    def guarding(
        cls, drafter: Drafter, stats: Statistics, *, vocab_size: int, takes_trees: bool, budget_s: float | None,
        clock: Callable[[], float],
    ) -> Self:  # fmt: skip
        """Guard a drafter; of a combined one each part by itself, so that the other goes on."""
        guard = partial(cls, stats=stats, vocab_size=vocab_size, takes_trees=takes_trees, clock=clock)
        if isinstance(drafter, CombinedDrafter):
            return guard(drafter.with_parts(partial(guard, budget_s=budget_s)), budget_s=None)
        return guard(drafter, budget_s=budget_s)

    def start(self, tokens: Sequence[int], sampler: Sampler) -> None:
        """Begin a request; see `Drafter`."""
        self._sampler, self._by_ratio = sampler, sampler.params.coupling == "rejection"
        self._guarded(lambda: self._drafter.start(tokens, sampler), tokens)

    def propose(self, tokens: Sequence[int], limit: int) -> Proposal:
        """Return what the drafter proposes; nothing if it fails, was dropped, or may propose nothing."""
        if limit < 1:
            return Proposal()
        return self._guarded(lambda: self._timed(tokens, limit), tokens) or Proposal()

    def _timed(self, tokens: Sequence[int], limit: int) -> Proposal:
        started = 0.0 if self._budget_s is None else self._clock()
        proposal = self._drafter.propose(tokens, limit)
        check_proposal(
            proposal, limit=limit, vocab_size=self._vocab_size, by_ratio=self._by_ratio, takes_trees=self._takes_trees
        )
        if self._budget_s is not None and (seconds := self._clock() - started) > self._budget_s:
            self._drop(f"took {1e3 * seconds:.1f} ms of draft_budget_ms {1e3 * self._budget_s:g}")
        return proposal

    def _guarded(self, action: Callable[[], _T], tokens: Sequence[int]) -> _T | None:
        try:
            return action()
        except Exception as error:
            self._drop(f"failed: {error!r}", error)
            return None
        finally:  # drafters push guesses to the sampler's history; whatever happened, it is the text's again
            self._sampler.rewind(len(tokens))

    def _drop(self, why: str, error: Exception | None = None) -> None:
        traceback = error if _log.isEnabledFor(logging.DEBUG) else None  # for whoever writes the drafter
        _log.error("the %s drafter %s; going on without it", self.name, why, exc_info=traceback)
        self._stats.num_drafter_faults += 1
        self._drafter = NoDrafter()


def check_proposal(proposal: Proposal, *, limit: int, vocab_size: int, by_ratio: bool, takes_trees: bool) -> None:
    """Raise `TypeError` or `ValueError` unless a proposal can be verified, and accepted without harm to the law.

    It has at most `limit` ids, which are Python ints of the vocabulary; its probabilities, if any, are [k, V] laws that
    give each of its tokens some mass, and are only taken where acceptance is by ratio. A tree has none, and is only
    taken by engines that take trees.
    """
    if not isinstance(proposal, Proposal):
        raise TypeError(f"expected a Proposal, found {type(proposal).__name__}")
    ids, probs = proposal.token_ids, proposal.probs
    if not isinstance(ids, tuple) or any(type(token) is not int for token in ids):
        raise TypeError(f"expected token_ids as a tuple of ints, found {ids!r}")
    if len(ids) > limit or not all(0 <= token < vocab_size for token in ids):
        raise ValueError(f"expected at most {limit} ids below {vocab_size}, found {ids}")
    if not 0 <= proposal.confidence <= 1:
        raise ValueError(f"expected a confidence from 0 to 1, found {proposal.confidence}")
    if proposal.parents is not None:
        if not takes_trees:
            raise ValueError("expected a chain, found a tree: this engine takes none")
        if probs is not None:
            raise ValueError("expected a tree without probabilities: trees are accepted by match")
        check_tree(ids, proposal.parents)
    if probs is not None:
        _check_laws(ids, probs, vocab_size=vocab_size, by_ratio=by_ratio)


def _check_laws(ids: tuple[int, ...], probs: Any, *, vocab_size: int, by_ratio: bool) -> None:
    if not by_ratio:
        raise ValueError("expected no probabilities: only coupling 'rejection' makes use of them")
    if not isinstance(probs, np.ndarray):
        raise TypeError(f"expected probabilities as an array, found {type(probs).__name__}")
    if probs.ndim != 2 or probs.shape[1] != vocab_size or len(probs) < len(ids):
        raise ValueError(f"expected probabilities [{len(ids)}, {vocab_size}], found {list(probs.shape)}")
    for row, token in zip(probs, ids, strict=False):
        if not (row.min() >= 0 and abs(row.sum() - 1) <= _TOLERANCE and row[token] > 0):
            raise ValueError(
                f"expected laws that their tokens were drawn from, found one that gives {token} {row[token]}"
            )
