"""Two drafters as one: the right one is asked, each one's share is counted, and one goes on without the other."""

import itertools
import logging
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from parts import ListDrafter, run
from specrt import LanguageModel
from specrt.acceptance import Proposal
from specrt.control import CallCosts, Step
from specrt.drafters import Drafter
from specrt.drafters.combined import SURE, CombinedController, CombinedDrafter, SureController
from specrt.drafters.model import ModelDrafter
from specrt.errors import RequestError
from specrt.stats import describe_parts
from toy import ToyEngine, hashed_logits

V, K = 5, 3
CALL_S = {2: 5.2e-3, 4: 5.9e-3, 6: 6.7e-3, 10: 8.4e-3, 16: 10.4e-3}
PLAIN_S = CALL_S[2]
MOST = 15
COUPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "gumbel": {"temperature": 0.9, "seed": 5},
    "rejection": {"temperature": 0.9, "coupling": "rejection", "seed": 5},
}


class Lookup(ListDrafter):
    """Guesses zeros after every third length of text, and is sure of them."""

    name = "lookup"

    def __init__(self) -> None:
        super().__init__(lambda tokens, limit: Proposal((0,) * min(limit, 2), confidence=self.confidence(tokens)))

    def confidence(self, tokens: Sequence[int]) -> float:
        return SURE if len(tokens) % 3 == 0 else 0.1


def combined(lookup: Drafter | None = None, neural: Drafter | None = None, *, salt: int = 0) -> CombinedDrafter:
    neural = neural or ModelDrafter(ToyEngine(V, salt=salt), vocab_size=V)
    return CombinedDrafter(lookup or Lookup(), neural, SureController(K))


def failing(drafter: Any, *, after: int = 0, method: str = "propose") -> Any:
    """Make a method of a drafter fail from its call number `after` on."""
    sound, calls = getattr(drafter, method), iter(range(10**6))

    def fail(*arguments: Any) -> Any:
        if next(calls) >= after:
            raise RuntimeError("out of order")
        return sound(*arguments)

    setattr(drafter, method, fail)
    return drafter


@pytest.mark.parametrize("coupling", COUPLINGS)
def test_the_neural_drafter_is_right_after_any_number_of_steps_without_it(coupling: str) -> None:
    """As the draft is the target, all its guesses are accepted, if it has caught up with what it did not see."""
    stats = run(ToyEngine(V), combined(), k=K, max_tokens=80, **COUPLINGS[coupling])[1].stats
    lookup, neural = stats.parts["lookup"], stats.parts["model"]
    assert neural.num_accepted == neural.num_proposed > 0
    assert lookup.num_drafts > 3
    assert lookup.num_accepted < lookup.num_proposed


@pytest.mark.parametrize("coupling", COUPLINGS)
def test_parts_add_up(coupling: str) -> None:
    stats = run(ToyEngine(V), combined(salt=9), k=K, max_tokens=61, **COUPLINGS[coupling])[1].stats
    for name in ("num_drafts", "num_proposed", "num_accepted"):
        assert sum(getattr(part, name) for part in stats.parts.values()) == getattr(stats, name) > 0
    assert stats.to_dict()["parts"]["model"]["num_drafts"] == stats.parts["model"].num_drafts
    assert describe_parts(stats.parts) in stats.summary()
    total = type(stats).combined([stats, stats])
    assert total.parts["lookup"].num_proposed == 2 * stats.parts["lookup"].num_proposed
    assert set(stats.parts) == {"lookup", "model"}, "what was combined is another object"


def test_parts_add_up_where_a_stop_cuts_a_block() -> None:
    cut = 0
    for end in range(V):
        loop = run(ToyEngine(V), combined(), k=K, max_tokens=60, eos=(end,))[1]
        stats = loop.stats
        for name in ("num_drafts", "num_proposed", "num_accepted"):
            assert sum(getattr(part, name) for part in stats.parts.values()) == getattr(stats, name)
        cut += sum((rows - 1) * count for rows, count in stats.calls_by_rows.items()) > stats.num_proposed
    assert cut, "no stop cut a block, so nothing was tested"


def test_the_lookup_goes_first_where_it_is_sure_and_nowhere_else() -> None:
    asked: list[int] = []

    def guess(tokens: Sequence[int], limit: int) -> Sequence[int]:
        asked.append(len(tokens))
        return [1] * limit

    neural = ListDrafter(guess)
    drafter = combined(neural=neural)
    for length in range(1, 10):
        proposal = drafter.propose([0] * length, K)
        assert (proposal.part, proposal.token_ids) == (("lookup", (0, 0)) if length % 3 == 0 else ("list", (1, 1, 1)))
    assert asked == [1, 2, 4, 5, 7, 8]


def test_where_the_neural_drafter_has_nothing_the_lookup_stands() -> None:
    proposal = combined(neural=ListDrafter(lambda tokens, limit: ())).propose([0], K)
    assert (proposal.part, proposal.token_ids) == ("lookup", (0, 0))


