"""The ORT dialect: attention as com.microsoft.GroupQueryAttention over KV buffers that are bound in place."""

from typing import Any

import torch
import torch.onnx

from specrt_export.decoder import AttentionOptions, Call
from specrt_profiles.profile import Profile


class OrtDialect:
    """Emits GroupQueryAttention: causal by position, cache written in place, rotation and soft cap included."""

    def __init__(self, profile: Profile) -> None:
        self._capacity = profile.capacity

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
            call.inputs["total_sequence_length"],
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
        if options.window is not None and options.window < self._capacity:
            attributes["local_window_size"] = options.window
        if options.softcap:
            attributes["softcap"] = float(options.softcap)
        out, *present = torch.onnx.ops.symbolic_multi_out(
            "com.microsoft::GroupQueryAttention", inputs, attributes,
            dtypes=(query.dtype,) * 3, version=1,
            shapes=([batch, width, heads * size], list(past[0].shape), list(past[1].shape)),
        )  # fmt: skip
        call.present[layer] = (present[0], present[1])
        return out.reshape(batch, width, heads, size)
