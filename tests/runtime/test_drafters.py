"""What the drafters propose, and the bookkeeping of the draft engine."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from parts import TREE, ListDrafter, medusa, run
from specrt.acceptance import Proposal
from specrt.drafters.eagle import EagleDrafter
from specrt.drafters.model import ModelDrafter
from specrt.drafters.ngram import NgramDrafter
from specrt.errors import RequestError
from specrt.sampling import Sampler, SamplingParams
from toy import ToyEngine, hashed_logits

V = 5


def look_up(tokens: Sequence[int], limit: int, **sizes: int) -> tuple[int, ...]:
    drafter = NgramDrafter(**sizes)
    drafter.start(tokens, make_sampler(tokens))
    return drafter.propose(tokens, limit).token_ids


def make_sampler(tokens: Sequence[int], **params: object) -> Sampler:
    return Sampler(SamplingParams(**params), list(tokens), vocab_size=V, end_ids=())  # type: ignore[arg-type]


def reference(tokens: Sequence[int], limit: int, max_ngram: int, min_ngram: int) -> tuple[int, ...]:
    """The same by scanning: longest n-gram first, most recent place first, going on over the guess itself."""
    for size in range(max_ngram, min_ngram - 1, -1):
        for start in range(len(tokens) - size - 1, -1, -1):
            if list(tokens[start : start + size]) == list(tokens[-size:]):
                known = list(tokens)
                for i in range(min(limit, [1, 3, 5, 9][size - 1] if size < 5 else limit)):
                    known.append(known[start + size + i])
                return tuple(known[len(tokens) :])
    return ()


@pytest.mark.parametrize(
    ("tokens", "limit", "expected"),
    [
        ([1, 2, 3, 4, 1, 2], 3, (3, 4, 1)),
        ([1, 2, 9, 1, 2, 3, 1, 2], 2, (3, 1)),  # most recent
        ([7, 1, 2, 5, 8, 1, 2, 6, 7, 1, 2], 1, (5,)),  # longest first
        ([1, 2, 1, 2, 1, 2], 5, (1, 2, 1, 2, 1)),  # beyond the end of the text
        ([4, 4, 4, 4], 4, (4, 4, 4, 4)),
        ([4, 4], 4, (4,)),  # no more than the length of the match warrants
        ([1, 2, 1, 2], 5, (1, 2, 1)),
        ([5, 1, 2, 3, 9, 1, 2, 3], 9, (9, 1, 2, 3, 9)),
        ([5, 6, 1, 2, 3, 9, 6, 1, 2, 3], 9, (9, 6, 1, 2, 3, 9, 6, 1, 2)),
        ([6, 1, 2, 3, 4, 9, 7, 7, 6, 1, 2, 3, 4], 16, (9, 7, 7, 6, 1, 2, 3, 4) * 2),  # any length after 5 tokens
        ([1, 2, 3], 3, ()),
        ([1], 3, ()),
        ([], 3, ()),
    ],
)
def test_prompt_lookup(tokens: list[int], limit: int, expected: tuple[int, ...]) -> None:
    assert look_up(tokens, limit) == expected


@pytest.mark.parametrize(("max_ngram", "min_ngram"), [(1, 1), (3, 1), (4, 2), (3, 3), (5, 1), (7, 4)])
def test_prompt_lookup_is_a_scan_of_the_text(max_ngram: int, min_ngram: int) -> None:
    rng = np.random.default_rng(0)
    for size in (2, 3, 8):
        tokens: list[int] = []
        drafter = NgramDrafter(max_ngram=max_ngram, min_ngram=min_ngram)
        drafter.start(tokens, make_sampler([0]))
        for _ in range(120):
            limit = int(rng.integers(1, 12))
            assert drafter.propose(tokens, limit).token_ids == reference(tokens, limit, max_ngram, min_ngram)
            tokens += rng.integers(0, size, rng.integers(1, 5)).tolist()


def test_a_new_request_forgets_the_last() -> None:
    drafter = NgramDrafter()
    drafter.start([1, 2, 3, 1], make_sampler([0]))
    assert drafter.propose([1, 2, 3, 1], 1).token_ids == (2,)
    drafter.start([3, 1], make_sampler([0]))
    assert drafter.propose([3, 1], 1).token_ids == ()


@pytest.mark.parametrize(("longest", "shortest"), [(0, 0), (2, 3), (3, 0), (-1, -1)])
def test_impossible_lengths_are_refused(longest: int, shortest: int) -> None:
    with pytest.raises(RequestError, match="prompt_lookup_min, prompt_lookup_max"):
        NgramDrafter(max_ngram=longest, min_ngram=shortest)


def test_the_draft_is_fed_every_token_once() -> None:
    fed: list[int] = []

    class Counting(ToyEngine):
        def _call(self, token_ids: Sequence[int], width: int) -> None:
            fed.append(len(token_ids))
            super()._call(token_ids, width)

    _, loop, _ = run(ToyEngine(V), ModelDrafter(Counting(V), vocab_size=V), k=4, prompt=[1] * 9, max_tokens=25)
    steps = loop.stats.num_steps
    assert fed[:4] == [8, 1, 1, 1]  # the prompt in chunks without its last token, which the first proposal feeds
    assert sum(fed) == 9 + 4 * steps - 1 + (steps - 1)  # one catch-up token more after each full acceptance


@pytest.mark.parametrize("drop", ["other steps", "plain steps"])
def test_the_draft_catches_up_with_tokens_it_did_not_draft(drop: str) -> None:
    model = ModelDrafter(ToyEngine(V, salt=9), vocab_size=V)

    class Sometimes(ListDrafter):
        def start(self, tokens: Sequence[int], sampler: Sampler) -> None:
            model.start(tokens, sampler)

        def propose(self, tokens: Sequence[int], limit: int) -> Proposal:
            if len(tokens) % 3:
                return Proposal((0,) * limit) if drop == "other steps" else Proposal()
            proposal = model.propose(tokens, limit)
            guess: list[int] = []
            for _ in range(limit):
                guess.append(int(np.argmax(hashed_logits([*tokens, *guess], V, salt=9))))
            assert proposal.token_ids == tuple(guess)
            return proposal

    plain, _, _ = run(ToyEngine(V), max_tokens=40)
    ids, loop, _ = run(ToyEngine(V), Sometimes(lambda tokens, limit: ()), k=4, max_tokens=40)
    assert ids == plain
    assert not loop.stats.num_drafter_faults


def test_the_draft_stops_at_its_own_capacity_and_decoding_goes_on() -> None:
    draft = ToyEngine(V, capacity=10)
    ids, loop, _ = run(ToyEngine(V), ModelDrafter(draft, vocab_size=V), k=3, max_tokens=30)
    assert len(ids) == 30
    assert draft.kv_length <= 10
    assert loop.stats.num_drafter_faults == 0
    assert loop.stats.num_proposed < 12


def test_a_prompt_beyond_the_drafts_capacity_is_decoded_plainly() -> None:
    ids, loop, _ = run(ToyEngine(V), ModelDrafter(ToyEngine(V, capacity=4), vocab_size=V), prompt=[1] * 9, max_tokens=8)
    assert (len(ids), loop.stats.num_proposed, loop.stats.num_drafter_faults) == (8, 0, 0)


def test_sampled_drafts_carry_the_law_they_were_drawn_from() -> None:
    engine = ToyEngine(V)
    drafter = ModelDrafter(engine, vocab_size=V)
    sampler = make_sampler([0, 1], temperature=0.8, coupling="rejection", top_k=3, seed=2)
    drafter.start([0, 1], sampler)
    proposal = drafter.propose([0, 1], 3)
    assert proposal.probs is not None
    for node in range(3):
        law = make_sampler([0, 1], temperature=0.8, top_k=3).law(hashed_logits([0, 1, *proposal.token_ids[:node]], V))
        expected = np.zeros(V)
        expected[law.ids] = law.probs
        np.testing.assert_allclose(proposal.probs[node], expected)
        assert proposal.probs[node][proposal.token_ids[node]] > 0


def test_tokens_only_the_draft_knows_are_never_proposed() -> None:
    def loud(prefix: Sequence[int]) -> np.ndarray:
        return np.arange(V + 4, dtype=np.float32)

    drafter = ModelDrafter(ToyEngine(V + 4, logits=loud), vocab_size=V)
    drafter.start([0, 1], make_sampler([0, 1]))
    assert drafter.propose([0, 1], 3).token_ids == (V - 1,) * 3


class ToyHead(ToyEngine):
    """A head over toy rows, on all of which its logits depend: it must be given each one's token and feature."""

    confidence = 0.5
    num_read = 0

    def read(self, token_ids: Sequence[int], features: np.ndarray) -> np.ndarray:
        assert len(token_ids) == len(features) > 0
        assert self.kv_length == self.num_read, "rows of guesses are still there"
        self.num_read += len(token_ids)
        assert features[:, 0].tolist() == list(range(self.kv_length, self.kv_length + len(token_ids)))
        self.prefill(token_ids)
        return self._row(self.kv_length)

    def step(self, token_id: int) -> np.ndarray:
        return self.decode(token_id)


