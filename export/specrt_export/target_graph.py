"""Trace a target or draft model: logits of the rows asked for, and features of all rows where a head reads them."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import onnx_ir as ir
import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoModelForCausalLM

from specrt_export.decoder import Call, Dialect, PassThrough, Wrapper, cache_argument, decoder_layers, trace_as
from specrt_profiles.profile import Profile
from specrt_profiles.tensors import DecoderDims, graph_inputs, graph_outputs


def trace(
    config: Any, dims: DecoderDims, profile: Profile, dialect: Dialect, *, taps: Sequence[int] = ()
) -> ir.Model:  # fmt: skip
    """Return the graph of the model that `config` describes.

    It has the inputs and outputs of `specrt_profiles.tensors`, but for best tokens, which come later (`best`); its
    initializers that are weights or buffers of the model hold placeholders under the names of `weights_of`. taps: the
    layers whose inputs are its features, none for what the output matrix reads; without effect where `dims` have no
    features. Raises `UnsupportedModelError` for a model whose attention the dialect cannot do, `ExportError` with
    torch's reason when the model cannot be traced.
    """
    contract = graph_inputs(dims, profile), graph_outputs(dims, replace(profile, output="logits"))
    dtype = getattr(torch, profile.float_type)
    return trace_as(lambda: _Target(skeleton(config, dtype), dims, taps), contract, dims, profile, dialect)


class _Target(Wrapper):
    def __init__(self, decoder: Any, dims: DecoderDims, taps: Sequence[int]) -> None:
        super().__init__(decoder)
        self._cache = cache_argument(decoder)
        self._has_features = bool(dims.feature_size)
        decoder.get_output_embeddings().register_forward_pre_hook(self._pick_rows)
        for layer in taps if self._has_features else ():
            decoder_layers(decoder)[layer].register_forward_pre_hook(self._watch(layer))

    def compute(self, call: Call) -> tuple[torch.Tensor, ...]:
        cache = {self._cache: PassThrough()}
        ids = {name: call.inputs[name] for name in ("input_ids", "position_ids")}
        logits = self.decoder(**ids, use_cache=True, **cache).logits.float()
        if not self._has_features:
            return (logits,)
        last = call.features.pop(-1)
        return logits, (torch.cat(list(call.features.values()), -1) if call.features else last).float()

    def _watch(self, layer: int) -> Callable[[nn.Module, Any], None]:
        def hook(_: nn.Module, inputs: Any) -> None:
            assert self.call is not None
            self.call.features[layer] = inputs[0]

        return hook

    def _pick_rows(self, module: nn.Module, inputs: Any) -> tuple[torch.Tensor]:
        """Give the output matrix only the rows that get logits."""
        self._watch(-1)(module, inputs)
        assert self.call is not None
        return (torch.index_select(inputs[0], 1, self.call.inputs["logits_indices"]),)


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
