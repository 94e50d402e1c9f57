"""What an export will take: sizes on disk and in memory, known before any weight is read."""

from dataclasses import dataclass

from specrt_export.checkpoint import Checkpoint
from specrt_profiles.profile import Precision, Profile
from specrt_profiles.tensors import DecoderDims

# Bytes per weight: values, and in blocks one fp32 scale and one zero point or offset per 32; at int8 some products are
# in blocks and others are not, which is decided later.
_BYTES_PER_WEIGHT: dict[Precision, float] = {
    "fp32": 4.0,
    "fp16": 2.0,
    "bf16": 2.0,
    "int8": 1 + 2.5 / 32,
    "int4": 0.5 + 8 / 32,
}
_LIBRARIES = 900_000_000  # torch, transformers and the exporter themselves, measured
# Bytes per layer and channel of what products see: 1600 tokens of about 6 times the hidden size, in bfloat16
_SEEN = 2 * 1600 * 6
_PACKED = 1.1  # ONNX Runtime packs most weights into copies of its own, measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Bytes of the artifact's weights, of the KV buffers at run time, and of memory at the export's peak."""

    artifact: int
    kv: int
    peak_memory: int


def estimate(checkpoint: Checkpoint, dims: DecoderDims, profile: Profile, *, tied: bool, num_rows: int) -> Estimate:
    """Estimate one engine's export; `tied` if the output matrix is the embedding, `num_rows` of logits compared."""
    tables = dims.vocab_size * dims.hidden_size * (1 if tied else 2)
    inner = max(0, checkpoint.num_parameters - tables)
    outer = 1 + 5 / 32 if profile.precision == "int4" else _BYTES_PER_WEIGHT[profile.precision]
    artifact = int(inner * _BYTES_PER_WEIGHT[profile.precision] + tables * outer)
    kv = dims.kv_bytes(profile.slots, profile.kv_type)
    logits = 4 * dims.vocab_size * num_rows
    loading = checkpoint.weight_bytes + 3 * 4 * dims.vocab_size * dims.hidden_size + 2 * logits
    if profile.precision == "int4":  # weights as blocks, and what the products see
        loading += artifact + _SEEN * dims.num_layers * dims.hidden_size
    checking = int(artifact * _PACKED) + artifact + kv + 3 * logits
    return Estimate(artifact=artifact, kv=kv, peak_memory=_LIBRARIES + max(loading, checking))


def show_bytes(count: int) -> str:
    """Format a number of bytes for people."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
