"""Self-writing: the target writes prompts and answers, shard by shard."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specrt_export.distill.batch import decoding
from specrt_export.distill.rows import FIXED, Rows, WritingPlan
from specrt_export.distill.shards import TextShard

_MIN_P = 0.02  # of a written user turn: less likely tokens make prompts that nobody would write
_SHORTEST = 16  # tokens of a document worth keeping


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSize:
    """Rows of one shard, and tokens per row."""

    rows: int = 96
    length: int = 768


def write_text(
    model: Any, plan: WritingPlan, size: BatchSize, *, seed: tuple[int, int], on_step: Callable[[int], None]
) -> TextShard:
    """Let the model (bfloat16) write one shard of about rows * length tokens.

    The shard is a function of the arguments on one kind of processor with one number of threads. `seed`: of the whole
    text, and the shard's number. `on_step` is told the tokens of each step.
    """
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence(seed)))
    rows = Rows(plan, size.rows, rng)
    with decoding(model, size.rows) as decoder:
        first = decoder.feed_prefix(plan.template.before) if plan.template.before else None
        logits = first.repeat(size.rows, 1) if first is not None else None
        for _ in range(size.length):
            picked = np.zeros(size.rows, np.int64)
            if logits is not None:
                if first is not None:
                    logits[torch.from_numpy(rows.beginning())] = first
                floors = np.where(rows.is_user(), _MIN_P, 0.0)
                picked = pick(logits, rows.temperatures(), floors, rng.random(size.rows))
            rows.feed(picked)
            logits = decoder.step(rows.tokens[-1], rows.starts[-1])
            on_step(size.rows)
    return documents(rows, plan.template.before)


def pick(
    logits: torch.Tensor, temperatures: NDArray[np.float64], floors: NDArray[np.float64], uniform: NDArray[np.float64]
) -> NDArray[np.int64]:
    """Choose a token per row of logits [R, V]: the likeliest at temperature 0, a drawn one above, 0 below.

    Drawn are tokens whose probability is at least `floors` times the largest, at the place `uniform` in [0, 1) of their
    summed probabilities.
    """
    picked = np.zeros(len(logits), np.int64)
    greedy = np.flatnonzero(temperatures == 0)
    picked[greedy] = logits[torch.from_numpy(greedy)].float().argmax(-1).numpy()
    drawn = np.flatnonzero(temperatures > 0)
    scaled = logits[torch.from_numpy(drawn)].float() / torch.from_numpy(temperatures[drawn, None]).float()
    probs = scaled.softmax(-1)
    probs *= probs >= probs.amax(-1, keepdim=True) * torch.from_numpy(floors[drawn, None]).float()
    sums = probs.double().cumsum(-1)
    wanted = torch.from_numpy(uniform[drawn, None]) * sums[:, -1:]
    last = probs.shape[-1] - 1 - (probs > 0).flip(-1).int().argmax(-1)
    picked[drawn] = torch.minimum(torch.searchsorted(sums, wanted, right=True)[:, 0], last).numpy()
    return picked


def documents(rows: Rows, prefix: Sequence[int]) -> TextShard:
    """Cut the rows into documents, each with the prefix; the shortest are left out."""
    tokens, roles, starts = (np.stack(parts, axis=1) for parts in (rows.tokens, rows.roles, rows.starts))
    found: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
    for row in range(len(tokens)):
        bounds = [*np.unique(starts[row]).tolist(), tokens.shape[1]]
        pieces = (slice(begin, end) for begin, end in pairwise(bounds))
        found += [(tokens[row, piece], roles[row, piece]) for piece in pieces if piece.stop - piece.start >= _SHORTEST]
    ids = [np.concatenate([np.array(prefix, np.int64), document]) for document, _ in found]
    origin = [np.concatenate([np.full(len(prefix), FIXED), role]) for _, role in found]
    return TextShard(
        tokens=np.concatenate([np.zeros(0), *ids]).astype(np.int32),
        roles=np.concatenate([np.zeros(0), *origin]).astype(np.uint8),
        offsets=np.cumsum([0, *map(len, ids)]).astype(np.int64),
    )
