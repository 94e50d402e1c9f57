"""Several steps of a head in one pass over whole texts, with chains that begin at many rows.

Step 1 reads all rows: token i + 1 and the target's feature of token i. A chain that begins at row s goes on from there
with the head's own features: step j reads token s + j and what step j - 1 gave. It attends to the rows up to s as step
1 left them, which is what the head's KV buffers hold after a verify, and to its own steps: the training-time test of
EAGLE-3 (arXiv 2503.01840).
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.cache_utils import Cache

from specrt_export.distill.head import Head

_ATTENTION = "specrt_unrolled"
_Pair = tuple[torch.Tensor, torch.Tensor]


class Unroll:
    """A head whose layer attends within chains; made by `unrolling`."""

    def __init__(self, head: Head) -> None:
        self.head = head
        self._seen: torch.Tensor | None = None

    def __call__(
        self, embeddings: torch.Tensor, features: torch.Tensor, starts: torch.Tensor, *, steps: int
    ) -> Iterator[torch.Tensor]:
        """Yield what step 1 gives in all rows, [B, T, H], then what each further step gives in the chains, [B, C, H].

        embeddings: [B, T, H] of token i + 1 in row i. features: [B, T, F] of the target after token i. starts: [C], the
        rows where chains begin, none beyond T - `steps`.
        """
        chain, length = _Chain(), embeddings.shape[1]
        self._seen = None
        out = self.head(embeddings, self.head.begin(features), torch.arange(length)[None], chain)
        yield out
        out = out[:, starts]
        blocks = [torch.arange(length)[None] <= starts[:, None]]
        for step in range(1, steps):
            blocks.append(torch.eye(len(starts), dtype=torch.bool))
            self._seen = torch.cat(blocks, 1)
            rows = starts + step
            out = self.head(embeddings[:, rows], out, rows[None], chain)
            yield out

    def attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None,
        scaling: float | None = None, **_: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        """Be the attention function of the head's layer."""
        repeats = query.shape[1] // key.shape[1]
        key, value = (tensor.repeat_interleave(repeats, 1) if repeats > 1 else tensor for tensor in (key, value))
        out = scaled_dot_product_attention(
            query, key, value, attn_mask=self._seen, is_causal=self._seen is None, scale=scaling
        )
        return out.transpose(1, 2), None


@contextlib.contextmanager
def unrolling(head: Head) -> Iterator[Unroll]:
    """Give the head's layer the attention of an `Unroll` while the block runs."""
    unroll, before = Unroll(head), head.decoder.config._attn_implementation
    AttentionInterface.register(_ATTENTION, unroll.attend)
    head.decoder.set_attn_implementation(_ATTENTION)
    try:
        yield unroll
    finally:
        head.decoder.set_attn_implementation(before)
        AttentionInterface._global_mapping.pop(_ATTENTION)


class _Chain(Cache):  # type: ignore[misc]
    """Keys and values [B, H_kv, .., D] of each step so far, side by side."""

    is_compileable = False

    def __init__(self) -> None:
        self.layers: list[Any] = []
        self._steps: list[_Pair] = []

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any) -> _Pair:
        self._steps.append((key_states, value_states))
        keys, values = zip(*self._steps, strict=True)
        return torch.cat(keys, 2), torch.cat(values, 2)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0
