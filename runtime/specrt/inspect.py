"""`specrt inspect`: an artifact at a glance."""

from pathlib import Path
from typing import Any

from specrt_profiles.codec import encode
from specrt_profiles.generation import read_generation
from specrt_profiles.manifest import EngineSpec, read_manifest


def describe(folder: Path) -> dict[str, Any]:
    """Return manifest and generation defaults for JSON."""
    return {"manifest": encode(read_manifest(folder)), "generation": encode(read_generation(folder))}


def show(folder: Path) -> str:
    """Return a page for people."""
    manifest, generation = read_manifest(folder), encode(read_generation(folder))
    profile, vocabulary = manifest.profile, manifest.vocabulary
    neutral = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "bad_words_ids": [], "min_tokens": 0, "max_tokens": None}
    defaults = [f"{name} {value}" for name, value in generation.items() if neutral.get(name, "?") != value]
    lines = [f"artifact      {folder} ({sum(f.size for f in manifest.files.values()) / 1e6:.0f} MB in {len(manifest.files)} files, schema {manifest.schema})"]
    for name, engine in manifest.engines.items():
        lines += _engine(name, engine)
    lines += [
        f"vocabulary    {vocabulary.num_tokens} tokens, end ids {', '.join(map(str, vocabulary.eos_token_ids)) or 'none'}, "
        f"fingerprint {vocabulary.fingerprint[:12]}",
        f"drafters      {', '.join([*manifest.drafters, 'none'])}; default {manifest.default_drafter}, k {profile.num_draft_tokens} of at most {profile.max_draft_tokens}",
        f"sampling      {', '.join(defaults)}{' (greedy)' if generation['temperature'] == 0 else ''}",
        f"profile       {profile.name}: {profile.description}",
        f"made with     {', '.join(f'{name} {version}' for name, version in manifest.tools.items())}",
    ]  # fmt: skip
    return "\n".join(lines)


def kv_bytes(engine: EngineSpec) -> int:
    """Return the size of an engine's KV buffers."""
    total = 0
    for tensor in engine.inputs:
        if tensor.name.startswith("past_"):
            size = 4
            for dim in tensor.shape:
                size *= int(dim)
            total += size
    return total


def _engine(name: str, engine: EngineSpec) -> list[str]:
    model, parity = engine.model, engine.parity
    return [
        f"{name:<13} {model.name} ({model.architecture}, {model.num_parameters / 1e6:.1f} M parameters, {engine.precision}), from {model.source}"
        f"{', revision ' + model.revision if model.revision else ''}, licence {model.licence or 'not stated'}",
        f"              capacity {engine.capacity} tokens, KV buffers {kv_bytes(engine) / 1e6:.0f} MB, prefill in chunks of {engine.prefill_width}, "
        f"verify widths {', '.join(map(str, engine.verify_widths))}",
        f"              against its source: max |diff| {parity.max_abs_diff:.2g}, mean KL {parity.mean_kl:.2g}, top-1 {parity.top1_agreement:.1%} of {parity.num_rows} rows; "
        f"bit-equal when exported: {', '.join(map(str, engine.exact_widths))}",
    ]  # fmt: skip


