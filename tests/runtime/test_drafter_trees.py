"""Trees of the suffix and eagle drafters: the likeliest guesses, well formed, and the text of plain decoding."""

from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path as FilePath
from typing import Any

import numpy as np
import pytest

import specrt
from parts import chi_square, chi_square_limit, run, toy_eagle
from specrt.acceptance import Proposal
from specrt.control import Step
from specrt.drafters import Drafter
from specrt.drafters.eagle import EagleDrafter
from specrt.drafters.suffix import BRANCHES, LONGEST, OWN, Occurrences, SuffixCache, SuffixDrafter, estimate
from specrt.sampling import Sampler, SamplingParams
from specrt.tree import check_tree
from toy import DriftingEngine, ToyEngine, hashed_logits

V = 4
WIDTHS = (2, 4, 6, 10, 16)
GREEDY = SamplingParams()
GUMBEL = SamplingParams(temperature=0.9, seed=5)
REJECTION = SamplingParams(temperature=0.9, seed=5, coupling="rejection")
PENALTY = SamplingParams(frequency_penalty=0.7)
Path = tuple[int, ...]


def make(name: str, *, tree: bool = True, size: int = V, salt: int = 9) -> Drafter:
    if name == "suffix":
        return SuffixDrafter(widths=WIDTHS, tree=tree)
    return toy_eagle(size, tree=tree, salt=salt)


def propose(drafter: Drafter, tokens: Sequence[int], limit: int, params: SamplingParams = GREEDY) -> Proposal:
    sampler = Sampler(params, list(tokens), vocab_size=V, end_ids=())
    drafter.start(tokens, sampler)
    return drafter.propose(tokens, limit)


def paths(proposal: Proposal) -> list[Path]:
    """Return the tokens on the way to every node."""
    found: list[Path] = []
    parents = proposal.parents or range(-1, len(proposal.token_ids) - 1)
    for token, parent in zip(proposal.token_ids, parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


def texts(count: int) -> Iterator[list[int]]:
    for seed in range(count):
        rng = np.random.default_rng(seed)
        yield rng.integers(0, V, rng.integers(2, 40)).tolist()


@pytest.mark.parametrize("params", [GREEDY, GUMBEL, REJECTION])
@pytest.mark.parametrize("name", ["suffix", "eagle"])
def test_every_proposal_is_a_tree_whose_first_branch_comes_first(name: str, params: SamplingParams) -> None:
    branching = 0
    for tokens in texts(30):
        for limit in (1, 2, 3, 5, 9, 15):
            found = propose(make(name), tokens, limit, params)
            assert 0 < len(found.token_ids) <= limit
            if found.parents is None:
                continue
            branching += 1
            check_tree(found.token_ids, found.parents)
            first = next((n for n, parent in enumerate(found.parents) if parent != n - 1), len(found.parents))
            assert first - 1 not in found.parents[first:], "the first branch goes on further down"
            assert first < found.num_levels + 1
    assert branching > 20


def suffix_chances(tokens: Sequence[int], levels: int) -> dict[Path, float]:
    """Return how likely every path is that the places of the text's last token lead to, by the definition."""
    known = Occurrences()
    known.extend(tokens)
    places, chances = known.places(tokens), {(): 1.0}
    for depth in range(levels):
        for path in [path for path in chances if len(path) == depth]:
            text = [*tokens, *path]
            agree = [(at, match) for at, match in places if text[at + 1 : at + 1 + depth] == list(path)]
            followers = [(text[at + 1 + depth], min(match + depth, LONGEST)) for at, match in agree]
            for token, chance in estimate(followers, {}, OWN).items():
                chances[(*path, token)] = chances[path] * chance
    del chances[()]
    return chances


@pytest.mark.parametrize("limit", [1, 3, 5])
def test_a_suffix_tree_holds_the_likeliest_guesses(limit: int) -> None:
    assert V <= BRANCHES
    for tokens in texts(30):
        found = propose(SuffixDrafter(widths=(limit + 1,), tree=True), tokens, limit)
        chances = suffix_chances(tokens, limit)
        if not chances:
            continue
        expected = sorted(chances.values(), reverse=True)[: len(found.token_ids)]
        assert len(found.token_ids) == min(limit, len(chances))
        np.testing.assert_allclose(sorted((chances[path] for path in paths(found)), reverse=True), expected, rtol=1e-12)
        branch: Path = ()
        while branch in (below := {path[:-1]: path for path in reversed(paths(found))}):
            best = max(chances[path] for path in paths(found) if path[:-1] == branch)
            branch = below[branch]
            assert chances[branch] == pytest.approx(best, rel=1e-12)


def eagle_chances(tokens: Sequence[int], levels: int, params: SamplingParams) -> dict[Path, float]:
    """Return how likely every path is by softmax over what ranks the head's tokens."""
    chances, sampler = {(): 1.0}, Sampler(params, list(tokens), vocab_size=V, end_ids=())
    for depth in range(levels):
        for path in [path for path in chances if len(path) == depth]:
            for token in path:
                sampler.push(token)
            ids, scores = sampler.rank(hashed_logits([*tokens[1:], *path], V, salt=9), position=len(tokens) + depth)
            sampler.rewind(len(tokens))
            weights = np.exp(scores - scores.max())
            for token, weight in zip(ids.tolist(), (weights / weights.sum()).tolist(), strict=True):
                chances[(*path, token)] = chances[path] * weight
    del chances[()]
    return chances


@pytest.mark.parametrize("params", [GREEDY, GUMBEL, REJECTION, PENALTY])
@pytest.mark.parametrize("limit", [1, 2, 4])
def test_an_eagle_tree_holds_the_likeliest_guesses_beside_the_best_branch(limit: int, params: SamplingParams) -> None:
    for tokens in texts(30):
        found = propose(make("eagle"), tokens, limit, params)
        chances = eagle_chances(tokens, limit, params)
        best: list[Path] = [()]  # each level's best token
        for _ in range(limit):
            best.append(max((path for path in chances if path[:-1] == best[-1]), key=chances.__getitem__))
        candidates = [path for path in chances if path[:-1] in best]
        expected = sorted(candidates, key=chances.__getitem__, reverse=True)[:limit]
        assert sorted(paths(found)) == sorted(expected)


def test_the_head_is_called_once_per_level() -> None:
    drafter = toy_eagle(V, tree=True)
    head: Any = drafter._head
    for tokens in texts(20):
        before = head.num_steps
        found = propose(drafter, tokens, 9)
        assert found.num_levels - 1 <= head.num_steps - before < 9
        assert head.kv_length == len(tokens) - 1


KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "gumbel": {"temperature": 0.9, "seed": 3, "repetition_penalty": 1.3, "logprobs": 2},
    "gumbel, filtered": {"temperature": 1.2, "seed": 4, "top_k": 3, "presence_penalty": 0.3},
    "rejection": {"temperature": 0.9, "seed": 3, "coupling": "rejection", "frequency_penalty": 0.2},
}


