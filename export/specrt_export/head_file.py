"""Heads as files: published layouts of EAGLE-1, 2 and 3 (arXiv 2401.15077, 2503.01840), read and checked.

A head reads the target's embedding and, unless it brings `lm_head.weight`, rows of the target's output matrix. `d2t`
says which token each row of its own stands for: as in published heads by what has to be added to the row's number, or
by the token's id. Medusa's layouts are in `medusa_file`, early exits in `exit_file`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import init_empty_weights

from specrt_export.distill.card import Card, ExitCard, MedusaCard, card_path, published_name
from specrt_export.distill.head import Head, Layout
from specrt_export.errors import ExportError, UnsupportedModelError
from specrt_export.exit_file import ExitFile, is_exit, read_exit
from specrt_export.head_tensors import HeadFile, read_tensors, take, token_ids
from specrt_export.medusa_file import MedusaFile, is_medusa, read_medusa
from specrt_profiles.codec import decode

_OTHERS = {"d2t", "t2d", "lm_head.weight", "embed_tokens.weight"}  # tensors of no layer


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleFile(HeadFile):
    """An EAGLE head; matrix: its own output matrix, None for the target's."""

    layout: Layout
    ffn: int
    matrix: torch.Tensor | None


def read_head(path: Path, config: Any, *, vocab_size: int) -> EagleFile | MedusaFile | ExitFile:
    """Read a head for the target that `config` describes; raises `ExportError` for anything that is not one."""
    tensors, card = read_tensors(path), _read_card(path)
    layout = _layout(path, tensors)
    if card is not None and card.layout != layout:
        kind = f"a {layout}" if layout == "medusa" else f"an {layout}"
        raise ExportError(f"{card_path(path)}: expected the card of {kind} head, found {card.layout}")
    if layout == "early-exit":
        return read_exit(
            path, tensors, hidden_size=int(config.hidden_size), num_layers=int(config.num_hidden_layers),
            card=card if isinstance(card, ExitCard) else None,
        )  # fmt: skip
    if layout == "medusa":
        return read_medusa(
            path, tensors, hidden_size=int(config.hidden_size), vocab_size=vocab_size,
            card=card if isinstance(card, MedusaCard) else None,
        )  # fmt: skip
    return _read_eagle(path, tensors, config, layout, vocab_size, card if isinstance(card, Card) else None)


def _read_eagle(
    path: Path, tensors: Mapping[str, torch.Tensor], config: Any, layout: Layout, vocab_size: int, card: Card | None
) -> EagleFile:  # fmt: skip
    gate = next((tensor for name, tensor in tensors.items() if name.endswith("gate_proj.weight")), None)
    ffn = None if gate is None else gate.shape[0]
    try:
        with init_empty_weights(include_buffers=False):
            shapes = {name: tuple(p.shape) for name, p in Head(config, layout, ffn=ffn).named_parameters()}
    except AttributeError as error:
        raise UnsupportedModelError(f"{config.model_type} has layers that heads are not made for ({error})") from None
    if "fc.bias" in shapes and "fc.bias" not in tensors:  # EAGLE-1 heads were published with and without it
        tensors = {**tensors, "fc.bias": torch.zeros(shapes["fc.bias"])}
    found = {name: take(path, tensors, published_name(layout, name), shape) for name, shape in shapes.items()}
    if unknown := sorted(tensors.keys() - {published_name(layout, name) for name in shapes} - _OTHERS):
        raise ExportError(f"{path}: expected the tensors of an {layout} head, found {unknown[0]} as well")
    matrix = tensors.get("lm_head.weight")
    ids = token_ids(path, tensors, vocab_size=vocab_size)
    rows = vocab_size if ids is None else len(ids)
    if matrix is not None:
        take(path, tensors, "lm_head.weight", (rows, int(config.hidden_size)))
    return EagleFile(
        path=path, layout=layout, ffn=ffn or int(config.intermediate_size), tensors=found, token_ids=ids,
        matrix=matrix, card=card,
    )  # fmt: skip


def _read_card(path: Path) -> Card | MedusaCard | ExitCard | None:
    card = card_path(path)
    if not card.exists():
        return None
    try:
        data = json.loads(card.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ExportError(f"{card}: not readable as a head's card ({error}): copy it again, or delete it") from None
    kinds: dict[Any, type[Card | MedusaCard | ExitCard]] = {"medusa": MedusaCard, "early-exit": ExitCard}
    kind = kinds.get(data.get("layout"), Card) if isinstance(data, dict) else Card
    return decode(kind, data, where=str(card), error=ExportError)


def _layout(path: Path, tensors: Mapping[str, torch.Tensor]) -> Layout | Literal["medusa", "early-exit"]:
    if any(name.startswith("midlayer.") for name in tensors):
        return "eagle3"
    if any(name.startswith("layers.0.") for name in tensors):
        return "eagle"
    if is_medusa(tensors):
        return "medusa"
    if is_exit(tensors):
        return "early-exit"
    raise ExportError(f"{path}: expected the layer of an EAGLE head or Medusa heads, found {sorted(tensors)[:3]}")
