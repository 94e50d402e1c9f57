"""The whole loop, enumerated in exact fractions: the law of the output is the target's, and planted bugs are seen.

Every random decision goes through an injected chooser that replays all branches. Bugs are planted in choosers and
drafters; each must show as a difference.
"""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from parts import ListDrafter, PlainDetokenizer, grow, toy_eagle
from specrt.acceptance import Law, Picker, Proposal, Verdict
from specrt.control import FixedController
from specrt.drafters import Drafter
from specrt.drafters.combined import CombinedDrafter, SureController
from specrt.drafters.ngram import NgramDrafter
from specrt.drafters.suffix import SuffixDrafter
from specrt.loop import Loop
from specrt.sampling import Sampler, SamplingParams
from specrt.stops import StopRules
from toy import DriftingEngine, ToyEngine

V = 4
GRID = 12  # all laws are multiples of 1 / GRID
CELLS = 720  # values of a uniform number that is shared; fine enough for every law and ratio of laws here
Text = tuple[int, ...]
Distribution = dict[Text, Fraction]


def make_law(salt: int, tag: str, prefix: Sequence[int]) -> np.ndarray:
    """Return a law with full support, in twelfths, that depends on the whole prefix."""
    digest = hashlib.blake2b(repr((salt, tag, tuple(prefix))).encode(), digest_size=8).digest()
    weights = [1] * V
    for byte in digest[: GRID - V]:
        weights[byte % V] += 1
    return np.array([Fraction(w, GRID) for w in weights], object)


class Branches:
    """One run's decisions: those of `prefix` are replayed, the first new ones are taken as they come."""

    def __init__(self, prefix: list[int]) -> None:
        self.taken: list[int] = []
        self.weight = Fraction(1)
        self.others: list[list[int]] = []
        self._prefix = prefix

    def pick(self, law: Sequence[Fraction]) -> int:
        step = len(self.taken)
        if step < len(self._prefix):
            choice = self._prefix[step]
        else:
            possible = [i for i, p in enumerate(law) if p > 0]
            choice = possible[0]
            self.others += [[*self.taken, other] for other in possible[1:]]
        self.taken.append(choice)
        self.weight *= law[choice]
        return choice


def enumerate_texts(run: Callable[[Branches], Text]) -> Distribution:
    texts: Distribution = defaultdict(Fraction)
    todo: list[list[int]] = [[]]
    while todo:
        branches = Branches(todo.pop())
        texts[run(branches)] += branches.weight
        todo += branches.others
    assert sum(texts.values()) == 1
    return texts


class ExactChooser:
    """Decides by enumeration; no key may be used twice."""

    def __init__(self, branches: Branches) -> None:
        self._branches = branches
        self._used: set[tuple[Any, ...]] = set()

    def fresh(self, law: Sequence[Fraction], *key: Any) -> int:
        assert key not in self._used, f"the draw {key} was used twice"
        self._used.add(key)
        return self._branches.pick(law)

    def accepts(self, target_prob: Fraction, draft_prob: Fraction, *, start: int, node: int) -> bool:
        chance = min(Fraction(1), target_prob / draft_prob)
        return self.fresh([chance, 1 - chance], "accept", start, node) == 0

    def token(self, weights: np.ndarray, *, position: int) -> int:
        return self.fresh(list(weights / weights.sum()), "token", position)

    def draft(self, weights: np.ndarray, *, start: int, node: int) -> int:
        return self.fresh(list(weights), "draft", start, node)


def inverse(law: Sequence[Fraction], u: Fraction) -> int:
    total = Fraction(0)
    for index, p in enumerate(law):
        total += p
        if u < total:
            return index
    raise AssertionError


