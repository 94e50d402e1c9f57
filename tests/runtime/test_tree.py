"""Trees as parents: depths, who sees whom, and what is no tree; and their proposals."""

import numpy as np
import pytest

from specrt import tree
from specrt.acceptance import Proposal, accept
from specrt.sampling import Sampler, SamplingParams

#        0 ── 1 ── 3
#       /      \
#  root         4
#       \
#        2 ── 5
PARENTS = (-1, 0, -1, 1, 1, 2)


def test_depths_count_the_tokens_before() -> None:
    assert tree.depths(PARENTS) == (0, 1, 0, 2, 2, 1)
    assert tree.depths(()) == ()
    assert tree.depths(range(-1, 5)) == tuple(range(6))


def test_a_token_sees_itself_and_its_ancestors() -> None:
    seen = [set(np.flatnonzero(row)) for row in tree.ancestry(PARENTS)]
    assert seen == [{0}, {0, 1}, {2}, {0, 1, 3}, {0, 1, 4}, {2, 5}]


def test_a_chain_sees_all_before() -> None:
    np.testing.assert_array_equal(tree.ancestry(range(-1, 4)), np.tri(5, dtype=bool))


def test_a_proposal_of_a_chain_and_its_tree_say_the_same() -> None:
    chain, same = Proposal((5, 6, 7)), Proposal((5, 6, 7), parents=(-1, 0, 1))
    assert tuple(chain.depths) == same.depths == (0, 1, 2)
    assert [chain.children(node) for node in range(-1, 3)] == [same.children(node) for node in range(-1, 3)]
    assert (chain.row_parents, same.row_parents) == (None, (-1, 0, 1, 2))


@pytest.mark.parametrize("count", range(5))
def test_the_first_tokens_of_a_tree_are_a_tree(count: int) -> None:
    first = Proposal((1, 2, 3, 4), parents=(-1, 0, -1, 2)).first(count)
    assert (first.token_ids, first.parents) == ((1, 2, 3, 4)[:count], (-1, 0, -1, 2)[:count])


WRONG = {
    "a child before its parent": ((1, 2), (1, -1), "every parent before its children, found (1, -1)"),
    "its own parent": ((1, 2), (-1, 1), "every parent before its children"),
    "a parent below the root": ((1, 2), (-1, -2), "every parent before its children"),
    "a parent too few": ((1, 2), (-1,), "expected 2 parents, found 1"),
    "a parent too many": ((1,), (-1, 0), "expected 1 parents, found 2"),
    "siblings that are equal": ((1, 2, 2), (-1, 0, 0), "siblings that differ"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_is_no_tree_is_refused_with_the_reason(kind: str) -> None:
    ids, parents, words = WRONG[kind]
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the words are looked at below
        tree.check_tree(ids, parents)
    assert words in str(caught.value)


def test_equal_tokens_under_different_parents_are_fine() -> None:
    tree.check_tree((1, 1, 1), (-1, 0, 1))
    tree.check_tree((1, 2, 7, 7), (-1, -1, 0, 1))


@pytest.mark.parametrize(
    ("picks", "path", "next_token"),
    [
        ({0: 8}, (), 8),
        ({0: 10, 1: 8}, (0,), 8),
        ({0: 12, 3: 15, 6: 8}, (2, 5), 8),
        ({0: 12, 3: 11}, (2,), 11),  # 11 is a child of another node
        ({0: 10, 1: 11, 2: 14, 5: 9}, (0, 1, 4), 9),
    ],
)
def test_acceptance_goes_down_the_tree_and_looks_at_no_other_row(
    picks: dict[int, int], path: tuple[int, ...], next_token: int
) -> None:
    rows = np.full((7, 20), np.nan, np.float32)  # looking would raise
    for row, token in picks.items():
        rows[row] = np.eye(20)[token]
    sampler = Sampler(SamplingParams(), [0], vocab_size=20, end_ids=())
    verdict = accept(Proposal((10, 11, 12, 13, 14, 15), parents=PARENTS), rows, sampler, start=1)
    assert (verdict.path, verdict.num_accepted, verdict.next_token) == (path, len(path), next_token)
    assert sampler.history.tokens[1:] == [*(10 + node for node in path), next_token]


def grow(seed: int, size: int) -> tuple[list[int], list[int], list[float]]:
    """Return tokens, parents and chances of a tree that was guessed in any order, parents before children."""
    rng, ids, parents, chances = np.random.default_rng(seed), list[int](), list[int](), list[float]()
    for node in range(size):
        parent = int(rng.integers(-1, node))
        parents.append(parent)
        ids.append(node + 100)
        chances.append((chances[parent] if parent >= 0 else 1.0) * float(rng.uniform(0.1, 1.0)))
    return ids, parents, chances


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("count", [1, 2, 5, 12])
def test_guesses_become_a_proposal_with_the_best_branch_first(seed: int, count: int) -> None:
    ids, parents, chances = grow(seed, 12)
    nodes = sorted(range(12), key=lambda node: -chances[node])[:count]
    found = Proposal.grown(ids, parents, chances, nodes=nodes)
    above = found.parents or tuple(range(-1, count - 1))
    tree.check_tree(found.token_ids, above)
    assert sorted(found.token_ids) == sorted(ids[node] for node in nodes)
    for token, parent in zip(found.token_ids, above, strict=True):
        assert parents[token - 100] == (found.token_ids[parent] - 100 if parent >= 0 else -1)
    branch, node = [], -1
    while below := [child for child in nodes if parents[child] == node]:
        node = max(below, key=chances.__getitem__)
        branch.append(node)
    assert [token - 100 for token in found.token_ids[: len(branch)]] == branch
    rest = [token - 100 for token in found.token_ids[len(branch) :]]
    assert rest == [node for node in nodes if node not in branch], "the others stay likeliest first"
    assert found.confidence == pytest.approx(chances[branch[-1]] ** (1 / len(branch)))
    assert (found.parents is None) == (len(branch) == count), "what does not branch is a chain"


def test_levels_are_those_of_the_longest_path() -> None:
    assert Proposal((1, 2, 3)).num_levels == 3
    assert Proposal(tuple(range(6)), parents=PARENTS).num_levels == 3
    assert Proposal().num_levels == 0
