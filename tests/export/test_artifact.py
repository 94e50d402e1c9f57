"""An artifact appears whole or not at all; a drafter is added to a copy."""

import errno
import os
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

import tiny
from specrt_export import artifact, engine, graph
from specrt_export.errors import CheckpointError, ExportError
from specrt_profiles.errors import ManifestError, VocabularyError
from specrt_profiles.files import check_hashes, sha256_of
from specrt_profiles.generation import GenerationDefaults, read_generation, write_generation
from specrt_profiles.manifest import MANIFEST_FILE, read_manifest, write_manifest

OUT_OF_SPACE = OSError(errno.ENOSPC, "No space left on device")


def hashes(folder: Path) -> dict[str, str]:
    return {path.name: sha256_of(path) for path in folder.iterdir()}


@pytest.fixture
def copied_engines(tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Take engines from the tiny artifact instead of building them; returns the generation config they will have."""
    settings: dict[str, Any] = {"eos_token_id": 0}

    def build(request: engine.EngineRequest, tokenizer: object, folder: Path, progress: object) -> engine.BuiltEngine:
        for path in tiny_artifact.glob(f"{request.name}.*"):
            (folder / path.name).write_bytes(path.read_bytes())
        spec = read_manifest(tiny_artifact).engines[request.name]
        spec = replace(spec, precision=request.profile.precision, model=engine._model_info(request.checkpoint, "Llama"))
        return engine.BuiltEngine(spec=spec, files={}, generation_config=GenerationConfig(**settings), parts=None)

    monkeypatch.setattr(artifact, "build_engine", build)
    return settings


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test fail as soon as an engine is built."""

    def build(*_: object) -> None:
        pytest.fail("work began")

    monkeypatch.setattr(artifact, "build_engine", build)


@pytest.fixture(scope="module")
def other_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another Llama with the same tokenizer, a licence, and fewer positions."""
    folder = tiny.make_model("llama", tmp_path_factory.mktemp("other"), seed=1, max_position_embeddings=96)
    (folder / "LICENSE").write_text("Draft licence\n", "utf-8")
    (folder / "README.md").write_text("---\nlicense: mit\n---\n", "utf-8")
    return folder


def test_the_manifest_lists_every_file_with_size_and_hash(tiny_artifact: Path) -> None:
    manifest = read_manifest(tiny_artifact)
    check_hashes(tiny_artifact, manifest.files)
    names = {path.name for path in tiny_artifact.iterdir()} - {MANIFEST_FILE}
    assert set(manifest.files) == names
    engines = {f"{name}.{end}" for name in ("target", "draft") for end in ("onnx", "onnx.data", "reference.npz")}
    assert names == engines | {"tokenizer.json", "chat_template.jinja", "generation.json"}


def test_the_manifest_says_what_was_used(tiny_artifact: Path) -> None:
    manifest = read_manifest(tiny_artifact)
    assert manifest.profile == tiny.TINY_PROFILE
    assert manifest.target.model.architecture == "LlamaForCausalLM"
    assert manifest.tools["torch"] == version("torch")
    assert manifest.default_drafter == "model"
    assert set(manifest.drafters) == {"model"}


def test_an_artifact_can_be_read_by_others(tiny_artifact: Path) -> None:
    assert tiny_artifact.stat().st_mode & 0o777 == 0o755


@pytest.mark.usefixtures("no_work")
def test_an_existing_output_is_refused(tiny_source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine", "utf-8")
    with pytest.raises(ExportError, match=r"out exists: choose another folder, or replace it with --overwrite"):
        tiny.export_tiny(tiny_source, out)
    assert hashes(out).keys() == {"notes.txt"}
    with pytest.raises(ExportError, match="exists"):
        tiny.export_tiny(tiny_source, out / "notes.txt")


@pytest.mark.usefixtures("copied_engines")
def test_an_existing_output_is_replaced_when_asked(tiny_source: Path, tmp_path: Path) -> None:
    out = tiny.export_tiny(tiny_source, tmp_path / "out")
    (out / "notes.txt").write_text("old", "utf-8")
    tiny.export_tiny(tiny_source, out, overwrite=True)
    assert not (out / "notes.txt").exists()
    check_hashes(out, read_manifest(out).files)
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.usefixtures("no_work")
def test_only_an_artifact_is_overwritten(tiny_source: Path, tmp_path: Path) -> None:
    folder, file, link = tmp_path / "thesis", tmp_path / "file", tmp_path / "link"
    folder.mkdir()
    (folder / "chapter.tex").write_text("precious", "utf-8")
    file.write_text("precious", "utf-8")
    link.symlink_to(tmp_path / "nowhere")
    for out in (folder, file, link, tiny_source):
        before = contents(tmp_path), contents(tiny_source)
        with pytest.raises(ExportError, match=f"{out.name} exists and is no artifact: --overwrite replaces artifacts"):
            tiny.export_tiny(tiny_source, out, overwrite=True)
        assert (contents(tmp_path), contents(tiny_source)) == before


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.usefixtures("no_work")
def test_an_output_that_cannot_be_written_is_refused_before_work(tiny_source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x", "utf-8")
    with pytest.raises(ExportError, match="file is not a folder that can be written to"):
        tiny.export_tiny(tiny_source, tmp_path / "file" / "out")


@pytest.mark.usefixtures("copied_engines")
@pytest.mark.parametrize("draft", ["ngram", "suffix", "none"])
def test_the_default_drafter_is_the_one_asked_for(tiny_source: Path, tmp_path: Path, draft: str) -> None:
    out = tiny.export_tiny(tiny_source, tmp_path / "deep" / "er" / "out", draft=draft)
    manifest = read_manifest(out)
    assert manifest.default_drafter == draft
    assert set(manifest.engines) == {"target"}


def interrupt(error: BaseException) -> Callable[..., None]:
    """Return a function that writes a piece of a file and raises."""

    def broken(*arguments: Any) -> None:
        path = next(a for a in arguments if isinstance(a, Path))
        path.write_bytes(b"half")
        raise error

    return broken


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    ("error", "raised", "text"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt, "^$"),
        (OUT_OF_SPACE, ExportError, "out: the disk is full: free some space and try again"),
        (OSError(errno.EIO, "Input/output error"), ExportError, "out: cannot be written: .*Input/output error"),
        (SystemExit(143), SystemExit, "143"),
    ],
)
def test_an_interrupted_export_leaves_nothing_and_keeps_what_was_there(
    tiny_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    error: BaseException, raised: type[BaseException], text: str, overwrite: bool,
) -> None:  # fmt: skip
    out = tmp_path / "out"
    if overwrite:
        out.mkdir()
        (out / MANIFEST_FILE).write_text("old", "utf-8")
    monkeypatch.setattr(engine, "write_reference", interrupt(error))
    with pytest.raises(raised, match=text):
        tiny.export_tiny(tiny_source, out, overwrite=overwrite)
    assert [path.name for path in tmp_path.iterdir()] == ["out"] * overwrite
    if overwrite:
        assert (out / MANIFEST_FILE).read_text("utf-8") == "old"


def test_a_full_disk_while_weights_are_written_leaves_nothing(
    tiny_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph.ir, "save", interrupt(OUT_OF_SPACE))
    with pytest.raises(ExportError, match="the disk is full"):
        tiny.export_tiny(tiny_source, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("copied_engines")
def test_an_interrupt_between_the_two_renames_keeps_the_old_artifact(
    tiny_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / MANIFEST_FILE).write_text("old", "utf-8")
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if target == out and (self / "target.onnx").exists():
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(KeyboardInterrupt):
        tiny.export_tiny(tiny_source, out, overwrite=True)
    assert list(tmp_path.iterdir()) == [out]
    assert (out / MANIFEST_FILE).read_text("utf-8") == "old"


@pytest.mark.usefixtures("copied_engines")
def test_an_artifact_that_cannot_be_read_back_is_not_kept(
    tiny_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def swapped(folder: Path, manifest: Any) -> None:
        write_manifest(folder, replace(manifest, default_drafter="nobody"))

    monkeypatch.setattr(artifact, "write_manifest", swapped)
    with pytest.raises(ManifestError, match="'nobody' is not among the drafters"):
        tiny.export_tiny(tiny_source, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("copied_engines")
def test_licence_and_readme_travel_and_are_listed(other_source: Path, tmp_path: Path) -> None:
    out = tiny.export_tiny(other_source, tmp_path / "out", draft=str(other_source), profile=tiny.profile(capacity=96))
    manifest = read_manifest(out)
    assert manifest.target.model.licence == "mit"
    for name in ("LICENSE", "draft-LICENSE"):
        assert (out / name).read_text("utf-8") == "Draft licence\n"
        assert name in manifest.files
    assert {"README.md", "draft-README.md"} <= set(manifest.files)


def test_generation_defaults_are_those_of_the_model(
    tiny_source: Path, tmp_path: Path, copied_engines: dict[str, Any]
) -> None:
    copied_engines |= {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [0, 4]}
    out = tiny.export_tiny(tiny_source, tmp_path / "out")
    assert read_generation(out) == GenerationDefaults(temperature=0.6, top_k=50, top_p=0.9)
    assert read_manifest(out).vocabulary.eos_token_ids == (0, 4)


def test_a_new_draft_goes_into_a_copy_that_stays_lossless(
    tiny_artifact: Path, other_source: Path, tmp_path: Path, machine_cache: Path
) -> None:
    before = hashes(tiny_artifact)
    out = tiny.export_tiny(None, tmp_path / "out", draft=str(other_source), add_to=tiny_artifact)
    assert hashes(tiny_artifact) == before
    after = hashes(out)
    for name in before:
        changed = name == MANIFEST_FILE or name.startswith("draft.")
        assert (after[name] != before[name]) == changed, name
    manifest, base = read_manifest(out), read_manifest(tiny_artifact)
    check_hashes(out, manifest.files)
    assert manifest.target == base.target
    assert manifest.engines["draft"].model.licence == "mit"
    assert manifest.engines["draft"].capacity == 96
    assert manifest.drafters["model"].vocabulary == base.vocabulary.fingerprint
    assert set(after) - set(before) == {"draft-LICENSE", "draft-README.md"}
    tiny.assert_lossless(out, machine_cache)


@pytest.mark.usefixtures("copied_engines")
def test_a_draft_is_added_to_an_artifact_without_one(tiny_source: Path, tmp_path: Path) -> None:
    base = tiny.export_tiny(tiny_source, tmp_path / "base")
    out = tiny.export_tiny(
        None, tmp_path / "out", draft=str(tiny_source), add_to=base, profile=tiny.profile(draft_precision="int8")
    )
    manifest = read_manifest(out)
    assert read_manifest(base).default_drafter == "ngram"
    assert manifest.default_drafter == "model"
    assert set(manifest.drafters) == {"model"}
    assert manifest.engines["draft"].precision == manifest.profile.draft_precision == "int8"


@pytest.mark.usefixtures("copied_engines")
def test_nothing_of_a_replaced_draft_is_left(other_source: Path, tiny_source: Path, tmp_path: Path) -> None:
    profile = tiny.profile(capacity=96)
    base = tiny.export_tiny(tiny_source, tmp_path / "base", draft=str(other_source), profile=profile)
    assert (base / "draft-LICENSE").is_file()
    out = tiny.export_tiny(None, tmp_path / "out", draft=str(tiny_source), add_to=base)
    assert not list(out.glob("draft-*"))
    assert not any(name.startswith("draft-") for name in read_manifest(out).files)
    assert (base / "draft-LICENSE").is_file()


@pytest.mark.usefixtures("copied_engines")
def test_only_the_default_drafter_can_be_changed_too(tiny_artifact: Path, tmp_path: Path) -> None:
    out = tiny.export_tiny(None, tmp_path / "out", draft="none", add_to=tiny_artifact)
    assert read_manifest(out) == replace(read_manifest(tiny_artifact), default_drafter="none")


@pytest.mark.usefixtures("copied_engines")
def test_an_artifact_may_be_replaced_by_its_copy(tiny_source: Path, tmp_path: Path) -> None:
    base = tiny.export_tiny(tiny_source, tmp_path / "base")
    tiny.export_tiny(None, base, draft=str(tiny_source), add_to=base, overwrite=True)
    check_hashes(base, read_manifest(base).files)
    assert read_manifest(base).default_drafter == "model"
    assert list(tmp_path.iterdir()) == [base]


@pytest.mark.usefixtures("copied_engines")
def test_without_hard_links_files_are_copied(
    tiny_artifact: Path, tiny_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    linked = tiny.export_tiny(None, tmp_path / "linked", draft=str(tiny_source), add_to=tiny_artifact)
    assert (linked / "target.onnx.data").samefile(tiny_artifact / "target.onnx.data")

    def refuse(*_: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    copied = tiny.export_tiny(None, tmp_path / "copied", draft=str(tiny_source), add_to=tiny_artifact)
    assert not (copied / "target.onnx.data").samefile(tiny_artifact / "target.onnx.data")
    assert hashes(copied) == hashes(linked)


def foreign(folder: Path, **settings: Any) -> Path:
    """A draft whose tokenizer gives other ids."""
    tiny.make_model("llama", folder, **settings)
    tiny.make_tokenizer(folder, extra=("<|tool|>",))
    return folder


@pytest.mark.usefixtures("no_work")
def test_a_draft_with_another_vocabulary_is_refused_with_the_first_difference(
    tiny_source: Path, tiny_artifact: Path, tmp_path: Path
) -> None:
    draft = str(foreign(tmp_path / "draft"))
    text = r"token 4 is '<\|tool\|>' in the draft and '!' in the target: choose a draft that shares"
    for request in ({"source": tiny_source}, {"source": None, "add_to": tiny_artifact}):
        with pytest.raises(VocabularyError, match=text):
            tiny.export_tiny(out=tmp_path / "out", draft=draft, **request)
    assert [path.name for path in tmp_path.iterdir()] == ["draft"]


@pytest.mark.usefixtures("no_work")
def test_a_draft_with_too_few_rows_is_refused(tiny_source: Path, tmp_path: Path) -> None:
    draft = tiny.make_model("llama", tmp_path / "draft", vocab_size=339)
    with pytest.raises(VocabularyError, match="339 embedding rows for the target's 340 tokens"):
        tiny.export_tiny(tiny_source, tmp_path / "out", draft=str(draft))


@pytest.mark.usefixtures("copied_engines")
def test_tokens_that_the_target_has_no_logits_for_do_not_matter(tmp_path: Path) -> None:
    target = tiny.make_model("llama", tmp_path / "target", vocab_size=339)
    tiny.export_tiny(target, tmp_path / "out", draft=str(target))


@pytest.mark.usefixtures("no_work")
def test_a_damaged_base_is_refused(tiny_source: Path, tiny_artifact: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    for path in tiny_artifact.iterdir():
        (base / path.name).write_bytes(path.read_bytes())
    defaults = read_generation(base)
    write_generation(base, replace(defaults, temperature=defaults.temperature + 0.5))
    with pytest.raises(ManifestError, match=r"generation\.json: expected SHA-256"):
        tiny.export_tiny(None, tmp_path / "out", draft=str(tiny_source), add_to=base)
    with pytest.raises(ManifestError, match=r"no manifest\.json there"):
        tiny.export_tiny(None, tmp_path / "out", draft=str(tiny_source), add_to=tiny_source)


@pytest.mark.usefixtures("no_work")
def test_an_unknown_draft_is_refused(tiny_source: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="unknown model 'ngramm'"):
        tiny.export_tiny(tiny_source, tmp_path / "out", draft="ngramm")
