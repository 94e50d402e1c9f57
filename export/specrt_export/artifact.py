"""Exports: a model, or a new drafter for an artifact that exists, into a self-contained folder."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np

from specrt_export import support
from specrt_export.checkpoint import resolve
from specrt_export.decoder import Dialect
from specrt_export.dialect_ort import OrtDialect
from specrt_export.dialect_trt import TensorrtDialect
from specrt_export.engine import build_engine
from specrt_export.engine_request import EngineRequest
from specrt_export.errors import ExportError
from specrt_export.estimate import estimate, show_bytes
from specrt_export.generation import generation_defaults
from specrt_export.head_engine import HeadRequest, TargetParts, build_head, drafter_of
from specrt_export.heads import Readers, prepare_readers
from specrt_export.parity import most_rows
from specrt_export.progress import Progress
from specrt_export.staging import check_disk, check_output, link_files, list_files, staging
from specrt_export.target_graph import trace
from specrt_export.tokenizer import load_tokenizer, save_tokenizer, tokens_of, vocabulary_of
from specrt_export.trimmed import check_draft_tokens, read_draft_tokens
from specrt_profiles.drafter import EARLY_EXIT, MODEL_FREE, DrafterSpec
from specrt_profiles.files import check_hashes
from specrt_profiles.generation import write_generation
from specrt_profiles.manifest import COMBINED, TOKENIZER_FILE, Manifest, read_manifest, write_manifest
from specrt_profiles.profile import DialectName, Precision, Profile
from specrt_profiles.vocabulary import check_draft_vocabulary, tokens_by_id

NO_ENGINE = (*MODEL_FREE, "none")  # values of `draft` that need no exported engine
_TOOLS = ("specrt", "torch", "transformers", "optimum", "onnx", "onnxscript", "onnxruntime")
_MODEL_DRAFTER = "model"
_DRAFT_TOKENS = "draft.tokens.npy"
_PRECISIONS: dict[DialectName, tuple[Precision, ...]] = {  # ONNX Runtime's CPU provider has no products in bfloat16
    "ort": ("fp32", "fp16", "int8", "int4"),
    "tensorrt": ("fp32", "fp16", "bf16", "int8", "int4"),
}
_DIALECTS: dict[str, Callable[[Profile], Dialect]] = {"ort": OrtDialect, "tensorrt": TensorrtDialect}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRequest:
    """What to export and where to.

    `draft` is `ngram`, `suffix`, `none` or a model, None for `combined` with a head, else `ngram`. `heads` are files of
    heads for the target. `early_exit` is the number of layers before an early exit, None for none unless one of `heads`
    is one. With `add_to`, `model` is None: the artifact there is copied to `out` and the copy gets the drafter.
    """

    model: str | None
    draft: str | None
    profile: Profile
    out: Path
    cache_dir: Path
    revision: str | None = None
    add_to: Path | None = None
    overwrite: bool = False
    heads: tuple[Path, ...] = ()
    early_exit: int | Literal["auto"] | None = None


def export(request: ExportRequest, progress: Progress) -> Path:
    """Write an artifact and return its folder.

    Everything that can be refused is refused before work is done. The artifact appears at `request.out` when it is
    complete and checked; until then there is only a hidden sibling, which any failure removes.
    """
    if (request.model is None) == (request.add_to is None):
        raise ExportError("expected either a MODEL to export or --add-to DIR with a --draft")
    check_output(request.out, overwrite=request.overwrite)
    base = None if request.add_to is None else _read_base(request.add_to)
    profile = (
        request.profile if base is None else replace(base.profile, draft_precision=request.profile.draft_precision)
    )
    _check_dialect(profile, request)
    target = None if request.model is None else _prepare("target", request.model, profile, request, progress)
    draft = None
    if request.draft is not None and request.draft not in NO_ENGINE:
        changed = replace(profile, precision=profile.draft_precision, trees=False)  # only targets verify
        draft = _prepare("draft", request.draft, changed, request, progress)
    tokenizer = load_tokenizer(target.checkpoint) if target is not None else None
    if draft is not None:
        known = _tokens_in(request.add_to, base) if target is None else tokens_of(tokenizer)[: target.dims.vocab_size]
        check_draft_vocabulary(known, tokens_of(load_tokenizer(draft.checkpoint)), draft_rows=draft.embedding_rows)
        check_draft_tokens(draft.token_ids, draft.checkpoint.directory, num_tokens=_num_rows(target, base))
    check_disk(request.out, sum(engine.num_bytes for engine in (target, draft) if engine is not None))
    with staging(request.out) as folder:
        if target is not None:
            manifest = _build_target(target, tokenizer, folder, progress)
        else:
            assert base is not None
            assert request.add_to is not None
            link_files(base.files, request.add_to, folder)
            manifest = base
        if draft is not None:
            manifest = _build_draft(manifest, draft, folder, progress)
        default = _MODEL_DRAFTER if draft is not None else request.draft or (COMBINED if manifest.heads else "ngram")
        write_manifest(folder, replace(manifest, default_drafter=default, files=list_files(folder, manifest.files)))
        read_manifest(folder)
    return request.out


def _num_rows(target: EngineRequest | None, base: Manifest | None) -> int:
    """Return how many tokens there are logits of, in a target that is exported or in an artifact's."""
    if target is not None:
        return target.dims.vocab_size
    assert base is not None
    return base.target.vocab_size