class SharedUniform(ExactChooser):
    """Planted: one uniform number per (start, node) serves two purposes."""

    def __init__(self, branches: Branches, *, pair: set[str]) -> None:
        super().__init__(branches)
        self._pair = pair
        self._cells: dict[tuple[int, int], int] = {}
        self._start = 0

    def _u(self, start: int, node: int) -> Fraction:
        key = (start, node)
        if key not in self._cells:
            self._cells[key] = self._branches.pick([Fraction(1, CELLS)] * CELLS)
        return Fraction(self._cells[key], CELLS)

    def draft(self, weights: np.ndarray, *, start: int, node: int) -> int:
        if "draft" not in self._pair:
            return super().draft(weights, start=start, node=node)
        return inverse(list(weights), self._u(start, node))

    def accepts(self, target_prob: Fraction, draft_prob: Fraction, *, start: int, node: int) -> bool:
        self._start = start
        if "accept" not in self._pair:
            return super().accepts(target_prob, draft_prob, start=start, node=node)
        return self._u(start, node) * draft_prob < target_prob

    def token(self, weights: np.ndarray, *, position: int) -> int:
        key = (self._start, position - self._start)
        if "token" not in self._pair or key not in self._cells:
            return super().token(weights, position=position)
        return inverse(list(weights / weights.sum()), self._u(*key))


class PositionKeyedDrafts(ExactChooser):
    """Planted ground for the tail bug: draft draws are reused when a position is drafted again."""

    def __init__(self, branches: Branches) -> None:
        super().__init__(branches)
        self._cells: dict[int, int] = {}

    def draft(self, weights: np.ndarray, *, start: int, node: int) -> int:
        position = start + node
        if position not in self._cells:
            self._cells[position] = self._branches.pick([Fraction(1, GRID)] * GRID)
        return inverse(list(weights), Fraction(self._cells[position], GRID))


class ExactPicker:
    """The sampler's side of acceptance on rows that are laws already."""

    params = SamplingParams(coupling="rejection", temperature=1.0)

    def __init__(self, chooser: Any) -> None:
        self.chooser = chooser
        real = Sampler(self.params, [0], vocab_size=V, end_ids=())
        real.chooser = chooser
        self.rank = real.rank  # of the rows of drafters, which are logits

    def pick(self, row: np.ndarray, *, position: int) -> int:
        return int(self.chooser.token(row, position=position))

    def law(self, row: np.ndarray) -> Law:
        return Law(None, row)

    def push(self, token: int) -> None: ...
    def rewind(self, length: int) -> None: ...
    def forget(self, position: int) -> None: ...


Guess = Callable[[Sequence[int], int, Any, int], tuple[list[int], list[np.ndarray] | None] | Proposal]


def sampled_guess(tokens: Sequence[int], limit: int, chooser: Any, salt: int) -> tuple[list[int], list[np.ndarray]]:
    """Draw a chain from draft laws."""
    guess: list[int] = []
    laws = []
    for node in range(limit):
        law = make_law(salt, "draft", [*tokens, *guess])
        guess.append(chooser.draft(law, start=len(tokens), node=node))
        laws.append(law)
    return guess, laws


def argmax_guess(tokens: Sequence[int], limit: int, _chooser: Any, salt: int) -> tuple[list[int], None]:
    """Guess each draft law's most probable token."""
    guess: list[int] = []
    for _ in range(limit):
        guess.append(int(np.argmax(make_law(salt, "draft", [*tokens, *guess]).astype(float))))
    return guess, None


def target_guess(tokens: Sequence[int], limit: int, chooser: Any, salt: int) -> tuple[list[int], list[np.ndarray]]:
    """Draw from the target's own laws: residuals have no mass."""
    guess: list[int] = []
    laws = []
    for node in range(limit):
        law = make_law(salt, "target", [*tokens, *guess])
        guess.append(chooser.draft(law, start=len(tokens), node=node))
        laws.append(law)
    return guess, laws


def tree_guess(*shape: int, depth_first: bool = False) -> Guess:
    """Guess the most probable tokens of the draft law at every node of a tree."""

    def guess(tokens: Sequence[int], limit: int, _chooser: Any, salt: int) -> Proposal:
        def children(path: list[int]) -> list[int]:
            law = make_law(salt, "draft", [*tokens, *path])
            return sorted(range(V), key=lambda token: -law[token])

        return grow(children, shape, limit, depth_first=depth_first)

    return guess


def sampled_tree_guess(tokens: Sequence[int], limit: int, chooser: Any, salt: int) -> Proposal:
    """Draw a token, which the proposal does not tell, put another beside it and one below that."""
    first = chooser.draft(make_law(salt, "draft", tokens), start=len(tokens), node=0)
    ids, parents = (first, (first + 1) % V, (first + 2) % V), (-1, -1, 1)
    return Proposal(ids[:limit], parents=parents[:limit])


