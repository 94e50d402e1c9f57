"""KV of earlier requests: whatever was kept, copied, dropped or cut short, a request is what it is from cold."""

import contextlib
import itertools
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from parts import ListDrafter, grow, make_loop, run
from specrt.acceptance import Proposal
from specrt.drafters import Drafter, NoDrafter
from specrt.drafters.model import ModelDrafter
from specrt.drafters.ngram import NgramDrafter
from specrt.kv import KvContents
from specrt.prefix_cache import PrefixCache
from toy import ToyEngine, hashed_logits

V, WIDTH, CAPACITY, BIG = 5, 8, 96, 10**9
BLOCK = WIDTH * 8  # bytes of a block of the toy engine
COUPLINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.9, "seed": 3},
    {"temperature": 0.9, "seed": 3, "coupling": "rejection"},
)


class ShapedEngine(ToyEngine):
    """An engine whose KV depends on the kind of call that wrote it, and for prefill calls on all of the call."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(V, capacity=CAPACITY, **arguments)
        self.contents.exact_widths = ()
        self._slots = [0] * len(self._slots)
        self._logits = lambda prefix: hashed_logits(prefix, V)

    def _call(self, token_ids: Sequence[int], width: int) -> None:
        start = self.kv_length
        super()._call(token_ids, width)
        whole = hash((start, *token_ids)) if width == WIDTH else min(width, 2)
        self._slots[start : start + width] = [whole * V + token for token in self._slots[start : start + width]]


class RecordingEngine(ToyEngine):
    """Keeps every row that it returned, by position."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(V, capacity=CAPACITY, **arguments)
        self.rows: dict[int, bytes] = {}

    def _row(self, start: int, rows: Sequence[int] = ()) -> np.ndarray:
        row = super()._row(start, rows)
        self.rows[start + len(rows)] = row.tobytes()
        return row

    def keep(self, rows: Sequence[int]) -> None:
        super().keep(rows)
        if self._is_tree:  # what follows a tree sees other bits than behind a chain
            kept = slice(self._start, self.kv_length)
            self._slots[kept] = [token + V for token in self._slots[kept]]


class ModelWithCache:
    """A target and a draft that go from request to request, with the cache between them."""

    def __init__(
        self, limit: int | None, *, target: type[Any] = RecordingEngine, draft: type[Any] = RecordingEngine
    ) -> None:
        self.target, self.draft = target(), draft()
        self.cache = None if limit is None else PrefixCache(limit)

    def reuse(self, engine: Any) -> Any:
        return None if self.cache is None else partial(self.cache.reuse, engine)

    def ask(self, prompt: Sequence[int], drafter: str, **options: Any) -> tuple[Any, Any]:
        """Return what must not depend on the past, and the statistics."""
        drafters: dict[str, Callable[[], Drafter]] = {
            "none": NoDrafter,
            "ngram": NgramDrafter,
            "tree": lambda: ListDrafter(branches),
            "model": lambda: ModelDrafter(self.draft, vocab_size=V, reuse=self.reuse(self.draft)),
        }
        self.target.rows = {}
        ids, loop, _ = run(
            self.target, drafters[drafter](), prompt=prompt, reuse=self.reuse(self.target), **{"k": 3, **options}
        )
        rows = [self.target.rows.get(len(prompt) + i) for i in range(len(ids))]
        return (ids, rows), loop.stats


def branches(tokens: Sequence[int], limit: int) -> Proposal:
    """Guess a tree whose second branch is often right."""
    return grow(lambda path: np.argsort(hashed_logits([*tokens, *path], V)).tolist()[::-1][1::-1], (2, 2, 1), limit)


def cold(prompt: Sequence[int], drafter: str, kind: type[Any] = RecordingEngine, **options: Any) -> Any:
    return ModelWithCache(None, target=kind, draft=kind).ask(prompt, drafter, **options)[0]


