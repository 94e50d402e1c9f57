"""The call contract between exported graphs and engines: names, types and shapes of every tensor.

One call of W tokens that start at position `start` (B = 1 sequence, R rows of logits wanted, S = `Profile.slots` KV
slots, H heads of D values, V rows of the output matrix, T the type that the graph computes in, `Profile.float_type`):

| tensor | type | shape | content |
|---|---|---|---|
| input_ids | int64 | [B, W] | the tokens; rows beyond the last real one hold any valid id |
| position_ids | int64 | [B, W] | start .. start + W - 1, in a tree start + depth; at most the last the model knows |
| seqlens_k (ORT) | int32 | [B] | start + W - 1: the KV length after the call, less one |
| total_sequence_length (ORT, without trees) | int32 | [] | start + W |
| write_indices (TensorRT) | int64 | [B] | start: the first slot that the call writes |
| tree_mask (`Profile.trees`) | bool | [B, W, W] | which rows of the call each row sees: itself and its ancestors |
| logits_indices | int64 | [R] | which of the W rows get logits; R may be 0 |
| past_key.{i}, past_value.{i} | T or int8 | [B, H_kv, S, D] | KV buffers of layer i, `start` slots valid |
| logits | float32 | [B, R, V] | |
| best_ids (not with `Profile.output` logits) | int64 | [B, R] | each row's best token, lowest id on ties; V for NaNs |
| best_logits (the same) | float32 | [B, R] | its logit |
| top_ids (`Profile.output` top-k) | int64 | [B, R, K] | tokens of the K largest logits, in any order where they tie |
| top_logits (`Profile.output` top-k) | float32 | [B, R, K] | their logits, falling |
| top_logsumexp (`Profile.output` top-k) | float32 | [B, R] | log of the sum of exp(logit) over all V |
| features (targets with a head) | float32 | [B, W, F] | what the target computes of each row, for the head to read |
| present_key.{i}, present_value.{i} | T or int8 | [B, H_kv, S, D] | the same buffers, bound in place |

A call writes KV slots start .. start + W - 1, and no slot beyond a row's own position has any part in it, so a rollback
is only a smaller `start` in the next call. The two dialects (`Profile.dialect`) share this table but for the inputs
marked with one of them. In the TensorRT dialect a slot out of sight weighs nothing, but is multiplied with: buffers
start as zeros there, and hold finite numbers always. Whoever calls keeps start + W within S: TensorRT drops what is
written beyond it and says nothing.

A head (EAGLE, `head_inputs`) has the same calls but for trees: row i stands for token i + 1 and the target's feature of
token i. Rows have a feature each, the target's or what an earlier call of the head left, N + M = W:

| tensor | type | shape | content |
|---|---|---|---|
| features | float32 | [B, N, F] | the target's |
| hidden | float32 | [B, M, H] | the head's own, of the rows that follow |
| logits | float32 | [B, R, V] | V: the tokens that the head can guess |
| confidence | float32 | [B, R] | the probability of the best of them |
| next_hidden | float32 | [B, R, H] | what the next row takes as `hidden` |

Heads that guess side by side (Medusa, `parallel_inputs`), head j the token j + 2 places after the feature's, have one
call and no KV:

| tensor | type | shape | content |
|---|---|---|---|
| features | float32 | [B, 1, F] | the target's, of one token |
| logits | float32 | [B, M, V] | of each of the M heads; V: the tokens that they can guess |
| confidence | float32 | [B, M] | the probability of each head's best token |
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from specrt_profiles.profile import KvName, Profile

BEST_IDS = "best_ids"
BEST_LOGITS = "best_logits"
TOP_IDS = "top_ids"
TOP_LOGITS = "top_logits"
TOP_LOGSUMEXP = "top_logsumexp"
TOP_K = 64  # or as many as there are
WIDTH = "width"
ROWS = "rows"
ELEMENT_BYTES: Mapping[str, int] = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int8": 1,
    "bool": 1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Name, element type and shape of one input or output; a string in the shape is a symbolic dimension."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderDims:
    """Sizes of a decoder: layers, query and KV heads, values per head, rows of the output matrix.

    feature_size: values per row of `features`, 0 where there are none.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    feature_size: int = 0

    def kv_bytes(self, num_tokens: int, kv_type: KvName) -> int:
        """Bytes of KV buffers that hold `num_tokens` tokens."""
        return 2 * ELEMENT_BYTES[kv_type] * self.num_layers * self.num_kv_heads * self.head_dim * num_tokens


def past_names(layer: int) -> tuple[str, str]:
    """Return the input names of one layer's KV buffers: key, value."""
    return f"past_key.{layer}", f"past_value.{layer}"