@pytest.mark.parametrize("coupling", COUPLINGS)
@pytest.mark.parametrize("method", ["start", "propose"])
@pytest.mark.parametrize("broken", ["lookup", "model"])
def test_a_part_that_fails_leaves_the_other(
    broken: str, method: str, coupling: str, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {"max_tokens": 60, "k": K, **COUPLINGS[coupling]}
    plain, _, _ = run(ToyEngine(V), **options)
    parts: dict[str, Any] = {"lookup": Lookup(), "model": ModelDrafter(ToyEngine(V), vocab_size=V)}
    failing(parts[broken], method=method, after=2 * (method == "propose"))
    with caplog.at_level(logging.INFO):
        ids, loop, _ = run(ToyEngine(V), combined(parts["lookup"], parts["model"]), **options)
    assert coupling == "rejection" or ids == plain
    assert loop.stats.num_drafter_faults == len(caplog.records) == 1
    assert f"the {broken} drafter failed" in caplog.text
    (other,) = parts.keys() - {broken}
    assert loop.stats.parts[other].num_drafts > 5
    assert str(loop.stats.hint) == "a part of the combined drafter failed and was dropped; see the log"


def test_a_part_beyond_its_budget_leaves_the_other() -> None:
    seconds = [0.0]

    def slow(tokens: Sequence[int], limit: int) -> Sequence[int]:
        seconds[0] += 0.03
        return [1] * limit

    drafter = combined(neural=ListDrafter(slow))
    loop = run(ToyEngine(V), drafter, k=K, max_tokens=40, draft_budget_s=0.02, clock=lambda: seconds[0])[1]
    assert loop.stats.num_drafter_faults == loop.stats.parts["list"].num_drafts == 1
    assert loop.stats.parts["lookup"].num_drafts > 5


Text = Sequence[tuple[float, float, int]]  # chance of a right guess of the lookup and of the neural part, tokens


def speed(text: Text, *, draft_s: float, only: str | None = None, k: int | None = None, seed: int = 0) -> float:
    """Return tokens per plain step over a text; the lookup says how sure it is, right on average."""
    rng = random.Random(seed)
    controller = CombinedController(CallCosts(CALL_S), neural="neural", k=k, first=5, max_step_s=1.0)
    seconds = tokens = 0.0
    for sure, chance, length in text:
        end = tokens + length
        while tokens < end:
            limit = controller.limit(MOST)
            found = Proposal(tuple(range(min(limit, 7))), confidence=sure, part="lookup")
            asked = controller.instead(found, limit) if only is None else limit * (only == "neural")
            drafted = Proposal(tuple(range(asked)), part="neural") if asked else found
            proposal = drafted.first(controller.keep(drafted))
            right, accepted = (chance if asked else sure), 0
            while accepted < len(proposal.token_ids) and rng.random() < right:
                accepted += 1
            verify_s = CallCosts(CALL_S).of(len(proposal.token_ids) + 1) * rng.uniform(0.9, 1.1)
            step = Step(
                proposal=proposal, num_drafted=len(drafted.token_ids), num_accepted=accepted,
                draft_s=asked * draft_s, verify_s=verify_s,
            )  # fmt: skip
            controller.learn(step)
            seconds += verify_s + step.draft_s
            tokens += accepted + 1
    return tokens / seconds * PLAIN_S


LOOKED_UP, FREE = (0.9, 0.7, 60), (0.1, 0.8, 60)


@pytest.mark.parametrize("k", [None, 5])
def test_a_text_with_both_kinds_of_places_is_faster_than_with_either_part(k: int | None) -> None:
    text = [LOOKED_UP, FREE] * 12
    draft_s = 0.12 * PLAIN_S
    both = speed(text, draft_s=draft_s, k=k)
    assert both > 1.15 * speed(text, draft_s=draft_s, k=k, only="lookup")
    assert both > 1.05 * speed(text, draft_s=draft_s, k=k, only="neural")


@pytest.mark.parametrize(
    ("place", "draft_s", "better"),
    [
        (LOOKED_UP, 0.2, "lookup"),
        (FREE, 0.1, "neural"),
        ((0.5, 0.9, 60), 0.05, "neural"),
        ((0.5, 0.9, 60), 2.0, "lookup"),
    ],
)
def test_a_steady_text_is_nearly_as_fast_as_with_its_better_part(
    place: tuple[float, float, int], draft_s: float, better: str
) -> None:
    text = [place] * 20
    alone = {only: speed(text, draft_s=draft_s * PLAIN_S, k=5, only=only) for only in ("lookup", "neural")}
    assert max(alone, key=alone.__getitem__) == better
    for k in (None, 5):
        assert speed(text, draft_s=draft_s * PLAIN_S, k=k) > 0.93 * alone[better]


@pytest.mark.parametrize("draft_s", [0.05, 0.3, 1.0])
@pytest.mark.parametrize("sure", [0.0, 0.6])
def test_a_text_that_defeats_both_costs_little(draft_s: float, sure: float) -> None:
    """The lookup's confidence is wrong here: what counts is what was accepted."""
    rng = random.Random(1)
    controller = CombinedController(CallCosts(CALL_S), neural="neural", k=None, first=5, max_step_s=1.0)
    seconds, steps = 0.0, 3000
    for _ in range(steps):
        limit = controller.limit(MOST)
        found = Proposal((0,) * 7, confidence=sure, part="lookup")
        asked = controller.instead(found, limit)
        drafted = Proposal((0,) * asked, part="neural") if asked else found
        proposal = drafted.first(controller.keep(drafted))
        verify_s = CallCosts(CALL_S).of(len(proposal.token_ids) + 1) * rng.uniform(0.9, 1.1)
        spent = asked * draft_s * PLAIN_S
        controller.learn(Step(proposal=proposal, num_drafted=len(drafted.token_ids), num_accepted=0,
                              draft_s=spent, verify_s=verify_s))  # fmt: skip
        seconds += verify_s + spent
    assert steps * PLAIN_S / seconds > 0.97


def test_a_step_is_never_longer_than_asked() -> None:
    controller = CombinedController(CallCosts(CALL_S), neural="neural", k=None, first=15, max_step_s=7e-3)
    for part in ("lookup", "neural") * 10:
        drafted = Proposal((0,) * 15, confidence=0.99, part=part)
        kept = controller.keep(drafted)
        assert CallCosts(CALL_S).of(kept + 1) < 7.1e-3
        controller.learn(Step(proposal=drafted.first(kept), num_drafted=15, num_accepted=kept, draft_s=1e-3,
                              verify_s=CallCosts(CALL_S).of(kept + 1)))  # fmt: skip
        assert controller.instead(Proposal(confidence=0.0), 15) <= 5


def guesses(tokens: Sequence[int], limit: int) -> list[int]:
    found: list[int] = []
    for _ in range(limit):
        found.append(int(np.argmax(hashed_logits([*tokens, *found], V))))
    return found


def lying_clock(seed: int) -> Callable[[], float]:
    """Return a clock that runs at another speed at every look."""
    rng = random.Random(seed)
    times = itertools.accumulate(rng.choice([0.0, 1e-4, 5e-3]) for _ in itertools.count())
    return lambda: next(times)


@pytest.mark.parametrize("k", [None, K])
def test_clocks_that_lie_change_no_token(k: int | None) -> None:
    """Which part drafts follows times; the text does not."""
    plain, _, _ = run(ToyEngine(V), max_tokens=70, temperature=0.8, seed=3)
    seen = set()
    for seed in range(5):
        choice = CombinedController(CallCosts(CALL_S), neural="model", k=k, first=K, max_step_s=1.0)
        drafter = CombinedDrafter(ListDrafter(guesses), ModelDrafter(ToyEngine(V, salt=9), vocab_size=V), choice)
        ids, loop, _ = run(
            ToyEngine(V), drafter, controller=choice, max_tokens=70, temperature=0.8, seed=3, clock=lying_clock(seed)
        )
        assert ids == plain
        seen.add(describe_parts(loop.stats.parts))
    assert len(seen) > 1, "the clocks had no influence, so nothing was tested"


LONG: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True}


