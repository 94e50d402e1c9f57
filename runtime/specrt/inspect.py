"""`specrt inspect`: an artifact at a glance."""

import math
from pathlib import Path
from typing import Any

from specrt_profiles.codec import encode
from specrt_profiles.generation import GenerationDefaults, read_generation
from specrt_profiles.manifest import EngineSpec, read_manifest
from specrt_profiles.tensors import ELEMENT_BYTES, TensorSpec


def describe(folder: Path) -> dict[str, Any]:
    """Return manifest and generation defaults for JSON."""
    return {"manifest": encode(read_manifest(folder)), "generation": encode(read_generation(folder))}


def show(folder: Path) -> str:
    """Return a page for people."""
    manifest = read_manifest(folder)
    profile, vocabulary = manifest.profile, manifest.vocabulary
    megabytes = sum(file.size for file in manifest.files.values()) / 1e6
    rows = [("artifact", [f"{folder}: {megabytes:.0f} MB in {len(manifest.files)} files, schema {manifest.schema}"])]
    rows += [(name, _engine(engine)) for name, engine in (*manifest.engines.items(), *manifest.heads.items())]
    ends = ", ".join(map(str, vocabulary.eos_token_ids)) or "none"
    drafters = f"{', '.join([*manifest.drafter_names, 'none'])}; default {manifest.default_drafter}"
    tools = ", ".join(f"{name} {version}" for name, version in manifest.tools.items())
    rows += [
        ("vocabulary", [f"{vocabulary.num_tokens} tokens, end ids {ends}, fingerprint {vocabulary.fingerprint[:12]}"]),
        (
            "drafters",
            [f"{drafters}, k {manifest.default_k(manifest.default_drafter)} of at most {profile.max_draft_tokens}"],
        ),
        ("sampling", [_sampling(read_generation(folder))]),
        ("profile", [f"{profile.name}: {profile.description}"]),
        ("made with", [tools]),
    ]
    return "\n".join(f"{name if not i else '':<12}{line}" for name, lines in rows for i, line in enumerate(lines))


def kv_bytes(engine: EngineSpec) -> int:
    """Return the size of an engine's KV buffers."""
    return sum(ELEMENT_BYTES[tensor.dtype] * math.prod(int(dim) for dim in tensor.shape) for tensor in _past(engine))


def _past(engine: EngineSpec) -> list[TensorSpec]:
    return [tensor for tensor in engine.inputs if tensor.name.startswith("past_")]


def _engine(engine: EngineSpec) -> list[str]:
    model, parity = engine.model, engine.parity
    revision = f", revision {model.revision}" if model.revision else ""
    return [
        f"{model.name} ({model.architecture}, {model.num_parameters / 1e6:.1f} M parameters, {engine.precision}), "
        f"{engine.dialect} dialect",
        f"from {model.source}{revision}, licence {model.licence or 'not stated'}",
        *_calls(engine),
        *([] if engine.exit is None else [f"early exit after {engine.exit.layer} layers, on the CPU"]),
        f"against its source over {parity.num_rows} rows: max |diff| {parity.max_abs_diff:.2g}, "
        f"mean KL {parity.mean_kl:.2g}, top-1 {parity.top1_agreement:.1%}, "
        f"perplexity {parity.perplexity:.2f} (source {parity.source_perplexity:.2f})",
    ]


def _calls(engine: EngineSpec) -> list[str]:
    past = _past(engine)
    if not past:
        (count,) = (tensor.shape[1] for tensor in engine.outputs if tensor.name == "logits")
        return [f"{count} heads in one call, {engine.vocab_size} tokens to guess, no KV buffers"]
    return [
        f"capacity {engine.capacity} tokens, KV buffers {kv_bytes(engine) / 1e6:.0f} MB ({past[0].dtype})",
        f"prefill in chunks of {engine.prefill_width}, verify widths {_list(engine.verify_widths)} "
        f"(bit-equal when exported: {_list(engine.exact_widths) or 'not asked'})",
    ]


def _sampling(defaults: GenerationDefaults) -> str:
    neutral = GenerationDefaults(temperature=-1.0)
    names = [name for name in encode(defaults) if getattr(defaults, name) != getattr(neutral, name)]
    shown = ", ".join(f"{name} {getattr(defaults, name)}" for name in names)
    return shown + (" (greedy)" if defaults.temperature == 0 else "")


def _list(widths: tuple[int, ...]) -> str:
    return ", ".join(map(str, widths))