def present_names(layer: int) -> tuple[str, str]:
    """Return the output names of one layer's KV buffers: key, value."""
    return f"present_key.{layer}", f"present_value.{layer}"


def graph_inputs(dims: DecoderDims, profile: Profile) -> tuple[TensorSpec, ...]:
    """Return the inputs of a graph in the profile's dialect, in graph order: the call, then the KV buffers."""
    batch = profile.batch_size
    total = () if profile.trees else (TensorSpec(name="total_sequence_length", dtype="int32", shape=()),)
    tree = (TensorSpec(name="tree_mask", dtype="bool", shape=(batch, WIDTH, WIDTH)),) if profile.trees else ()
    places = {
        "ort": (TensorSpec(name="seqlens_k", dtype="int32", shape=(batch,)), *total),
        "tensorrt": (TensorSpec(name="write_indices", dtype="int64", shape=(batch,)),),
    }
    call = (
        TensorSpec(name="input_ids", dtype="int64", shape=(batch, WIDTH)),
        TensorSpec(name="position_ids", dtype="int64", shape=(batch, WIDTH)),
        *places[profile.dialect],
        *tree,
        TensorSpec(name="logits_indices", dtype="int64", shape=(ROWS,)),
    )
    return call + _kv(dims, profile, past_names)


def graph_outputs(dims: DecoderDims, profile: Profile) -> tuple[TensorSpec, ...]:
    """Return the outputs of a graph, in graph order; they are the same in both dialects."""
    rows = (profile.batch_size, ROWS)
    logits = TensorSpec(name="logits", dtype="float32", shape=(*rows, dims.vocab_size))
    best = (
        TensorSpec(name=BEST_IDS, dtype="int64", shape=rows),
        TensorSpec(name=BEST_LOGITS, dtype="float32", shape=rows),
    )
    top = tuple(
        TensorSpec(name=name, dtype=dtype, shape=(*rows, min(TOP_K, dims.vocab_size)))
        for name, dtype in ((TOP_IDS, "int64"), (TOP_LOGITS, "float32"))
    )
    total = TensorSpec(name=TOP_LOGSUMEXP, dtype="float32", shape=rows)
    small = {"logits": (), "argmax": best, "top-k": (*best, *top, total)}[profile.output]
    features = TensorSpec(name="features", dtype="float32", shape=(profile.batch_size, WIDTH, dims.feature_size))
    more = (features,) if dims.feature_size else ()
    return (logits, *small, *more, *_kv(dims, profile, present_names))


def head_inputs(dims: DecoderDims, profile: Profile) -> tuple[TensorSpec, ...]:
    """Return the inputs of a head's graph, in graph order; `dims.feature_size` is what it reads of the target."""
    batch = profile.batch_size
    call = graph_inputs(dims, profile)
    kv = call[len(call) - 2 * dims.num_layers :]
    rows = (
        TensorSpec(name="features", dtype="float32", shape=(batch, "new", dims.feature_size)),
        TensorSpec(name="hidden", dtype="float32", shape=(batch, "own", dims.hidden_size)),
    )
    return (*call[: -len(kv)], *rows, *kv)


def head_outputs(dims: DecoderDims, profile: Profile) -> tuple[TensorSpec, ...]:
    """Return the outputs of a head's graph, in graph order."""
    batch = profile.batch_size
    return (
        TensorSpec(name="logits", dtype="float32", shape=(batch, ROWS, dims.vocab_size)),
        TensorSpec(name="confidence", dtype="float32", shape=(batch, ROWS)),
        TensorSpec(name="next_hidden", dtype="float32", shape=(batch, ROWS, dims.hidden_size)),
        *_kv(dims, profile, present_names),
    )


def parallel_inputs(dims: DecoderDims, profile: Profile) -> tuple[TensorSpec, ...]:
    """Return the inputs of the graph of parallel heads."""
    return (TensorSpec(name="features", dtype="float32", shape=(profile.batch_size, 1, dims.feature_size)),)


def parallel_outputs(dims: DecoderDims, profile: Profile, *, num_heads: int) -> tuple[TensorSpec, ...]:
    """Return the outputs of the graph of parallel heads, in graph order."""
    heads = (profile.batch_size, num_heads)
    return (
        TensorSpec(name="logits", dtype="float32", shape=(*heads, dims.vocab_size)),
        TensorSpec(name="confidence", dtype="float32", shape=heads),
    )


def _kv(dims: DecoderDims, profile: Profile, names: Callable[[int], tuple[str, str]]) -> tuple[TensorSpec, ...]:
    shape = (profile.batch_size, dims.num_kv_heads, profile.slots, dims.head_dim)
    pairs = (names(layer) for layer in range(dims.num_layers))
    return tuple(TensorSpec(name=name, dtype=profile.kv_type, shape=shape) for pair in pairs for name in pair)
