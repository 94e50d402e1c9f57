"""An EAGLE head of an artifact: what is written, and what it has to agree with."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from specrt_export import parity
from specrt_export.distill.head import Head
from specrt_export.distill.unroll import unrolling
from specrt_export.errors import UnsupportedModelError
from specrt_export.head_engine import HeadRequest, Rows, TargetParts
from specrt_export.head_file import EagleFile
from specrt_export.head_graph import weights
from specrt_export.weights import Chosen
from specrt_profiles.drafter import DrafterKind
from specrt_profiles.tensors import TensorSpec, head_inputs, head_outputs

_ARCHITECTURES = {"eagle": "EAGLE", "eagle3": "EAGLE-3"}


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleRequest(HeadRequest):
    """An EAGLE head to build. config: the target's configuration."""

    head: EagleFile
    config: Any

    @property
    def kind(self) -> DrafterKind:
        """The drafter that it is for."""
        return "eagle"

    @property
    def architecture(self) -> str:
        """What it is."""
        return _ARCHITECTURES[self.head.layout]

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The graph's inputs."""
        return head_inputs(self.dims, self.profile)

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """The graph's outputs."""
        return head_outputs(self.dims, self.profile)

    def check_embedding(self, model: Any, name: str) -> None:
        """Raise `UnsupportedModelError` for a target that reads something else than its embedding's rows."""
        if type(model.get_input_embeddings()) is not nn.Embedding:
            raise UnsupportedModelError(
                f"{name} changes what it reads from its embedding, which heads are not made for"
            )

    def weights(self, parts: TargetParts) -> dict[str, torch.Tensor]:
        """Return all weights by their names in the graph."""
        return weights(self.head, parts.embedding, self._rows(parts))

    def chosen(self, parts: TargetParts) -> Chosen:
        """Return how to store them: the embedding as the target's graph does."""
        return Chosen() if parts.form is None else Chosen(forms={"decoder.embed.weight": parts.form})

    def read(self, parts: TargetParts) -> list[list[int]]:
        """Return the tokens of each text that the head reads: all but the first."""
        return [list(text[1:]) for text in parts.texts]

    def source_logits(self, parts: TargetParts) -> list[Rows]:
        """Return the head's logits [n - 1, V] over each text, computed by torch in fp32."""
        module, rows, found = head_module(self.head, self.config), self._rows(parts), []
        with torch.inference_mode(), unrolling(module) as unroll:
            for ids, features in zip(parts.texts, parts.features, strict=True):
                embeddings = nn.functional.embedding(torch.tensor([list(ids[1:])]), parts.embedding).float()
                none = torch.zeros(0, dtype=torch.int64)
                (out,) = unroll(embeddings, torch.from_numpy(features[None, :-1]), none, steps=1)
                found.append(module.logits(out, rows.float())[0].numpy())
        return found

    def graph_logits(self, runner: parity.GraphRunner, parts: TargetParts) -> list[Rows]:
        """Return the graph's logits over each text, in calls of every width."""
        return [self._over(runner, *pair) for pair in zip(self.read(parts), parts.features, strict=True)]

    def _over(self, runner: parity.GraphRunner, ids: Sequence[int], features: Rows) -> Rows:
        found: list[Rows] = []
        start, widths = 0, (self.profile.prefill_width, *self.profile.verify_widths)
        own = np.zeros((1, 0, self.dims.hidden_size), np.float32)
        while start < len(ids):
            width = widths[len(found) % len(widths)]
            piece = ids[start : start + width]
            read = np.zeros((1, width, self.dims.feature_size), np.float32)
            read[0, : len(piece)] = features[start : start + len(piece)]
            found.append(runner(piece, start, width, {"features": read, "hidden": own}))
            start += len(piece)
        return np.concatenate(found)

    def _rows(self, parts: TargetParts) -> torch.Tensor:
        return self.output_rows(parts) if self.head.matrix is None else self.head.matrix


def head_module(head: EagleFile, config: Any) -> Head:
    """Return a head in torch, in fp32."""
    module = Head(config, head.layout, ffn=head.ffn)
    module.load_state_dict({name: tensor.float() for name, tensor in head.tensors.items()}, strict=False)
    return module.eval()
