"""Control of k: what pays is taken, what does not is left, and no text is lost by it.

Time is simulated: calls and drafts cost what a table says, guesses are right with a given chance.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from parts import ListDrafter, make_loop, ngram, run
from specrt import control
from specrt.acceptance import Proposal
from specrt.control import AdaptiveController, CallCosts, Controller, FixedController, Step
from toy import ToyEngine

CALL_S = {2: 5.2e-3, 4: 5.9e-3, 6: 6.7e-3, 10: 8.4e-3, 16: 10.4e-3}
PLAIN_S = CALL_S[2]
MOST = 15
KS = (0, 1, 3, 5, 9, 15)
Text = Sequence[tuple[float, int]]


def adaptive(*, first: int = 5) -> AdaptiveController:
    return AdaptiveController(CallCosts(CALL_S), first=first)


def speed(
    make: Callable[[], Controller],
    text: Text,
    *,
    draft_s: float,
    noise: float = 0.1,
    seed: int = 0,
) -> list[float]:
    """Return tokens per plain step for each part (chance of a right guess, number of tokens) of a text."""
    rng, controller, speeds = random.Random(seed), make(), []
    for chance, length in text:
        seconds, tokens = 0.0, 0
        while tokens < length:
            limit = controller.limit(MOST)
            drafted = Proposal(tuple(range(limit)))
            proposal = drafted.first(controller.keep(drafted))
            accepted = 0
            while accepted < len(proposal.token_ids) and rng.random() < (
                chance(len(proposal.token_ids)) if callable(chance) else chance
            ):
                accepted += 1
            verify_s = CallCosts(CALL_S).of(len(proposal.token_ids) + 1)
            step = Step(
                proposal=proposal, num_drafted=limit, num_accepted=accepted, draft_s=limit * draft_s,
                verify_s=verify_s * rng.uniform(1 - noise, 1 + noise),
            )  # fmt: skip
            controller.learn(step)
            seconds += verify_s + step.draft_s
            tokens += accepted + 1
        speeds.append(tokens / seconds * PLAIN_S)
    return speeds


def best_fixed(text: Text, *, draft_s: float) -> list[float]:
    every = [speed(lambda k=k: FixedController(k), text, draft_s=draft_s) for k in KS]  # type: ignore[misc]
    return [max(parts) for parts in zip(*every, strict=True)]


@pytest.mark.parametrize("draft_s", [0.0, 0.1 * PLAIN_S, 0.4 * PLAIN_S, PLAIN_S])
@pytest.mark.parametrize("seed", range(3))
def test_a_text_that_defeats_every_guess_costs_two_percent_at_most(draft_s: float, seed: int) -> None:
    (found,) = speed(adaptive, [(0.0, 3000)], draft_s=draft_s, seed=seed)
    assert found >= 0.98


@pytest.mark.parametrize("draft_s", [0.0, 0.1 * PLAIN_S])
def test_a_text_that_turns_easy_is_as_fast_as_with_the_best_fixed_k(draft_s: float) -> None:
    text = [(0.0, 800), (0.8, 800), (0.0, 400), (0.9, 800)]
    found, best = speed(adaptive, text, draft_s=draft_s), best_fixed(text, draft_s=draft_s)
    assert found[1] >= 0.9 * best[1]
    assert found[3] >= 0.9 * best[3]


@pytest.mark.parametrize("chance", [0.2, 0.5, 0.7, 0.9, 0.98])
@pytest.mark.parametrize("draft_s", [0.0, 0.1 * PLAIN_S, 0.3 * PLAIN_S])
def test_a_steady_text_is_nearly_as_fast_as_with_the_best_fixed_k(chance: float, draft_s: float) -> None:
    text = [(chance, 2000)]
    assert speed(adaptive, text, draft_s=draft_s)[0] >= 0.9 * best_fixed(text, draft_s=draft_s)[0]


@pytest.mark.parametrize("chance", [0.2, 0.35, 0.5])
def test_a_cheap_drafter_is_not_sent_to_rest_by_bad_luck_in_a_short_answer(chance: float) -> None:
    text, draft_s = [(chance, 160)], 0.036 * PLAIN_S  # an EAGLE head of SmolLM2-135M

    def mean(make: Callable[[], Controller]) -> float:
        return float(np.mean([speed(make, text, draft_s=draft_s, seed=seed)[0] for seed in range(40)]))

    best = max(mean(lambda k=k: FixedController(k)) for k in KS)  # type: ignore[misc]
    assert mean(adaptive) >= 0.95 * best


def test_without_the_account_probing_alone_would_lose_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "RISK", 1.0)
    (found,) = speed(adaptive, [(0.0, 3000)], draft_s=PLAIN_S)
    assert found < 0.98


def test_a_free_drafter_always_fills_the_narrowest_call() -> None:
    controller = adaptive()
    for _ in range(50):
        proposal = Proposal((1, 2, 3)).first(controller.keep(Proposal((1, 2, 3))))
        controller.learn(Step(proposal=proposal, num_drafted=3, num_accepted=0, draft_s=0.0, verify_s=PLAIN_S))
    assert controller.keep(Proposal((1, 2, 3))) == 1
    assert controller.limit(MOST) == MOST


def test_a_drafter_that_does_not_pay_rests_and_is_probed_again() -> None:
    controller, limits = adaptive(), []
    for _ in range(400):
        limit = controller.limit(MOST)
        limits.append(limit)
        proposal = Proposal(tuple(range(limit)))
        controller.learn(
            Step(proposal=proposal, num_drafted=limit, num_accepted=0, draft_s=limit * 0.3 * PLAIN_S, verify_s=PLAIN_S)
        )
    assert limits[0] == 5
    assert sum(limit > 0 for limit in limits[100:]) >= 2
    assert set(limits[100:]) == {0, 1}


def test_many_rejections_in_a_row_end_wide_guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "TRUST", 1e9)  # the rate alone would never give up

    def feed(controller: AdaptiveController, accepted: int) -> None:
        step = Step(proposal=Proposal((1,)), num_drafted=1, num_accepted=accepted, draft_s=0.0, verify_s=PLAIN_S)
        controller.learn(step)

    controller, wide = adaptive(), Proposal(tuple(range(9)), confidence=0.9)
    for _ in range(control.MAX_REJECTED - 1):
        feed(controller, 0)
    assert controller.keep(wide) == 9
    feed(controller, 0)
    assert controller.keep(wide) == 1
    feed(controller, 1)
    assert controller.keep(wide) == 9


def test_each_class_of_proposals_has_its_own_rate() -> None:
    controller = adaptive()
    for _ in range(30):
        for confidence, accepted in ((0.3, 0), (0.8, 3)):
            proposal = Proposal((1, 2, 3), confidence=confidence)
            step = Step(proposal=proposal, num_drafted=3, num_accepted=accepted, draft_s=0.0, verify_s=PLAIN_S)
            controller.learn(step)
    assert controller.keep(Proposal(tuple(range(9)), confidence=0.3)) == 1
    assert controller.keep(Proposal(tuple(range(9)), confidence=0.8)) == 9


def test_an_unsure_proposal_does_not_decide_about_the_next_one() -> None:
    """Every other guess is unsure and wrong: the next one is as likely to be good as any."""
    controller, limits = adaptive(), []
    for number in range(60):
        limit = controller.limit(MOST)
        limits.append(limit)
        proposal = Proposal(tuple(range(limit)), confidence=0.1 if number % 2 else 0.9)
        controller.learn(
            Step(
                proposal=proposal, num_drafted=max(1, limit), num_accepted=0 if number % 2 else limit,
                draft_s=limit * 0.1 * PLAIN_S, verify_s=CallCosts(CALL_S).of(limit + 1),
            )
        )  # fmt: skip
    assert min(limits) > 0


def test_call_costs_follow_what_is_measured_and_keep_their_proportion() -> None:
    costs = CallCosts(CALL_S)
    for _ in range(200):
        costs.learn(2, 2 * PLAIN_S)
    assert costs.of(1) == costs.of(2) == pytest.approx(2 * PLAIN_S, rel=0.01)
    assert CALL_S[16] * 1.3 < costs.of(16) < CALL_S[16] * 2
    assert costs.of(99) == costs.of(16)
    assert costs.widths == tuple(CALL_S)


def test_one_slow_call_changes_little() -> None:
    costs = CallCosts(CALL_S)
    costs.learn(2, 1000 * PLAIN_S)
    assert costs.of(2) < 1.1 * PLAIN_S


class Wild:
    """A controller that decides by dice: nothing it does may show in the text."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def limit(self, most: int) -> int:
        return self._rng.randint(0, most)

    def keep(self, proposal: Proposal) -> int:
        return self._rng.randint(0, len(proposal.token_ids))

    def learn(self, step: Step) -> None:
        assert step.num_accepted <= len(step.proposal.token_ids) <= step.num_drafted


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.9, "seed": 3}, {"temperature": 1.2, "seed": 3, "coupling": "rejection"}]
)
@pytest.mark.parametrize("controller", [adaptive, lambda: Wild(0), lambda: Wild(1), lambda: Wild(2)])
def test_no_controller_changes_the_text(params: dict[str, Any], controller: Callable[[], Controller]) -> None:
    plain, _, _ = run(ToyEngine(vocab_size=5), k=0, max_tokens=40, **params)
    found, loop, _ = run(ToyEngine(vocab_size=5), ngram(), controller=controller(), max_tokens=40, **params)
    assert found == plain
    assert loop.stats.num_drafter_faults == 0


