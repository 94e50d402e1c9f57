"""Texts on disk: numbered files of documents, each written whole or not at all."""

import os
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from specrt_export.errors import ExportError

_SUFFIX = ".npz"


@dataclass(frozen=True, slots=True, kw_only=True)
class TextShard:
    """Documents of tokens: document i is tokens[offsets[i] : offsets[i + 1]], and roles likewise.

    tokens: int32 [n]. roles: uint8 [n], see `rows`. offsets: int64 [documents + 1].
    """

    tokens: NDArray[np.int32]
    roles: NDArray[np.uint8]
    offsets: NDArray[np.int64]


def shard_path(folder: Path, index: int) -> Path:
    """Return where shard `index` lies."""
    return folder / f"text-{index:05d}{_SUFFIX}"


def write_shard(path: Path, shard: TextShard) -> None:
    """Write a shard under a hidden name and rename it when it is complete."""
    for old in path.parent.glob(f".{path.name}.*"):  # of a process that was killed
        old.unlink(missing_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with part.open("wb") as file:
            np.savez(file, tokens=shard.tokens, roles=shard.roles, offsets=shard.offsets)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def read_shard(path: Path) -> TextShard:
    """Read a shard; raises `ExportError` when it is none."""
    try:
        with np.load(path) as arrays:
            shard = TextShard(tokens=arrays["tokens"], roles=arrays["roles"], offsets=arrays["offsets"])
    except (OSError, ValueError, KeyError, zipfile.BadZipFile, EOFError) as error:
        raise ExportError(f"{path}: expected a shard of texts, found something else ({error}): delete it") from None
    sizes = len(shard.tokens), len(shard.roles), int(shard.offsets[-1]) if len(shard.offsets) else -1
    if len(set(sizes)) != 1:
        raise ExportError(f"{path}: expected tokens, roles and offsets of one size, found {sizes}: delete it")
    return shard
