"""Row exactness: which call widths compute a token's row to the same bits, whatever the other rows hold.

Speculation on and off gives the same bits only if a token's logits do not depend on the width of the call that
computes them, on their place in it, or on the rows after them. That holds for many kernels but is promised by none,
so it is tested on the machine at hand.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

_SPAN = 16  # positions compared per context
_ANCHORS = 4  # positions computed a second time per width and context
_CONTEXTS = (3, 130)  # tokens before them: attention takes other paths over short and long caches


class Forward(Protocol):
    """One call of an engine."""

    def __call__(self, token_ids: Sequence[int], start: int, width: int) -> NDArray[np.float32]:
        """Feed tokens at positions start, start + 1, ... in a call of `width` rows.

        Returns logits [len(token_ids), V], valid until the next call.
        """
        ...


@dataclass(frozen=True, slots=True)
class Exactness:
    """Widths that give the same bits, in groups; a width whose rows depend on each other is in `dependent`."""

    groups: tuple[tuple[int, ...], ...]
    dependent: tuple[int, ...]

    def agree(self, widths: Collection[int]) -> bool:
        """Tell whether calls of all these widths give the same bits."""
        return any(set(widths) <= set(group) for group in self.groups)

    def ladder(self, verify_widths: Sequence[int]) -> tuple[int, ...]:
        """Return the verify widths to use together: the group with most of them, the widest of those on a tie.

        Empty if in every width rows depend on each other: then nothing can be promised.
        """
        ladders = [tuple(w for w in group if w in verify_widths) for group in self.groups]
        return max(ladders, key=lambda widths: (len(widths), max(widths, default=0)), default=())


def find_exact_widths(forward: Forward, widths: Sequence[int], *, vocab_size: int, capacity: int) -> Exactness:
    """Group `widths` by the bits they give for random tokens after a short and a longer context.

    A few positions are computed a second time, at another place of the call and with other tokens after them. Takes
    about 40 calls per context; leaves random tokens in the KV buffers.
    """
    rng = np.random.default_rng(0)
    span = max(1, min(_SPAN, capacity - 2))
    contexts = sorted({max(1, min(context, capacity - span - 1)) for context in _CONTEXTS})
    rows: dict[int, list[NDArray[np.float32]]] = {width: [] for width in widths}
    dependent: set[int] = set()
    for context in contexts:
        tokens = rng.integers(0, vocab_size, context + span).tolist()
        _feed(forward, tokens[:context], 0, max(widths))
        for width in widths:
            rows[width].append(_feed(forward, tokens[context:], context, width))
            noise = rng.integers(0, vocab_size, width).tolist()
            if not _independent(forward, tokens, noise, context, width, rows[width][-1], capacity):
                dependent.add(width)
    return Exactness(_group(rows, dependent), tuple(sorted(dependent)))


def _feed(forward: Forward, tokens: list[int], start: int, width: int) -> NDArray[np.float32]:
    """Feed all tokens in calls of `width`; return their logits [len(tokens), V]."""
    calls = range(0, len(tokens), width)
    return np.concatenate([forward(tokens[i : i + width], start + i, width).copy() for i in calls])


def _independent(forward: Forward, tokens: list[int], noise: list[int], context: int, width: int,
                 rows: NDArray[np.float32], capacity: int) -> bool:  # fmt: skip
    """Tell whether rows stay the same when calls begin one token later and end in noise."""
    kept = max(1, min(width, len(rows)) // 2)
    anchors = range(1, len(rows) - kept + 1, kept)
    for anchor in anchors[:_ANCHORS]:
        start = context + anchor
        call = [*tokens[start : start + kept], *noise[kept:]][: capacity - start]
        if not np.array_equal(forward(call, start, width)[:kept], rows[anchor : anchor + kept]):
            return False
    return True


def _group(rows: dict[int, list[NDArray[np.float32]]], dependent: set[int]) -> tuple[tuple[int, ...], ...]:
    groups: list[list[int]] = []
    for width in (w for w in rows if w not in dependent):
        for group in groups:
            if all(np.array_equal(a, b) for a, b in zip(rows[group[0]], rows[width], strict=True)):
                group.append(width)
                break
        else:
            groups.append([width])
    return tuple(tuple(group) for group in groups)
