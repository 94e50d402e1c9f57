"""Suffix decoding: guess that the text goes on as it mostly did where its latest tokens occurred before.

After SuffixDecoding (Oliaro et al. 2024, https://arxiv.org/abs/2411.04975): the longest suffix that occurred before,
the counts of what followed it, and a length that depends on how likely the guess is. Two things differ. Suffixes of
every length count at once, the shorter ones as prior of the longer ones. And the places are found through chains
of occurrences, not through a tree: a token costs the same two entries in whatever text, and the oldest texts are
dropped by dropping their tokens.
"""

import heapq
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from specrt.acceptance import Proposal
from specrt.sampling import Sampler

DEFAULT_CACHE_TOKENS = 65_536
LONGEST = 32  # tokens of a suffix that are compared
_RUN = 4  # a chain per run of so many tokens, beside the one per token: places with longer matches come first
_MOST = 16  # places that are looked at
_END = -1  # no token: what follows a text
Places = list[tuple[int, int]]  # index of the last token, tokens that match


@dataclass(frozen=True, slots=True)
class Smoothing:
    """How far counts are trusted: `discount` is taken off a count, `strength` is how many counts the prior weighs."""

    discount: float
    strength: float


# Fitted to greedy texts of SmolLM2-135M of nine kinds, with the times of calls at int8, int4 and fp32: a flat optimum.
OWN = Smoothing(discount=0.1, strength=2.0)
OTHERS = Smoothing(discount=0.3, strength=6.0)  # other texts say less about this one
BRANCHES = 4  # tokens that a tree guesses for one place
WORTH = 0.25  # accepted tokens that another row of a call has to bring in to be worth its time


