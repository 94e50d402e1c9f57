"""Medusa heads of an artifact: what is written, and what it has to agree with."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import linear

from specrt_export import parity
from specrt_export.distill.medusa import MedusaHeads
from specrt_export.head_engine import HeadRequest, Rows, TargetParts
from specrt_export.medusa_file import MedusaFile
from specrt_export.medusa_graph import weights
from specrt_export.weights import Chosen
from specrt_profiles.drafter import DrafterKind
from specrt_profiles.tensors import TensorSpec, parallel_inputs, parallel_outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaRequest(HeadRequest):
    """Medusa heads to build."""

    head: MedusaFile

    @property
    def kind(self) -> DrafterKind:
        """The drafter that they are for."""
        return "medusa"

    @property
    def architecture(self) -> str:
        """What they are."""
        return "Medusa"

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The graph's inputs."""
        return parallel_inputs(self.dims, self.profile)

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """The graph's outputs."""
        return parallel_outputs(self.dims, self.profile, num_heads=self.head.num_heads)

    def check_embedding(self, model: Any, name: str) -> None:
        """Do nothing: heads read no tokens."""

    def weights(self, parts: TargetParts) -> dict[str, torch.Tensor]:
        """Return all weights by their names in the graph."""
        return weights(self.head, self.output_rows(parts))

    def chosen(self, parts: TargetParts) -> Chosen:
        """Return how to store them: the target's own output matrix, if it is all there, as the target's graph does."""
        whole = not self.head.matrices and self.head.token_ids is None
        return Chosen() if parts.form is None or not whole else Chosen(forms={"decoder.ends.0.weight": parts.form})

    def read(self, parts: TargetParts) -> list[list[int]]:
        """Return the tokens of each text after which the heads are tried, once for each head."""
        return [[ids[i] for i in self._places(ids) for _ in range(self.head.num_heads)] for ids in parts.texts]

    def source_logits(self, parts: TargetParts) -> list[Rows]:
        """Return the heads' logits [n, V] over each text, computed by torch in fp32."""
        module, found = heads_module(self.head), []
        ends = [matrix.float() for matrix in self.head.matrices or (self.output_rows(parts),)]
        ends = ends * self.head.num_heads if len(ends) == 1 else ends
        with torch.inference_mode():
            for ids, features in zip(parts.texts, parts.features, strict=True):
                rows = module(torch.from_numpy(features[self._places(ids)])[:, None])
                logits = torch.stack([linear(rows[:, head], end) for head, end in enumerate(ends)], 1)
                found.append(logits.flatten(0, 1).numpy())
        return found

    def graph_logits(self, runner: parity.GraphRunner, parts: TargetParts) -> list[Rows]:
        """Return the graph's logits, a call for each place."""
        count = self.head.num_heads
        return [
            np.concatenate([
                runner([0] * count, 0, count, {"features": features[None, place : place + 1]}).copy()
                for place in self._places(ids)
            ])
            for ids, features in zip(parts.texts, parts.features, strict=True)
        ]  # fmt: skip

    def _places(self, ids: Any) -> range:
        """Return where the heads are tried: about as many rows of logits in all as the text has tokens."""
        return range(0, len(ids), self.head.num_heads)


def heads_module(head: MedusaFile) -> MedusaHeads:
    """Return heads in torch, in fp32."""
    size = next(iter(head.tensors.values())).shape[0]
    module = MedusaHeads(size, num_heads=head.num_heads, num_blocks=head.num_blocks)
    module.load_state_dict({name: tensor.float() for name, tensor in head.tensors.items()})
    return module.eval()
