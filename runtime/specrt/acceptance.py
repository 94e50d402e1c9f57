"""Accept or reject a proposal so that the target's output law is kept exactly.

A proposal of k tokens, its nodes 0 .. k - 1, follows n committed tokens: one after the other (a chain), or as a tree
of alternatives. Row 0 of the logits is the target's after the committed tokens, row i + 1 the one after node i and
the nodes before it. Two rules, both exact:

match   for tokens chosen in any way that the target's draw has no part in, or with noise shared with the target: the
        target picks its token y from a node's row; the child that equals y is accepted, else y is the next token.
        Siblings share that one draw, so a tree needs no more than a chain (Miao et al. 2024 verify each in turn).
ratio   for chains sampled from laws that the proposal carries (Leviathan et al. 2023, Chen et al. 2023): accept with
        probability min(1, target / draft), else draw from the residual max(0, target - draft).

Rows are looked at one after the other down the tree; no row off the accepted path is.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from specrt import tree
from specrt.rows import Row, Rows

Array = NDArray[Any]  # float64 in use; exact fractions in the tests that enumerate


@dataclass(frozen=True, slots=True)
class Proposal:
    """Tokens a drafter guesses.

    probs: None for tokens accepted by match; else [k, V], row j the very law that token j was drawn from. confidence:
    how likely each token is accepted where those before it are, as far as the drafter knows; it must not depend on
    tokens that were sampled. parents: None for a chain; else the node that each token follows, -1 for the last
    committed token. Parents come before their children, and siblings differ. part: which part of a combined drafter
    guessed them.
    """

    token_ids: tuple[int, ...] = ()
    probs: Array | None = None
    confidence: float = 0.7
    parents: tuple[int, ...] | None = None
    part: str | None = None

    @classmethod
    def grown(
        cls, token_ids: Sequence[int], parents: Sequence[int], chances: Sequence[float], *, nodes: Sequence[int]
    ) -> "Proposal":
        """Return some nodes of a tree as a proposal, the best branch first; a chain if they do not branch.

        chances: how likely all is right up to a node. nodes: those to take, likeliest first, parents before children.
        """
        branch = tree.first_branch(nodes, parents)
        confidence = chances[branch[-1]] ** (1 / len(branch))
        if len(branch) == len(nodes):
            return cls(tuple(token_ids[node] for node in branch), confidence=confidence)
        on_branch = set(branch)
        order = [*branch, *(node for node in nodes if node not in on_branch)]
        places = {-1: -1} | {node: place for place, node in enumerate(order)}
        return cls(
            tuple(token_ids[node] for node in order), confidence=confidence,
            parents=tuple(places[parents[node]] for node in order),
        )  # fmt: skip

    def first(self, count: int) -> "Proposal":
        """Return the proposal of the first `count` tokens."""
        if count >= len(self.token_ids):
            return self
        return replace(
            self,
            token_ids=self.token_ids[:count],
            probs=None if self.probs is None else self.probs[:count],
            parents=None if self.parents is None else self.parents[:count],
        )

    @property
    def depths(self) -> Sequence[int]:
        """How many nodes come before each node on its way from the root."""
        return range(len(self.token_ids)) if self.parents is None else tree.depths(self.parents)

    @property
    def num_levels(self) -> int:
        """How many nodes the longest path has."""
        return max(self.depths, default=-1) + 1

    @property
    def row_parents(self) -> tuple[int, ...] | None:
        """The parents of a call's rows: that of the last committed token, then the nodes; None for a chain."""
        return None if self.parents is None else (-1, *(parent + 1 for parent in self.parents))

    def children(self, node: int) -> dict[int, int]:
        """Return the nodes that follow a node, -1 for the root, by their tokens."""
        if self.parents is None:
            return {self.token_ids[node + 1]: node + 1} if node + 1 < len(self.token_ids) else {}
        return {self.token_ids[child]: child for child, parent in enumerate(self.parents) if parent == node}


@dataclass(frozen=True, slots=True)
class Verdict:
    """The accepted nodes from the root on, and the target's own token that follows them.

    The next token is a bonus token if nothing was proposed there, a recovered token otherwise.
    """

    path: tuple[int, ...]
    next_token: int

    @property
    def num_accepted(self) -> int:
        """How many proposed tokens were accepted."""
        return len(self.path)

    @property
    def is_first_branch(self) -> bool:
        """Whether the accepted nodes are the first of the proposal: their rows stood where a chain's would."""
        return self.path == tuple(range(len(self.path)))


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

    def pick(self, logits: Row, *, position: int) -> int:
        """Return the target's token from a row of logits [V], under the request's parameters."""
        ...

    def law(self, logits: Row) -> Law:
        """Return the target's law from a row of logits [V], under the request's parameters."""
        ...

    def push(self, token: int) -> None:
        """Take a token as committed: later rows are processed with it in their prefix."""
        ...


def accept(proposal: Proposal, logits: Rows, picker: Picker, *, start: int) -> Verdict:
    """Judge a proposal by the target's logits [k + 1, V]; `start` is n, the number of committed tokens."""
    path: list[int] = []
    node = -1
    while True:
        row, position, children = logits[node + 1], start + len(path), proposal.children(node)
        if proposal.probs is None or not children:
            chosen = picker.pick(row, position=position)
        else:
            (token,) = children
            chosen = _by_ratio(picker.law(row), proposal.probs[node + 1], token, picker.chooser, start, node + 1)
        picker.push(chosen)
        if chosen not in children:
            return Verdict(tuple(path), chosen)
        node = children[chosen]
        path.append(node)


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