def eagle(prompt: Sequence[int], *, ids: Sequence[int] = range(V), capacity: int = 64) -> EagleDrafter:
    """Return the drafter of a head whose logits are the target's of the tokens `ids`."""
    head = ToyHead(V, capacity=capacity, logits=lambda rows: hashed_logits([prompt[0], *rows], V)[list(ids)])
    features = np.arange(80.0, dtype=np.float32)[:, None]  # of each position its number
    return EagleDrafter(head, features=features, token_ids=np.array(ids), vocab_size=V)


@pytest.mark.parametrize("k", [1, 3, 5, 9])
@pytest.mark.parametrize("params", [{}, {"temperature": 0.9, "seed": 3}, {"repetition_penalty": 1.4}], ids=str)
@pytest.mark.parametrize("prompt", [[0, 1], [3] * 20], ids=len)
def test_a_head_that_knows_the_target_is_always_right(prompt: list[int], params: dict[str, Any], k: int) -> None:
    plain, _, _ = run(ToyEngine(V), prompt=prompt, max_tokens=40, **params)
    ids, loop, _ = run(ToyEngine(V), eagle(prompt), prompt=prompt, k=k, max_tokens=40, **params)
    assert ids == plain
    assert loop.stats.num_drafter_faults == 0
    assert loop.stats.num_accepted == loop.stats.num_proposed > 15


