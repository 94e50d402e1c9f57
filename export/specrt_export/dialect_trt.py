"""The TensorRT dialect: standard operators only, in the forms that TensorRT neither drops nor misreads.

New keys and values go into their slots by TensorScatter-24, which TensorRT performs in place where the cache is an
input of the network and the result an output. What a row may see is a mask made in the graph, see `mask`. See
`lint_trt` for what TensorRT takes.
"""

from typing import Any

import torch
import torch.onnx

from specrt_export.decoder import AttentionOptions, Call
from specrt_export.mask import seen_slots, window_within
from specrt_export.rotary import Rotary
from specrt_profiles.profile import Profile


class TensorrtDialect:
    """Emits RotaryEmbedding, TensorScatter and Attention; a soft cap, which TensorRT's Attention lacks, by hand."""

    def __init__(self, profile: Profile) -> None:
        self._profile, self._slots = profile, profile.slots

    def attention(
        self, call: Call, layer: int, qkv: tuple[torch.Tensor, ...], options: AttentionOptions
    ) -> torch.Tensor:
        """Return [B, W, H, D] and store the layer's buffers; see `Dialect.attention` for the shapes."""
        query, key, value = qkv
        positions, start = call.inputs["position_ids"], call.inputs["write_indices"]
        if options.rotary is not None:
            query, key = (_rotate(x, options.rotary, positions) for x in (query, key))
        past_key, past_value = call.past[layer]
        key, value = call.present[layer] = (_store(past_key, key, start), _store(past_value, value, start))
        window = window_within(options.window, self._profile)
        mask = seen_slots(call.inputs, slots=self._slots, window=window)
        if options.softcap:
            out = _capped(query, key, value, mask, scale=options.scale, softcap=options.softcap)
        else:
            out = torch.onnx.ops.symbolic(
                "Attention", [query, key, value, mask], {"scale": options.scale},
                dtype=query.dtype, shape=query.shape,
            )  # fmt: skip
        return out.transpose(1, 2)


def _rotate(x: torch.Tensor, rotary: Rotary, position_ids: torch.Tensor) -> torch.Tensor:
    """Rotate in fp32: tables in half precision would lose what tells far positions apart."""
    size = 2 * rotary.cos.shape[-1]
    attributes: dict[str, Any] = {"interleaved": int(rotary.style == "interleaved")}
    if size < x.shape[-1]:
        attributes["rotary_embedding_dim"] = size
    rotated = torch.onnx.ops.symbolic(
        "RotaryEmbedding", [x.float(), rotary.cos, rotary.sin, position_ids], attributes,
        dtype=torch.float32, shape=x.shape,
    )  # fmt: skip
    return rotated.to(x.dtype)


def _store(past: torch.Tensor, new: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """Return the buffer [B, H_kv, S, D] with `new` [B, H_kv, W, D] in its slots from `start` [B] on."""
    return torch.onnx.ops.symbolic(
        "TensorScatter", [past, new, start], {"axis": -2}, dtype=past.dtype, shape=past.shape
    )


def _capped(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, *, scale: float, softcap: float
) -> torch.Tensor:
    """Return attention [B, H, W, D] with scores in (-softcap, softcap), heads of one group in one product.

    Scores are cap tanh(q k / cap), as Gemma 2 has them (Gemma Team 2024, section 2).
    """
    batch, heads, width, size = query.shape
    groups, slots = key.shape[1], key.shape[2]
    rows = (query * (scale / softcap)).reshape(batch, groups, -1, size)
    scores = torch.tanh(torch.matmul(rows, key.transpose(2, 3)).float()) * softcap
    seen = scores.reshape(batch, heads, width, slots).masked_fill(~mask, float("-inf"))
    weights = torch.softmax(seen, -1).to(value.dtype).reshape(batch, groups, -1, slots)
    return torch.matmul(weights, value).reshape(batch, heads, width, size)
