"""An early exit of a target: its graph in three parts, so that the layers below the exit can run alone.

Parts share the weights file of the whole graph, and no two of them multiply with the same matrix (an embedding that is
the output matrix as well is gathered from in the first). With H values per row (float32, as is all that the graph
computes), W tokens and R rows of logits:

| part | reads | gives |
|---|---|---|
| below | what the whole graph reads, KV buffers of the first layers | exit_rows [B, R, H], state [B, W, H], their KV |
| above | the same but for input_ids; state, KV buffers of the others | rows [B, R, H], features, their KV |
| output | rows | logits |

state is what the first layer above the exit reads; rows and exit_rows are what the output matrix reads, of the rows
asked for, at the end of all layers and at the exit.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace

from specrt_profiles.tensors import ROWS, WIDTH, TensorSpec

BELOW, ABOVE, OUTPUT = "below", "above", "output"
STATE, PICKED, EXIT_PICKED = "state", "rows", "exit_rows"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitSpec:
    """Where a target can be left: after `layer` layers, with H values per row; and the files of its parts."""

    layer: int
    hidden_size: int
    below: str
    above: str
    output: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The tensors of a part, in graph order."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


def parts_of(spec: ExitSpec, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]) -> dict[str, Part]:
    """Return the parts of a graph with these inputs and outputs, by name."""
    layer, size = spec.layer, spec.hidden_size
    call = tuple(tensor for tensor in inputs if not _is_kv(tensor) and tensor.name != "input_ids")
    ids = tuple(tensor for tensor in inputs if tensor.name == "input_ids")
    features = tuple(tensor for tensor in outputs if tensor.name == "features")
    logits = tuple(tensor for tensor in outputs if tensor.name == "logits")
    state = TensorSpec(name=STATE, dtype="float32", shape=(1, WIDTH, size))
    rows = TensorSpec(name=PICKED, dtype="float32", shape=(1, ROWS, size))
    exit_rows = replace(rows, name=EXIT_PICKED)
    return {
        BELOW: Part(
            inputs=(*ids, *call, *_kv(inputs, below=layer)), outputs=(exit_rows, state, *_kv(outputs, below=layer))
        ),
        ABOVE: Part(
            inputs=(state, *call, *_kv(inputs, above=layer)), outputs=(rows, *features, *_kv(outputs, above=layer))
        ),
        OUTPUT: Part(inputs=(rows,), outputs=logits),
    }


def exit_problem(spec: ExitSpec, *, files: Collection[str], inputs: tuple[TensorSpec, ...]) -> str | None:
    """Say what does not fit to the files of an artifact or the layers of its target; None if nothing."""
    num_layers = sum(tensor.name.startswith("past_key.") for tensor in inputs)
    if not 1 <= spec.layer < num_layers:
        return f"layer: expected 1 to {num_layers - 1}, found {spec.layer}"
    missing = [name for name in (spec.below, spec.above, spec.output) if name not in files]
    return f"{missing[0]!r} is not among the listed files" if missing else None


def _is_kv(tensor: TensorSpec) -> bool:
    return tensor.name.startswith(("past_", "present_"))


def _kv(tensors: tuple[TensorSpec, ...], *, below: int | None = None, above: int = 0) -> tuple[TensorSpec, ...]:
    """Return the KV buffers of layers above <= layer < below."""
    numbered = [(int(tensor.name.rpartition(".")[2]), tensor) for tensor in tensors if _is_kv(tensor)]
    return tuple(tensor for layer, tensor in numbered if above <= layer and (below is None or layer < below))
