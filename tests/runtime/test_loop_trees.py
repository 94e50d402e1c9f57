"""The loop with trees over toy engines: the same output as plain decoding, the law, bookkeeping, planted bugs."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from parts import ListDrafter, chi_square, chi_square_limit, grow, run
from specrt.acceptance import Proposal
from toy import DriftingEngine, ToyEngine, hashed_logits

V = 5
KS = (1, 3, 5, 9, 15)
SHAPES = [(2,), (2, 1, 1, 1), (3, 2, 1), (1, 2, 2), (V, V), (1, 1, 1, 1)]


def ranked(tokens: Sequence[int], salt: int = 0) -> list[int]:
    """Return all tokens, those first that the target (or with a salt, another model) prefers."""
    return np.argsort(-hashed_logits(tokens, V, salt=salt), kind="stable").tolist()


def second_is_right(tokens: Sequence[int]) -> list[int]:
    """Return all tokens, what the target says greedily in second place: every accepted path leaves the first branch."""
    best, *others = ranked(tokens)
    return [others[0], best, *others[1:]]


CHILDREN: dict[str, Callable[[Sequence[int]], list[int]]] = {
    "right": ranked,
    "right in second place": second_is_right,
    "wrong": lambda tokens: ranked(tokens)[1:],
    "another model": lambda tokens: ranked(tokens, salt=9),
}


def trees(name: str, shape: Sequence[int], *, depth_first: bool = False) -> ListDrafter:
    def guess(tokens: Sequence[int], limit: int) -> Proposal:
        return grow(lambda path: CHILDREN[name]([*tokens, *path]), shape, limit, depth_first=depth_first)

    return ListDrafter(guess)


class SharedNoiseDrafter(ListDrafter):
    """Guesses what another model picks with the target's noise, and the most probable token beside it."""

    def __init__(self) -> None:
        super().__init__(self.guess)

    def guess(self, tokens: Sequence[int], limit: int) -> Proposal:
        sampler = self.sampler

        def children(path: list[int]) -> list[int]:
            for token in path:
                sampler.push(token)
            row = hashed_logits([*tokens, *path], V, salt=9)
            picked = sampler.pick(row, position=len(tokens) + len(path))
            sampler.rewind(len(tokens))
            return [picked, *(token for token in ranked([*tokens, *path]) if token != picked)]

        return grow(children, (2, 2, 1), limit)