def cut_before_guess(tokens: Sequence[int], limit: int, chooser: Any, salt: int) -> tuple[list[int], list[np.ndarray]]:
    """Planted: a drawn token is kept or dropped depending on itself."""
    guess, laws = sampled_guess(tokens, limit, chooser, salt)
    keep = next(
        (i for i, (x, law) in enumerate(zip(guess, laws, strict=True)) if law[x] <= Fraction(2, GRID)), len(guess)
    )
    return guess[:keep], laws[:keep]


def cut_after_guess(tokens: Sequence[int], limit: int, chooser: Any, salt: int) -> tuple[list[int], list[np.ndarray]]:
    """Stop drafting after a token of low probability, which stays in: allowed."""
    guess, laws = [], []
    for node in range(limit):
        law = make_law(salt, "draft", [*tokens, *guess])
        guess.append(chooser.draft(law, start=len(tokens), node=node))
        laws.append(law)
        if law[guess[-1]] <= Fraction(2, GRID):
            break
    return guess, laws


class EveryK:
    """Chooses k from what the loop may know: committed tokens and how many were accepted."""

    def __init__(self, k: int) -> None:
        self.k = k

    def __call__(self, tokens: Sequence[int], last: list[int], last_start: int) -> int:
        return self.k


class AcceptanceK(EveryK):
    """Long after a full acceptance, short after a rejection: allowed."""

    def __call__(self, tokens: Sequence[int], last: list[int], last_start: int) -> int:
        accepted = list(tokens[last_start : last_start + len(last)]) == last
        return self.k if not last or accepted else 1


class TailK(EveryK):
    """Planted: what was drafted beyond the rejected token steers the next k."""

    def __call__(self, tokens: Sequence[int], last: list[int], last_start: int) -> int:
        tail = last[len(tokens) - last_start :]
        return self.k if not tail or tail[0] % 2 else 0


def exact_law(length: int, salt: int, stop: int | None, prompt: Sequence[int] = (0,)) -> Distribution:
    def run(branches: Branches) -> Text:
        tokens: list[int] = []
        while len(tokens) < length and (not tokens or tokens[-1] != stop):
            tokens.append(branches.pick(list(make_law(salt, "target", [*prompt, *tokens]))))
        return tuple(tokens)

    return enumerate_texts(run)


def loop_law(
    guess: Guess | None, *, k: int, length: int, salt: int, stop: int | None = None, choose_k: type[EveryK] = EveryK,
    make_chooser: Callable[[Branches], Any] = ExactChooser, make_engine: type[ToyEngine] = ToyEngine,
    strict: bool = False, combine: Callable[[Drafter], Drafter] = lambda drafter: drafter,
    make_drafter: Callable[[], Drafter] | None = None, prompt: Sequence[int] = (0,),
) -> Distribution:  # fmt: skip
    def run(branches: Branches) -> Text:
        chooser = make_chooser(branches)
        engine = make_engine(V, logits=lambda prefix: make_law(salt, "target", prefix))
        drafter = make_drafter() if make_drafter else ListDrafter(_Guesser(guess, chooser, salt, choose_k(k)))
        params = SamplingParams(max_tokens=length)
        stops = StopRules(params, end_ids=() if stop is None else (stop,), room=32, detokenizer=PlainDetokenizer())
        picker: Any = ExactPicker(chooser)
        controller = FixedController(k if guess or make_drafter else 0)
        loop = Loop(
            engine, combine(drafter), picker, stops, list(prompt), controller=controller, clock=lambda: 0.0,
            strict=strict,
        )  # fmt: skip
        texts = tuple(token.id for token in loop.run())
        assert not loop.stats.num_drafter_faults
        return texts

    return enumerate_texts(run)


