"""KV buffers in int8: a quarter of the memory, with one fixed scale per layer, head and channel.

The scales come from what the model's keys (rotated, as they are stored) and values are on text that it writes itself.
Fixed scales keep a stored token independent of all others.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from specrt_export.decoder import cache_argument
from specrt_export.editor import Editor
from specrt_export.parity import as_fp32

Scales = dict[str, NDArray[np.float32]]  # [1, H_kv, 1, D] by name: key.{layer}, value.{layer}

_ATTENTION = "GroupQueryAttention"
_SCALES = {"key": 12, "value": 13}  # inputs of GroupQueryAttention
_OPTIONS: Mapping[str, Any] = {"k_quant_type": "PER_CHANNEL", "v_quant_type": "PER_CHANNEL", "kv_cache_bit_width": 8}
_MARGIN = 1.1  # other texts go a little further
_LEAST = 1e-6


def kv_scales(model: Any, texts: Sequence[Sequence[int]]) -> Scales:
    """Return the step of the stored integers for each head and channel, from what a model computes over texts."""
    cache = _Watching()
    with torch.no_grad(), as_fp32(model):
        for ids in texts:
            cache.reset_to_empty()
            model(input_ids=torch.tensor([list(ids)]), use_cache=True, **{cache_argument(model): cache})
    return {name: np.maximum(_MARGIN * peak.numpy() / 127, _LEAST) for name, peak in cache.largest.items()}


def store_kv_as_int8(graph: ir.Graph, scales: Scales) -> None:
    """Let attention keep keys and values as integers, in place; the graph's KV tensors become int8."""
    editor = Editor(graph)
    for node in list(graph):
        if node.op_type == _ATTENTION:
            layer = str(node.inputs[3].name).rpartition(".")[2]  # type: ignore[union-attr]
            inputs = [*node.inputs, *[None] * (max(_SCALES.values()) + 1 - len(node.inputs))]
            for part, place in _SCALES.items():
                inputs[place] = editor.constant(f"{part}.{layer}.scale", scales[f"{part}.{layer}"])
            _rebuild(editor, node, inputs, {**_options(node), **_OPTIONS})
    _set_kv_type(graph, ir.DataType.INT8)


def store_kv_as_floats(graph: ir.Graph) -> None:
    """Undo `store_kv_as_int8`, where it was done."""
    for node in list(graph):
        if node.op_type == _ATTENTION and "kv_cache_bit_width" in node.attributes:
            inputs = [None if place in _SCALES.values() else value for place, value in enumerate(node.inputs)]
            while inputs[-1] is None:
                inputs.pop()
            kept = {name: value for name, value in _options(node).items() if name not in _OPTIONS}
            _rebuild(Editor(graph), node, inputs, kept)
    _set_kv_type(graph, ir.DataType.FLOAT)


class _Watching(DynamicCache):  # type: ignore[misc]
    """A cache that notes the largest magnitudes [1, H_kv, 1, D] of what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.largest: dict[str, torch.Tensor] = {}

    def reset_to_empty(self) -> None:
        self.layers.clear()

    def update(self, key: torch.Tensor, value: torch.Tensor, layer: int, *args: Any, **kwargs: Any) -> Any:
        for name, rows in ((f"key.{layer}", key), (f"value.{layer}", value)):
            peak = rows.float().abs().amax((0, 2), keepdim=True)
            self.largest[name] = torch.maximum(self.largest[name], peak) if name in self.largest else peak
        return super().update(key, value, layer, *args, **kwargs)


def _options(node: ir.Node) -> dict[str, Any]:
    return {name: attribute.value for name, attribute in node.attributes.items()}


def _rebuild(editor: Editor, node: ir.Node, inputs: Sequence[ir.Value | None], options: Mapping[str, Any]) -> None:
    new = ir.node(_ATTENTION, inputs, options, domain=node.domain, num_outputs=len(node.outputs))
    for old, out in zip(node.outputs, new.outputs, strict=True):
        out.name, out.shape, out.type = old.name, old.shape, old.type
    ir.convenience.replace_nodes_and_values(editor.graph, node, [node], [new], node.outputs, new.outputs)


def _set_kv_type(graph: ir.Graph, dtype: ir.DataType) -> None:
    for value in (*graph.inputs, *graph.outputs):
        if str(value.name).startswith(("past_", "present_")):
            value.type = ir.TensorType(dtype)
