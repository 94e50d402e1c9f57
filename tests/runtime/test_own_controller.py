"""A request may bring a controller of its own: it decides how many tokens are guessed, and never what the text says."""

import random
from pathlib import Path
from typing import Any

import pytest

from specrt.acceptance import Proposal
from specrt.control import FixedController, Step
from specrt.drafters.combined import OwnController, SureController
from specrt.errors import RequestError
from specrt.language_model import LanguageModel, load
from specrt.machine import Choice

PROMPT = "def mean(values):" * 3
LONG: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}


class Bold:
    """Answers beyond what there is room for, now and then below nothing."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = random.Random(seed)
        self.steps: list[Step] = []
        self.asked: list[int] = []

    def limit(self, most: int) -> int:
        self.asked.append(most)
        return self._rng.randint(-2, most + 5)

    def keep(self, proposal: Proposal) -> int:
        return self._rng.randint(-2, len(proposal.token_ids) + 5)

    def learn(self, step: Step) -> None:
        self.steps.append(step)


class Chooser(Bold):
    """Chooses parts too."""

    def __init__(self, answer: int) -> None:
        super().__init__()
        self.answer = answer

    def limit(self, most: int) -> int:
        return most

    def keep(self, proposal: Proposal) -> int:
        return len(proposal.token_ids)

    def instead(self, lookup: Proposal, limit: int) -> int:
        return self.answer


@pytest.mark.parametrize("drafter", ["ngram", "suffix", "model", "combined"])
@pytest.mark.parametrize("params", [{}, {"temperature": 0.9, "seed": 3}])
def test_it_decides_and_no_token_changes(tiny_model: LanguageModel, drafter: str, params: dict[str, Any]) -> None:
    plain = tiny_model.generate(PROMPT, k=0, **params, **LONG)
    lengths = set()
    for seed in range(3):
        own = Bold(seed)
        found = tiny_model.generate(PROMPT, drafter=drafter, controller=own, **params, **LONG)
        assert found.token_ids == plain.token_ids
        assert found.stats.num_drafter_faults == 0
        assert len(own.steps) == found.stats.num_steps
        assert sum(len(step.proposal.token_ids) for step in own.steps) == found.stats.num_proposed > 0
        lengths.add(found.stats.num_proposed)
    assert len(lengths) > 1, "the controllers had no influence, so nothing was tested"


def test_one_object_may_go_on_from_request_to_request(tiny_model: LanguageModel) -> None:
    own = Bold()
    for _ in range(2):
        tiny_model.generate(PROMPT, drafter="ngram", controller=own, max_tokens=5, ignore_eos=True)
    assert own.asked.count(4) == 2  # the first step of a request of five tokens


def test_answers_are_held_to_what_there_is_room_for() -> None:
    for answer, held in ((-3, 0), (2, 2), (9, 4)):
        own = OwnController(FixedController(answer))
        own._inner.limit = own._inner.keep = lambda _, answer=answer: answer  # type: ignore[method-assign]
        assert (own.limit(4), own.keep(Proposal((1, 2, 3, 4)))) == (held, held)
        assert OwnController(Chooser(answer)).instead(Proposal((1,)), 4) == held


def test_without_a_choice_of_its_own_the_lookup_goes_where_it_is_sure() -> None:
    own, sure = OwnController(FixedController(3)), SureController(3)
    for confidence in (0.2, 0.9):
        proposal = Proposal((1, 2), confidence=confidence)
        assert own.instead(proposal, 3) == sure.instead(proposal, 3)


def test_it_may_choose_the_part(tiny_model: LanguageModel) -> None:
    for answer, part in ((0, "suffix"), (3, "model")):
        stats = tiny_model.generate(PROMPT, drafter="combined", controller=Chooser(answer), **LONG).stats
        assert stats.parts[part].num_proposed > 0
        assert all(counts.num_proposed == 0 for name, counts in stats.parts.items() if name != part)


def test_an_error_of_its_own_is_the_callers_and_the_model_goes_on(tiny_model: LanguageModel) -> None:
    class Broken(FixedController):
        def keep(self, proposal: Proposal) -> int:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        tiny_model.generate(PROMPT, controller=Broken(3), max_tokens=3)
    assert tiny_model.generate(PROMPT, max_tokens=3).token_ids


@pytest.mark.parametrize("value", [3, "auto", FixedController, object()])
def test_what_has_not_its_methods_is_refused(tiny_model: LanguageModel, value: Any) -> None:
    with pytest.raises(RequestError, match=r"^controller: expected an object with the methods limit, keep and learn"):
        tiny_model.generate(PROMPT, controller=value)


@pytest.mark.parametrize(("name", "value"), [("k", 3), ("k", "auto"), ("max_step_ms", 5.0)])
def test_what_it_decides_is_not_said_twice(tiny_model: LanguageModel, name: str, value: Any) -> None:
    options: Any = {name: value, "controller": FixedController(3)}
    with pytest.raises(RequestError, match=f"^{name}: a controller decides how many tokens: leave out one of them$"):
        tiny_model.generate(PROMPT, **options)


def test_a_seeds_text_is_not_left_to_it_where_guesses_are_drawn(tiny_model: LanguageModel) -> None:
    options: Any = {"temperature": 0.8, "coupling": "rejection", "controller": FixedController(3), "max_tokens": 3}
    with pytest.raises(RequestError, match=r"^controller: with coupling 'rejection' a seed's text depends on it"):
        tiny_model.generate(PROMPT, drafter="model", seed=1, **options)
    assert tiny_model.generate(PROMPT, drafter="model", **options).token_ids
    assert tiny_model.generate(PROMPT, drafter="ngram", seed=1, **options).token_ids


def test_the_machines_choice_of_k_does_not_stand_in_its_way(
    tiny_artifact: Path, machine_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load(tiny_artifact, cache_dir=machine_cache) as model:
        monkeypatch.setattr(model, "choice", Choice(drafter="suffix", k=3, max_step_ms=50.0))
        own = Bold()
        stats = model.generate(PROMPT, controller=own, **LONG).stats
    assert (stats.drafter, len(own.steps)) == ("suffix", stats.num_steps)


def test_measured_call_times_are_there_for_controllers(tiny_model: LanguageModel) -> None:
    assert set(tiny_model.call_s) == set(tiny_model.target.verify_widths)
    assert all(seconds > 0 for seconds in tiny_model.call_s.values())