class _Guesser:
    def __init__(self, guess: Guess | None, chooser: Any, salt: int, choose_k: EveryK) -> None:
        self._guess, self._chooser, self._salt, self._choose_k = guess, chooser, salt, choose_k
        self._last: list[int] = []
        self._last_start = 0

    def __call__(self, tokens: Sequence[int], limit: int) -> Proposal:
        assert self._guess is not None
        limit = min(limit, self._choose_k(tokens, self._last, self._last_start))
        if limit < 1:
            self._last = []
            return Proposal()
        guess = self._guess(tokens, limit, self._chooser, self._salt)
        if isinstance(guess, Proposal):
            return guess
        ids, laws = guess
        self._last, self._last_start = list(ids), len(tokens)
        return Proposal(tuple(ids), np.array(laws, object).reshape(len(ids), V) if laws is not None else None)


def error(found: Distribution, wanted: Distribution) -> Fraction:
    return max(abs(found.get(text, Fraction(0)) - wanted.get(text, Fraction(0))) for text in {*found, *wanted})


SALTS = range(3)


@pytest.mark.parametrize("salt", SALTS)
@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("guess", [None, argmax_guess, sampled_guess, target_guess, cut_after_guess])
def test_three_tokens_have_exactly_the_targets_law(guess: Guess | None, k: int, salt: int) -> None:
    assert error(loop_law(guess, k=k, length=3, salt=salt), exact_law(3, salt, None)) == 0


@pytest.mark.parametrize("guess", [argmax_guess, sampled_guess])
def test_proposals_of_three_have_exactly_the_targets_law(guess: Guess) -> None:
    assert error(loop_law(guess, k=3, length=4, salt=0), exact_law(4, 0, None)) == 0


@pytest.mark.parametrize("salt", SALTS)
@pytest.mark.parametrize("guess", [argmax_guess, sampled_guess])
def test_a_stop_inside_a_block_keeps_the_law(guess: Guess, salt: int) -> None:
    assert error(loop_law(guess, k=2, length=3, salt=salt, stop=2), exact_law(3, salt, 2)) == 0


@pytest.mark.parametrize("salt", SALTS)
def test_a_k_that_follows_acceptance_keeps_the_law(salt: int) -> None:
    found = loop_law(sampled_guess, k=2, length=3, salt=salt, choose_k=AcceptanceK)
    assert error(found, exact_law(3, salt, None)) == 0


TREES: dict[str, Guess] = {
    "two": tree_guess(2),
    "three": tree_guess(3),
    "all": tree_guess(V),
    "two and one": tree_guess(2, 1),
    "two and two": tree_guess(2, 2),
    "two and one, depth first": tree_guess(2, 1, depth_first=True),
    "one and two": tree_guess(1, 2, depth_first=True),
    "a chain as a tree": tree_guess(1, 1, 1),
}


def lookup(tokens: Sequence[int], limit: int) -> Proposal:
    """Guess one or two tokens, and be sure of them where the text so far says so."""
    sure = sum(tokens) % 2 == 0
    return Proposal(((tokens[-1] + 1) % V, 0)[: min(limit, 1 + sure)], confidence=0.9 if sure else 0.2)


class Peeking(CombinedDrafter):
    """Planted: looks at what was drawn before it decides whose guesses are verified."""

    def propose(self, tokens: Sequence[int], limit: int) -> Proposal:
        drawn = self._neural.propose(tokens, limit)
        return drawn if drawn.token_ids[0] % 2 else self._lookup.propose(tokens, limit)


@pytest.mark.parametrize("salt", SALTS)
@pytest.mark.parametrize("k", [1, 2])
def test_a_lookup_in_the_place_of_drawn_guesses_keeps_the_law(k: int, salt: int) -> None:
    def law(kind: type[CombinedDrafter]) -> Distribution:
        return loop_law(
            sampled_guess, k=k, length=3, salt=salt,
            combine=lambda drafter: kind(ListDrafter(lookup), drafter, SureController(k)),
        )  # fmt: skip

    assert error(law(CombinedDrafter), exact_law(3, salt, None)) == 0
    assert error(law(Peeking), exact_law(3, salt, None)) > Fraction(1, 1000)


@pytest.mark.parametrize("salt", SALTS)
@pytest.mark.parametrize("name", TREES)
def test_trees_have_exactly_the_targets_law(name: str, salt: int) -> None:
    assert error(loop_law(TREES[name], k=3, length=4, salt=salt), exact_law(4, salt, None)) == 0


def test_a_tree_that_was_drawn_has_exactly_the_targets_law() -> None:
    assert error(loop_law(sampled_tree_guess, k=3, length=4, salt=0), exact_law(4, 0, None)) == 0


