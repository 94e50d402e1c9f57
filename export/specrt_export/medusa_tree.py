"""Which guesses of parallel heads make a tree: nodes as the ranks of the guesses on their way from the root.

A node of depth d stands for the d heads being right with their guesses of these ranks at once. With the accuracies of
the ranks taken as independent its probability is their product (Medusa, arXiv 2401.10774, section 2.3.3), and the sum
over a tree's nodes is the number of its tokens that are accepted on average.
"""

import heapq
from collections.abc import Sequence

Node = tuple[int, ...]

# The tree `mc_sim_7b_63` that was published with the paper, the most useful node first; each digit is a rank.
_PUBLISHED = (
    "0 00 1 01 2 000 10 02 3 03 4 04 20 05 001 5 06 6 07 010 11 7 08 002 30 09 8 9 100 020 12 003 40 21 004 005 0000 "
    "011 006 030 50 13 007 008 009 60 040 14 70 012 200 31 22 80 050 15 101 021 90 060 0001 16 070"
)


def published_tree(*, num_heads: int, size: int) -> tuple[Node, ...]:
    """Return the first `size` nodes of the published tree that `num_heads` heads have guesses for."""
    nodes = [tuple(map(int, word)) for word in _PUBLISHED.split()]
    return tuple(node for node in nodes if len(node) <= num_heads)[:size]


def best_tree(ranks: Sequence[Sequence[float]], *, size: int) -> tuple[Node, ...]:
    """Return the tree of `size` nodes with the most accepted tokens on average, the most useful node first.

    ranks: of each head how often each of its guesses is right, [heads, ranks]. A node is never more probable than the
    one it follows, so that taking the most probable one each time is the best there is, for every smaller size too.
    Nodes without any chance are left out.
    """
    found: list[Node] = []
    waiting: list[tuple[float, Node]] = []

    def add(chance: float, node: Node) -> None:
        if len(node) < len(ranks):
            for rank, accuracy in enumerate(ranks[len(node)]):
                if accuracy > 0:
                    heapq.heappush(waiting, (-chance * accuracy, (*node, rank)))

    add(1.0, ())
    while waiting and len(found) < size:
        chance, node = heapq.heappop(waiting)
        found.append(node)
        add(-chance, node)
    return tuple(found)
