"""Heads on disk: weights under their published names, and a card that says what they belong to."""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from specrt_export.distill.head import Layout
from specrt_export.distill.train import TrainingPlan
from specrt_export.errors import ExportError
from specrt_export.exit_fit import ExitHead
from specrt_profiles.codec import encode

_TOOLS = ("specrt", "torch", "transformers")
_LAYER = {"eagle": "layers.0.", "eagle3": "midlayer."}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a head belongs to: a model by name, and hashes of its vocabulary and of all its weights in fp32."""

    name: str
    vocabulary: str
    weights: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedCard:
    """How a drafter came to be.

    tokens: of the text it learned from. loss: None where nothing was learned. agreement: how often each token of greedy
    chains of 5 is the target's, on greedy answers that were held out. block_efficiency: tokens per target call that
    follow from it.
    """

    target: Target
    tokens: int
    updates: int
    planned_updates: int
    loss: float | None
    agreement: tuple[float, ...]
    block_efficiency: float
    training: TrainingPlan
    command: str
    tools: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadCard(TrainedCard):
    """How many tokens a head can guess, and the share of the text that they are."""

    vocabulary_size: int
    coverage: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Card(HeadCard):
    """What an EAGLE head is. layers: whose inputs are its features; none for what the output matrix reads."""

    layout: Layout
    layers: tuple[int, ...]
    ffn: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaCard(HeadCard):
    """What Medusa heads are: how many, of how many blocks each.

    agreement: of each head. ranks: of each head, how often the text's token is its best guess, its second, and so on.
    """

    layout: Literal["medusa"]
    heads: int
    blocks: int
    ranks: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitCard(TrainedCard):
    """What an early exit is, and how good it was before.

    layer: how many run before it. cost: of a guess (`exit_fit.ExitMeasure`); speedup: predicted from it and from
    `agreement`, with chains of `k`. agreement_plain: without a translator; agreement_before: in closed form.
    """

    layout: Literal["early-exit"]
    layer: int
    cost: float
    speedup: float
    k: int
    agreement_plain: tuple[float, ...]
    agreement_before: tuple[float, ...]
    block_efficiency_before: float


def tools() -> dict[str, str]:
    """Return the versions of what trains."""
    return {name: version(name) for name in _TOOLS}


def card_path(head: Path) -> Path:
    """Return where a head's card lies."""
    return head.with_suffix(".json")


def check_head_path(path: Path) -> None:
    """Raise `ExportError` for a path that no head can be written to."""
    if path.suffix != ".safetensors":
        raise ExportError(f"{path}: expected a name that ends in .safetensors")
    if not path.absolute().parent.is_dir():
        raise ExportError(f"{path}: there is no folder {path.parent}")


def write_head(
    path: Path, weights: Mapping[str, torch.Tensor], vocabulary: NDArray[np.int64], card: Card | MedusaCard
) -> None:
    """Write a head's parameters in bfloat16, then the card; each replaces an older one when it is complete.

    Embedding and output matrix are the target's and are left out. `d2t` holds, as in published heads, what has to be
    added to a row's number to get its token id.
    """
    tensors = {published_name(card.layout, name): tensor.bfloat16() for name, tensor in weights.items()}
    tensors["d2t"] = torch.from_numpy(vocabulary - np.arange(len(vocabulary)))
    _write(path, tensors, card, {})


def write_exit(path: Path, head: ExitHead, card: ExitCard) -> None:
    """Write an early exit that has a translator, in bfloat16, then the card; see `exit_file`."""
    assert head.translator is not None
    assert head.bias is not None
    tensors = {"translator.weight": head.translator.bfloat16(), "translator.bias": head.bias.bfloat16()}
    _write(path, tensors, card, {"layer": str(head.layer)})


def _write(path: Path, tensors: Mapping[str, torch.Tensor], card: TrainedCard, meta: Mapping[str, str]) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}")
    text = part.with_suffix(".json")
    try:
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()}, part, metadata={"format": "pt", **meta}
        )
        text.write_text(json.dumps(encode(card), indent=2) + "\n", "utf-8")
        part.replace(path)
        text.replace(card_path(path))
    finally:
        part.unlink(missing_ok=True)
        text.unlink(missing_ok=True)


def published_name(layout: Layout | Literal["medusa"], name: str) -> str:
    """Return the name that published heads have for a parameter of `Head` or `MedusaHeads`."""
    if layout == "medusa":
        _, head, block, kind = name.split(".")
        return f"{head}.{block}.linear.{kind}"
    inside = name.removeprefix("decoder.layers.0.")
    if inside == name:
        return name
    if inside.startswith("input_layernorm."):  # the two norms of an EAGLE-3 layer
        inside = inside.removeprefix("input_layernorm.")
    return _LAYER[layout] + inside


def fingerprint_of(model: Any) -> str:
    """Return a SHA-256 over names, shapes and values (as fp32) of all parameters of a model."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        digest.update(parameter.detach().float().contiguous().numpy().data)
    return digest.hexdigest()