@pytest.mark.parametrize("salt", SALTS)
def test_a_stop_inside_a_tree_keeps_the_law(salt: int) -> None:
    assert error(loop_law(tree_guess(2, 2), k=3, length=4, salt=salt, stop=2), exact_law(4, salt, 2)) == 0


SPLIT = (0, 1, 0, 2, 0, 1, 1, 0, 2, 2, 0)  # what follows a token here is open
BUILT_IN: dict[str, Callable[[], Drafter]] = {
    "ngram": NgramDrafter,
    "suffix": lambda: SuffixDrafter(widths=(2, 4)),
    "suffix tree": lambda: SuffixDrafter(widths=(4,), tree=True),
    "eagle": lambda: toy_eagle(V, tree=False),
    "eagle tree": lambda: toy_eagle(V, tree=True),
}


@pytest.mark.parametrize("salt", SALTS)
@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_drafters_keep_exactly_the_targets_law(name: str, salt: int) -> None:
    found = loop_law(None, make_drafter=BUILT_IN[name], k=3, length=4, salt=salt, prompt=SPLIT)
    assert error(found, exact_law(4, salt, None, SPLIT)) == 0


@pytest.mark.parametrize("name", ["suffix tree", "eagle tree"])
def test_trees_of_built_in_drafters_show_what_an_engine_does_wrong(name: str) -> None:
    """They do branch, and paths off their first branch are accepted."""
    worst = Fraction(0)
    for salt in SALTS:
        found = loop_law(
            None, make_drafter=BUILT_IN[name], k=3, length=4, salt=salt, prompt=SPLIT, make_engine=NotMoved
        )
        worst = max(worst, error(found, exact_law(4, salt, None, SPLIT)))
    assert worst > Fraction(1, 10_000)


class OneNumberPerPosition(ExactChooser):
    """Final tokens by inverse CDF, from one number for each position however often it is decided."""

    def __init__(self, branches: Branches) -> None:
        super().__init__(branches)
        self._cells: dict[int, int] = {}

    def token(self, weights: np.ndarray, *, position: int) -> int:
        if position not in self._cells:
            self._cells[position] = self._branches.pick([Fraction(1, GRID)] * GRID)
        return inverse(list(weights / weights.sum()), Fraction(self._cells[position], GRID))


@pytest.mark.parametrize("strict", [True, False])
def test_a_strict_request_has_the_targets_law_although_trees_drift(strict: bool) -> None:
    found = loop_law(
        tree_guess(2), k=2, length=3, salt=0, make_engine=DriftingEngine, make_chooser=OneNumberPerPosition,
        strict=strict,
    )  # fmt: skip
    assert (error(found, exact_law(3, 0, None)) == 0) == strict


class SiblingsSeen(ToyEngine):
    """Planted: a mask that leaves out no earlier row of the call."""

    def seen(self, row: int, parents: Sequence[int]) -> list[int]:
        return list(range(row + 1))


class WrongParent(ToyEngine):
    """Planted: a row follows the one before its parent."""

    def seen(self, row: int, parents: Sequence[int]) -> list[int]:
        return super().seen(row, [max(parent - 1, min(parent, 0)) for parent in parents])


class MovedFromTheRowBefore(ToyEngine):
    """Planted: rows that have to move are taken one too early."""

    def keep(self, rows: Sequence[int]) -> None:
        if list(rows) != list(range(len(rows))):
            self._slots[self._start + 1 :] = self._slots[self._start : -1]
        super().keep(rows)


class NotMoved(ToyEngine):
    """Planted: the first rows of the call are kept instead of the accepted ones."""

    def keep(self, rows: Sequence[int]) -> None:
        self.rollback(self._start + len(rows))


@pytest.mark.parametrize("bug", [SiblingsSeen, WrongParent, MovedFromTheRowBefore, NotMoved])
def test_bugs_planted_in_an_engine_with_trees_are_seen(bug: type[ToyEngine]) -> None:
    settings: dict[str, Any] = {"k": 3, "length": 4, "salt": 0}
    assert error(loop_law(tree_guess(2, 1), **settings, make_engine=bug), exact_law(4, 0, None)) > Fraction(1, 10_000)


