"""Heads as files: published layouts of EAGLE-1, 2 and 3 (arXiv 2401.15077, 2503.01840), read and checked.

A head reads the target's embedding and, unless it brings `lm_head.weight`, rows of the target's output matrix. `d2t`
says which token each row of its own stands for: as in published heads by what has to be added to the row's number, or
by the token's id.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import init_empty_weights
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from specrt_export.distill.card import Card, card_path, fingerprint_of, published_name
from specrt_export.distill.head import Head, Layout
from specrt_export.errors import ExportError, UnsupportedModelError
from specrt_profiles.codec import decode

_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_CONVERT = (
    "import torch; from safetensors.torch import save_file; "
    "save_file(torch.load('{old}', weights_only=True), '{new}')"
)  # fmt: skip
_OTHERS = {"d2t", "t2d", "lm_head.weight", "embed_tokens.weight"}  # tensors of no layer


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadFile:
    """A head as it was read.

    tensors: by parameter of `Head`. token_ids: of the rows of its output matrix, ascending or not; None for all
    tokens in order. matrix: its own output matrix, None for the target's. card: what `specrt distill` wrote beside it.
    """

    path: Path
    layout: Layout
    ffn: int
    tensors: Mapping[str, torch.Tensor]
    token_ids: NDArray[np.int64] | None
    matrix: torch.Tensor | None
    card: Card | None

    def check_target(self, model: Any, name: str) -> None:
        """Raise `ExportError` if there is a card that names another target."""
        if self.card is not None and self.card.target.weights != fingerprint_of(model):
            raise ExportError(
                f"{self.path}: made for {self.card.target.name} with other weights than {name} has: "
                "train one with specrt distill"
            )


def read_head(path: Path, config: Any, *, vocab_size: int) -> HeadFile:
    """Read a head for the target that `config` describes; raises `ExportError` for anything that is not one."""
    tensors, card = _read(path), _read_card(path)
    layout = _layout(path, tensors)
    if card is not None and card.layout != layout:
        raise ExportError(f"{card_path(path)}: expected the card of an {layout} head, found {card.layout}")
    gate = next((tensor for name, tensor in tensors.items() if name.endswith("gate_proj.weight")), None)
    ffn = None if gate is None else gate.shape[0]
    try:
        with init_empty_weights(include_buffers=False):
            shapes = {name: tuple(p.shape) for name, p in Head(config, layout, ffn=ffn).named_parameters()}
    except AttributeError as error:
        raise UnsupportedModelError(f"{config.model_type} has layers that heads are not made for ({error})") from None
    found = {name: _take(path, tensors, published_name(layout, name), shape) for name, shape in shapes.items()}
    if unknown := sorted(tensors.keys() - {published_name(layout, name) for name in shapes} - _OTHERS):
        raise ExportError(f"{path}: expected the tensors of an {layout} head, found {unknown[0]} as well")
    matrix = tensors.get("lm_head.weight")
    ids = token_ids(path, tensors, vocab_size=vocab_size)
    rows = vocab_size if ids is None else len(ids)
    if matrix is not None:
        _take(path, tensors, "lm_head.weight", (rows, int(config.hidden_size)))
    return HeadFile(
        path=path, layout=layout, ffn=ffn or int(config.intermediate_size), tensors=found, token_ids=ids,
        matrix=matrix, card=card,
    )  # fmt: skip


def token_ids(path: Path, tensors: Mapping[str, torch.Tensor], *, vocab_size: int) -> NDArray[np.int64] | None:
    """Return the token of each row by `d2t`, None without; what the offsets do not explain may be the ids."""
    if "d2t" not in tensors:
        return None
    stored = tensors["d2t"].numpy()
    if stored.ndim != 1 or stored.dtype.kind not in "iu" or not len(stored):
        raise ExportError(f"{path}: d2t: expected whole numbers [rows], found {stored.dtype} {list(stored.shape)}")
    known = tensors["t2d"].numpy().astype(bool) if "t2d" in tensors else None
    for ids in (stored + np.arange(len(stored)), stored):
        inside = 0 <= int(ids.min()) <= int(ids.max()) < vocab_size
        if inside and len(np.unique(ids)) == len(ids) and (known is None or _same(ids, known)):
            return ids.astype(np.int64)
    raise ExportError(
        f"{path}: d2t: expected {len(stored)} different tokens below {vocab_size}, as offsets or as ids, "
        f"found numbers from {stored.min()} to {stored.max()}"
    )


def _same(ids: NDArray[np.integer[Any]], known: NDArray[np.bool_]) -> bool:
    return bool(int(ids.max()) < len(known) and known[ids].all() and known.sum() == len(ids))


def _read(path: Path) -> dict[str, torch.Tensor]:
    """Return a file's tensors; those that start with `module.` or `model.` lose that."""
    if path.suffix in _PICKLES:
        line = _CONVERT.format(old=path, new=path.with_suffix(".safetensors"))
        raise ExportError(f'{path}: expected .safetensors, found a PyTorch file: convert it with  python -c "{line}"')
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ExportError(f"{path}: not readable as safetensors ({str(error).splitlines()[0]})") from None
    return {name.removeprefix("module.").removeprefix("model."): tensor for name, tensor in tensors.items()}


def _read_card(path: Path) -> Card | None:
    card = card_path(path)
    if not card.exists():
        return None
    try:
        data = json.loads(card.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ExportError(f"{card}: not readable as a head's card ({error}): copy it again, or delete it") from None
    return decode(Card, data, where=str(card), error=ExportError)


def _layout(path: Path, tensors: Mapping[str, torch.Tensor]) -> Layout:
    if any(name.startswith("midlayer.") for name in tensors):
        return "eagle3"
    if any(name.startswith("layers.0.") for name in tensors):
        return "eagle"
    raise ExportError(f"{path}: expected the layer of an EAGLE head, found {sorted(tensors)[:3]}")


def _take(path: Path, tensors: Mapping[str, torch.Tensor], name: str, shape: tuple[int, ...]) -> torch.Tensor:
    if name not in tensors:
        if name == "fc.bias":  # EAGLE-1 heads were published with and without it
            return torch.zeros(shape)
        raise ExportError(f"{path}: expected {name} {list(shape)}, found no such tensor: copy the whole head again")
    if tuple(tensors[name].shape) != shape:
        raise ExportError(
            f"{path}: expected {name} {list(shape)}, found {list(tensors[name].shape)}: made for another target"
        )
    return tensors[name]
