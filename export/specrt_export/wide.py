"""A graph of 16-bit floats in fp32 arithmetic, to compare it with its source on a CPU.

ONNX Runtime's CPU provider has no products in bfloat16, and computes most operators of a float16 graph in fp32 without
rounding in between, so that neither what such a graph costs nor an overflow would be seen. A copy that computes in fp32
and rounds the result of every node to its type shows both; weights keep the values they are stored with.
"""

import onnx_ir as ir

_HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_CONSTANTS = ("Constant", "ConstantOfShape")


def widen(graph: ir.Graph, *, rounded: bool) -> None:
    """Turn every 16-bit float of a graph into fp32, in place; `rounded`: keep the rounding of each node's result."""
    nodes = list(graph)
    for value in list(graph.initializers.values()):
        if value.dtype in _HALVES:
            _then(graph, value, None, [ir.DataType.FLOAT])
    for node in nodes:
        for out in node.outputs:
            if out.dtype in _HALVES:
                _widen_output(graph, node, out, rounded=rounded)
    for value in graph.inputs:
        if value.dtype in _HALVES:
            value.type = ir.TensorType(ir.DataType.FLOAT)


def _widen_output(graph: ir.Graph, node: ir.Node, out: ir.Value, *, rounded: bool) -> None:
    kind = out.dtype
    assert kind is not None
    if node.op_type in _CONSTANTS:
        _then(graph, out, node, [ir.DataType.FLOAT])
        return
    if node.op_type == "Cast":
        node.attributes["to"] = ir.AttrInt64("to", ir.DataType.FLOAT.value)
    out.type = ir.TensorType(ir.DataType.FLOAT)
    if rounded and not out.is_graph_output():
        _then(graph, out, node, [kind, ir.DataType.FLOAT])


def _then(graph: ir.Graph, value: ir.Value, after: ir.Node | None, kinds: list[ir.DataType]) -> None:
    """Put casts between a value and what reads it."""
    readers = [(node, place) for node, place in value.uses()]
    new: list[ir.Node] = []
    source = value
    for kind in kinds:
        new.append(ir.node("Cast", [source], {"to": kind.value}))
        source = new[-1].outputs[0]
        source.shape, source.type = value.shape, ir.TensorType(kind)
    for node, place in readers:
        node.replace_input_with(place, source)
    if after is None:
        graph.insert_before(graph[0], new)
    else:
        graph.insert_after(after, new)
