"""The ORT dialect: attention as com.microsoft.GroupQueryAttention over KV buffers that are bound in place.

A graph that takes trees gives the operator a bias, which has to cover all slots. The operator still looks no further
than a call's last slot, and calls that are no trees keep the bits they have without a bias.
"""

from typing import Any

import torch
import torch.onnx

from specrt_export.decoder import AttentionOptions, Call
from specrt_export.mask import seen_slots, window_within
from specrt_profiles.profile import Profile

_BIAS = 10  # place of attention_bias among the inputs


class OrtDialect:
    """Emits GroupQueryAttention: causal by position, cache written in place, rotation and soft cap included."""

    def __init__(self, profile: Profile) -> None:
        self._profile, self._slots, self._trees = profile, profile.slots, profile.trees
        self._tree_width = profile.verify_widths[-1]

    def attention(
        self, call: Call, layer: int, qkv: tuple[torch.Tensor, ...], options: AttentionOptions
    ) -> torch.Tensor:
        """Return [B, W, H, D] and store the layer's buffers; see `Dialect.attention` for the shapes."""
        query, key, value = qkv
        batch, heads, width, size = query.shape
        past = call.past[layer]
        flat = [x.transpose(1, 2).reshape(batch, width, x.shape[1] * size) for x in (query, key, value)]
        inputs: list[torch.Tensor | None] = [
            *flat,
            *past,
            call.inputs["seqlens_k"],
            torch.tensor(self._slots, dtype=torch.int32) if self._trees else call.inputs["total_sequence_length"],
        ]
        attributes: dict[str, Any] = {
            "num_heads": heads,
            "kv_num_heads": key.shape[1],
            "scale": options.scale,
            "do_rotary": int(options.rotary is not None),
        }
        if options.rotary is not None:
            tables = (options.rotary.cos.to(query.dtype), options.rotary.sin.to(query.dtype))
            inputs += [*tables, call.inputs["position_ids"]]
            attributes["rotary_interleaved"] = int(options.rotary.style == "interleaved")
        window = window_within(options.window, self._profile)
        if self._trees:
            inputs += [None] * (_BIAS - len(inputs))
            inputs.append(self._bias(call, window).to(query.dtype))
        if window is not None:  # in slots, of which a token of a tree may have some behind its position
            attributes["local_window_size"] = window + (self._tree_width if self._trees else 0)
        if options.softcap:
            attributes["softcap"] = float(options.softcap)
        out, *present = torch.onnx.ops.symbolic_multi_out(
            "com.microsoft::GroupQueryAttention", inputs, attributes,
            dtypes=(query.dtype,) * 3, version=1,
            shapes=([batch, width, heads * size], list(past[0].shape), list(past[1].shape)),
        )  # fmt: skip
        call.present[layer] = (present[0], present[1])
        return out.reshape(batch, width, heads, size)

    def _bias(self, call: Call, window: int | None) -> torch.Tensor:
        seen = seen_slots(call.inputs, slots=self._slots, window=window)
        return torch.where(seen, 0.0, float("-inf"))
