"""A drafter that fails, proposes rubbish or is late: dropped, said and counted once, and the text is unharmed."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from parts import chi_square, chi_square_limit, run
from specrt.acceptance import Proposal
from specrt.drafters.model import ModelDrafter
from specrt.sampling import Sampler
from toy import ToyEngine, hashed_logits

V, K, TOKENS = 5, 3, 16
Spoil = Callable[[Sampler, Proposal, int], Any]  # sampler, a sound proposal, the limit -> what is returned
COUPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "gumbel": {"temperature": 0.9, "repetition_penalty": 1.3, "seed": 5},
    "rejection": {"temperature": 0.9, "coupling": "rejection", "seed": 5},
}


def fail(sampler: Sampler, proposal: Proposal, limit: int) -> Any:
    raise RuntimeError("out of\norder")


def fail_half_way(sampler: Sampler, proposal: Proposal, limit: int) -> Any:
    for token in (1, 2, 3):
        sampler.push(token)
    raise MemoryError


def with_ids(ids: Any) -> Spoil:
    return lambda sampler, proposal, limit: Proposal(ids)


def with_probs(change: Callable[[np.ndarray], Any]) -> Spoil:
    """Spoil a proposal's laws, which are even where it has none."""

    def spoil(sampler: Sampler, proposal: Proposal, limit: int) -> Any:
        even = np.full((len(proposal.token_ids), V), 1 / V)
        return Proposal(proposal.token_ids, change(even if proposal.probs is None else proposal.probs.copy()))

    return spoil


def set_all(value: float) -> Callable[[np.ndarray], np.ndarray]:
    return lambda probs: np.full_like(probs, value)


def without_its_token(sampler: Sampler, proposal: Proposal, limit: int) -> Any:
    laws = np.zeros((len(proposal.token_ids), V))
    for row, token in zip(laws, proposal.token_ids, strict=True):
        row[(token + 1) % V] = 1.0
    return Proposal(proposal.token_ids, laws)


def negative(probs: np.ndarray) -> np.ndarray:
    probs[:, 0] -= 1.0
    probs[:, 1] += 1.0
    return probs


FAULTS: dict[str, Spoil] = {
    "an exception": fail,
    "an exception half-way": fail_half_way,
    "nothing": lambda sampler, proposal, limit: None,
    "a list": lambda sampler, proposal, limit: list(proposal.token_ids),
    "ids in a list": lambda sampler, proposal, limit: Proposal(list(proposal.token_ids)),  # type: ignore[arg-type]
    "an array of ids": lambda sampler, proposal, limit: Proposal(np.array(proposal.token_ids)),  # type: ignore[arg-type]
    "ids of NumPy": with_ids((np.int64(1),)),
    "an id that is a float": with_ids((1.0,)),
    "an id that is a bool": with_ids((True,)),
    "an id that is None": with_ids((None,)),
    "an id beyond the vocabulary": with_ids((0, V)),
    "a negative id": with_ids((-1,)),
    "too many tokens": lambda sampler, proposal, limit: Proposal((0,) * (limit + 1)),
    "laws of another size": with_probs(lambda probs: np.full((len(probs), V + 1), 1 / (V + 1))),
    "laws missing": with_probs(lambda probs: probs[:-1]),
    "laws without rows": with_probs(lambda probs: probs[0]),
    "laws in a list": with_probs(lambda probs: probs.tolist()),
    "laws of NaN": with_probs(set_all(np.nan)),
    "laws of infinity": with_probs(set_all(np.inf)),
    "laws of zero": with_probs(set_all(0.0)),
    "laws of sum 2": with_probs(lambda probs: 2 * probs),
    "negative probabilities": with_probs(negative),
    "a law without its token": without_its_token,
    "a node that is its own parent": lambda sampler, proposal, limit: Proposal((0, 1), parents=(-1, 1)),
    "equal siblings": lambda sampler, proposal, limit: Proposal((1, 1), parents=(-1, -1)),
    "a parent too few": lambda sampler, proposal, limit: Proposal((0, 1), parents=(-1,)),
    "a tree with laws": lambda sampler, proposal, limit: Proposal((0, 1), np.full((2, V), 1 / V), parents=(-1, -1)),
    "a confidence of NaN": lambda sampler, proposal, limit: Proposal((0, 1), confidence=np.nan),
    "a confidence above 1": lambda sampler, proposal, limit: Proposal((0, 1), confidence=1.5),
}


