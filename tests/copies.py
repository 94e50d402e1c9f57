"""Copies of an artifact with something changed in them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specrt_profiles.files import sha256_of
from specrt_profiles.manifest import MANIFEST_FILE


def copy_artifact(source: Path, out: Path, edit: Callable[[dict[str, Any]], None] | None = None) -> Path:
    """Copy an artifact, apply `edit` to its manifest, and return the copy."""
    shutil.copytree(source, out)
    if edit is not None:
        edit_manifest(out, edit)
    return out


def edit_manifest(folder: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest's data in place."""
    path = folder / MANIFEST_FILE
    data = json.loads(path.read_text("utf-8"))
    edit(data)
    path.write_text(json.dumps(data), "utf-8")


def edit_generation(folder: Path, **defaults: Any) -> None:
    """Change the sampling defaults of a copy."""
    path = folder / "generation.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | defaults), "utf-8")
    refresh(folder)


def refresh(folder: Path) -> None:
    """Enter the files' present sizes and hashes into the manifest, so that only their content is wrong."""

    def measure(data: dict[str, Any]) -> None:
        data["files"] = {
            path.name: {"size": path.stat().st_size, "sha256": sha256_of(path)}
            for path in sorted(folder.iterdir())
            if path.name != MANIFEST_FILE
        }

    edit_manifest(folder, measure)


def draft_with_target_of(other: Path, folder: Path) -> None:
    """Put the target of another artifact in the place of a copy's draft."""
    import onnx

    graph = onnx.load(other / "target.onnx", load_external_data=False)
    for entry in (entry for tensor in graph.graph.initializer for entry in tensor.external_data):
        if entry.key == "location":
            entry.value = "draft.onnx.data"
    onnx.save(graph, folder / "draft.onnx")
    for name in ("onnx.data", "reference.npz"):
        shutil.copyfile(other / f"target.{name}", folder / f"draft.{name}")
    spec = json.loads((other / MANIFEST_FILE).read_text("utf-8"))["engines"]["target"]
    names = {"file": "draft.onnx", "weights": "draft.onnx.data", "reference": "draft.reference.npz"}
    edit_manifest(folder, lambda data: data["engines"].update(draft=spec | names))
    refresh(folder)


def draft_with_target(data: dict[str, Any]) -> None:
    """Make the target its own draft: a draft that is always right."""
    data["engines"]["draft"] = data["engines"]["target"]
