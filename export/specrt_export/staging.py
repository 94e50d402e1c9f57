"""Writing an artifact: beside its place, renamed when it is complete, and nothing left behind otherwise."""

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from specrt_export.errors import ExportError
from specrt_export.estimate import show_bytes
from specrt_profiles.files import FileEntry, sha256_of
from specrt_profiles.manifest import MANIFEST_FILE


def check_output(out: Path, *, overwrite: bool) -> None:
    """Refuse an output that exists, unless it is an artifact to replace, and one that cannot be written."""
    if os.path.lexists(out):
        if not overwrite:
            raise ExportError(f"{out} exists: choose another folder, or replace it with --overwrite")
        if not (out / MANIFEST_FILE).is_file() or out.is_symlink():
            raise ExportError(f"{out} exists and is no artifact: --overwrite replaces artifacts only")
        if Path.cwd().is_relative_to(out.resolve()):
            raise ExportError(f"{out}: the working directory is in it: run this from elsewhere")
    parent = next(path for path in out.absolute().parents if path.exists())
    if not (parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)):
        raise ExportError(f"{out}: {parent} is not a folder that can be written to")


def check_disk(out: Path, needed: int) -> None:
    """Refuse to begin what will not fit: `needed` bytes on the disk of `out`."""
    parent = next(path for path in out.resolve().parents if path.exists())
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise ExportError(
            f"{parent}: {show_bytes(needed)} needed for the artifact, {show_bytes(free)} free: free some space"
        )


@contextlib.contextmanager
def staging(out: Path) -> Iterator[Path]:
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
            raise ExportError(f"{out}: the disk is full: free some space and try again") from None
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


def link_files(names: Iterable[str], source: Path, folder: Path) -> None:
    """Copy an artifact's files; they are hard-linked where the file system can (neither side is ever written to)."""
    for name in names:
        try:
            os.link(source / name, folder / name)
        except OSError:
            shutil.copyfile(source / name, folder / name)


def list_files(folder: Path, known: Mapping[str, FileEntry]) -> dict[str, FileEntry]:
    """Return size and SHA-256 of every file, computing only those that are not known yet."""
    paths = sorted(path for path in folder.iterdir() if path.name != MANIFEST_FILE)
    return {
        path.name: known.get(path.name) or FileEntry(size=path.stat().st_size, sha256=sha256_of(path)) for path in paths
    }
