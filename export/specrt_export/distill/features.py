"""What a target computes over texts: collected once, read many times while a head is trained."""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib.format import open_memmap
from numpy.typing import NDArray
from torch import nn

from specrt_export.decoder import decoder_layers
from specrt_export.distill.shards import TextShard
from specrt_export.errors import UnsupportedModelError

_BATCH = 2048  # tokens
_LARGEST = 65504.0  # of float16: the first tokens of a text may have states beyond
_TOLERANCE = 2e-2  # of the largest logit: bfloat16 has 8 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureShard:
    """Features of one text shard's n tokens.

    features: float16 [n, F], what the target knows after reading each token. last: float16 [n, H], what its output
    matrix reads; the same array where these are the features.
    """

    features: NDArray[np.float16]
    last: NDArray[np.float16]


def taps(layout: str, num_layers: int) -> tuple[int, ...]:
    """Return the layers whose inputs are features, as published heads have it; none for what the output matrix reads.

    EAGLE-3 (arXiv 2503.01840) reads before layers 2, n / 2 and n - 3.
    """
    if layout == "eagle":
        return ()
    low, middle, late = 2, num_layers // 2, num_layers - 3
    if not 0 <= low < middle < late:
        raise UnsupportedModelError(f"an eagle3 head needs a target of 7 layers or more, found {num_layers}")
    return low, middle, late


@contextlib.contextmanager
def watching(model: Any, layers: Sequence[int], *, logits: bool) -> Iterator[dict[str, torch.Tensor]]:
    """Yield a mapping that holds, after each call of the model, the inputs of `layers` and `last` [B, T, H].

    Without `logits` the model computes those of the first position only.
    """
    seen: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Callable[..., tuple[torch.Tensor] | None]:
        def hook(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor] | None:
            seen[name] = inputs[0].detach()
            return (inputs[0][:, :1],) if name == "last" and not logits else None

        return hook

    modules = {"last": model.get_output_embeddings()}
    if layers:
        modules |= {str(layer): decoder_layers(model)[layer] for layer in layers}
    handles = [module.register_forward_pre_hook(keep(name)) for name, module in modules.items()]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def check_output(model: Any, token_ids: Sequence[int]) -> None:
    """Raise `UnsupportedModelError` unless logits are the output matrix times what it reads, and nothing else."""
    capped = getattr(model.config, "final_logit_softcapping", None) is not None
    with torch.inference_mode(), watching(model, (), logits=True) as seen:
        logits = model(input_ids=torch.tensor([list(token_ids)]), use_cache=False).logits.float()
        ours = torch.nn.functional.linear(seen["last"].float(), model.get_output_embeddings().weight.float())
    if capped or float((logits - ours).abs().max()) > _TOLERANCE * float(logits.abs().max()):
        raise UnsupportedModelError(
            f"{type(model).__name__} changes its logits after the output matrix, which heads are not made for"
        )


def collect(
    model: Any, shard: TextShard, layers: Sequence[int], folder: Path, on_tokens: Callable[[int], None]
) -> None:
    """Compute a text shard's features (model in bfloat16) into `folder`, which appears when it is complete."""
    for old in folder.parent.glob(f".{folder.name}.*"):  # of a process that was killed
        shutil.rmtree(old, ignore_errors=True)
    part = folder.with_name(f".{folder.name}.{os.getpid()}")
    part.mkdir(parents=True, exist_ok=True)
    count, hidden = len(shard.tokens), model.get_output_embeddings().weight.shape[1]
    sizes = {"last": hidden, "features": hidden * len(layers)}
    maps = {
        name: open_memmap(part / f"{name}.npy", mode="w+", dtype=np.float16, shape=(count, size))
        for name, size in sizes.items()
        if size
    }
    with torch.inference_mode(), watching(model, layers, logits=False) as seen:
        for group in in_groups(np.diff(shard.offsets), _BATCH):
            ids, places = padded(shard, group)
            model(input_ids=torch.from_numpy(ids), use_cache=False)
            real = torch.from_numpy(places >= 0)
            where = places[places >= 0]
            maps["last"][where] = seen["last"][real].half().numpy()
            if layers:
                joined = torch.cat([seen[str(layer)] for layer in layers], -1).clamp(-_LARGEST, _LARGEST)
                maps["features"][where] = joined[real].half().numpy()
            on_tokens(len(where))
    for array in maps.values():
        array.flush()
    part.rename(folder)


def read_features(folder: Path) -> FeatureShard:
    """Map a shard's features."""
    last = np.load(folder / "last.npy", mmap_mode="r")
    several = folder / "features.npy"
    features = np.load(several, mmap_mode="r") if several.exists() else last
    return FeatureShard(features=features, last=last)


def in_groups(lengths: NDArray[np.int64], num_tokens: int) -> Iterator[NDArray[np.int64]]:
    """Yield groups of documents of similar length, each of at most `num_tokens` with what fills them up (or one)."""
    order = np.argsort(lengths, kind="stable")
    begin = 0
    for end in range(1, len(order) + 1):
        if end == len(order) or lengths[order[end]] * (end + 1 - begin) > num_tokens:
            yield order[begin:end]
            begin = end


def padded(shard: TextShard, group: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return token ids [B, T] of documents, filled up with 0, and each token's place in the shard, -1 for filling."""
    lengths = np.diff(shard.offsets)[group]
    steps = np.arange(int(lengths.max()))
    places = np.where(steps < lengths[:, None], shard.offsets[group][:, None] + steps, -1)
    return np.where(places >= 0, shard.tokens[places], 0).astype(np.int64), places