def _prepare(name: str, model: str, profile: Profile, request: ExportRequest, progress: Progress) -> EngineRequest:
    """Find and check a model, and say what its export will take."""
    revision = request.revision if name == "target" else None
    with progress.bytes(f"{name}: fetch {model}") as on_bytes:
        checkpoint = resolve(model, revision=revision, cache_dir=request.cache_dir, on_bytes=on_bytes)
    config = support.load_config(checkpoint)
    longest = support.longest_context(config)
    if name == "draft" and longest is not None:
        profile = replace(profile, capacity=min(profile.capacity, longest))
    dims = support.check_supported(checkpoint, config, profile)
    dialect = _DIALECTS[profile.dialect](profile)
    mine = Readers()
    if name == "target":
        mine = prepare_readers(request.heads, request.early_exit, config, dims, profile, dialect)
    if mine.heads:
        dims = replace(dims, feature_size=mine.heads[0].dims.feature_size)
    embedding_rows = dims.vocab_size
    known = read_draft_tokens(checkpoint.directory, vocab_size=embedding_rows) if name == "draft" else None
    if known is not None:
        dims = replace(dims, vocab_size=len(known))
    window = support.narrow_window(config, profile)
    tied = bool(getattr(config, "tie_word_embeddings", True))
    sizes = estimate(checkpoint, dims, profile, tied=tied, num_rows=most_rows(profile, window=window))
    progress.say(
        f"{name}: {checkpoint.name}, {checkpoint.num_parameters / 1e6:.1f} M parameters at {profile.precision}: "
        f"weights about {show_bytes(sizes.artifact)} on disk, KV buffers {show_bytes(sizes.kv)} for {profile.capacity} "
        f"tokens, peak memory of this export about {show_bytes(sizes.peak_memory)}"
    )
    with progress.step(f"{name}: trace the graph"):
        taps = mine.heads[0].taps if mine.heads else ()
        traced = trace(config, dims, profile, dialect, taps=taps, marked=mine.exit is not None, token_ids=known)
    return EngineRequest(
        name=name, checkpoint=checkpoint, dims=dims, traced=traced, profile=profile, window=window,
        num_bytes=sizes.artifact, heads=mine.heads, exit=mine.exit, token_ids=known,
        embedding_rows=embedding_rows,
    )  # fmt: skip


def _build_target(target: EngineRequest, tokenizer: Any, folder: Path, progress: Progress) -> Manifest:
    with progress.step("tokenizer: save and compare with the source"):
        save_tokenizer(tokenizer, folder)
    built = build_engine(target, tokenizer, folder, progress)
    defaults, ignored = generation_defaults(built.generation_config, vocab_size=target.dims.vocab_size)
    if ignored:
        progress.say(f"    left out of the model's generation config: {', '.join(ignored)}")
    write_generation(folder, defaults)
    _write_documents(target, folder, prefix="")
    manifest = Manifest(
        profile=target.profile,
        vocabulary=vocabulary_of(tokenizer, built.generation_config, num_rows=target.dims.vocab_size),
        engines={"target": built.spec},
        drafters={},
        default_drafter="ngram",
        tools={name: version(name) for name in _TOOLS},
        files=built.files,
    )
    for head in target.heads:
        assert built.parts is not None
        manifest = _build_head(manifest, head, built.parts, folder, progress)
    if built.spec.exit is None:
        return manifest
    exit_drafter = DrafterSpec(kind=EARLY_EXIT, vocabulary=manifest.vocabulary.fingerprint)
    return replace(manifest, drafters={**manifest.drafters, EARLY_EXIT: exit_drafter})


