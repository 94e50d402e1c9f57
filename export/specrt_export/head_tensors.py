"""What files of heads have in common: safetensors, which tokens their rows stand for, which target they are of."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from specrt_export.distill.card import TrainedCard, fingerprint_of
from specrt_export.errors import ExportError

_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_CONVERT = (
    "import torch; from safetensors.torch import save_file; "
    "save_file(torch.load('{old}', weights_only=True), '{new}')"
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadFile:
    """A head as it was read.

    tensors: by parameter of the module that runs them. token_ids: of the rows of its output matrix, ascending or not;
    None for all tokens in order. card: what `specrt distill` wrote beside it.
    """

    path: Path
    tensors: Mapping[str, torch.Tensor]
    token_ids: NDArray[np.int64] | None
    card: TrainedCard | None

    def check_target(self, model: Any, name: str) -> None:
        """Raise `ExportError` if there is a card that names another target."""
        if self.card is not None and self.card.target.weights != fingerprint_of(model):
            raise ExportError(
                f"{self.path}: made for {self.card.target.name} with other weights than {name} has: "
                "train one with specrt distill"
            )


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
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


def take(path: Path, tensors: Mapping[str, torch.Tensor], name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor; raises `ExportError` where it is missing or has another shape."""
    if name not in tensors:
        raise ExportError(f"{path}: expected {name} {list(shape)}, found no such tensor: copy the whole head again")
    if tuple(tensors[name].shape) != shape:
        raise ExportError(
            f"{path}: expected {name} {list(shape)}, found {list(tensors[name].shape)}: made for another target"
        )
    return tensors[name]
