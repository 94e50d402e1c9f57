"""A replay does what the target would have made of it: the same steps, proposals and acceptances, at its own clock."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from parts import ListDrafter, grow, make_loop, ngram, run
from specrt.acceptance import Proposal
from specrt.control import FixedController
from specrt.drafters import Drafter, NoDrafter
from specrt.replay import Transcript
from toy import ToyEngine

CALL_S = {2: 2.0, 4: 4.0, 6: 6.0, 10: 10.0, 16: 16.0}
PROMPT = [0, 1]


def trees() -> Drafter:
    def guess(tokens: Sequence[int], limit: int) -> Proposal:
        return grow(lambda path: [(tokens[-1] + len(path) + i) % 4 for i in range(4)], (3, 2, 1), limit)

    return ListDrafter(guess)


@pytest.mark.parametrize("drafter", [ngram, NoDrafter, trees])
@pytest.mark.parametrize("k", [1, 3, 9, 15])
@pytest.mark.parametrize("params", [{}, {"temperature": 0.7, "seed": 5}, {"temperature": 0.7, "seed": 5, "top_k": 2}])
def test_steps_are_those_of_the_target(drafter: Callable[[], Drafter], k: int, params: dict[str, Any]) -> None:
    toy = ToyEngine(vocab_size=4)
    ids, real, _ = run(toy, drafter(), k=k, max_tokens=50, prompt=PROMPT, **params)
    transcript = Transcript(toy, [*PROMPT, *ids], CALL_S)
    again, replayed, _ = run(transcript, drafter(), k=k, max_tokens=50, prompt=PROMPT, **params)
    assert again == ids
    for name in ("num_steps", "num_proposed", "num_accepted", "accepted_by_position", "proposed_by_position"):
        assert getattr(replayed.stats, name) == getattr(real.stats, name), name
    assert drafter is NoDrafter or real.stats.num_accepted > 0


def test_a_call_takes_what_its_width_was_measured_to_take() -> None:
    toy = ToyEngine(vocab_size=4)
    ids, _, _ = run(toy, k=0, max_tokens=9, prompt=PROMPT)
    transcript = Transcript(toy, [*PROMPT, *ids], CALL_S, real=lambda: 0.0)
    loop = make_loop(
        transcript, NoDrafter(), controller=FixedController(0), max_tokens=9, prompt=PROMPT, clock=transcript.clock
    )
    list(loop.run())
    assert loop.stats.verify_s == pytest.approx(9 * CALL_S[2])
    assert loop.stats.decode_s == pytest.approx(9 * CALL_S[2])


def test_real_time_of_the_replay_itself_does_not_count_as_the_targets() -> None:
    toy, ticks = ToyEngine(vocab_size=4), iter(range(1000))
    transcript = Transcript(toy, [0, 1, 2, 3], CALL_S, real=lambda: float(next(ticks)))
    transcript.prefill([0])
    before = transcript.clock()
    transcript.verify([1, 2, 3])
    assert transcript.clock() - before == CALL_S[4] + 2  # a tick to the call and one from it, none within
