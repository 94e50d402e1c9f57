"""Trace a target or draft model: logits of the rows asked for, and features of all rows where a head reads them."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from accelerate import init_empty_weights
from numpy.typing import NDArray
from torch import nn
from transformers import AutoModelForCausalLM

from specrt_export.decoder import Call, Dialect, PassThrough, Wrapper, cache_argument, decoder_layers, trace_as
from specrt_export.exit_graph import mark_specs
from specrt_export.trimmed import trim_output
from specrt_profiles.profile import Profile
from specrt_profiles.tensors import DecoderDims, graph_inputs, graph_outputs

_LAST, _PICKED = -1, -2  # keys among what is watched, beside the layers: what the output matrix would read, and reads


def trace(
    config: Any, dims: DecoderDims, profile: Profile, dialect: Dialect, *, taps: Sequence[int] = (),
    marked: bool = False, token_ids: NDArray[np.int64] | None = None,
) -> ir.Model:  # fmt: skip
    """Return the graph of the model that `config` describes.

    It has the inputs and outputs of `specrt_profiles.tensors`, but for best tokens, which come later (`best`); its
    initializers that are weights or buffers of the model hold placeholders under the names of `weights_of`. taps: the
    layers whose inputs are its features, none for what the output matrix reads; without effect where `dims` have no
    features. marked: with the outputs of `exit_graph.mark_specs` before the KV buffers. token_ids: those that there are
    logits of, None for all. Raises `UnsupportedModelError` for a model whose attention the dialect cannot do,
    `ExportError` with torch's reason when it cannot be traced.
    """
    outputs = graph_outputs(dims, replace(profile, output="logits"))
    if marked:
        own = len(outputs) - 2 * dims.num_layers
        outputs = (*outputs[:own], *mark_specs(dims), *outputs[own:])
    contract, dtype = (graph_inputs(dims, profile), outputs), getattr(torch, profile.float_type)

    def make() -> Wrapper:
        model = skeleton(config, dtype)
        if token_ids is not None:
            trim_output(model, token_ids)
        return _Target(model, dims, taps, marked=marked)

    return trace_as(make, contract, dims, profile, dialect)


class _Target(Wrapper):
    def __init__(self, decoder: Any, dims: DecoderDims, taps: Sequence[int], *, marked: bool) -> None:
        super().__init__(decoder)
        self._cache = cache_argument(decoder)
        self._has_features, self._taps, self._marked = bool(dims.feature_size), taps, marked
        decoder.get_output_embeddings().register_forward_pre_hook(self._pick_rows)
        layers = decoder_layers(decoder) if taps or marked else ()
        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(self._watch(index))
        if marked:
            list(layers)[-1].register_forward_hook(self._watch_last(dims.num_layers))

    def compute(self, call: Call) -> tuple[torch.Tensor, ...]:
        cache = {self._cache: PassThrough()}
        ids = {name: call.inputs[name] for name in ("input_ids", "position_ids")}
        logits = self.decoder(**ids, use_cache=True, **cache).logits.float()
        seen, out = call.features, [logits]
        if self._has_features:
            tapped = [seen[layer] for layer in self._taps]
            out.append((torch.cat(tapped, -1) if tapped else seen[_LAST]).float())
        if self._marked:
            out += [*(seen[layer] for layer in sorted(seen) if layer > 0), seen[_PICKED]]
        return tuple(out)

    def _watch(self, key: int) -> Callable[[nn.Module, Any], None]:
        def hook(_: nn.Module, inputs: Any) -> None:
            assert self.call is not None
            self.call.features[key] = inputs[0]

        return hook

    def _watch_last(self, key: int) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_: nn.Module, __: Any, out: Any) -> None:
            assert self.call is not None
            self.call.features[key] = out if isinstance(out, torch.Tensor) else out[0]

        return hook

    def _pick_rows(self, module: nn.Module, inputs: Any) -> tuple[torch.Tensor]:
        """Give the output matrix only the rows that get logits."""
        self._watch(_LAST)(module, inputs)
        assert self.call is not None
        picked = torch.index_select(inputs[0], 1, self.call.inputs["logits_indices"])
        self._watch(_PICKED)(module, (picked,))
        return (picked,)


def skeleton(config: Any, dtype: torch.dtype) -> nn.Module:
    """Return the model, every weight a zero stretched to its shape."""
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype, trust_remote_code=False)
    return stretch(model)


def stretch(model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """Give a model without weights zeros stretched to their shapes, of its own types if not of `dtype`."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            zeros = torch.zeros((), dtype=dtype or parameter.dtype).expand(parameter.shape)
            setattr(module, name, nn.Parameter(zeros, requires_grad=False))
    skeleton: nn.Module = model.eval()
    return skeleton
