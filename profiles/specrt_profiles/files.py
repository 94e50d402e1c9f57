"""The files of an artifact: their sizes and hashes, and whether they are still so."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from specrt_profiles.errors import ManifestError


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """Size in bytes and SHA-256 of one file of the artifact."""

    size: int
    sha256: str


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file as hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_sizes(folder: Path, files: Mapping[str, FileEntry]) -> None:
    """Raise `ManifestError` for the first listed file that is missing or of another size."""
    for name, entry in files.items():
        path = folder / name
        try:
            size = path.stat().st_size if path.is_file() else None
        except OSError as error:
            raise ManifestError(f"{path}: cannot be read: {error.strerror}") from None
        if size is None:
            raise ManifestError(f"{path}: listed in the manifest but missing: copy the whole artifact again")
        if size != entry.size:
            raise ManifestError(f"{path}: expected {entry.size} bytes, found {size}: copy the file again")


def check_hashes(folder: Path, files: Mapping[str, FileEntry]) -> None:
    """Raise `ManifestError` for the first listed file whose content has changed."""
    for name, entry in files.items():
        found = sha256_of(folder / name)
        if found != entry.sha256:
            raise ManifestError(f"{folder / name}: expected SHA-256 {entry.sha256}, found {found}: copy the file again")