def texts(seed: int, count: int) -> list[list[int]]:
    """Return prompts that begin alike in all ways: by a few tokens, by blocks, by all of a prompt and its answer."""
    rng = random.Random(seed)
    known = [[rng.randrange(V) for _ in range(rng.choice([1, 2, 9, 30]))]]
    for _ in range(count - 1):
        old = rng.choice(known)
        kept = rng.choice([0, 1, len(old) // 2, WIDTH, len(old), len(old)])
        known.append([*old[:kept], *(rng.randrange(V) for _ in range(rng.choice([0, 1, 3, WIDTH, 20])))][:60] or [1])
    return known


@pytest.mark.parametrize("limit", [0, 5 * BLOCK, BIG])
@pytest.mark.parametrize("kind", [RecordingEngine, ShapedEngine])
@pytest.mark.parametrize("seed", range(6))
def test_a_request_is_what_it_is_after_a_cold_start(kind: type[Any], limit: int, seed: int) -> None:
    model = ModelWithCache(limit, target=kind, draft=kind)
    rng = random.Random(seed)
    cached = 0
    for prompt in texts(seed, 25):
        drafter, options = rng.choice(["none", "ngram", "tree", "model", "model"]), rng.choice(COUPLINGS)
        options = {**options, "max_tokens": rng.choice([0, 1, 7, 20]), "k": rng.choice([1, 3, 7])}
        found, stats = model.ask(prompt, drafter, **options)
        assert found == cold(prompt, drafter, kind, **options)
        assert not stats.num_drafter_faults
        assert 0 <= stats.num_cached_tokens < len(prompt)
        cached += stats.num_cached_tokens
    assert cached > 0 or limit < BIG


@pytest.mark.parametrize("max_tokens", [1, 5, 20])
def test_a_prompt_that_goes_on_reads_only_what_is_new(max_tokens: int) -> None:
    model = ModelWithCache(0)
    prompt = [1, 2, 3, 4, 0, 1, 1, 2, 2, 3]
    (answer, _), first = model.ask(prompt, "none", max_tokens=max_tokens)
    assert first.num_cached_tokens == 0
    asked = [*prompt, *answer, 3, 3]
    model.target.widths_used.clear()
    _, second = model.ask(asked, "none", max_tokens=1)
    assert second.num_cached_tokens == len(prompt) + max_tokens - 1, "the last token of an answer was not fed yet"
    assert model.target.widths_used == [WIDTH, 2]
    assert second.cached_rate == second.num_cached_tokens / len(asked)


def test_the_same_prompt_again_reads_nothing_but_its_last_token() -> None:
    model = ModelWithCache(0)
    prompt = [1, 2, 3, 4]
    model.ask(prompt, "none", max_tokens=9)
    model.target.widths_used.clear()
    _, stats = model.ask(prompt, "none", max_tokens=1)
    assert (stats.num_cached_tokens, model.target.widths_used) == (3, [2])


def test_without_copies_only_the_last_text_is_known() -> None:
    model = ModelWithCache(0)
    for prompt, expected in (([1] * 20, 0), ([2] * 20, 0), ([1] * 20, 0), ([1] * 12 + [2], 12)):
        assert model.ask(prompt, "none", max_tokens=1)[1].num_cached_tokens == expected
    assert model.cache.num_bytes == 0


def test_copies_bring_back_whole_blocks_of_earlier_texts() -> None:
    model = ModelWithCache(BIG)
    one, other = [1, 2, 3, 4] * 2 + [0, 1, 2] * 4, [2] * 20
    for prompt, expected in ((one, 0), (other, 0), (one, 16), (other, 16), (other, 19)):
        assert model.ask(prompt, "none", max_tokens=1)[1].num_cached_tokens == expected
    assert model.cache.num_bytes == 4 * BLOCK


def test_a_block_is_known_by_what_comes_before_it() -> None:
    model = ModelWithCache(BIG)
    model.ask([1] * WIDTH + [2] * WIDTH + [0], "none", max_tokens=1)
    for prompt, expected in (([2] * 20, 0), ([1] * WIDTH + [3] * 12, WIDTH), ([3] * WIDTH + [2] * 12, 0)):
        found, stats = model.ask(prompt, "none", max_tokens=5)
        assert (found, stats.num_cached_tokens) == (cold(prompt, "none", max_tokens=5), expected)


def test_texts_share_the_blocks_of_their_common_beginning() -> None:
    model = ModelWithCache(BIG)
    system = [3, 1, 4, 1, 0, 2, 2, 4] * 2
    for tail in ([1] * 9, [2] * 9, [3] * 9, [1] * 9):
        model.ask([*system, *tail], "none", max_tokens=1)
    assert model.cache.num_bytes == (2 + 3) * BLOCK


def test_a_text_that_goes_on_is_not_copied() -> None:
    model = ModelWithCache(BIG)
    model.ask([1] * 20, "none", max_tokens=1)
    model.ask([1] * 20 + [2] * 20, "none", max_tokens=1)
    assert model.cache.num_bytes == 0


def test_shape_bound_kv_is_reused_by_whole_prefill_calls_only() -> None:
    model = ModelWithCache(0, target=ShapedEngine)
    prompt = [1] * 21
    model.ask(prompt, "none", max_tokens=20)
    _, stats = model.ask(prompt + [2] * 20, "none", max_tokens=1)
    assert stats.num_cached_tokens == 16
    _, stats = model.ask(prompt[:10] + [2] * 20, "none", max_tokens=1)
    assert stats.num_cached_tokens == WIDTH


def test_a_call_of_another_width_ends_what_can_be_reused() -> None:
    engine = RecordingEngine()
    engine.prefill([1] * 10)
    engine.verify([2, 3])
    engine.decode(4)  # a draft's way: other bits
    engine.verify([0, 1])
    text = [*[1] * 10, 2, 3, 4, 0, 1]
    assert engine.contents.common(text, engine.kv_length, cold_bits=True) == 12
    assert engine.contents.common(text, engine.kv_length, cold_bits=False) == 15


def test_nothing_is_known_beyond_the_kv_length_or_after_a_gap() -> None:
    engine = RecordingEngine()
    engine.prefill([1] * 20)
    engine.rollback(7)
    assert engine.contents.common([1] * 20, engine.kv_length, cold_bits=False) == 7
    engine.verify([2])
    engine.kv_length = 20  # as if slots beyond were still good
    assert engine.contents.common([1] * 20, 20, cold_bits=False) == 7
    engine.prefill([1])
    assert engine.contents.common([*[1] * 7, 2, *[1] * 13], 21, cold_bits=False) == 8


@pytest.mark.parametrize("start", [1, 3, WIDTH + 1])
def test_a_full_call_at_another_place_is_not_that_of_a_cold_start(start: int) -> None:
    contents = KvContents(CAPACITY, WIDTH)
    contents.wrote(0, [1] * start, 2)
    contents.wrote(start, [1] * WIDTH, WIDTH)
    assert contents.length(CAPACITY, cold_bits=True) == 0
    contents.begin(0)
    for at in (0, WIDTH):
        contents.wrote(at, [1] * WIDTH, WIDTH)
    contents.begin(WIDTH + 3)
    contents.wrote(WIDTH + 3, [1] * WIDTH, WIDTH)
    assert contents.length(CAPACITY, cold_bits=True) == WIDTH
    assert contents.length(CAPACITY, cold_bits=False) == 2 * WIDTH + 3


class Broken(Exception):
    """A planted fault."""


class FailingSlots(list[int]):
    """Slots in which the n-th write gets half of its way."""

    def __init__(self, items: Sequence[int]) -> None:
        super().__init__(items)
        self.left: int | None = None

    def __setitem__(self, where: Any, value: Any) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                if isinstance(where, slice):
                    half = len(value) // 2
                    super().__setitem__(slice(where.start, where.start + half), [4] * half)
                raise Broken
        super().__setitem__(where, value)


class FailingEngine(RecordingEngine):
    def __init__(self) -> None:
        super().__init__()
        self._slots: Any = FailingSlots(self._slots)


FIRST, SECOND = [1, 2, 3, 4] * 5, [1, 2, 3, 4] * 2 + [0, 3] * 6


@pytest.mark.parametrize("which", ["target", "draft"])
@pytest.mark.parametrize("limit", [0, BIG])
def test_a_write_that_fails_leaves_no_wrong_entry(limit: int, which: str) -> None:
    options: dict[str, Any] = {"max_tokens": 12, "temperature": 0.9, "seed": 1, "coupling": "rejection"}
    expected = {tuple(prompt): cold(prompt, "model", **options) for prompt in (FIRST, SECOND, [*FIRST, 2])}
    for at in itertools.count():
        model = ModelWithCache(limit, target=FailingEngine, draft=FailingEngine)
        for prompt in (FIRST, SECOND):
            model.ask(prompt, "model", **options)
        slots = getattr(model, which)._slots
        slots.left = at
        for prompt in (FIRST, SECOND, FIRST):  # brings back copies, and goes on where buffers agree
            with contextlib.suppress(Broken):
                if not model.ask(prompt, "model", **options)[1].num_drafter_faults:
                    continue
            break
        else:
            break
        slots.left = None
        for prompt in (SECOND, FIRST, [*FIRST, 2], SECOND):
            assert model.ask(prompt, "model", **options)[0] == expected[tuple(prompt)]
    assert at > 10, "faults at all writes of three requests"


@pytest.mark.parametrize("limit", [0, BLOCK - 1, BLOCK, 4 * BLOCK, 9 * BLOCK, BIG])
@pytest.mark.parametrize("seed", range(4))
def test_copies_stay_within_the_limit_and_can_be_found(limit: int, seed: int) -> None:
    model = ModelWithCache(limit)
    assert model.cache is not None
    most = 0
    for prompt in texts(seed, 60):
        model.ask(prompt, "model", max_tokens=9)
        entries = model.cache._entries
        assert model.cache.num_bytes == sum(entry.block.num_bytes for entry in entries.values()) <= limit
        numbers = {0, *(entry.number for entry in entries.values())}
        assert {before for _, before, _ in entries} <= numbers, "a block whose beginning is gone"
        most = max(most, model.cache.num_bytes)
    assert most > limit - 2 * BLOCK or limit in (0, BLOCK - 1, BIG)
    model.cache.clear()
    assert model.cache.num_bytes == 0


def test_what_was_used_last_stays() -> None:
    model = ModelWithCache(4 * BLOCK)
    system, others = [1] * 2 * WIDTH, [[token] * 2 * WIDTH for token in (2, 3, 4)]
    model.ask([*system, 0], "none", max_tokens=1)
    for other in others:
        model.ask([*other, 0], "none", max_tokens=1)
        _, stats = model.ask([*system, 0], "none", max_tokens=1)
        assert stats.num_cached_tokens == 2 * WIDTH


def test_a_copy_with_a_cold_starts_bits_takes_the_place_of_one_without() -> None:
    engine, cache = ShapedEngine(), PrefixCache(BIG)
    prompt, other = [1] * 2 * WIDTH, [2] * 2 * WIDTH

    def ask(text: list[int], *, one_by_one: bool, cold_bits: bool) -> int:
        length = cache.reuse(engine, text, cold_bits=cold_bits)
        if one_by_one:
            for token in text[length:]:
                engine.decode(token)
        else:
            engine.prefill(text[length:])
        return length

    for one_by_one, cold_bits, expected in ((True, False, 0), (True, False, 16), (False, True, 0), (False, True, 16)):
        assert ask(prompt, one_by_one=one_by_one, cold_bits=cold_bits) == expected
        ask(other, one_by_one=one_by_one, cold_bits=cold_bits)
    assert cache.num_bytes == 4 * BLOCK


def test_a_drafts_text_under_rejection_does_not_depend_on_the_past() -> None:
    """Guesses drawn from other bits would be accepted otherwise now and then: the seed's text would change."""
    prompt = [1, 2, 3, 4] * 6
    options: dict[str, Any] = {"temperature": 0.9, "coupling": "rejection", "max_tokens": 20}
    model = ModelWithCache(BIG, draft=ShapedEngine)
    for seed in range(10):
        found, stats = model.ask(prompt, "model", seed=seed, **options)
        target = ModelWithCache(None, draft=ShapedEngine)
        assert found == target.ask(prompt, "model", seed=seed, **options)[0]
        assert stats.num_proposed > 0


def test_what_a_tree_leaves_behind_is_its_path_in_other_bits() -> None:
    model = ModelWithCache(0)
    prompt = [1, 2, 3, 4]
    (answer, _), stats = model.ask(prompt, "tree", max_tokens=12)
    assert model.target.num_moved > 0
    assert stats.num_accepted > 0
    text = [*prompt, *answer]
    assert model.target.contents.common(text, model.target.kv_length, cold_bits=False) == len(text) - 1
    found, stats = model.ask([*text, 2], "none", max_tokens=9)
    assert stats.num_cached_tokens == len(prompt) - 1
    assert found == cold([*text, 2], "none", max_tokens=9)


def test_the_draft_goes_on_where_its_buffers_agree() -> None:
    model = ModelWithCache(0)
    prompt = [1, 2, 3, 4] * 6
    (answer, _), _ = model.ask(prompt, "model", max_tokens=10)
    model.draft.widths_used.clear()
    model.ask([*prompt, *answer, 1, 2], "model", max_tokens=4)
    assert model.draft.widths_used.count(WIDTH) == 1


def test_streams_that_end_early_leave_the_right_text_behind() -> None:
    prompt = [1, 2, 3, 4] * 3
    for taken in range(12):
        model = ModelWithCache(BIG)
        guess = ListDrafter(lambda tokens, limit: [1] * limit)
        loop = make_loop(model.target, guess, prompt=prompt, reuse=model.reuse(model.target), max_tokens=20)
        stream = loop.run()
        ids = list(itertools.islice((token.id for token in stream), taken))
        stream.close()
        follow = [*prompt, *ids, 2, 2]
        assert model.ask(follow, "none", max_tokens=9)[0] == cold(follow, "none", max_tokens=9)
