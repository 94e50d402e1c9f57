"""Products with one input become one product: fewer calls of kernels, and one rounding of the input for all.

q, k and v become packed for GroupQueryAttention, which takes them so; gate and up are split again behind the product.
What stands between the product and its readers (a bias, a row's scale, the offsets of int4 blocks) is packed as well.
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from specrt_export.editor import Editor

# By operator: the inputs that belong to the weight, and the axis of each that runs over the outputs
_WEIGHTS: dict[str, dict[int, int]] = {
    "MatMul": {1: 1},
    "MatMulNBits": {1: 0, 2: 0, 3: 0},
    "MatMulIntegerToFloat": {1: 1, 3: 0, 6: 0},
    "MatMulInt8": {1: 1, 2: 0},
    "MatMulInt4": {1: 1, 2: 1},
}
_SINKS = ("Add", "Mul")  # element-wise, so that they may come before the split


def pack_products(graph: ir.Graph) -> None:
    """Merge products that share their input, in place; their weights are concatenated when they are written."""
    packer = _Packer(graph)
    for siblings in _siblings(graph):
        packer.merge(siblings)
    packer.sink_splits()
    for node in list(graph):
        if node.op_type == "GroupQueryAttention":
            packer.feed_packed(node)


def _siblings(graph: ir.Graph) -> list[list[ir.Node]]:
    found: dict[object, list[ir.Node]] = defaultdict(list)
    for node in graph:
        weights = _WEIGHTS.get(node.op_type)
        if weights is None or not all(_is_own_weight(graph, node, i) for i in weights):
            continue
        shared = tuple(None if i in weights else value for i, value in enumerate(node.inputs))
        has = tuple(i for i in weights if i < len(node.inputs) and node.inputs[i] is not None)
        options = tuple(sorted((name, a.value) for name, a in node.attributes.items() if name != "N"))
        found[node.op_type, shared, has, options].append(node)
    return [nodes for nodes in found.values() if len(nodes) > 1]


def _is_own_weight(graph: ir.Graph, node: ir.Node, i: int) -> bool:
    value = node.inputs[i] if i < len(node.inputs) else None
    if value is None:
        return True
    alone = value.name in graph.initializers and len(value.uses()) == 1
    return alone and (node.op_type != "MatMul" or len(_shape(value)) == 2)


class _Packer:
    def __init__(self, graph: ir.Graph) -> None:
        self._graph, self._editor = graph, Editor(graph)
        self._sizes: dict[ir.Node, list[int]] = {}  # of the parts, by split

    def merge(self, nodes: Sequence[ir.Node]) -> None:
        """Put one product and a split in the place of several products."""
        first, weights = nodes[0], _WEIGHTS[nodes[0].op_type]
        inputs = [
            self._concatenate([node.inputs[i] for node in nodes], weights[i]) if i in weights else value
            for i, value in enumerate(first.inputs)
        ]
        attributes = {name: attribute.value for name, attribute in first.attributes.items()}
        if "N" in attributes:
            attributes["N"] = sum(node.attributes.get_int("N", 0) for node in nodes)
        sizes = [_shape(node.inputs[1])[weights[1]] for node in nodes]
        self._split(ir.node(first.op_type, inputs, attributes, domain=first.domain), nodes, sizes)

    def sink_splits(self) -> None:
        """Move splits behind what is done alike to each of their outputs."""
        pending = list(self._sizes)
        while pending:
            split = pending.pop()
            readers = [_only_reader(out) for out in split.outputs]
            nodes = [node for node in readers if node is not None]
            if len(set(nodes)) < len(split.outputs) or any(node.op_type != nodes[0].op_type for node in nodes):
                continue
            if nodes[0].op_type not in _SINKS:
                continue
            others = [_other(node, out) for node, out in zip(nodes, split.outputs, strict=True)]
            other = self._packed_operand(split, others)
            if other is None:
                continue
            packed = ir.node(nodes[0].op_type, [split.inputs[0], other])
            pending.append(self._split(packed, nodes, self._sizes[split]))
            merged = [node for node in self._sizes if node in (split, others[0].producer())]
            self._graph.remove(merged, safe=True)
            pending = [node for node in pending if node not in merged]
            for node in merged:
                del self._sizes[node]

    def feed_packed(self, attention: ir.Node) -> None:
        """Give attention the packed q, k and v instead of the three that they are split into."""
        q, k, v = attention.inputs[:3]
        split = q.producer() if q is not None else None
        if split is None or split.op_type != "Split" or tuple(split.outputs) != (q, k, v):
            return
        if all(_only_reader(out) is attention for out in split.outputs):
            for i, value in enumerate((split.inputs[0], None, None)):
                attention.replace_input_with(i, value)
            self._graph.remove(split, safe=True)

    def _packed_operand(self, split: ir.Node, others: Sequence[ir.Value]) -> ir.Value | None:
        """Return what to combine the unsplit value with so that its parts meet `others`, or None."""
        if all(value is others[0] for value in others):
            shape = others[0].shape
            return others[0] if shape is not None and len(shape) > 0 and shape[-1] == 1 else None
        producer = others[0].producer()
        if producer is not None:
            same = self._sizes.get(producer) == self._sizes[split] and tuple(producer.outputs) == tuple(others)
            alone = all(_only_reader(value) is not None for value in others)
            return producer.inputs[0] if same and alone else None
        sizes = self._sizes[split]
        if all(_is_vector(self._graph, value, size) for value, size in zip(others, sizes, strict=True)):
            return self._concatenate(others, 0)
        return None

    def _split(self, packed: ir.Node, nodes: Sequence[ir.Node], sizes: list[int]) -> ir.Node:
        """Insert a node in the place of several whose outputs it holds side by side, and a split into theirs."""
        olds = [node.outputs[0] for node in nodes]
        parts = self._editor.constant("split." + "+".join(map(str, sizes)), np.array(sizes))
        out = packed.outputs[0]
        if olds[0].shape is not None:
            out.shape, out.type = ir.Shape([*list(olds[0].shape)[:-1], sum(sizes)]), olds[0].type
        split = ir.node("Split", [out, parts], {"axis": -1}, num_outputs=len(nodes))
        self._sizes[split] = sizes
        for old, new in zip(olds, split.outputs, strict=True):
            new.name, new.shape, new.type = old.name, old.shape, old.type
        ir.convenience.replace_nodes_and_values(self._graph, nodes[0], nodes, [packed, split], olds, split.outputs)
        return split

    def _concatenate(self, values: Sequence[ir.Value | None], axis: int) -> ir.Value | None:
        given = [value for value in values if value is not None]
        if not given:
            return None
        tensors = [value.const_value for value in given]
        shape = _shape(given[0])
        shape[axis] = sum(_shape(value)[axis] for value in given)
        dtype = given[0].dtype
        assert dtype is not None

        def make() -> NDArray[np.generic]:
            return np.concatenate([tensor.numpy() for tensor in tensors if tensor is not None], axis)

        for value in given:
            self._graph.initializers.pop(str(value.name), None)
        return self._editor.initializer(f"{given[0].name}+{len(given) - 1}", dtype, tuple(shape), make)


def _shape(value: ir.Value | None) -> list[int]:
    assert value is not None
    assert value.shape is not None
    return list(value.shape.numpy())


def _only_reader(value: ir.Value) -> ir.Node | None:
    nodes = [node for node, _ in value.uses()]
    return nodes[0] if len(nodes) == 1 and not value.is_graph_output() else None


def _other(node: ir.Node, value: ir.Value) -> ir.Value:
    other = node.inputs[1] if node.inputs[0] is value else node.inputs[0]
    assert other is not None
    return other


def _is_vector(graph: ir.Graph, value: ir.Value, size: int) -> bool:
    return value.name in graph.initializers and value.shape is not None and list(value.shape) == [size]
