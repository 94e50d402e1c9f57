"""Trace a head: its layer over the target's features or its own, and the rows of the output matrix it can guess."""

from typing import Any

import onnx_ir as ir
import torch
from accelerate import init_empty_weights
from torch import nn

from specrt_export.decoder import Call, Dialect, PassThrough, Wrapper, trace_as
from specrt_export.distill.head import Head
from specrt_export.head_file import EagleFile
from specrt_export.target_graph import stretch
from specrt_profiles.profile import Profile
from specrt_profiles.tensors import DecoderDims, head_inputs, head_outputs


def trace_head(
    config: Any, head: EagleFile, num_tokens: int, dims: DecoderDims, profile: Profile, dialect: Dialect
) -> ir.Model:
    """Return a head's graph; see `specrt_profiles.tensors` for the contract and `weights` for the names.

    dims are the head's own, num_tokens the rows of the target's embedding.
    """
    contract = head_inputs(dims, profile), head_outputs(dims, profile)

    def make() -> Wrapper:
        with init_empty_weights(include_buffers=False):
            parts = _Parts(Head(config, head.layout, ffn=head.ffn), num_tokens, dims)
        return _Wrapper(stretch(parts, getattr(torch, profile.float_type)))

    return trace_as(make, contract, dims, profile, dialect)


def weights(head: EagleFile, embedding: torch.Tensor, matrix: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return all weights under their names in the graph; matrix: the rows that the head can guess."""
    named = {f"decoder.head.{name}": tensor for name, tensor in head.tensors.items()}
    return {**named, "decoder.embed.weight": embedding, "decoder.lm_head.weight": matrix}


class _Parts(nn.Module):
    """A head with what it has of the target."""

    def __init__(self, head: Head, num_tokens: int, dims: DecoderDims) -> None:
        super().__init__()
        self.head = head
        self.embed = nn.Embedding(num_tokens, dims.hidden_size)
        self.lm_head = nn.Linear(dims.hidden_size, dims.vocab_size, bias=False)


class _Wrapper(Wrapper):
    @property
    def attending(self) -> nn.Module:
        parts: Any = self.decoder
        decoder: nn.Module = parts.head.decoder
        return decoder

    def compute(self, call: Call) -> tuple[torch.Tensor, ...]:
        parts: Any = self.decoder
        head, inputs, dtype = parts.head, call.inputs, parts.lm_head.weight.dtype
        embeddings = parts.embed(inputs["input_ids"])
        rows = torch.cat([head.begin(inputs["features"].to(dtype)), inputs["hidden"].to(dtype)], 1)
        rows = torch.index_select(rows, 1, torch.arange(embeddings.shape[1]))  # there are as many: N + M = W
        out = head(embeddings, rows, inputs["position_ids"], PassThrough())
        picked = torch.index_select(out, 1, inputs["logits_indices"])
        logits = parts.lm_head(head.norm(picked)).float()
        return logits, logits.softmax(-1).amax(-1), picked.float()