def test_a_head_that_guesses_few_tokens_guesses_those() -> None:
    for params in ({}, {"temperature": 0.9, "seed": 3}, {"temperature": 0.9, "seed": 3, "coupling": "rejection"}):
        plain, _, _ = run(ToyEngine(V), max_tokens=40, **params)
        ids, loop, _ = run(ToyEngine(V), eagle([0, 1], ids=[4, 2]), k=3, max_tokens=40, **params)
        assert ids == plain
        assert loop.stats.num_drafter_faults == 0
        assert 0 < loop.stats.num_accepted < loop.stats.num_proposed


@pytest.mark.parametrize("ids", [list(range(V)), [4, 2]])
@pytest.mark.parametrize("params", [{}, {"temperature": 0.9, "coupling": "rejection", "seed": 3}], ids=str)
def test_a_head_takes_the_most_probable_of_its_tokens(params: dict[str, Any], ids: list[int]) -> None:
    """Sampling by ratio as well: a draw would be the target's own."""
    sampler = make_sampler([0, 1], **params)
    drafter = eagle([0, 1], ids=ids)
    drafter.start([0, 1], sampler)
    proposal = drafter.propose([0, 1], 3)
    known = [0, 1]
    for token in proposal.token_ids:
        assert token == ids[int(hashed_logits(known, V)[ids].argmax())]
        known.append(token)
    assert proposal.probs is None
    assert proposal.confidence == 0.5


def test_a_head_stops_at_its_capacity_and_says_nothing_after_one_token() -> None:
    ids, loop, _ = run(ToyEngine(V), eagle([0, 1], capacity=20), k=5, max_tokens=40)
    assert (len(ids), loop.stats.num_drafter_faults) == (40, 0)
    ids, loop, _ = run(ToyEngine(V), eagle([2]), prompt=[2], k=5, max_tokens=1)
    assert (len(ids), loop.stats.num_proposed) == (1, 0)