class Occurrences:
    """Texts one behind the other, and the earlier places of each token and of each run of four, latest first.

    Adding a token and finding places take time that does not depend on the texts.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._dropped = 0  # places count from the first token ever added
        self._known = 0  # places before this one are entered: what follows them is known
        self._since_end = 0
        self._latest_token: dict[int, int] = {}
        self._latest_run: dict[tuple[int, ...], int] = {}
        self._before_token: list[int] = []
        self._before_run: list[int] = []

    def extend(self, tokens: Iterable[int]) -> None:
        """Go on with the text."""
        self.tokens += tokens
        for index in range(self._known - self._dropped, len(self.tokens) - 1):
            self._enter(index)
        self._known = self._dropped + max(0, len(self.tokens) - 1)

    def drop(self, count: int) -> None:
        """Forget the first `count` tokens, which are whole texts with their ends."""
        for index in range(count):
            place, token, run = self._dropped + index, self.tokens[index], self._run(index)
            if self._latest_token.get(token) == place:
                del self._latest_token[token]
            if self._latest_run.get(run) == place:
                del self._latest_run[run]
        for values in (self.tokens, self._before_token, self._before_run):
            del values[:count]
        self._dropped += count
        self._known = max(self._known, self._dropped)  # the last end of all is not entered yet

    def places(self, text: Sequence[int]) -> list[tuple[int, int]]:
        """Return where the end of `text` occurred: (index of the last token, tokens that match), long matches first."""
        found: dict[int, int] = {}
        run, last = tuple(text[-_RUN:]), text[-1]
        for place, before, known in (
            (self._latest_run.get(run, -1), self._before_run, len(run)),
            (self._latest_token.get(last, -1), self._before_token, 1),
        ):
            while place >= self._dropped and len(found) < _MOST:
                index = place - self._dropped
                if index not in found:
                    found[index] = self._matching(index, text, known)
                place = before[index]
        return list(found.items())

    def _enter(self, index: int) -> None:
        place, token = self._dropped + index, self.tokens[index]
        self._before_token.append(self._latest_token.get(token, -1))
        self._latest_token[token] = place
        self._since_end = 0 if token == _END else self._since_end + 1
        before = -1
        if self._since_end >= _RUN:
            run = self._run(index)
            before = self._latest_run.get(run, -1)
            self._latest_run[run] = place
        self._before_run.append(before)

    def _run(self, index: int) -> tuple[int, ...]:
        return tuple(self.tokens[max(0, index - _RUN + 1) : index + 1])

    def _matching(self, index: int, text: Sequence[int], known: int) -> int:
        """Return how many tokens up to `index` are the last ones of `text`, up to LONGEST."""
        most = min(LONGEST, index + 1, len(text))
        tokens = self.tokens
        while known < most and tokens[index - known] == text[-1 - known]:
            known += 1
        return known


class SuffixCache:
    """Outputs of earlier requests, `limit` tokens in all: whole outputs go, the oldest first.

    They decide how much is guessed and how fast, never what is said.
    """

    def __init__(self, *, limit: int = DEFAULT_CACHE_TOKENS) -> None:
        self.limit = limit
        self.num_tokens = 0
        self.occurrences = Occurrences()
        self._sizes: deque[int] = deque()

    def add(self, output: Sequence[int]) -> None:
        """Take an output; one that is longer than the limit is left out."""
        if not 0 < len(output) <= self.limit:
            return
        while self.num_tokens + len(output) > self.limit:
            size = self._sizes.popleft()
            self.occurrences.drop(size + 1)
            self.num_tokens -= size
        self.occurrences.extend((*output, _END))
        self._sizes.append(len(output))
        self.num_tokens += len(output)

    def clear(self) -> None:
        """Forget everything."""
        self.num_tokens = 0
        self.occurrences = Occurrences()
        self._sizes.clear()


class SuffixDrafter:
    """Guesses along the places where the text's latest tokens occurred before, in the text and in a cache.

    `widths` is the ladder of verify widths. The rows of the narrowest are there anyway and are always filled, if need
    be with the text's commonest token; a wider one is taken where its rows are worth their time. tree: guesses branch
    where counts are split, instead of following the most likely token alone.
    """

    name = "suffix"

    def __init__(self, *, widths: Sequence[int], cache: SuffixCache | None = None, tree: bool = False) -> None:
        self._branches = BRANCHES if tree else 1
        self._lengths = [width - 1 for width in widths if width > 1]
        self._others = Occurrences() if cache is None else cache.occurrences
        self._own = Occurrences()
        self._counts: Counter[int] = Counter()
        self._commonest = 0

    def start(self, tokens: Sequence[int], sampler: Sampler) -> None:
        """Forget the last request."""
        self._own = Occurrences()
        self._counts.clear()
        self._take(tokens)

    def propose(self, tokens: Sequence[int], limit: int) -> Proposal:
        """Guess up to `limit` tokens."""
        self._take(tokens[len(self._own.tokens) :])
        known = self._own.tokens
        length = len(known)
        try:
            return self._guess(limit)
        finally:
            del known[length:]  # guesses were read as if they were text

    def _take(self, tokens: Sequence[int]) -> None:
        self._own.extend(tokens)
        counts = self._counts
        for token in tokens:
            counts[token] += 1
            if counts[token] >= counts[self._commonest]:
                self._commonest = token

    def _guess(self, limit: int) -> Proposal:
        """Fill one width after the other as long as its additional rows are likely to bring in what they cost."""
        growing = self._grow()
        ids: list[int] = []
        parents: list[int] = []
        chances: list[float] = []
        kept = 0
        for length in self._lengths:
            length, gain = min(length, limit), 0.0
            for token, parent, chance in islice(growing, length - len(ids)):
                ids.append(token)
                parents.append(parent)
                chances.append(chance)
                gain += chance
                if kept and gain + chance * (length - len(ids)) < WORTH * (length - kept):
                    break
            if len(ids) == kept or (kept and gain < WORTH * (length - kept)):
                break
            kept = len(ids)
        if not kept:
            return Proposal((self._commonest,), confidence=0.0)
        found = Proposal.grown(ids, parents, chances, nodes=range(kept))
        return replace(found, confidence=round(found.confidence, 1))

    def _grow(self) -> Iterator[tuple[int, int, float]]:
        """Yield guesses, the likeliest first: a token, the guess it follows, and how likely all is right up to it."""
        text, others = self._own.tokens, self._others.tokens
        start, queue = len(text), list[tuple[float, int, int, int]]()
        reached: list[tuple[Places, Places, list[int]]] = [(self._own.places(text), self._others.places(text), [])]
        node, chance = -1, 1.0
        while True:
            own, cached, path = reached[node + 1]
            text[start:] = path
            chances = _chances(text, own, others, cached)
            best = sorted(chances, key=chances.__getitem__, reverse=True)[: self._branches]
            for rank, token in enumerate(best):
                heapq.heappush(queue, (-chance * chances[token], node, rank, token))
            if not queue:
                return
            minus, node, _, token = heapq.heappop(queue)
            yield token, node, -minus
            own, cached, path = reached[node + 1]
            text[start:] = path
            reached.append((_follow(text, own, token), _follow(others, cached, token), [*path, token]))
            node, chance = len(reached) - 2, -minus


def _chances(
    text: Sequence[int], own: list[tuple[int, int]], other: Sequence[int], cached: list[tuple[int, int]]
) -> Mapping[int, float]:
    """Estimate how likely each token is next that followed at one of the places; latest first among own ones."""
    prior = estimate([(other[place + 1], match) for place, match in cached if other[place + 1] != _END], {}, OTHERS)
    return estimate([(text[place + 1], match) for place, match in own], prior, OWN)


def _follow(text: Sequence[int], places: list[tuple[int, int]], token: int) -> list[tuple[int, int]]:
    """Return the places one token further on, where that is `token`."""
    return [(place + 1, min(match + 1, LONGEST)) for place, match in places if text[place + 1] == token]


def estimate(
    followers: Sequence[tuple[int, int]], prior: Mapping[int, float], smoothing: Smoothing
) -> Mapping[int, float]:
    """Estimate the probability of each token that followed a suffix or has a prior.

    followers: the token and how many tokens before it match, per place. A suffix of m tokens that occurred n times, c
    times before token x, makes it p_m(x) = (max(0, c - discount) + strength p_{m-1}(x)) / (n + strength), with p_0 the
    prior (interpolated absolute discounting; Teh 2006). Levels with the same counts are taken in one power.
    """
    if not followers:
        return prior
    chances = dict(prior)
    counts: dict[int, int] = {}
    for token, _ in followers:
        counts[token] = counts.get(token, 0) + 1
        chances.setdefault(token, 0.0)
    left = sorted(followers, key=_match, reverse=True)
    discount, strength, below = smoothing.discount, smoothing.strength, 0
    while left:
        level, total = left[-1][1], len(left)
        keep = (strength / (total + strength)) ** (level - below)
        for token, chance in chances.items():
            limit = max(0.0, counts.get(token, 0) - discount) / total
            chances[token] = limit + keep * (chance - limit)
        while left and left[-1][1] == level:
            counts[left.pop()[0]] -= 1
        below = level
    return chances


def _match(follower: tuple[int, int]) -> int:
    return follower[1]
