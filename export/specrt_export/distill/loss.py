"""What a head is trained on, and how well it drafts."""

from dataclasses import dataclass

import torch
from torch.nn.functional import linear, log_softmax, smooth_l1_loss

from specrt_export.distill.unroll import Unroll


@dataclass(frozen=True, slots=True)
class Batch:
    """B texts of T rows each.

    embeddings: [B, T, H] of token i + 1 in row i. features: [B, T, F] of token i. wanted: [B, T, H], what the target's
    output matrix reads after token i + 1. following: [B, T], token i + 2 as a row of the draft vocabulary, -1 where it
    is not in it. weights: [B, T], of each row in the loss.
    """

    embeddings: torch.Tensor
    features: torch.Tensor
    wanted: torch.Tensor
    following: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOptions:
    """Steps of a chain; weight of the distance between features (`eagle` only); weight of a step to the one before."""

    steps: int
    regression: float
    decay: float


def loss(unroll: Unroll, batch: Batch, rows: torch.Tensor, starts: torch.Tensor, options: LossOptions) -> torch.Tensor:
    """Return the loss over several steps: cross entropy to the target's distribution over the draft vocabulary.

    rows: [V, H] of the output matrix. starts: see `Unroll`.
    """
    everywhere = torch.arange(batch.weights.shape[1])
    total = torch.zeros(())
    steps = options.steps if len(starts) else 1
    for step, out in enumerate(unroll(batch.embeddings, batch.features, starts, steps=steps)):
        place = everywhere if step == 0 else starts + step
        use = (batch.weights[:, place] > 0) & (batch.following[:, place] >= 0)
        weights, wanted, given = batch.weights[:, place][use], batch.wanted[:, place][use], out[use]
        probs = linear(wanted, rows).float().softmax(-1)
        term = -(probs * log_softmax(unroll.head.logits(given, rows).float(), -1)).sum(-1)
        if unroll.head.layout == "eagle" and options.regression:
            gap = smooth_l1_loss(given.float(), wanted.float(), reduction="none").mean(-1)
            term = term + options.regression * gap
        total = total + options.decay**step * (term * weights).sum() / weights.sum().clamp(min=1)
    return total


def agreement(unroll: Unroll, batch: Batch, rows: torch.Tensor, *, steps: int) -> torch.Tensor:
    """Return whether each token of chains of `steps` is the text's: bool [steps, n].

    A chain begins at each row from which on all of it counts; step j of it is j - 1 rows further.
    """
    starts = torch.arange(max(0, batch.weights.shape[1] - steps + 1))
    counts = torch.stack([batch.weights[:, starts + step] > 0 for step in range(steps)]).all(0)
    if not counts.any():
        return torch.zeros(steps, 0, dtype=torch.bool)
    found = []
    for step, out in enumerate(unroll(batch.embeddings, batch.features, starts, steps=steps)):
        given = out[:, starts][counts] if step == 0 else out[counts]
        found.append(unroll.head.logits(given, rows).argmax(-1) == batch.following[:, starts + step][counts])
    return torch.stack(found)


def by_step(agreed: torch.Tensor) -> tuple[float, ...]:
    """Return the share of right tokens of each step, from `agreement` [steps, n]; nothing when there are none."""
    return tuple(round(share, 4) for share in agreed.float().mean(1).tolist()) if agreed.shape[1] else ()


def block_efficiency(agreed: torch.Tensor) -> float:
    """Return tokens per target call of greedy chains, from `agreement` [steps, n] of rows in the order of the text.

    Each chain begins after the token that ended the one before, as in decoding. A mean over all rows would count a
    passage of right guesses once for every row in it, but decoding begins only one chain there.
    """
    taken = (1 + agreed.int().cumprod(0).sum(0)).tolist()
    calls = tokens = 0
    while tokens < len(taken):
        tokens += taken[tokens]
        calls += 1
    return tokens / calls if calls else 1.0
