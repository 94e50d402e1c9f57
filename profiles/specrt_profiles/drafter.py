"""Drafters as an artifact lists them, and the checks that they fit to the rest of it."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

from specrt_profiles.codec import OPTIONAL

DrafterKind = Literal["ngram", "suffix", "model", "eagle", "medusa", "early-exit"]
MODEL_FREE: tuple[DrafterKind, ...] = ("ngram", "suffix")  # need no files: every artifact has them
EARLY_EXIT: DrafterKind = "early-exit"  # runs the first layers of the target
HEADS: tuple[DrafterKind, ...] = ("eagle", "medusa")  # have an engine that reads the target's features
READERS: tuple[DrafterKind, ...] = (*HEADS, EARLY_EXIT)  # read what the target computes
DRAWING: tuple[DrafterKind, ...] = ("model", EARLY_EXIT)  # draw their guesses where coupling is by rejection
BRANCHING: tuple[DrafterKind, ...] = ("suffix", "eagle", "medusa")  # can propose trees


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterSpec:
    """A drafter that the artifact offers; one of kind `model` names its engine and the vocabulary it was made for.

    One of `HEADS` names its head among `Manifest.heads`. tokens: the file with the id of each token that a head can
    guess, or a model that cannot guess all. tree: of
    kind `medusa` for targets that take trees: nodes, the most useful first, each as the ranks of the guesses on its way
    from the root ([0, 2]: what comes third after the best guess at the token before). Drafters that need no files are
    there whether they are listed or not; artifacts once listed `ngram`.
    """

    kind: DrafterKind
    engine: str | None = None
    vocabulary: str | None = None
    tokens: str | None = field(default=None, metadata=OPTIONAL)
    tree: tuple[tuple[int, ...], ...] | None = field(default=None, metadata=OPTIONAL)


def drafter_problem(
    drafter: DrafterSpec, *, engines: Collection[str], heads: Collection[str], files: Collection[str], vocabulary: str,
    has_exit: bool,
) -> str | None:  # fmt: skip
    """Say what a drafter lacks of an artifact's engines, heads, files, vocabulary and exit; None if nothing."""
    if drafter.kind == EARLY_EXIT and not has_exit:
        return ": the target has no early exit"
    if drafter.kind in HEADS and drafter.engine not in heads:
        return f".engine: no head is named {drafter.engine!r}"
    if drafter.kind in HEADS and drafter.tokens not in files:
        return f".tokens: {drafter.tokens!r} is not among the listed files"
    if drafter.kind == "model" and drafter.tokens not in (None, *files):
        return f".tokens: {drafter.tokens!r} is not among the listed files"
    if drafter.kind == "model" and drafter.engine not in set(engines) - {"target"}:
        return f".engine: no draft engine is named {drafter.engine!r}"
    if drafter.kind not in MODEL_FREE and drafter.vocabulary != vocabulary:
        made = f"made for vocabulary {drafter.vocabulary}, the target has {vocabulary}"
        return f": {made}: add the drafter to this target again"
    return None if drafter.tree is None else _tree_problem(drafter.tree)


def _tree_problem(tree: Sequence[tuple[int, ...]]) -> str | None:
    seen: set[tuple[int, ...]] = {()}
    for path in tree:
        if not path or min(path) < 0 or path[:-1] not in seen or path in seen:
            return f".tree: expected each node once and after the one it follows, found {list(path)}"
        seen.add(path)
    return None