def _build_head(
    manifest: Manifest, head: HeadRequest, parts: TargetParts, folder: Path, progress: Progress
) -> Manifest:  # fmt: skip
    spec, files = build_head(head, parts, folder, progress)
    kind, drafter = head.kind, drafter_of(head, manifest.vocabulary.fingerprint)
    return replace(
        manifest,
        heads={**manifest.heads, kind: spec},
        drafters={**manifest.drafters, kind: drafter},
        files={**manifest.files, **files},
    )


def _build_draft(manifest: Manifest, draft: EngineRequest, folder: Path, progress: Progress) -> Manifest:
    for old in folder.glob("draft*"):
        old.unlink()
    built = build_engine(draft, load_tokenizer(draft.checkpoint), folder, progress)
    _write_documents(draft, folder, prefix="draft-")
    tokens = None
    if draft.token_ids is not None:
        tokens = _DRAFT_TOKENS
        np.save(folder / tokens, draft.token_ids, allow_pickle=False)
    drafter = DrafterSpec(kind="model", engine="draft", vocabulary=manifest.vocabulary.fingerprint, tokens=tokens)
    kept = {name: entry for name, entry in manifest.files.items() if not name.startswith("draft")}
    return replace(
        manifest,
        profile=replace(manifest.profile, draft_precision=draft.profile.precision),
        engines={**manifest.engines, "draft": built.spec},
        drafters={**manifest.drafters, _MODEL_DRAFTER: drafter},
        files={**kept, **built.files},
    )


def _read_base(folder: Path) -> Manifest:
    manifest = read_manifest(folder)
    check_hashes(folder, manifest.files)
    return manifest


def _tokens_in(artifact: Path | None, base: Manifest | None) -> list[str | None]:
    """Return the tokens of an artifact's target; those that it has no logits for never occur and are left out."""
    from tokenizers import Tokenizer

    assert artifact is not None
    assert base is not None
    tokenizer = Tokenizer.from_file(str(artifact / TOKENIZER_FILE))
    return tokens_by_id(tokenizer.get_vocab(with_added_tokens=True))[: base.target.vocab_size]


def _write_documents(engine: EngineRequest, folder: Path, *, prefix: str) -> None:
    for name, text in engine.checkpoint.documents.items():
        (folder / f"{prefix}{name}").write_text(text, "utf-8")


def _check_dialect(profile: Profile, request: ExportRequest) -> None:
    """Refuse a precision that the dialect does not have, and a head that no engine would run."""
    chosen: dict[str, Precision] = {"--precision": profile.precision}
    reader = "--head" if request.heads else None if request.early_exit is None else "--early-exit"
    if reader is not None and profile.dialect != "ort":
        raise ExportError(f"{reader}: expected --dialect ort, found {profile.dialect}: only ONNX Runtime runs it yet")
    if reader is not None and request.add_to is not None:
        raise ExportError(f"{reader}: expected a MODEL, whose graph gives what it reads, found --add-to")
    if request.heads or request.draft not in (None, *NO_ENGINE):
        chosen["--draft-precision"] = profile.draft_precision
    known = _PRECISIONS[profile.dialect]
    for option, precision in chosen.items():
        if precision not in known:
            names = f"{', '.join(known[:-1])} or {known[-1]}"
            raise ExportError(f"expected {option} {names} for --dialect {profile.dialect}, found {precision}")
    if profile.dialect == "tensorrt" and profile.kv_precision == "int8":
        raise ExportError(
            "expected --kv-precision same for --dialect tensorrt, found int8: its cache update takes floats only"
        )