@pytest.mark.parametrize("name", ["combined", "suffix+model", "ngram+model"])
def test_parts_can_be_named(tiny_model: LanguageModel, name: str) -> None:
    stats = tiny_model.generate("def mean(values):" * 3, drafter=name, k=3, **LONG).stats
    lookup = "ngram" if name == "ngram+model" else "suffix"
    assert (stats.drafter, set(stats.parts)) == (name, {lookup, "model"})
    assert tiny_model.manifest.drafter_names == ("ngram", "suffix", "model", "combined")


@pytest.mark.parametrize("name", ["model+ngram", "ngram+suffix", "ngram+", "+model", "ngram+none", "combined+model", 5])
def test_what_cannot_be_combined_is_refused(tiny_model: LanguageModel, name: Any) -> None:
    with pytest.raises(RequestError, match="the artifact has ngram, suffix, model, combined, none, found"):
        tiny_model.generate("a", drafter=name)


def test_a_seed_repeats_a_text_of_drawn_guesses_whatever_clocks_say(tiny_model: LanguageModel) -> None:
    options: Any = {"drafter": "combined", "coupling": "rejection", "temperature": 0.8, "seed": 4, **LONG}
    found = set()
    for seed in range(6):
        with tiny_model.start("def mean(values):" * 3, options, clock=lying_clock(seed), cold=True) as stream:
            found.add(tuple(token.id for token in stream))
    assert len(found) == 1


def test_a_seed_repeats_a_text_of_drawn_guesses(tiny_model: LanguageModel) -> None:
    options: dict[str, Any] = {"drafter": "combined", "coupling": "rejection", "temperature": 0.8, "seed": 4, **LONG}
    first = tiny_model.generate("def mean(values):" * 3, **options)
    assert len(first.stats.parts) == 2
    assert tiny_model.generate("def mean(values):" * 3, **options).token_ids == first.token_ids
    for name, value in {"k": "auto", "draft_budget_ms": 5.0, "suffix_cache": True}.items():
        with pytest.raises(RequestError, match=f"^{name}: with coupling 'rejection' a seed's text depends on"):
            tiny_model.generate("a", **options | {name: value})
