"""Trees of guessed tokens, given by parents: token i follows token parents[i] < i, or what came before them all at -1.

A chain of n tokens has the parents -1, 0, 1, .. n - 2.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray


def depths(parents: Sequence[int]) -> tuple[int, ...]:
    """Return how many of the tokens come before each one on its way from the root."""
    found: list[int] = []
    for parent in parents:
        found.append(found[parent] + 1 if parent >= 0 else 0)
    return tuple(found)


def ancestry(parents: Sequence[int]) -> NDArray[np.bool_]:
    """Return which tokens each one may see [n, n]: itself and those on its way from the root."""
    seen = np.eye(len(parents), dtype=np.bool_)
    for token, parent in enumerate(parents):
        if parent >= 0:
            seen[token] |= seen[parent]
    return seen


def first_branch(nodes: Iterable[int], parents: Sequence[int]) -> list[int]:
    """Return the nodes of the first branch, which goes on with the first child of each of them.

    nodes: of a tree, or of a part of it that begins at the root, parents before children.
    """
    branch, last = [], -1
    for node in nodes:
        if parents[node] == last:
            branch.append(node)
            last = node
    return branch


def check_tree(token_ids: Sequence[int], parents: Sequence[int]) -> None:
    """Raise `ValueError` unless every parent comes before its children and siblings are different tokens."""
    if len(parents) != len(token_ids):
        raise ValueError(f"expected {len(token_ids)} parents, found {len(parents)}")
    if not all(-1 <= parent < token for token, parent in enumerate(parents)):
        raise ValueError(f"expected every parent before its children, found {tuple(parents)}")
    if len(set(zip(parents, token_ids, strict=True))) < len(token_ids):
        raise ValueError(f"expected siblings that differ, found {tuple(token_ids)} under {tuple(parents)}")