class Accepting(ToyEngine):
    """Counts the accepted paths that are no first branch."""

    num_others = 0

    def keep(self, rows: Sequence[int]) -> None:
        self.num_others += list(rows) != list(range(len(rows)))
        super().keep(rows)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["suffix", "eagle"])
def test_the_output_is_that_of_plain_decoding(name: str, kind: str) -> None:
    others = 0
    for k, prompt in product((1, 3, 9, 15), ([0, 1], [0, 1, 0, 2, 0, 1, 3, 0, 3])):
        params: dict[str, Any] = {"max_tokens": 40, "prompt": prompt, **KINDS[kind]}
        plain = run(ToyEngine(V), **params)[2]
        engine = Accepting(V)
        _, loop, tokens = run(engine, make(name), k=k, **params)
        assert (tokens, loop.stats.num_drafter_faults) == (plain, 0)
        others += engine.num_others
        _, loop, tokens = run(DriftingEngine(V), make(name), k=k, strict=True, **params)
        assert (tokens, loop.stats.num_drafter_faults) == (plain, 0)
    assert others > 0


def test_with_shared_noise_a_head_that_is_the_target_is_right_with_its_first_branch() -> None:
    def others(coupling: str) -> int:
        found = 0
        for seed in range(6):
            engine = Accepting(8, logits=lambda prefix: hashed_logits(prefix[1:], 8))
            params: dict[str, Any] = {"temperature": 1.5, "max_tokens": 40, "seed": seed, "coupling": coupling}
            _, loop, _ = run(engine, make("eagle", salt=0, size=8), k=5, **params)
            assert loop.stats.num_accepted > 10
            found += engine.num_others
        return found

    assert others("gumbel") == 0 < others("rejection")


