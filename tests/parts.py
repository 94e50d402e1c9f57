"""Helpers that put real loops together over toy engines, and the statistics of the tests."""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from specrt.acceptance import Proposal
from specrt.control import Controller, FixedController
from specrt.drafters import Drafter, NoDrafter
from specrt.drafters.eagle import EagleDrafter
from specrt.drafters.medusa import MedusaDrafter
from specrt.drafters.ngram import NgramDrafter
from specrt.loop import Loop, Token
from specrt.prefix_cache import Reuse
from specrt.sampling import Sampler, SamplingParams
from specrt.stops import StopRules
from toy import ToyHead, ToyParallelHeads

TREE = ((0,), (0, 0), (1,), (0, 1), (0, 0, 0), (1, 0), (2,), (0, 0, 1), (1, 1), (0, 0, 0, 0), (0, 1, 0))


class ToyMedusaDrafter(MedusaDrafter):
    """The drafter of toy heads, which are told the text."""

    def __init__(self, heads: ToyParallelHeads, *, vocab_size: int, tree: Any = None) -> None:
        self.toy = heads
        features, ids = np.arange(200.0, dtype=np.float32)[:, None], np.array(heads.token_ids)
        super().__init__(heads, features=features, token_ids=ids, vocab_size=vocab_size, tree=tree)

    def propose(self, tokens: Sequence[int], limit: int) -> Proposal:
        self.toy.tokens = list(tokens)
        return super().propose(tokens, limit)


def medusa(
    vocab_size: int, *, tree: Any = None, salt: int = 0, ids: Sequence[int] | None = None, num_heads: int = 4
) -> ToyMedusaDrafter:
    """Return the drafter of toy heads: a chain, or `TREE` or another tree."""
    heads = ToyParallelHeads(vocab_size, num_heads=num_heads, salt=salt, ids=ids)
    return ToyMedusaDrafter(heads, vocab_size=vocab_size, tree=tree)


class PlainDetokenizer:
    """Tokens as letters."""

    def push(self, token_id: int) -> str:
        return chr(ord("a") + token_id)

    def flush(self) -> str:
        return ""


class ListDrafter:
    """Proposes what a function of the tokens says."""

    name = "list"

    def __init__(self, guess: Callable[[Sequence[int], int], Proposal | Sequence[int]]) -> None:
        self._guess = guess

    def start(self, tokens: Sequence[int], sampler: Sampler) -> None:
        self.sampler = sampler

    def propose(self, tokens: Sequence[int], limit: int) -> Proposal:
        guess = self._guess(tokens, limit)
        return guess if isinstance(guess, Proposal) else Proposal(tuple(guess))


def grow(
    children: Callable[[list[int]], Sequence[int]], shape: Sequence[int], limit: int, *, depth_first: bool = False
) -> Proposal:
    """Return a tree of up to `limit` tokens: shape[d] of the `children` of a path of d tokens, in either order."""
    ids: list[int] = []
    parents: list[int] = []
    todo = [(-1, [token]) for token in children([])[: shape[0]]]
    while todo and len(ids) < limit:
        (parent, path), *todo = todo
        below = children(path)[: shape[len(path)]] if len(path) < len(shape) else ()
        found = [(len(ids), [*path, token]) for token in below]
        todo = [*found, *todo] if depth_first else [*todo, *found]
        ids.append(path[-1])
        parents.append(parent)
    return Proposal(tuple(ids), parents=tuple(parents))


def make_loop(
    target: Any,
    drafter: Drafter | None = None,
    *,
    prompt: Sequence[int] = (0, 1),
    k: int = 3,
    controller: Controller | None = None,
    eos: tuple[int, ...] = (),
    clock: Callable[[], float] | None = None,
    draft_budget_s: float | None = None,
    reuse: Reuse | None = None,
    strict: bool = False,
    **params: Any,
) -> Loop:
    """Return a loop over `target` with real sampler, stop rules and acceptance."""
    sampling = SamplingParams(**params)
    end_ids = tuple(dict.fromkeys((*eos, *sampling.stop_token_ids)))
    stops = StopRules(sampling, end_ids=end_ids, room=target.capacity - len(prompt), detokenizer=PlainDetokenizer())
    sampler = Sampler(sampling, list(prompt), vocab_size=target.vocab_size, end_ids=end_ids)
    ticks = itertools.count()
    clock = clock or (lambda: float(next(ticks)))
    controller = controller or FixedController(k)
    return Loop(
        target, drafter or NoDrafter(), sampler, stops, list(prompt), controller=controller, clock=clock,
        draft_budget_s=draft_budget_s, strict=strict, reuse=reuse,
    )  # fmt: skip


def run(target: Any, drafter: Drafter | None = None, **arguments: Any) -> tuple[list[int], Loop, list[Token]]:
    """Run a loop to its end; return the generated ids, the loop and the tokens."""
    loop = make_loop(target, drafter, **arguments)
    tokens = list(loop.run())
    return [token.id for token in tokens], loop, tokens


def ngram() -> NgramDrafter:
    return NgramDrafter()


def toy_eagle(vocab_size: int, *, tree: bool, capacity: int = 64, salt: int = 9) -> EagleDrafter:
    """Return the drafter of a toy head that knows all tokens."""
    head: Any = ToyHead(vocab_size, capacity=capacity, salt=salt)
    features, ids = np.zeros((capacity, 1), np.float32), np.arange(vocab_size)
    return EagleDrafter(head, features=features, token_ids=ids, vocab_size=vocab_size, tree=tree)


def chi_square(observed: Iterable[int], expected: Iterable[float]) -> tuple[float, int]:
    """Return the statistic and its degrees of freedom; cells with fewer than 5 expected are merged."""
    pairs = sorted(zip(observed, expected, strict=True), key=lambda pair: pair[1])
    cells: list[list[float]] = [[0.0, 0.0]]
    for seen, wanted in pairs:
        if cells[-1][1] >= 5:
            cells.append([0.0, 0.0])
        cells[-1][0] += seen
        cells[-1][1] += wanted
    if len(cells) > 1 and cells[-1][1] < 5:
        last = cells.pop()
        cells[-1][0] += last[0]
        cells[-1][1] += last[1]
    return sum((seen - wanted) ** 2 / wanted for seen, wanted in cells), len(cells) - 1


def chi_square_limit(degrees: int) -> float:
    """Return the value exceeded with probability 1e-4 (Wilson and Hilferty 1931)."""
    z = 3.719
    return degrees * (1 - 2 / (9 * degrees) + z * math.sqrt(2 / (9 * degrees))) ** 3
