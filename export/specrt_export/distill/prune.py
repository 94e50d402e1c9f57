"""A draft from the target itself: its decoder with fewer layers.

Which layers go is measured: a layer whose output points where its input did changes little. ShortGPT (arXiv 2403.03853)
calls 1 - cos(input, output), averaged over tokens, a layer's block influence, and drops the layers with the least.
"""

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cosine_similarity
from transformers import AutoModelForCausalLM

from specrt_export.decoder import decoder_layers
from specrt_export.distill.features import in_groups, padded, watching
from specrt_export.distill.shards import TextShard
from specrt_export.errors import ExportError

_BATCH = 2048  # tokens


def influence(model: Any, shard: TextShard, *, num_tokens: int) -> tuple[float, ...]:
    """Return the block influence of each layer but the last, over the first `num_tokens` tokens of whole documents."""
    count = len(decoder_layers(model))
    documents = max(1, int(np.searchsorted(shard.offsets, num_tokens, side="right")) - 1)
    total, tokens = torch.zeros(count - 1), 0
    with torch.inference_mode(), watching(model, range(count), logits=False) as seen:
        for group in in_groups(np.diff(shard.offsets[: documents + 1]), _BATCH):
            ids, places = padded(shard, group)
            model(input_ids=torch.from_numpy(ids), use_cache=False)
            real = torch.from_numpy(places >= 0)
            inputs = [seen[str(layer)][real].float() for layer in range(count)]
            turns = [
                1 - cosine_similarity(inputs[i], inputs[i + 1], dim=-1).sum() / len(inputs[i]) for i in range(count - 1)
            ]
            total += torch.stack(turns) * len(inputs[0])
            tokens += len(inputs[0])
    return tuple(round(value, 6) for value in (total / tokens).tolist())


def resolve_layers(asked: int | None, num_layers: int) -> int:
    """Return how many of a model's `num_layers` a draft keeps, a quarter unless asked otherwise.

    Raises `ExportError` unless these are at least 2, and fewer than there are.
    """
    kept = max(2, num_layers // 4) if asked is None else asked
    if not 2 <= kept < num_layers:
        raise ExportError(f"expected --layers from 2 on and fewer than the model's {num_layers}, found {kept}")
    return kept


def kept_layers(influences: Sequence[float], num_layers: int) -> tuple[int, ...]:
    """Return the layers of a draft of `num_layers`, ascending: the first, the last, and those with most influence.

    influences: of all layers but the last.
    """
    last = len(influences)
    ranked = sorted(range(1, last), key=lambda layer: (-influences[layer], layer))
    return tuple(sorted({0, last, *ranked[: num_layers - 2]}))


def pruned(model: Any, layers: Sequence[int]) -> Any:
    """Return a copy of a model with only these layers, in float32; all but decoder layers and last norm is frozen."""
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):  # of the file that it was read from; these weights are whole
        del config.quantization_config
    for name, value in config.to_dict().items():  # layer_types and the like
        if "layer" in name and isinstance(value, list) and len(value) == config.num_hidden_layers:
            setattr(config, name, [value[layer] for layer in layers])
    config.num_hidden_layers = len(layers)
    small = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    decoder_layers(small)
    prefix = f"{model.base_model_prefix}.layers."
    numbers = {old: new for new, old in enumerate(layers)}
    state = {}
    for name, tensor in model.state_dict().items():
        number, _, inside = name.removeprefix(prefix).partition(".")
        if not name.startswith(prefix):
            state[name] = tensor
        elif int(number) in numbers:
            state[f"{prefix}{numbers[int(number)]}.{inside}"] = tensor
    small.load_state_dict(state)
    small.generation_config = copy.deepcopy(model.generation_config)
    for ends in (small.get_input_embeddings(), small.get_output_embeddings()):
        ends.requires_grad_(False)
    return small
