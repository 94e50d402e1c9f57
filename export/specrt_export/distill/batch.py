"""Many texts of one model at a time: decode a batch of rows, one token of every row per step."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import pad
from transformers import AttentionInterface
from transformers.cache_utils import Cache

from specrt_export.decoder import AttentionOptions, cache_argument

_ATTENTION = "specrt_rows"
_GROW = 64  # slots: products with gaps between their matrices take a kernel that is several times slower
_Pair = tuple[torch.Tensor, torch.Tensor]


class RowDecoder:
    """Keys, values and positions of a batch of rows.

    The first slots hold a prefix that all rows share; every row's own tokens come after it.
    """

    def __init__(self, model: Any, num_rows: int) -> None:
        self._model = model
        self._cache = _RowCache()
        self._cache_argument = cache_argument(model)
        self._prefix = 0
        self._positions = np.zeros((num_rows, 0), np.int64)
        self._visible = np.zeros((num_rows, 0), bool)
        self._masks: dict[int | None, torch.Tensor] = {}

    def feed_prefix(self, tokens: Sequence[int]) -> torch.Tensor:
        """Feed the shared prefix of at least one token; return its last logits [1, V]."""
        rows = len(self._positions)
        for token in tokens:
            self._prefix += 1
            logits = self.step(np.full(rows, token), np.zeros(rows, np.int64))
        return logits[:1].clone()

    def step(self, tokens: NDArray[np.int64], starts: NDArray[np.int64]) -> torch.Tensor:
        """Feed one token [R] to every row; return logits [R, V].

        `starts` [R] counts from the end of the prefix: a token sees the prefix and its row's tokens from there on.
        """
        slot = self._cache.slot
        place = slot - np.where(slot < self._prefix, 0, starts)
        self._positions = np.concatenate([self._positions, place[:, None]], axis=1)
        slots = np.arange(slot + 1)
        self._visible = (slots < self._prefix) | (slots >= starts[:, None] + self._prefix)
        self._masks.clear()
        ids, positions = (torch.from_numpy(np.ascontiguousarray(array)[:, None]) for array in (tokens, place))
        out = self._model(
            input_ids=ids, position_ids=positions, use_cache=True, **{self._cache_argument: self._cache}
        )  # fmt: skip
        self._cache.slot += 1
        logits: torch.Tensor = out.logits[:, -1]
        return logits

    def attend(self, query: torch.Tensor, kept: _Pair, options: AttentionOptions) -> torch.Tensor:
        """Return [R, 1, H, D] for query [R, H, 1, D], keys and values [R * H_kv, slots, D]."""
        keys, values = kept
        rows, heads, _, _ = query.shape
        grouped = (query * options.scale).reshape(len(keys), -1, query.shape[-1])
        scores = torch.bmm(grouped, keys.transpose(1, 2)).view(rows, heads, -1).float()
        if options.softcap is not None:
            scores = options.softcap * torch.tanh(scores / options.softcap)
        weights = (scores + self._mask(options.window, keys.shape[1])).softmax(-1).to(values.dtype)
        return torch.bmm(weights.view(len(keys), -1, keys.shape[1]), values).view(rows, 1, heads, -1)

    def _mask(self, window: int | None, num_slots: int) -> torch.Tensor:
        """Return 0 for the slots that each row's token sees, minus infinity for the others: [R, 1, slots]."""
        if window not in self._masks:
            seen = self._visible
            if window is not None:
                seen = seen & (self._positions > self._positions[:, -1:] - window)
            mask = torch.zeros(seen.shape).masked_fill(~torch.from_numpy(seen), -torch.inf)
            self._masks[window] = pad(mask, (0, num_slots - seen.shape[1]), value=-torch.inf)[:, None]
        return self._masks[window]


@contextlib.contextmanager
def decoding(model: Any, num_rows: int) -> Iterator[RowDecoder]:
    """Yield a decoder for a batch of rows; the model has its attention while the block runs."""
    decoder = RowDecoder(model, num_rows)

    def attention(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None,
        scaling: float | None = None, sliding_window: int | None = None, softcap: float | None = None, **_: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
        options = AttentionOptions(scale=scale, window=sliding_window, softcap=softcap, rotary=None)
        return decoder.attend(query, (key, value), options), None

    before = model.config._attn_implementation
    AttentionInterface.register(_ATTENTION, attention)
    model.set_attn_implementation(_ATTENTION)
    try:
        with torch.inference_mode():
            yield decoder
    finally:
        model.set_attn_implementation(before)
        AttentionInterface._global_mapping.pop(_ATTENTION)


class _RowCache(Cache):  # type: ignore[misc]
    """Keys and values [R * H_kv, slots, D] per layer; takes one token of every row at a time."""

    is_compileable = False

    def __init__(self) -> None:
        self.layers: list[Any] = []
        self.slot = 0
        self._kept: dict[int, _Pair] = {}

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any) -> _Pair:
        key, value = key_states.flatten(0, 1), value_states.flatten(0, 1)
        keys, values = self._kept.get(layer_idx, (key[:, :0], value[:, :0]))
        if self.slot == keys.shape[1]:
            keys, values = pad(keys, (0, 0, 0, _GROW)), pad(values, (0, 0, 0, _GROW))
            self._kept[layer_idx] = keys, values
        keys[:, self.slot], values[:, self.slot] = key[:, 0], value[:, 0]
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0