@pytest.mark.parametrize("depth_first", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", CHILDREN)
def test_greedy_output_does_not_depend_on_the_tree(name: str, shape: tuple[int, ...], depth_first: bool) -> None:
    plain, _, _ = run(ToyEngine(V), max_tokens=40)
    for k in KS:
        ids, loop, _ = run(ToyEngine(V), trees(name, shape, depth_first=depth_first), k=k, max_tokens=40)
        assert ids == plain
        assert not loop.stats.num_drafter_faults


@pytest.mark.parametrize("coupling", ["gumbel", "rejection"])
@pytest.mark.parametrize("name", CHILDREN)
def test_one_seed_gives_one_text(name: str, coupling: str) -> None:
    sampled: dict[str, Any] = {
        "temperature": 0.9, "top_k": 4, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "max_tokens": 30,
    }  # fmt: skip
    for seed in range(8):
        plain, _, _ = run(ToyEngine(V), seed=seed, coupling=coupling, **sampled)
        for drafter in (trees(name, (2, 2, 1)), trees(name, (3, 1, 1), depth_first=True), SharedNoiseDrafter()):
            ids, loop, _ = run(ToyEngine(V), drafter, k=7, seed=seed, coupling=coupling, **sampled)
            assert (ids, loop.stats.num_drafter_faults) == (plain, 0)


def test_shared_noise_is_accepted_more_often() -> None:
    def accepted(coupling: str) -> int:
        params: dict[str, Any] = {"temperature": 1.0, "max_tokens": 40, "coupling": coupling}
        drafter = SharedNoiseDrafter
        return sum(run(ToyEngine(V), drafter(), k=9, seed=seed, **params)[1].stats.num_accepted for seed in range(10))

    assert accepted("gumbel") > accepted("rejection")


SIZE = 3
TEXT = 4


def joint_law(temperature: float) -> np.ndarray:
    """Return the exact law of the first tokens after the prompt (0, 1)."""
    law = np.zeros([SIZE] * TEXT)
    for text in np.ndindex(*law.shape):
        p = 1.0
        for i, token in enumerate(text):
            weights = np.exp(hashed_logits([0, 1, *text[:i]], SIZE).astype(np.float64) / temperature)
            p *= weights[token] / weights.sum()
        law[text] = p
    return law


def statistic(make_engine: type[ToyEngine], coupling: str, shape: Sequence[int], runs: int = 1500) -> tuple[float, int]:
    def guess(tokens: Sequence[int], limit: int) -> Proposal:
        def children(path: list[int]) -> list[int]:
            return np.argsort(-hashed_logits([*tokens, *path], SIZE, salt=9)).tolist()

        return grow(children, shape, limit)

    counts = np.zeros([SIZE] * TEXT)
    for seed in range(runs):
        params: dict[str, Any] = {"coupling": coupling, "temperature": 0.8, "max_tokens": TEXT + 1, "seed": seed}
        ids, _, _ = run(make_engine(SIZE), ListDrafter(guess), k=4, **params)
        counts[tuple(ids[:TEXT])] += 1
    return chi_square(counts.ravel(), runs * joint_law(0.8).ravel())


@pytest.mark.parametrize("coupling", ["gumbel", "rejection"])
@pytest.mark.parametrize("shape", [(3,), (2, 1), (2, 2)])
def test_the_joint_law_of_four_tokens_is_the_targets(coupling: str, shape: tuple[int, ...]) -> None:
    found, degrees = statistic(ToyEngine, coupling, shape)
    assert found < chi_square_limit(degrees)


class SiblingsSeen(ToyEngine):
    """Planted: a mask that leaves out no earlier row of the call."""

    def seen(self, row: int, parents: Sequence[int]) -> list[int]:
        return list(range(row + 1))


class MovedFromTheRowBefore(ToyEngine):
    """Planted: rows that have to move are taken one too early."""

    def keep(self, rows: Sequence[int]) -> None:
        for place, row in enumerate(rows):
            if place != row:
                self._slots[self._start + row] = self._slots[self._start + row - 1]
        super().keep(rows)


@pytest.mark.parametrize("bug", [SiblingsSeen, MovedFromTheRowBefore])
def test_planted_bugs_change_the_law_and_the_greedy_text(bug: type[ToyEngine]) -> None:
    found, degrees = statistic(bug, "gumbel", (2, 1))
    assert found > chi_square_limit(degrees)
    plain, _, _ = run(ToyEngine(V), max_tokens=40)
    assert run(bug(V), trees("right in second place", (2, 2)), k=5, max_tokens=40)[0] != plain


def test_only_rows_that_are_out_of_place_are_moved() -> None:
    first, second = ToyEngine(V), ToyEngine(V)
    run(first, trees("right", (2, 1, 1), depth_first=True), k=5, max_tokens=40)
    _, loop, _ = run(second, trees("right in second place", (2,)), k=2, max_tokens=40)
    assert first.num_moved == 0, "the best branch comes first in a tree that is written depth first"
    assert second.num_moved == loop.stats.num_accepted > 0


def test_a_tree_is_verified_in_the_smallest_width_that_fits() -> None:
    engine = ToyEngine(V)
    run(engine, trees("right", (2, 2)), k=6, max_tokens=40)
    assert set(engine.widths_used) <= {8, 2, 4, 6, 10}
    assert max(engine.widths_used[1:]) == 10


@pytest.mark.parametrize("k", [1, 2, 5, 9])
def test_an_end_token_inside_a_tree_ends_the_text_there(k: int) -> None:
    plain, _, _ = run(ToyEngine(V), max_tokens=30)
    for end in set(plain):
        expected = plain[: plain.index(end) + 1]
        ids, loop, _ = run(ToyEngine(V), trees("right in second place", (2, 2, 2)), k=k, max_tokens=30, eos=(end,))
        assert (ids, loop.finish_reason) == (expected, "stop")
        assert loop._target.kv_length == len(loop.tokens) - 1


@pytest.mark.parametrize("k", [3, 9, 15])
def test_trees_reach_exactly_the_capacity(k: int) -> None:
    ids, loop, _ = run(ToyEngine(V, capacity=40), trees("right", (2, 2, 2, 1, 1, 1)), k=k, prompt=[1, 2, 3])
    assert (len(ids), loop.finish_reason, loop.stats.num_drafter_faults) == (37, "capacity", 0)


def test_log_probabilities_come_from_the_accepted_rows() -> None:
    params: dict[str, Any] = {"max_tokens": 20, "logprobs": 2, "temperature": 0.7, "seed": 3}
    plain = [token.logprob for token in run(ToyEngine(V), **params)[2]]
    for name in CHILDREN:
        assert [token.logprob for token in run(ToyEngine(V), trees(name, (2, 2, 2)), k=14, **params)[2]] == plain


def test_statistics_count_every_token_of_a_tree() -> None:
    _, loop, _ = run(ToyEngine(V), trees("right in second place", (2, 1)), k=4, max_tokens=13)
    stats = loop.stats
    # five trees of two branches of two tokens, one of two tokens near the end, then none; the second child is right
    assert (stats.num_steps, stats.num_proposed, stats.num_accepted) == (7, 5 * 4 + 2, 6)
    assert (stats.proposed_by_position, stats.accepted_by_position) == ([12, 10], [6, 0])


def test_a_cut_tree_counts_up_to_the_cut() -> None:
    plain, _, _ = run(ToyEngine(V), max_tokens=4)
    assert plain[0] not in plain[1:]
    _, loop, _ = run(ToyEngine(V), trees("right in second place", (2, 2)), k=6, max_tokens=30, eos=(plain[0],))
    assert (loop.stats.num_proposed, loop.stats.num_accepted, loop.stats.num_tokens) == (2, 1, 1)


STRICT: dict[str, dict[str, Any]] = {
    "greedy": {},
    "gumbel": {"temperature": 0.9, "seed": 3, "repetition_penalty": 1.3, "logprobs": 2},
    "rejection": {"temperature": 0.9, "seed": 3, "coupling": "rejection", "frequency_penalty": 0.2},
}


@pytest.mark.parametrize("kind", STRICT)
@pytest.mark.parametrize("name", CHILDREN)
def test_strict_requests_have_plain_decodings_output_from_an_engine_whose_trees_drift(name: str, kind: str) -> None:
    params: dict[str, Any] = {"max_tokens": 40, **STRICT[kind]}
    plain = run(ToyEngine(V), **params)[2]
    drifts = recomputed = 0
    for shape in SHAPES:
        loose, _, _ = run(DriftingEngine(V), trees(name, shape), k=9, **params)
        drifts += loose != [token.id for token in plain]
        _, loop, tokens = run(DriftingEngine(V), trees(name, shape), k=9, strict=True, **params)
        assert tokens == plain
        assert loop.stats.num_tokens == loop.stats.num_accepted + loop.stats.num_steps
        assert loop.stats.num_drafter_faults == 0
        recomputed += loop.stats.num_recomputed
    assert (drifts > 0) == (recomputed > 0) == ((name, kind) != ("wrong", "greedy"))


def test_only_paths_that_leave_the_first_branch_are_verified_once_more() -> None:
    first, other = trees("right", (2, 1, 1), depth_first=True), trees("right in second place", (2,))
    _, loop, _ = run(ToyEngine(V), first, k=5, strict=True, max_tokens=41)
    assert (loop.stats.num_recomputed, loop.stats.num_calls) == (0, loop.stats.num_steps)
    engine = ToyEngine(V)
    _, loop, _ = run(engine, other, k=2, strict=True, max_tokens=40)
    stats = loop.stats
    assert 0 < stats.num_recomputed == stats.num_accepted
    assert stats.num_calls == stats.num_steps + stats.num_recomputed == len(engine.widths_used) - 1
    assert stats.block_efficiency == 40 / stats.num_calls
    assert engine.num_moved == 0


def test_a_second_verification_counts_as_time_of_the_target() -> None:
    seconds = [0.0]

    class Slow(ToyEngine):
        def verify(self, token_ids: Sequence[int], parents: Sequence[int] | None = None) -> np.ndarray:
            seconds[0] += 1.0
            return super().verify(token_ids, parents)

    drafter = trees("right in second place", (2,))
    _, loop, _ = run(Slow(V), drafter, k=2, strict=True, max_tokens=20, clock=lambda: seconds[0])
    assert (loop.stats.verify_s, loop.stats.rest_s) == (loop.stats.num_calls, 0)


class ChainEngine(ToyEngine):
    takes_trees = False


@pytest.mark.parametrize("kind", ["no tree", "probabilities", "an engine without trees"])
def test_a_drafter_of_trees_that_cannot_be_verified_is_dropped(kind: str) -> None:
    parents = (0, -1) if kind == "no tree" else (-1, -1)
    probs = np.full((2, V), 1 / V) if kind == "probabilities" else None
    engine = ChainEngine(V) if kind == "an engine without trees" else ToyEngine(V)
    plain, _, _ = run(ToyEngine(V), max_tokens=12)
    drafter = ListDrafter(lambda *_: Proposal((0, 1), probs, parents=parents))
    ids, loop, _ = run(engine, drafter, k=3, max_tokens=12)
    assert (ids, loop.stats.num_drafter_faults) == (plain, 1)
