"""Early exits as files: `translator.weight` [H, H] and `translator.bias` [H].

A row h becomes h @ weight + bias, as with `exit_fit.ExitHead`; the weight is the transpose of what torch's linear
layers hold. The metadata's `layer` is the number of layers before the exit.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from specrt_export.distill.card import ExitCard
from specrt_export.errors import ExportError
from specrt_export.exit_fit import ExitHead
from specrt_export.head_tensors import HeadFile, take

_WEIGHT, _BIAS = "translator.weight", "translator.bias"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitFile(HeadFile):
    """An early exit as it was read; its translator is float32."""

    head: ExitHead

    @property
    def layer(self) -> int:
        """Return how many layers run before the exit."""
        return self.head.layer


def is_exit(tensors: Mapping[str, torch.Tensor]) -> bool:
    """Tell whether there is a translator of an early exit."""
    return any(name.startswith("translator.") for name in tensors)


def read_exit(
    path: Path, tensors: Mapping[str, torch.Tensor], *, hidden_size: int, num_layers: int, card: ExitCard | None
) -> ExitFile:  # fmt: skip
    """Return the exit of a file's tensors for a target of so many layers; raises `ExportError`."""
    found = {_WEIGHT: take(path, tensors, _WEIGHT, (hidden_size, hidden_size)),
             _BIAS: take(path, tensors, _BIAS, (hidden_size,))}  # fmt: skip
    if unknown := sorted(tensors.keys() - found.keys()):
        raise ExportError(f"{path}: expected the translator of an early exit, found {unknown[0]} as well")
    layer = _layer(path)
    if not 1 <= layer < num_layers:
        raise ExportError(
            f"{path}: expected an exit after 1 to {num_layers - 1} layers, found {layer}: made for another target"
        )
    if card is not None and card.layer != layer:
        raise ExportError(f"{path}: an exit after {layer} layers, but its card says {card.layer}: copy both again")
    head = ExitHead(layer=layer, translator=found[_WEIGHT].float(), bias=found[_BIAS].float())
    return ExitFile(path=path, tensors=found, token_ids=None, card=card, head=head)


def _layer(path: Path) -> int:
    with safe_open(path, framework="pt") as file:
        text = (file.metadata() or {}).get("layer", "")
    if not text.isdecimal():
        raise ExportError(f"{path}: expected the number of layers before the exit as metadata layer, found {text!r}")
    return int(text)
