"""Prompt lookup: guess that the text goes on as it did the last time its latest tokens occurred (Saxena 2023)."""

from collections.abc import Sequence

from specrt.acceptance import Proposal
from specrt.errors import RequestError
from specrt.sampling import Sampler

# Most tokens to guess after a match of 1, 2, ... tokens: the longer the match, the likelier the text goes on as it did.
# They fill the widths of the usual ladder (2, 4, 6, 10, 16).
LENGTHS = (1, 3, 5, 9, 15)
DEFAULT_MAX, DEFAULT_MIN = len(LENGTHS), 1
CONFIDENCE = (0.25, 0.5, 0.65, 0.75, 0.8)  # how often a guess after such a match was right in nine kinds of texts
LONGEST = 32  # every length takes an entry per token and a lookup per step; longer matches say no more


class NgramDrafter:
    """Looks up the longest of the last `max_ngram` .. `min_ngram` tokens that occurred before, most recent place first.

    A match of n tokens is good for a guess of at most `LENGTHS[n - 1]` tokens, one of 5 or more for any. A guess that
    reaches the end of the known tokens goes on over itself, so a repeating pattern fills any length. The index grows
    with the text; a lookup takes time independent of its length.
    """

    name = "ngram"

    def __init__(self, *, max_ngram: int = DEFAULT_MAX, min_ngram: int = DEFAULT_MIN) -> None:
        check_sizes(max_ngram=max_ngram, min_ngram=min_ngram)
        self._sizes = range(max_ngram, min_ngram - 1, -1)
        self._next: dict[tuple[int, ...], int] = {}  # n-gram -> index of the token after its latest occurrence
        self._indexed = 0

    def start(self, tokens: Sequence[int], sampler: Sampler) -> None:
        """Forget earlier requests."""
        self._next.clear()
        self._indexed = 0

    def propose(self, tokens: Sequence[int], limit: int) -> Proposal:
        """Guess up to `limit` tokens; none if no n-gram occurred before."""
        self._index(tokens)
        for size in self._sizes:
            if size < len(tokens):
                follows = self._next.get(tuple(tokens[-size:]))
                if follows is not None:
                    most = LENGTHS[size - 1] if size < len(LENGTHS) else limit
                    known = _continue(tokens, follows, min(most, limit))
                    return Proposal(known, confidence=CONFIDENCE[min(size, len(CONFIDENCE)) - 1])
        return Proposal()

    def _index(self, tokens: Sequence[int]) -> None:
        """Enter all n-grams that are followed by a known token."""
        for end in range(max(1, self._indexed), len(tokens)):
            for size in self._sizes:
                if size <= end:
                    self._next[tuple(tokens[end - size : end])] = end
        self._indexed = len(tokens)


def check_sizes(*, max_ngram: int, min_ngram: int) -> None:
    """Raise `RequestError` unless 1 <= min_ngram <= max_ngram <= 32."""
    if not 1 <= min_ngram <= max_ngram <= LONGEST:
        raise RequestError(
            f"prompt_lookup_min, prompt_lookup_max: expected 1 <= min <= max <= {LONGEST}, "
            f"found {min_ngram} and {max_ngram}"
        )


def _continue(tokens: Sequence[int], follows: int, limit: int) -> tuple[int, ...]:
    """Copy `limit` tokens from index `follows` on; beyond the end, from the copy itself."""
    known = list(tokens[follows : follows + limit])
    period = len(tokens) - follows
    while len(known) < limit:
        known.append(known[len(known) - period])
    return tuple(known)