@pytest.mark.parametrize("k", [1, 3, 4])
@pytest.mark.parametrize("prompt", [[0, 1], [3] * 20], ids=len)
def test_parallel_heads_that_know_the_target_are_always_right(prompt: list[int], k: int) -> None:
    plain, _, _ = run(ToyEngine(V), prompt=prompt, max_tokens=40)
    for tree in (None, [(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)]):
        ids, loop, _ = run(ToyEngine(V), medusa(V, tree=tree), prompt=prompt, k=k, max_tokens=40)
        assert ids == plain
        assert loop.stats.num_drafter_faults == 0
        assert loop.stats.num_accepted == loop.stats.num_proposed > 15


@pytest.mark.parametrize("params", [{"temperature": 0.9}, {"temperature": 0.9, "repetition_penalty": 1.4}], ids=str)
def test_the_first_of_parallel_heads_shares_the_targets_noise(params: dict[str, Any]) -> None:
    for seed in range(5):
        _, loop, _ = run(ToyEngine(V), medusa(V), k=1, max_tokens=40, seed=seed, **params)
        assert loop.stats.num_accepted == loop.stats.num_proposed > 15


def test_a_tree_of_parallel_heads_is_cut_to_the_limit_and_begins_with_its_first_branch() -> None:
    tokens = [0, 1, 2]
    drafter = medusa(V, tree=TREE)
    ranked = []
    path = list(tokens)
    for _ in range(4):
        ranked.append(np.argsort(-hashed_logits(path, V), kind="stable").tolist())
        path.append(ranked[-1][0])
    for limit in range(1, 16):
        drafter.start(tokens, make_sampler(tokens))
        proposal = drafter.propose(tokens, limit)
        nodes = []
        for index in range(len(proposal.token_ids)):
            at, node = index, list[int]()
            parents = proposal.parents or range(-1, len(proposal.token_ids) - 1)
            while at >= 0:
                node.insert(0, proposal.token_ids[at])
                at = parents[at]
            nodes.append(tuple(node))
        wanted = {tuple(ranked[depth][rank] for depth, rank in enumerate(node)) for node in TREE[:limit]}
        assert set(nodes) == wanted
        depth = max(map(len, nodes))
        assert nodes[:depth] == [tuple(row[0] for row in ranked[:size]) for size in range(1, depth + 1)]
        assert (proposal.parents is None) == (limit < 3)
        assert proposal.confidence == 0.5


@pytest.mark.parametrize("params", [{}, {"temperature": 0.9, "coupling": "rejection"}], ids=str)
def test_parallel_heads_with_few_tokens_to_guess(params: dict[str, Any]) -> None:
    tokens = [0, 1]
    drafter = medusa(V, ids=[4, 2], tree=TREE)
    for banned, wanted in (({}, {4, 2}), ({4: -np.inf}, {2})):
        drafter.start(tokens, make_sampler(tokens, logit_bias=banned, **params))
        proposal = drafter.propose(tokens, 15)
        assert set(proposal.children(-1)) == set(proposal.token_ids) == wanted
        assert proposal.probs is None
    drafter.start(tokens, make_sampler(tokens, logit_bias={4: -np.inf, 2: -np.inf}, **params))
    with pytest.raises(RequestError, match="no token is left to choose"):
        drafter.propose(tokens, 15)


def test_what_looks_at_earlier_tokens_sees_the_best_guesses_of_parallel_heads() -> None:
    for seed in range(10):
        tokens = [seed % V, 1]
        drafter, sampler = medusa(V), make_sampler(tokens, presence_penalty=50.0)
        drafter.start(tokens, sampler)
        guesses = drafter.propose(tokens, 4).token_ids
        assert len(set(guesses)) == 4


def test_parallel_heads_say_nothing_after_one_token_or_without_room() -> None:
    drafter = medusa(V)
    drafter.start([2], make_sampler([2]))
    assert drafter.propose([2], 3) == Proposal()
    assert drafter.propose([2, 1], 0) == Proposal()


def test_nodes_that_no_head_guesses_for_are_left_out() -> None:
    drafter = medusa(V, num_heads=2, tree=TREE)
    drafter.start([0, 1], make_sampler([0, 1]))
    proposal = drafter.propose([0, 1], 15)
    assert max(proposal.depths) == 1
    assert len(proposal.token_ids) == sum(len(node) <= 2 for node in TREE)
