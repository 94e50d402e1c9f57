"""Medusa heads as files (arXiv 2401.10774): both published layouts, read and checked.

| | block j of head i | its output matrix |
|---|---|---|
| the paper's | `{i}.{j}.linear.weight`, `.bias`, with `medusa_head.` before or not | `{i}.{number of blocks}.weight` |
| vLLM's | `blocks.{i}.layers.{j}.weight`, and `.bias` or not | `lm_heads.{i}.weight` |

Where only head 0 has an output matrix, or there is one `lm_head.weight`, it is that of all heads; where there is none,
the target's. `d2t` (see `head_file`) or vLLM's `token_map`, which holds ids, tells which tokens its rows stand for.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from specrt_export.distill.card import MedusaCard
from specrt_export.errors import ExportError
from specrt_export.head_tensors import HeadFile, take, token_ids

_PREFIX = re.compile(r"^medusa_heads?\.")
_BLOCK = re.compile(r"^(?:(\d+)\.(\d+)\.linear|blocks\.(\d+)\.layers\.(\d+))\.(weight|bias)$")
_MATRIX = re.compile(r"^(?:(\d+)\.\d+|lm_heads\.(\d+))\.weight$")
_OTHERS = {"d2t", "t2d", "token_map", "lm_head.weight"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaFile(HeadFile):
    """Medusa heads; matrices: one for each head, one for all, or none where they end in the target's."""

    num_heads: int
    num_blocks: int
    matrices: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class _Names:
    """How a file names the tensors of heads."""

    vllm: bool
    num_blocks: int

    def block(self, head: int, block: int) -> str:
        return f"blocks.{head}.layers.{block}" if self.vllm else f"{head}.{block}.linear"

    def matrix(self, head: int) -> str:
        return f"lm_heads.{head}.weight" if self.vllm else f"{head}.{self.num_blocks}.weight"


def is_medusa(tensors: Mapping[str, torch.Tensor]) -> bool:
    """Tell whether there are blocks of Medusa heads."""
    return any(_BLOCK.match(_PREFIX.sub("", name)) for name in tensors)


def read_medusa(
    path: Path, tensors: Mapping[str, torch.Tensor], *, hidden_size: int, vocab_size: int, card: MedusaCard | None
) -> MedusaFile:
    """Return the heads of a file's tensors, as many as config.json beside it says; raises `ExportError`."""
    tensors = {_PREFIX.sub("", name): tensor for name, tensor in tensors.items()}
    blocks = [match for name in tensors if (match := _BLOCK.match(name))]
    places = [(int(match[1] or match[3] or 0), int(match[2] or match[4] or 0)) for match in blocks]
    num_heads, num_blocks = (1 + max(numbers) for numbers in zip(*places, strict=True))
    names = _Names(vllm=any(match[3] for match in blocks), num_blocks=num_blocks)
    num_heads = _declared(path, num_heads, num_blocks)
    found: dict[str, torch.Tensor] = {}
    has_bias = any(match[5] == "bias" for match in blocks)
    for head in range(num_heads):
        for block in range(num_blocks):
            name, ours = names.block(head, block), f"blocks.{head}.{block}"
            found[f"{ours}.weight"] = take(path, tensors, f"{name}.weight", (hidden_size, hidden_size))
            found[f"{ours}.bias"] = (
                take(path, tensors, f"{name}.bias", (hidden_size,)) if has_bias else torch.zeros(hidden_size)
            )
    if unknown := sorted(name for name in tensors.keys() - _OTHERS if not (_BLOCK.match(name) or _MATRIX.match(name))):
        raise ExportError(f"{path}: expected the tensors of Medusa heads, found {unknown[0]} as well")
    ids = _token_ids(path, tensors, vocab_size)
    return MedusaFile(
        path=path, tensors=found, token_ids=ids, card=card, num_heads=num_heads, num_blocks=num_blocks,
        matrices=_matrices(path, tensors, names, num_heads, ids, (vocab_size, hidden_size)),
    )  # fmt: skip


def _matrices(
    path: Path, tensors: Mapping[str, torch.Tensor], names: _Names, num_heads: int, ids: NDArray[np.int64] | None,
    whole: tuple[int, int],
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Return the output matrices that a file has, restricted to the tokens that its heads can guess."""
    has = [name for name in tensors if _MATRIX.match(name)]
    wanted = ["lm_head.weight"] if "lm_head.weight" in tensors else []
    if has and not wanted:
        wanted = [names.matrix(head) for head in range(1 if has == [names.matrix(0)] else num_heads)]
    size = (whole[0] if ids is None else len(ids), whole[1])
    found = []
    for name in wanted:
        if ids is not None and name in tensors and tuple(tensors[name].shape) == whole:
            found.append(tensors[name][torch.from_numpy(ids)])
        else:
            found.append(take(path, tensors, name, size))
    return tuple(found)


def _token_ids(path: Path, tensors: Mapping[str, torch.Tensor], vocab_size: int) -> NDArray[np.int64] | None:
    if "token_map" not in tensors:
        return token_ids(path, tensors, vocab_size=vocab_size)
    stored = tensors["token_map"].numpy()
    whole = stored.ndim == 1 and stored.dtype.kind in "iu" and len(stored) > 0
    if not whole or not 0 <= stored.min() <= stored.max() < vocab_size or len(np.unique(stored)) < len(stored):
        raise ExportError(f"{path}: token_map: expected different tokens below {vocab_size}")
    ids: NDArray[np.int64] = stored.astype(np.int64)
    return ids


def _declared(path: Path, num_heads: int, num_blocks: int) -> int:
    """Return the number of heads by config.json, as far as there is one that speaks of heads."""
    file = path.with_name("config.json")
    try:
        data = json.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        return num_heads
    except (OSError, ValueError) as error:
        raise ExportError(f"{file}: not readable ({error}): copy it again, or delete it") from None
    if not isinstance(data, dict) or "medusa_num_heads" not in data:
        return num_heads
    heads, blocks = data["medusa_num_heads"], data.get("medusa_num_layers", num_blocks)
    if type(heads) is not int or not 1 <= heads <= num_heads or blocks != num_blocks:
        raise ExportError(
            f"{path}: expected {heads} heads of {blocks} blocks, as {file.name} says, found {num_heads} of "
            f"{num_blocks}: copy the whole head again"
        )
    return heads
