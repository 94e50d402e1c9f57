"""The folder that a training works in: text, features and checkpoints, and what they belong to."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specrt_export.errors import ExportError

_ABOUT = "about.json"


@dataclass(frozen=True, slots=True)
class Work:
    """Where things lie."""

    folder: Path

    @property
    def texts(self) -> Path:
        """Folder of the written text."""
        return self.folder / "texts"

    def features(self, kind: str, number: int) -> Path:
        """Folder of one shard's features of a kind."""
        return self.folder / f"features-{kind}" / f"{number:05d}"

    def checkpoint(self, layout: str) -> Path:
        """File of a training's state."""
        return self.folder / f"state-{layout}.safetensors"


def open_work(folder: Path, about: Mapping[str, Any]) -> Work:
    """Create the folder, or go on in it; raises `ExportError` when what is there belongs to something else."""
    path = folder / _ABOUT
    if folder.exists() and not path.is_file() and any(folder.iterdir()):
        raise ExportError(f"{folder}: expected the folder of an earlier training or a new one, found other things")
    if path.is_file():
        found = _read(path)
        for key, value in about.items():
            if found.get(key) != value:
                raise ExportError(f"{folder}: has {key} {found.get(key)!r}, expected {value!r}: choose another --work")
    work = Work(folder)
    work.texts.mkdir(parents=True, exist_ok=True)
    if not path.is_file():
        part = path.with_name(f".{_ABOUT}")
        part.write_text(json.dumps(about, indent=2, sort_keys=True) + "\n", "utf-8")
        part.replace(path)
    return work


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ExportError(f"{path}: not readable ({error}): delete the folder to begin again") from None
    return found if isinstance(found, dict) else {}