@pytest.mark.parametrize("coupling", ["gumbel", "rejection"])
@pytest.mark.parametrize("name", ["suffix", "eagle"])
def test_the_joint_law_of_three_tokens_is_the_targets(name: str, coupling: str) -> None:
    size, length, runs, prompt = 3, 3, 1500, [0, 1, 0, 2, 0, 1, 1, 0]
    law, counts = np.ones([size] * length), np.zeros([size] * length)
    for text in np.ndindex(*law.shape):
        for i, token in enumerate(text):
            weights = np.exp(hashed_logits([*prompt, *text[:i]], size).astype(np.float64) / 0.8)
            law[text] *= weights[token] / weights.sum()
    for seed in range(runs):
        params: dict[str, Any] = {"coupling": coupling, "temperature": 0.8, "max_tokens": length + 1, "seed": seed}
        ids, loop, _ = run(ToyEngine(size), make(name, size=size), k=3, prompt=prompt, **params)
        assert not loop.stats.num_drafter_faults
        counts[tuple(ids[:length])] += 1
    found, degrees = chi_square(counts.ravel(), runs * law.ravel())
    assert found < chi_square_limit(degrees)


@pytest.mark.parametrize("name", ["suffix", "eagle"])
@pytest.mark.parametrize("capacity", [12, 20])
def test_trees_reach_exactly_the_capacity(name: str, capacity: int) -> None:
    drafter = make(name) if name == "suffix" else toy_eagle(V, tree=True, capacity=capacity)
    ids, loop, _ = run(ToyEngine(V, capacity=capacity), drafter, k=15, prompt=[1, 2, 3])
    assert (len(ids), loop.finish_reason, loop.stats.num_drafter_faults) == (capacity - 3, "capacity", 0)


@pytest.mark.parametrize("capacity", [5, 8, 13])
def test_a_head_with_less_room_than_the_target_guesses_as_far_as_it_can(capacity: int) -> None:
    plain, _, _ = run(ToyEngine(V), max_tokens=30)
    ids, loop, _ = run(ToyEngine(V), toy_eagle(V, tree=True, capacity=capacity), k=9, max_tokens=30)
    assert ids[: capacity - 2] == plain[: capacity - 2]
    assert loop.stats.num_drafter_faults <= 1


def test_nothing_is_guessed_where_nothing_is_known() -> None:
    assert propose(make("eagle"), [2], 9) == Proposal()
    assert propose(make("suffix"), [2], 9).token_ids == (2,)
    drafter: EagleDrafter = toy_eagle(V, tree=True)
    assert propose(drafter, [2, 1], 9).token_ids


def test_a_tree_looks_into_earlier_outputs_too() -> None:
    cache = SuffixCache()
    for following in (5, 6, 5):
        cache.add([1, 2, 3, following, 7])
    drafter = SuffixDrafter(widths=(16,), cache=cache, tree=True)
    found = propose(drafter, [9, 1, 2, 3], 15)
    assert paths(found)[:2] == [(5,), (5, 7)]
    assert set(paths(found)) == {(5,), (6,), (5, 7), (6, 7)}


@pytest.fixture(scope="module")
def model(trees_artifact: FilePath, machine_cache: FilePath) -> Iterator[specrt.LanguageModel]:
    with specrt.load(trees_artifact, cache_dir=machine_cache) as loaded:
        yield loaded


@pytest.mark.parametrize("k", [3, 9, "auto"])
@pytest.mark.parametrize("drafter", ["suffix", "eagle", "combined"])
def test_a_request_has_trees_if_it_asks_for_them(model: specrt.LanguageModel, drafter: str, k: Any) -> None:
    prompt = [5, 9, 40, 5, 9, 41, 5, 9, 42, 5, 9]
    for params in KINDS.values():
        options: Any = {"max_tokens": 40, "ignore_eos": True, "drafter": drafter, "k": k, **params}
        plain = model.generate(prompt, **{**options, "k": 0})
        for tree in (False, True):
            steps: list[Step] = []
            with model.start(prompt, {**options, "tree": tree, "strict": True}, steps=steps) as stream:
                ids = tuple(token.id for token in stream)
                assert stream.result.logprobs == plain.logprobs
            assert ids == plain.token_ids
            assert stream.result.stats.num_drafter_faults == 0
            branches = any(step.proposal.parents for step in steps)
            assert branches <= tree
            assert branches == tree or k == "auto" or drafter == "combined", "what does not pay is not guessed"
