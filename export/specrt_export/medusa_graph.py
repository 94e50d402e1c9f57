"""Trace Medusa heads: all of them over one feature of the target, in one call."""

import onnx_ir as ir
import torch
from accelerate import init_empty_weights
from torch import nn

from specrt_export.decoder import Call, Wrapper, export_program, quiet
from specrt_export.distill.medusa import MedusaHeads
from specrt_export.errors import ExportError
from specrt_export.medusa_file import MedusaFile
from specrt_export.target_graph import stretch
from specrt_profiles.profile import Profile
from specrt_profiles.tensors import DecoderDims, parallel_inputs, parallel_outputs


def trace_medusa(head: MedusaFile, dims: DecoderDims, profile: Profile) -> ir.Model:
    """Return the graph of heads; see `specrt_profiles.tensors` for the contract and `weights` for the names.

    dims are the heads' own: `vocab_size` tokens that they can guess.
    """
    with init_empty_weights(include_buffers=False):
        parts = _Parts(head, dims)
    wrapper = _Wrapper(stretch(parts, getattr(torch, profile.float_type)))
    outputs = parallel_outputs(dims, profile, num_heads=head.num_heads)
    try:
        with quiet():
            return export_program(wrapper, parallel_inputs(dims, profile), outputs).model
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise ExportError(f"torch could not trace the heads of {head.path}: {reason}") from error


def weights(head: MedusaFile, matrix: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return all weights under their names in the graph; matrix: what heads without their own end in."""
    named = {f"decoder.heads.{name}": tensor for name, tensor in head.tensors.items()}
    ends = {f"decoder.ends.{index}.weight": tensor for index, tensor in enumerate(head.matrices or (matrix,))}
    return {**named, **ends}


class _Parts(nn.Module):
    """The heads with their output matrices."""

    def __init__(self, head: MedusaFile, dims: DecoderDims) -> None:
        super().__init__()
        self.heads = MedusaHeads(dims.hidden_size, num_heads=head.num_heads, num_blocks=head.num_blocks)
        count = max(1, len(head.matrices))
        self.ends = nn.ModuleList(nn.Linear(dims.hidden_size, dims.vocab_size, bias=False) for _ in range(count))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Return logits [B, M, V] for features [B, 1, H]."""
        rows = self.heads(features)
        if len(self.ends) == 1:
            logits: torch.Tensor = self.ends[0](rows)
            return logits
        return torch.cat([end(rows[:, index : index + 1]) for index, end in enumerate(self.ends)], 1)


class _Wrapper(Wrapper):
    def compute(self, call: Call) -> tuple[torch.Tensor, ...]:
        features = call.inputs["features"].to(next(self.decoder.parameters()).dtype)
        logits = self.decoder(features).float()
        return logits, logits.softmax(-1).amax(-1)