class Spoiled(ModelDrafter):
    """A draft model that is sound until its proposal number `at`."""

    def __init__(self, spoil: Spoil, *, at: int, salt: int = 9, vocab_size: int = V) -> None:
        super().__init__(ToyEngine(vocab_size, salt=salt), vocab_size=vocab_size)
        self.spoil, self.at, self.calls = spoil, at, 0

    def propose(self, tokens: Sequence[int], limit: int) -> Proposal:
        self.calls += 1
        proposal = super().propose(tokens, limit)
        if self.calls <= self.at:
            return proposal
        assert self._sampler is not None
        result: Proposal = self.spoil(self._sampler, proposal, limit)
        return result


@pytest.mark.parametrize(("at", "salt"), [(0, 9), (2, 9), (2, 0)], ids=["first", "middle", "after full acceptance"])
@pytest.mark.parametrize("coupling", COUPLINGS)
@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_costs_the_drafter_and_nothing_else(
    kind: str, coupling: str, at: int, salt: int, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"max_tokens": TOKENS, "k": K, **COUPLINGS[coupling]}
    drafter = Spoiled(FAULTS[kind], at=at, salt=salt)
    plain, _, _ = run(ToyEngine(V), **options)
    with caplog.at_level(logging.INFO):
        ids, loop, tokens = run(ToyEngine(V), drafter, **options)
    assert (loop.stats.num_drafter_faults, len(caplog.records), drafter.calls) == (1, 1, at + 1)
    (line,) = caplog.text.splitlines()
    assert "the model drafter failed: " in line
    assert line.endswith("going on without it")
    assert len(ids) == len(tokens) == TOKENS
    assert all(type(token) is int for token in ids)
    assert coupling == "rejection" or ids == plain
    assert len(loop.stats.proposed_by_position) == (K if at else 0), "the sound proposals before it are used"
    assert salt or loop.stats.num_accepted == at * K, "each step before the fault accepted in full"


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_leaves_the_law_of_sampled_drafts(kind: str) -> None:
    runs, size = 500, V
    law = np.zeros((size, size))
    for first in range(size):
        law[first] = softmax([0, 1])[first] * softmax([0, 1, first])
    counts = np.zeros_like(law)
    for seed in range(runs):
        drafter = Spoiled(FAULTS[kind], at=seed % 2)
        options: dict[str, Any] = {"temperature": 1.0, "coupling": "rejection", "seed": seed, "max_tokens": 3}
        counts[tuple(run(ToyEngine(V), drafter, k=1, **options)[0][:2])] += 1
    statistic, degrees = chi_square(counts.ravel(), runs * law.ravel())
    assert statistic < chi_square_limit(degrees)


def softmax(prefix: list[int]) -> np.ndarray:
    weights = np.exp(hashed_logits(prefix, V).astype(np.float64))
    return weights / weights.sum()


class FailingStart(Spoiled):
    def start(self, tokens: Sequence[int], sampler: Sampler) -> None:
        sampler.push(1)
        raise RuntimeError("no engine")


@pytest.mark.parametrize("max_tokens", [1, TOKENS])
@pytest.mark.parametrize("coupling", COUPLINGS)
def test_a_drafter_that_fails_to_start_is_dropped(coupling: str, max_tokens: int) -> None:
    options = {"max_tokens": max_tokens, "k": K, **COUPLINGS[coupling]}
    plain, _, _ = run(ToyEngine(V), **options)
    ids, loop, _ = run(ToyEngine(V), FailingStart(fail, at=99), **options)
    assert (ids, loop.stats.num_drafter_faults, loop.stats.num_proposed) == (plain, 1, 0)