def test_the_part_of_a_proposal_that_is_verified_keeps_its_laws() -> None:
    probs = np.eye(3)
    proposal = Proposal((0, 1, 2), probs, 0.4)
    first = proposal.first(2)
    assert first.token_ids == (0, 1)
    assert first.confidence == 0.4
    assert first.probs is not None
    assert np.array_equal(first.probs, probs[:2])
    assert proposal.first(3) is proposal


def test_the_loop_tells_the_controller_what_was_drafted_and_what_was_verified() -> None:
    steps: list[Step] = []

    class Half(FixedController):
        def keep(self, proposal: Proposal) -> int:
            return len(proposal.token_ids) // 2

        def learn(self, step: Step) -> None:
            steps.append(step)

    loop = make_loop(
        ToyEngine(vocab_size=5),
        ListDrafter(lambda tokens, limit: [1, 2, 3, 4][:limit]),
        controller=Half(4),
        max_tokens=6,
    )
    list(loop.run())
    assert steps[0].num_drafted == 4
    assert steps[0].proposal.token_ids == (1, 2)
    assert all(step.draft_s > 0 and step.verify_s > 0 for step in steps)
    assert loop.stats.num_proposed == sum(len(step.proposal.token_ids) for step in steps)


def test_a_tree_is_verified_whole_or_in_what_is_free() -> None:
    """By its levels: a wide tree of one level brings a token at most, however many guesses there are."""
    deep = Proposal(tuple(range(5)), confidence=0.9, parents=(-1, 0, 1, 2, 0))
    wide = Proposal(tuple(range(5)), confidence=0.6, parents=(-1, -1, -1, -1, -1))
    assert adaptive().keep(deep) == 5
    assert adaptive().keep(wide) == 1
    controller = AdaptiveController(CallCosts(CALL_S), first=5, max_step_s=CALL_S[4])
    assert controller.keep(deep) == 3