def one_after_the_other(*, one_draw: bool) -> Callable[..., Verdict]:
    """Accept siblings one after the other, each in what the target's law is without those before it.

    That is exact if each has a draw of its own; planted: they share one.
    """

    def accept(proposal: Proposal, logits: np.ndarray, picker: Picker, *, start: int) -> Verdict:
        path: list[int] = []
        chooser: Any = picker.chooser
        node = -1
        while True:
            law, key = logits[node + 1].copy(), (start, len(path))
            shared = Fraction(0)  # the part of the one draw that is used up
            accepted = None
            for token, child in proposal.children(node).items():
                chance = law[token] / law.sum()
                if one_draw:
                    chance = max(Fraction(0), chance - shared) / (1 - shared)
                    shared = max(shared, law[token] / law.sum())
                if chance == 1 or chooser.fresh([chance, 1 - chance], "accept", *key, child) == 0:
                    accepted = token, child
                    break
                law[token] = Fraction(0)
            if accepted is None:
                return Verdict(tuple(path), chooser.token(law, position=start + len(path)))
            node = accepted[1]
            path.append(node)

    return accept


@pytest.mark.parametrize("shape", [(2,), (3,), (2, 2)])
def test_siblings_that_share_a_draw_are_seen(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = exact_law(4, 0, None)
    monkeypatch.setattr("specrt.loop.accept", one_after_the_other(one_draw=False))
    assert error(loop_law(tree_guess(*shape), k=3, length=4, salt=0), wanted) == 0
    monkeypatch.setattr("specrt.loop.accept", one_after_the_other(one_draw=True))
    assert error(loop_law(tree_guess(*shape), k=3, length=4, salt=0), wanted) > Fraction(1, 10_000)


def test_a_token_picked_from_its_parents_row_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from specrt.acceptance import accept

    def late(proposal: Proposal, logits: np.ndarray, picker: Picker, *, start: int) -> Verdict:
        return accept(proposal, logits[[0, *range(len(logits) - 1)]], picker, start=start)

    monkeypatch.setattr("specrt.loop.accept", late)
    assert error(loop_law(tree_guess(2, 1), k=3, length=4, salt=0), exact_law(4, 0, None)) > Fraction(1, 10_000)


def shares(*pair: str) -> Callable[[Branches], Any]:
    return lambda branches: SharedUniform(branches, pair=set(pair))


PLANTED: dict[str, dict[str, Any]] = {
    "draft and accept share a number": {"guess": sampled_guess, "make_chooser": shares("draft", "accept"), "k": 1},
    "accept and residual share a number": {"guess": sampled_guess, "make_chooser": shares("accept", "token"), "k": 1},
    "draft and residual share a number": {"guess": sampled_guess, "make_chooser": shares("draft", "token"), "k": 1},
    "a drawn token is dropped because of its value": {"guess": cut_before_guess, "k": 2},
    "the discarded tail steers k": {
        "guess": sampled_guess,
        "choose_k": TailK,
        "make_chooser": PositionKeyedDrafts,
        "k": 2,
        "length": 3,
    },
}


@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bugs_are_seen(bug: str) -> None:
    settings = {"length": 2, **PLANTED[bug]}
    worst = max(error(loop_law(salt=s, **settings), exact_law(settings["length"], s, None)) for s in SALTS)
    assert worst > Fraction(1, 10_000)


def test_rows_tested_against_the_wrong_law_are_seen() -> None:
    def biased(tokens: Sequence[int], limit: int, chooser: Any, salt: int) -> tuple[list[int], None]:
        return sampled_guess(tokens, limit, chooser, salt)[0], None  # sampled, but declared deterministic: still exact

    def wrong(tokens: Sequence[int], limit: int, chooser: Any, salt: int) -> tuple[list[int], list[np.ndarray]]:
        guess, laws = sampled_guess(tokens, limit, chooser, salt)
        return guess, [np.roll(law, 1) for law in laws]  # not the law it was drawn from

    assert error(loop_law(biased, k=2, length=2, salt=0), exact_law(2, 0, None)) == 0
    assert error(loop_law(wrong, k=1, length=2, salt=0), exact_law(2, 0, None)) > 0
