"""Exports: a model, or a new drafter for an artifact that exists, into a self-contained folder."""

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from specrt_export import support
from specrt_export.checkpoint import resolve
from specrt_export.decoder import Dialect, trace
from specrt_export.dialect_ort import OrtDialect
from specrt_export.dialect_trt import TensorrtDialect
from specrt_export.engine import EngineRequest, build_engine
from specrt_export.errors import ExportError
from specrt_export.estimate import estimate, show_bytes
from specrt_export.generation import generation_defaults
from specrt_export.parity import most_rows
from specrt_export.progress import Progress
from specrt_export.tokenizer import load_tokenizer, save_tokenizer, tokens_of, vocabulary_of
from specrt_profiles.generation import write_generation
from specrt_profiles.manifest import (
    MANIFEST_FILE,
    MODEL_FREE,
    TOKENIZER_FILE,
    DrafterSpec,
    FileEntry,
    Manifest,
    check_hashes,
    read_manifest,
    sha256_of,
    write_manifest,
)
from specrt_profiles.profile import Profile
from specrt_profiles.vocabulary import check_draft_vocabulary, tokens_by_id

NO_ENGINE = (*MODEL_FREE, "none")  # values of `draft` that need no exported engine
_TOOLS = ("specrt", "torch", "transformers", "optimum", "onnx", "onnxscript", "onnxruntime")
_MODEL_DRAFTER = "model"
_DIALECTS: dict[str, Callable[[Profile], Dialect]] = {"ort": OrtDialect, "tensorrt": TensorrtDialect}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRequest:
    """What to export and where to.

    `draft` is `ngram`, `suffix`, `none` or a model. With `add_to`, `model` is None: the artifact there is copied to
    `out` and the copy gets the drafter.
    """

    model: str | None
    draft: str
    profile: Profile
    out: Path
    cache_dir: Path
    revision: str | None = None
    add_to: Path | None = None
    overwrite: bool = False


