"""How many tokens to guess in a step: a fixed number, or as many as pay by what was measured so far.

A step that verifies k tokens costs D + T(k + 1) seconds (D for drafting, T for the call of the verify width that takes
k + 1 rows) and gives E = 1 + p + ... + p^k tokens, if each is accepted with probability p (Leviathan, Kalman and Matias
2023, equation 1). The adaptive controller takes the k with most tokens per second. Three things keep it from losing:

* p is learned for each class of proposals on its own: a drafter says how sure it is, which is where p starts. How many
  tokens to draft is decided before that is known, by all proposals so far.
* Guesses that the narrowest call has room for are always taken from drafters that cost nothing. They tell when the text
  gets easy again.
* An account: a step pays in what it gained over plain decoding, or takes out what it lost. Where it is empty, nothing
  is risked but `RISK` of the time that passes, so that even a text made to defeat drafting costs little more than that.

Decisions follow clocks and counts of accepted tokens, so they may change how fast a text comes, never the text: see
`specrt.language_model` for the one case (sampled drafts under a seed) where they would.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from specrt.acceptance import Proposal
from specrt.cost_model import call_seconds, expected_tokens

RISK = 0.01  # of the time spent, that speculation may lose
CREDIT = 16  # plain steps; an account never holds more, so that past gains are not gambled away when a text turns hard
TRUST = 4  # how many observed tokens a drafter's own confidence counts for
KEEP = 0.9  # weight of what was seen before when the same class is seen again
KEEP_ALL = 0.97  # the same for proposals of all classes, which say how good one is that is still to be drafted
FADE = 0.98  # the same for each step that a drafter rests: what is known about it grows old
PROBE = 16  # steps that a drafter rests after it was found not to pay
MAX_REJECTED = 8  # steps in a row without an accepted token, after which only free guesses are taken
FREE = 0.03  # of a plain step: a drafter that takes less for a proposal costs nothing
_LEARN = 0.05  # weight of a new call time, for all widths and once more for its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What a step did: the verified part of a proposal, how much of it was accepted, seconds of drafter and target."""

    proposal: Proposal
    num_drafted: int
    num_accepted: int
    draft_s: float
    verify_s: float


@runtime_checkable
class Controller(Protocol):
    """Decides for one request how many tokens are drafted and verified.

    One of a caller's own is the request option `controller`. It may go by counts, clocks and how sure a drafter is;
    where guesses are drawn (coupling `rejection`, with a draft model or an early exit) `keep` must not go by which
    tokens they are, or the law of the text is another.
    """

    def limit(self, most: int) -> int:
        """Return how many tokens to draft in the coming step, 0 .. `most`."""
        ...

    def keep(self, proposal: Proposal) -> int:
        """Return how many of the proposed tokens to verify, the first ones."""
        ...

    def learn(self, step: Step) -> None:
        """Take in what a step cost and brought."""
        ...


class FixedController:
    """Always the same k."""

    def __init__(self, k: int) -> None:
        self._k = k

    def limit(self, most: int) -> int:
        """Return k, or what there is room for."""
        return min(self._k, most)

    def keep(self, proposal: Proposal) -> int:
        """Keep all."""
        return len(proposal.token_ids)

    def learn(self, step: Step) -> None:
        """Learn nothing."""


class RecordingController:
    """Another controller, whose steps are kept in a list."""

    def __init__(self, inner: Controller, steps: list[Step]) -> None:
        self.limit, self.keep = inner.limit, inner.keep
        self._inner, self._steps = inner, steps

    def learn(self, step: Step) -> None:
        """Keep the step, and pass it on."""
        self._steps.append(step)
        self._inner.learn(step)


class CallCosts:
    """Seconds of a verify call by width, followed as they change with context and load.

    A call that took longer than expected makes all widths dearer, its own twice as much: widths that are not in use
    keep their proportion.
    """

    def __init__(self, seconds: Mapping[int, float]) -> None:
        self._seconds = dict(sorted(seconds.items()))

    def of(self, rows: int) -> float:
        """Return the seconds of a call that takes `rows` rows."""
        return call_seconds(self._seconds, rows)

    @property
    def widths(self) -> tuple[int, ...]:
        """The widths, rising."""
        return tuple(self._seconds)

    def learn(self, rows: int, seconds: float) -> None:
        """Take in the time of a call; a single one changes little."""
        width = next((w for w in self._seconds if w >= rows), self.widths[-1])
        ratio = min(2.0, max(0.5, seconds / self._seconds[width]))
        for other in self._seconds:
            self._seconds[other] *= ratio ** (2 * _LEARN if other == width else _LEARN)


class Account:
    """Seconds that the steps of a request gained over plain decoding, less what they lost; see the module's text."""

    def __init__(self, costs: CallCosts) -> None:
        self._costs = costs
        self._balance = CREDIT * costs.of(1) / 4

    @property
    def is_open(self) -> bool:
        """Whether something may be risked."""
        return self._balance > 0

    def book(self, num_tokens: int, spent: float) -> None:
        """Take in a step that gave `num_tokens` tokens in `spent` seconds."""
        plain_s = self._costs.of(1)
        self._balance = min(CREDIT * plain_s, self._balance + num_tokens * plain_s - spent + RISK * spent)


