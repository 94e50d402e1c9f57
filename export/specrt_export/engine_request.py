"""What `engine` builds, and `choose` measures for."""

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from specrt_export.checkpoint import Checkpoint
from specrt_export.exit_engine import ExitRequest
from specrt_export.head_engine import HeadRequest
from specrt_profiles.profile import Profile
from specrt_profiles.tensors import DecoderDims, TensorSpec, graph_inputs, graph_outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """What to build: `name` is `target` or `draft`, `profile.precision` is this engine's, `traced` its graph so far.

    `window` is the width of a sliding window narrower than the capacity, or None; `num_bytes` the estimated size;
    `heads` read its features, `exit` is where it can be left. `token_ids` are those that it has logits of, None for
    all; it reads `embedding_rows`.
    """

    name: str
    checkpoint: Checkpoint
    dims: DecoderDims
    traced: ir.Model
    profile: Profile
    window: int | None
    num_bytes: int
    heads: tuple[HeadRequest, ...] = ()
    exit: ExitRequest | None = None
    embedding_rows: int = 0
    token_ids: NDArray[np.int64] | None = None

    @property
    def tables(self) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
        """The graph's inputs and outputs."""
        return graph_inputs(self.dims, self.profile), graph_outputs(self.dims, self.profile)
