"""Two drafters as one: a lookup, which costs next to nothing, and a neural drafter for where it knows nothing.

In each step the lookup proposes first. Which proposal is verified is decided before the neural drafter has run, by what
was measured: tokens per second to expect of either, from how often its guesses of that confidence were accepted in
this request, what drafting them takes, and what the call takes (`AdaptiveController.speed`). Until the neural drafter
has run once, and where a seed's text must not depend on clocks, the lookup goes first if it is sure enough.

Neither rule looks at guesses that were drawn from a law, so that the law of the output is kept (see
`specrt.acceptance`).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, Self

from specrt.acceptance import Proposal
from specrt.control import Account, AdaptiveController, CallCosts, Controller, FixedController, Step
from specrt.drafters import Drafter
from specrt.sampling import Sampler

SURE = 0.65  # confidence of a lookup that goes first where nothing else is known; an n-gram of 3 tokens has it


class Choice(Protocol):
    """Chooses between the parts of a combined drafter."""

    def instead(self, lookup: Proposal, limit: int) -> int:
        """Return how many tokens, up to `limit`, the neural drafter is to guess instead; 0 to take the lookup's."""
        ...


class CombinedDrafter:
    """Proposes what a lookup found, or what a neural drafter guesses, as `choice` says; see the module's text.

    The neural drafter has to catch up with the tokens of steps that it did not draft. Proposals carry the name of the
    part they are from. Where the neural drafter has nothing to say, the lookup's proposal stands.
    """

    def __init__(self, lookup: Drafter, neural: Drafter, choice: Choice, *, name: str = "combined") -> None:
        self.name = name
        self._lookup, self._neural, self._choice = lookup, neural, choice

    def with_parts(self, change: Callable[[Drafter], Drafter]) -> Self:
        """Return the same of changed parts."""
        return type(self)(change(self._lookup), change(self._neural), self._choice, name=self.name)

    def start(self, tokens: Sequence[int], sampler: Sampler) -> None:
        """Begin a request with both."""
        self._lookup.start(tokens, sampler)
        self._neural.start(tokens, sampler)

    def propose(self, tokens: Sequence[int], limit: int) -> Proposal:
        """Guess up to `limit` tokens."""
        found = replace(self._lookup.propose(tokens, limit), part=self._lookup.name)
        k = self._choice.instead(found, limit)
        if k == 0:
            return found
        guessed = self._neural.propose(tokens, k)
        return replace(guessed, part=self._neural.name) if guessed.token_ids else found


class SureController(FixedController):
    """Always the same k; the lookup's proposal wherever it is sure enough. Depends on the text alone."""

    def instead(self, lookup: Proposal, limit: int) -> int:
        """Return `limit` unless the lookup is sure."""
        return 0 if lookup.token_ids and lookup.confidence >= SURE else limit


class OwnController(SureController):
    """A caller's own controller, whose answers are held to what there is room for.

    It chooses between the parts of a combined drafter if it has a method `instead` (`Choice`); else the lookup's
    proposal is taken wherever it is sure enough.
    """

    def __init__(self, inner: Controller) -> None:
        self._inner, self._instead = inner, getattr(inner, "instead", super().instead)

    def limit(self, most: int) -> int:
        """Return what it answers, within 0 .. `most`."""
        return _within(self._inner.limit(most), most)

    def instead(self, lookup: Proposal, limit: int) -> int:
        """Return what it answers, within 0 .. `limit`."""
        return _within(self._instead(lookup, limit), limit)

    def keep(self, proposal: Proposal) -> int:
        """Return what it answers, up to all tokens."""
        return _within(self._inner.keep(proposal), len(proposal.token_ids))

    def learn(self, step: Step) -> None:
        """Let it learn."""
        self._inner.learn(step)


class CombinedController:
    """Chooses the part that gives more tokens per second, with an adaptive controller for each.

    k: fixed for both parts, None for what pays. neural: name of the neural part. The other arguments are those of
    `AdaptiveController`.
    """

    def __init__(self, costs: CallCosts, *, neural: str, k: int | None, first: int, max_step_s: float) -> None:
        account = Account(costs)
        self._lookup = AdaptiveController(costs, first=first, max_step_s=max_step_s, account=account)
        self._neural = AdaptiveController(costs, first=first, max_step_s=max_step_s, account=account)
        self._name, self._k = neural, k

    def limit(self, most: int) -> int:
        """Return `most`, or the fixed k: a lookup costs nothing, and `instead` says how far the other part goes."""
        return most if self._k is None else min(self._k, most)

    def instead(self, lookup: Proposal, limit: int) -> int:
        """Return the neural part's k where that is faster; see `Choice`."""
        if self._k is None:
            k, kept = self._neural.limit(limit), self._lookup.keep(lookup)
        else:
            k, kept = limit, len(lookup.token_ids)
        if not k:
            return 0
        if not self._neural.is_measured:
            return 0 if lookup.token_ids and self._lookup.rate(lookup.confidence) >= SURE else k
        return k if self._neural.speed(k) > self._lookup_speed(lookup, kept) else 0

    def _lookup_speed(self, lookup: Proposal, kept: int) -> float:
        return self._lookup.speed(kept, lookup.confidence, num_levels=lookup.first(kept).num_levels)

    def keep(self, proposal: Proposal) -> int:
        """Return how many of the first tokens pay."""
        return self._of(proposal).keep(proposal) if self._k is None else len(proposal.token_ids)

    def learn(self, step: Step) -> None:
        """Let the part that proposed learn, and the other grow older."""
        part = self._of(step.proposal)
        part.learn(step)
        (self._lookup if part is self._neural else self._neural).stand_by()

    def _of(self, proposal: Proposal) -> AdaptiveController:
        return self._neural if proposal.part == self._name else self._lookup


def _within(count: int, most: int) -> int:
    return max(0, min(int(count), most))