def test_a_guess_pushed_at_the_start_is_taken_back() -> None:
    options: dict[str, Any] = {"max_tokens": 1, "k": K, "repetition_penalty": 50.0}
    plain, _, _ = run(ToyEngine(V), **options)
    best = int(np.argmax(hashed_logits([0, 1], V)))

    class Pushing(Spoiled):
        def start(self, tokens: Sequence[int], sampler: Sampler) -> None:
            sampler.push(best)

    assert run(ToyEngine(V), Pushing(fail, at=99), **options)[0] == plain


@pytest.mark.parametrize("late", [0, 2])
@pytest.mark.parametrize("coupling", COUPLINGS)
def test_a_drafter_beyond_its_budget_is_dropped(coupling: str, late: int, caplog: pytest.LogCaptureFixture) -> None:
    options = {"max_tokens": TOKENS, "k": K, **COUPLINGS[coupling]}
    seconds = [0.0]

    def wait(sampler: Sampler, proposal: Proposal, limit: int) -> Proposal:
        seconds[0] += 0.021
        return proposal

    drafter = Spoiled(wait, at=late, salt=0)
    plain, _, _ = run(ToyEngine(V), **options)
    with caplog.at_level(logging.INFO):
        ids, loop, _ = run(ToyEngine(V), drafter, draft_budget_s=0.02, clock=lambda: seconds[0], **options)
    assert (loop.stats.num_drafter_faults, drafter.calls) == (1, late + 1)
    assert [record.message for record in caplog.records] == [
        "the model drafter took 21.0 ms of draft_budget_ms 20; going on without it"
    ]
    assert loop.stats.num_accepted == K * (late + 1), "a late proposal is still used"
    assert coupling == "rejection" or ids == plain


def test_a_drafter_within_its_budget_stays() -> None:
    seconds = [0.0]

    def wait(sampler: Sampler, proposal: Proposal, limit: int) -> Proposal:
        seconds[0] += 0.019
        return proposal

    drafter = Spoiled(wait, at=0, salt=0)
    _, loop, _ = run(ToyEngine(V), drafter, k=K, max_tokens=12, draft_budget_s=0.02, clock=lambda: seconds[0])
    assert (loop.stats.num_drafter_faults, drafter.calls) == (0, 3)


def test_an_interrupt_is_not_a_fault() -> None:
    def interrupt(sampler: Sampler, proposal: Proposal, limit: int) -> Proposal:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(ToyEngine(V), Spoiled(interrupt, at=1), max_tokens=TOKENS)


def test_the_traceback_is_there_for_whoever_debugs_a_drafter(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        run(ToyEngine(V), Spoiled(fail, at=0), max_tokens=TOKENS)
    assert 'raise RuntimeError("out of\\norder")' in caplog.text


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_laws_that_are_rounded_are_taken(dtype: Any) -> None:
    law = softmax([0]).astype(dtype)
    drafter = Spoiled(lambda sampler, proposal, limit: Proposal((0,), law[None]), at=0)
    options: dict[str, Any] = {"temperature": 1.0, "coupling": "rejection", "seed": 1, "max_tokens": 5}
    assert not run(ToyEngine(V), drafter, **options)[1].stats.num_drafter_faults


@pytest.mark.parametrize("coupling", ["greedy", "gumbel"])
def test_sound_laws_are_a_fault_where_acceptance_is_by_match(coupling: str) -> None:
    options = {"max_tokens": TOKENS, "k": K, **COUPLINGS[coupling]}
    plain, _, _ = run(ToyEngine(V), **options)
    ids, loop, _ = run(ToyEngine(V), Spoiled(with_probs(lambda probs: probs), at=1), **options)
    assert (ids, loop.stats.num_drafter_faults) == (plain, 1)