class AdaptiveController:
    """Picks the k that pays most; see the module's text.

    costs: shared between requests. first: k of the first proposal of a drafter whose cost is not known yet.
    max_step_s: how long drafting and call may take; plain steps are not held to it. account: shared with the other
    drafters of the request, its own if left out.
    """

    def __init__(
        self, costs: CallCosts, *, first: int, max_step_s: float = math.inf, account: Account | None = None
    ) -> None:
        self._costs, self._first, self._max_step_s = costs, first, max_step_s
        self._classes: dict[float, tuple[float, float]] = {}  # confidence -> accepted, seen
        self._all = 0.0, 0.0  # the same of all classes
        self._latest: float | None = None
        self._token_s = self._proposal_s = 0.0  # of drafting
        self._levels_per_token = 1.0  # less for trees
        self._account = account or Account(costs)
        self._rest = self._rejected = 0

    @property
    def is_measured(self) -> bool:
        """Whether a proposal of the drafter has been seen, so that its cost is known."""
        return self._latest is not None

    def speed(self, k: int, confidence: float | None = None, *, num_levels: int | None = None) -> float:
        """Return the tokens per second to expect of k guesses.

        confidence, num_levels: of a proposal that is there, whose cost is spent; None for one that is still to be
        drafted, which is taken to be like those before it.
        """
        drafting = k * self._token_s if confidence is None else 0.0
        rate = self._rate_to_come() if confidence is None else self.rate(confidence)
        levels = k * self._levels_per_token if num_levels is None else num_levels
        return expected_tokens(rate, levels) / (self._costs.of(k + 1) + drafting)

    def rate(self, confidence: float) -> float:
        """Return the share of guesses of this confidence to expect accepted where those before them are."""
        return _rate(self._classes.get(confidence, (0.0, 0.0)), confidence)

    def stand_by(self) -> None:
        """Take note of a step without this drafter: what is known about it grows old."""
        self._rest = max(0, self._rest - 1)
        self._classes = {key: _fade(counts, FADE) for key, counts in self._classes.items()}
        self._all = _fade(self._all, FADE)

    def limit(self, most: int) -> int:
        """Return `most` for a drafter that costs nothing, else the k that pays by the proposals so far.

        Where more must not be risked that is a guess that fills the narrowest call, as often as the account can pay for
        it. The same guess now and then finds out whether a drafter that did not pay does again.
        """
        if self._latest is None:
            return self._within(min(self._first, most))
        if self._proposal_s < FREE * self._costs.of(1):
            return most
        if self._rest:
            return 0
        best = self._best(self._rate_to_come(), most, self._token_s, self._levels_per_token)
        if best and self._may_risk():
            return best
        if not best:
            self._rest = PROBE
        return min(most, self._costs.widths[0] - 1) if self._account.is_open else 0

    def keep(self, proposal: Proposal) -> int:
        """Return the number of first tokens that pays, never less than the narrowest call takes along."""
        proposed = self._within(len(proposal.token_ids))
        free = min(proposed, self._costs.widths[0] - 1)
        if not self._may_risk():
            return free
        rate = self.rate(proposal.confidence)
        if proposal.parents is None:
            return max(free, self._best(rate, proposed, 0.0))
        whole = expected_tokens(rate, proposal.first(proposed).num_levels) / self._costs.of(proposed + 1)
        return proposed if whole > expected_tokens(rate, free) / self._costs.of(free + 1) else free

    def learn(self, step: Step) -> None:
        """Update rates, costs and account."""
        verified = len(step.proposal.token_ids)
        self._account.book(step.num_accepted + 1, step.draft_s + self._costs.of(verified + 1))
        self._costs.learn(verified + 1, step.verify_s)
        if not verified:
            if self._rest:
                self.stand_by()
            return
        self._token_s = _follow(self._token_s, step.draft_s / step.num_drafted)
        self._proposal_s = _follow(self._proposal_s, step.draft_s)
        self._latest = step.proposal.confidence
        self._levels_per_token = step.proposal.num_levels / verified
        accepted, tried = step.num_accepted, step.num_accepted + (step.num_accepted < step.proposal.num_levels)
        before = self._classes.get(self._latest, (0.0, 0.0))
        self._classes[self._latest] = _fade(before, KEEP, accepted, tried)
        self._all = _fade(self._all, KEEP_ALL, accepted, tried)
        self._rejected = 0 if step.num_accepted else self._rejected + 1

    def _rate_to_come(self) -> float:
        """Return the share to expect of a proposal that is still to be drafted, of which no confidence is known."""
        return _rate(self._all, self._latest or 0.0)

    def _may_risk(self) -> bool:
        return self._account.is_open and self._rejected < MAX_REJECTED

    def _best(self, rate: float, most: int, draft_s: float, levels_per_token: float = 1.0) -> int:
        sizes = {0, most, *(width - 1 for width in self._costs.widths if width <= most)}
        seconds = {k: self._costs.of(k + 1) + k * draft_s for k in sizes}
        allowed = [k for k in sizes if k == 0 or seconds[k] <= self._max_step_s]
        return max(allowed, key=lambda k: (expected_tokens(rate, k * levels_per_token) / seconds[k], k))

    def _within(self, most: int) -> int:
        """Return the largest k up to `most` whose call is short enough."""
        return max((k for k in range(1, most + 1) if self._costs.of(k + 1) <= self._max_step_s), default=0)


def _rate(counts: tuple[float, float], confidence: float) -> float:
    """Return accepted / seen, with a drafter's own confidence for what was not seen yet."""
    return (counts[0] + TRUST * confidence) / (counts[1] + TRUST)


def _fade(counts: tuple[float, float], weight: float, accepted: float = 0.0, seen: float = 0.0) -> tuple[float, float]:
    """Return counts in which those before have less weight than what was just seen."""
    return counts[0] * weight + accepted, counts[1] * weight + seen


def _follow(known: float, seen: float) -> float:
    """Return an estimate that is nearer to what was seen; a single outlier moves it little."""
    return known * min(2.0, max(0.5, seen / known)) ** 0.5 if known else seen