def test_a_tree_whose_longest_path_is_accepted_has_no_rejected_level() -> None:
    tree = Proposal((1, 2, 3, 4), confidence=0.5, parents=(-1, 0, -1, -1))
    rates = []
    for accepted in (2, 1):
        controller = adaptive()
        for _ in range(10):
            step = Step(proposal=tree, num_drafted=4, num_accepted=accepted, draft_s=0.0, verify_s=PLAIN_S)
            controller.learn(step)
        rates.append(controller.rate(0.5))
    assert rates[0] > 0.85
    assert rates[1] == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("parents", [(-1, -1, -1, -1, -1), (-1, 0, -1, -1, -1)])
def test_trees_to_come_are_taken_to_have_as_many_levels_as_the_latest(parents: tuple[int, ...]) -> None:
    tree, controller, draft_s = Proposal((1, 2, 3, 4, 5), confidence=0.5, parents=parents), adaptive(), 0.5 * PLAIN_S
    for _ in range(30):
        controller.learn(Step(proposal=tree, num_drafted=5, num_accepted=1, draft_s=draft_s, verify_s=CALL_S[6]))
    rate, levels = controller.rate(0.5), tree.num_levels
    tokens = 1 + sum(rate**level for level in range(1, levels + 1))
    assert controller.speed(5) == pytest.approx(tokens / (CALL_S[6] + draft_s), rel=0.05)  # all classes forget slower
    assert controller.speed(5, 0.5, num_levels=levels) == pytest.approx(tokens / CALL_S[6], rel=0.01)
    assert controller.limit(MOST) < 9