def export(request: ExportRequest, progress: Progress) -> Path:
    """Write an artifact and return its folder.

    Everything that can be refused is refused before work is done. The artifact appears at `request.out` when it is
    complete and checked; until then there is only a hidden sibling, which any failure removes.
    """
    if (request.model is None) == (request.add_to is None):
        raise ExportError("expected either a MODEL to export or --add-to DIR with a --draft")
    _check_output(request)
    base = None if request.add_to is None else _read_base(request.add_to)
    profile = (
        request.profile if base is None else replace(base.profile, draft_precision=request.profile.draft_precision)
    )
    _check_dialect(profile, request.draft)
    target = None if request.model is None else _prepare("target", request.model, profile, request, progress)
    draft = None
    if request.draft not in NO_ENGINE:
        changed = replace(profile, precision=profile.draft_precision, trees=False)  # only targets verify
        draft = _prepare("draft", request.draft, changed, request, progress)
    tokenizer = load_tokenizer(target.checkpoint) if target is not None else None
    if draft is not None:
        known = _tokens_in(request.add_to, base) if target is None else tokens_of(tokenizer)[: target.dims.vocab_size]
        check_draft_vocabulary(known, tokens_of(load_tokenizer(draft.checkpoint)), draft_rows=draft.dims.vocab_size)
    _check_disk(request.out, [engine for engine in (target, draft) if engine is not None])
    with _staging(request.out) as folder:
        if target is not None:
            manifest = _build_target(target, tokenizer, folder, progress)
        else:
            assert base is not None
            assert request.add_to is not None
            manifest = _copy_base(base, request.add_to, folder)
        if draft is not None:
            manifest = _build_draft(manifest, draft, folder, progress)
        default = _MODEL_DRAFTER if draft is not None else request.draft
        write_manifest(folder, replace(manifest, default_drafter=default, files=_list_files(folder, manifest)))
        read_manifest(folder)
    return request.out


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
    window = support.narrow_window(config, profile)
    tied = bool(getattr(config, "tie_word_embeddings", True))
    sizes = estimate(checkpoint, dims, profile, tied=tied, num_rows=most_rows(profile, window=window))
    progress.say(
        f"{name}: {checkpoint.name}, {checkpoint.num_parameters / 1e6:.1f} M parameters at {profile.precision}: "
        f"weights about {show_bytes(sizes.artifact)} on disk, KV buffers {show_bytes(sizes.kv)} for {profile.capacity} "
        f"tokens, peak memory of this export about {show_bytes(sizes.peak_memory)}"
    )
    with progress.step(f"{name}: trace the graph"):
        traced = trace(config, dims, profile, _DIALECTS[profile.dialect](profile))
    return EngineRequest(
        name=name, checkpoint=checkpoint, dims=dims, traced=traced, profile=profile, window=window,
        num_bytes=sizes.artifact,
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
    return Manifest(
        profile=target.profile,
        vocabulary=vocabulary_of(tokenizer, built.generation_config, num_rows=target.dims.vocab_size),
        engines={"target": built.spec},
        drafters={},
        default_drafter="ngram",
        tools={name: version(name) for name in _TOOLS},
        files=built.files,
    )


def _build_draft(manifest: Manifest, draft: EngineRequest, folder: Path, progress: Progress) -> Manifest:
    for old in folder.glob("draft*"):
        old.unlink()
    built = build_engine(draft, load_tokenizer(draft.checkpoint), folder, progress)
    _write_documents(draft, folder, prefix="draft-")
    drafter = DrafterSpec(kind="model", engine="draft", vocabulary=manifest.vocabulary.fingerprint)
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
    check_hashes(folder, manifest)
    return manifest


def _copy_base(base: Manifest, source: Path, folder: Path) -> Manifest:
    """Copy an artifact's files; weights are hard-linked where the file system can (neither side is ever written to)."""
    for name in base.files:
        try:
            os.link(source / name, folder / name)
        except OSError:
            shutil.copyfile(source / name, folder / name)
    return base


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


def _list_files(folder: Path, manifest: Manifest) -> dict[str, FileEntry]:
    """Return size and SHA-256 of every file, computing only those that are not known yet."""
    paths = sorted(path for path in folder.iterdir() if path.name != MANIFEST_FILE)
    return {
        path.name: manifest.files.get(path.name) or FileEntry(size=path.stat().st_size, sha256=sha256_of(path))
        for path in paths
    }


def _check_dialect(profile: Profile, draft: str) -> None:
    """Refuse a precision that the dialect does not have yet."""
    if profile.dialect == "ort":
        return
    chosen = {"--precision": profile.precision, "--kv-precision": profile.kv_precision}
    if draft not in NO_ENGINE:
        chosen["--draft-precision"] = profile.draft_precision
    for option, precision in chosen.items():
        if precision != "fp32":
            raise ExportError(
                f"expected {option} fp32 for --dialect tensorrt, found {precision}: other precisions are not there yet"
            )


def _check_output(request: ExportRequest) -> None:
    """Refuse an output that exists, unless it is an artifact to replace, and one that cannot be written."""
    out = request.out
    if os.path.lexists(out):
        if not request.overwrite:
            raise ExportError(f"{out} exists: choose another folder, or replace it with --overwrite")
        if not (out / MANIFEST_FILE).is_file() or out.is_symlink():
            raise ExportError(f"{out} exists and is no artifact: --overwrite replaces artifacts only")
        if Path.cwd().is_relative_to(out.resolve()):
            raise ExportError(f"{out}: the working directory is in it: run this from elsewhere")
    parent = next(path for path in out.absolute().parents if path.exists())
    if not (parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)):
        raise ExportError(f"{out}: {parent} is not a folder that can be written to")


def _check_disk(out: Path, engines: list[EngineRequest]) -> None:
    needed = sum(engine.num_bytes for engine in engines)
    parent = next(path for path in out.resolve().parents if path.exists())
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise ExportError(
            f"{parent}: {show_bytes(needed)} needed for the artifact, {show_bytes(free)} free: free some space"
        )


@contextlib.contextmanager
def _staging(out: Path) -> Iterator[Path]:
    """Yield a hidden sibling of `out` that becomes `out` when the block succeeds and vanishes when it does not."""
    folder = _hidden_sibling(out)
    try:
        folder.mkdir(mode=0o700, parents=True)
        yield folder
        folder.chmod(0o755)
        if out.exists():
            _replace(out, folder)
        else:
            folder.rename(out)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise ExportError(f"{out}: the disk is full: free some space and export again") from None
        raise ExportError(f"{out}: cannot be written: {error}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _replace(out: Path, new: Path) -> None:
    """Rename `new` to `out`; what was there is deleted, or put back if this is interrupted."""
    aside = _hidden_sibling(out)
    old = aside / out.name
    try:
        aside.mkdir(mode=0o700)
        out.rename(old)
        new.rename(out)
    except BaseException:
        if old.exists() and not out.exists():
            old.rename(out)
        raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _hidden_sibling(out: Path) -> Path:
    """Return a path that nothing has; made inside a `try`, so that no interrupt can come before its `finally`."""
    return out.parent / f".{out.name}.{secrets.token_hex(8)}"
