"""Accept or reject a proposal so that the target's output law is kept exactly.

A proposal of k tokens x_1 .. x_k follows n committed tokens. Row j of the logits is the target's for position n + j,
after the committed tokens and x_1 .. x_j. Two rules, both exact:

match   for tokens chosen in any deterministic way, or with noise shared with the target: the target picks its
        token y from row j; x_{j+1} is accepted if it equals y, else y is the next token.
ratio   for tokens sampled from laws that the proposal carries (Leviathan et al. 2023, Chen et al. 2023): accept with
        probability min(1, target / draft), else draw from the residual max(0, target - draft).

Rows are looked at one after the other; nothing is computed after the first rejection.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]  # float64 in use; exact fractions in the tests that enumerate


@dataclass(frozen=True, slots=True)
class Proposal:
    """Tokens a drafter guesses, a chain of k.

    probs: None for tokens accepted by match; else [k, V], row j the very law that token j was drawn from. confidence:
    how likely each token is accepted where those before it are, as far as the drafter knows; it must not depend on
    tokens that were sampled.
    """

    token_ids: tuple[int, ...] = ()
    probs: Array | None = None
    confidence: float = 0.7

    def first(self, count: int) -> "Proposal":
        """Return the proposal of the first `count` tokens."""
        if count >= len(self.token_ids):
            return self
        return Proposal(self.token_ids[:count], None if self.probs is None else self.probs[:count], self.confidence)


@dataclass(frozen=True, slots=True)
class Verdict:
    """How many proposed tokens were accepted, and the target's own token that follows them.

    The next token is a bonus token if all were accepted, a recovered token otherwise.
    """

    num_accepted: int
    next_token: int


@dataclass(frozen=True, slots=True)
class Law:
    """Probabilities [m] of the ascending token `ids` [m]; of all tokens [V] if `ids` is None."""

    ids: NDArray[np.int64] | None
    probs: Array

    def of(self, token: int) -> Any:
        """Return the probability of one token."""
        if self.ids is None:
            return self.probs[token]
        index = int(np.searchsorted(self.ids, token))
        return self.probs[index] if index < len(self.ids) and self.ids[index] == token else 0


class Chooser(Protocol):
    """Makes the random decisions; each is keyed, so that none is used twice."""

    def accepts(self, target_prob: Any, draft_prob: Any, *, start: int, node: int) -> bool:
        """Decide with probability min(1, target_prob / draft_prob)."""
        ...

    def token(self, weights: Array, *, position: int) -> int:
        """Return an index drawn in proportion to `weights` [m]: the final word on a position."""
        ...

    def draft(self, weights: Array, *, start: int, node: int) -> int:
        """Return an index drawn in proportion to `weights` [m] for a proposal."""
        ...


class Picker(Protocol):
    """The target's side of acceptance: processed rows, and the tokens committed while they are processed."""

    chooser: Chooser

    def pick(self, logits: Array, *, position: int) -> int:
        """Return the target's token from a row of logits [V], under the request's parameters."""
        ...

    def law(self, logits: Array) -> Law:
        """Return the target's law from a row of logits [V], under the request's parameters."""
        ...

    def push(self, token: int) -> None:
        """Take a token as committed: later rows are processed with it in their prefix."""
        ...


def accept(proposal: Proposal, logits: Array, picker: Picker, *, start: int) -> Verdict:
    """Judge a proposal by the target's logits [k + 1, V]; `start` is n, the number of committed tokens."""
    for node, token in enumerate(proposal.token_ids):
        if proposal.probs is None:
            chosen = picker.pick(logits[node], position=start + node)
        else:
            chosen = _by_ratio(picker.law(logits[node]), proposal.probs[node], token, picker.chooser, start, node)
        picker.push(chosen)
        if chosen != token:
            return Verdict(node, chosen)
    bonus = picker.pick(logits[len(proposal.token_ids)], position=start + len(proposal.token_ids))
    picker.push(bonus)
    return Verdict(len(proposal.token_ids), bonus)


def residual(target: Law, draft_probs: Array) -> Array:
    """Return max(0, target - draft) on the target's ids, not normalised; the target's law where that is zero.

    Only rounding makes it zero: a token is rejected only where the draft has more mass than the target, so that
    elsewhere the target has more.
    """
    on_target = draft_probs if target.ids is None else draft_probs[target.ids]
    weights = np.maximum(target.probs - on_target, 0)
    return weights if weights.sum() > 0 else target.probs


def _by_ratio(target: Law, draft_probs: Array, token: int, chooser: Chooser, start: int, node: int) -> int:
    if chooser.accepts(target.of(token), draft_probs[token], start=start, node=node):
        return token
    index = chooser.token(residual(target, draft_probs), position=start + node)
    return index if target.ids is None else int(target.ids[index])
