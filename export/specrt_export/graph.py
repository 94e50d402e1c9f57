"""From a traced decoder to the graph that ships: weights, fusion, lint, one data file."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import onnx_ir as ir
import onnxscript.optimizer
import torch
from onnxscript.rewriter import onnx_fusions

from specrt_export.editor import Editor
from specrt_export.errors import ExportError, UnsupportedModelError
from specrt_export.kv import store_kv_as_floats, store_kv_as_int8
from specrt_export.packing import pack_products
from specrt_export.parity import Round
from specrt_export.shared import find_same
from specrt_export.weight_only import dequantize_before_products
from specrt_export.weights import SAME_BYTES, Chosen, attach_weights
from specrt_export.wide import widen
from specrt_profiles.profile import DialectName, Precision
from specrt_profiles.tensors import TensorSpec

_FOLD_LIMIT = 4096  # values; weights are far larger and must stay lazy
_ALIGNMENT = 4096  # bytes, so that every large tensor can be memory-mapped
_INLINE_LIMIT = 256  # bytes; smaller constants stay in the graph file

_TENSORRT_OPSET = 24

# Operators that treat every row of a call by itself; anything else might let a rejected token change the rows before
# it. Those in _ALONG_AXIS do so if they work along the last axis, those in _ATTENTION the way their dialect emits them.
# The row-exactness test has the final word.
_ALONG_AXIS = frozenset({"ReduceMax", "ReduceMean", "ReduceSum", "Softmax", "TopK"})
_FIXED_SCALE = {"QuantizeLinear": 1, "MatMulIntegerToFloat": 2}  # the input that has to be one constant
_GATHERS = frozenset({"Gather", "GatherBlockQuantized"})
_ATTENTION: dict[DialectName, frozenset[str]] = {
    "ort": frozenset({"GroupQueryAttention"}),
    "tensorrt": frozenset({"Attention", "RotaryEmbedding", "TensorScatter"}),
}
_ROW_WISE = _ALONG_AXIS | {
    "Abs", "Add", "And", "Cast", "Ceil", "Clip", "Concat", "Constant", "Cos", "DequantizeLinear", "Div", "Equal", "Erf",
    "Exp", "Expand",
    "Floor", "FusedMatMul", "Gather", "GatherBlockQuantized", "GatherElements", "GatherND", "Gelu", "Gemm", "Greater",
    "GreaterOrEqual", "Identity", "LayerNormalization", "Less", "LessOrEqual", "Log", "MatMul",
    "MatMulIntegerToFloat", "MatMulNBits", "Max", "Min", "Mod", "Mul", "Neg", "Not", "Or", "Pow", "QuantizeLinear",
    "RMSNormalization", "Range", "Reciprocal", "Relu", "Reshape", "Round", "ScatterElements", "Shape", "Sigmoid",
    "Sign", "Sin", "Slice", "Softplus", "Split", "Sqrt", "Squeeze", "Sub", "Swish", "Tanh", "Tile", "Transpose",
    "Unsqueeze", "Where",
}  # fmt: skip


def finish(
    model: ir.Model,
    weights: dict[str, torch.Tensor],
    precision: Precision,
    chosen: Chosen,
    *,
    dialect: DialectName = "ort",
) -> dict[str, Round]:
    """Attach the weights to a traced model and simplify it in place; return the rounding of those quantised.

    dialect: the TensorRT one keeps to standard operators, at opset 24.
    """
    rounding = attach_weights(model.graph, weights, precision, chosen, dialect=dialect)
    if dialect == "tensorrt":
        _split_fused_products(model.graph)
    onnxscript.optimizer.optimize_ir(model, input_size_limit=_FOLD_LIMIT, output_size_limit=_FOLD_LIMIT)
    onnx_fusions.fuse(model)
    _widen_mixed_norms(model.graph)
    _drop_idle_reshapes(model.graph)
    _remove_unused(model)  # what nobody reads would count as a reader
    for node in model.graph:
        node.metadata_props.clear()  # torch keeps stack traces there, with the paths of this machine
    pack_products(model.graph)
    dequantize_before_products(model.graph)
    _remove_unused(model)
    if chosen.kv:
        store_kv_as_int8(model.graph, chosen.kv)
    if dialect == "ort":
        model.opset_imports.setdefault("com.microsoft", 1)
    else:  # what opset 24 changed in the operators of 23 are additional types and inputs
        model.opset_imports[""] = _TENSORRT_OPSET
    return rounding


def save_in_fp32_arithmetic(path: Path, twin: Path, *, rounded: bool = False) -> None:
    """Write the model at `path` once more, as `twin` over the same weights file, with nothing rounded but the weights.

    rounded: round the result of every node to the type it has, as an engine does that computes in that type, and what
    attention stores to the type of its buffers.
    """
    model = ir.load(path)
    for node in list(model.graph):
        if node.op_type == "MatMulNBits":
            node.attributes["accuracy_level"] = ir.AttrInt64("accuracy_level", 0)
        elif node.op_type == "MatMulIntegerToFloat":
            (integers, matrix, _, scales), bias = node.inputs[:4], node.inputs[6:]
            assert integers is not None
            source = integers.producer()
            assert source is not None
            wide = ir.node("DequantizeLinear", [matrix, scales], {"axis": 1})
            new = [wide, ir.node("MatMul", [source.inputs[0], wide.outputs[0]])]
            new += [ir.node("Add", [new[-1].outputs[0], *bias])] if bias else []
            Editor(model.graph).replace(node, *new)
    if not rounded:
        store_kv_as_floats(model.graph)
    widen(model.graph, rounded=rounded)
    ir.save(model, twin)


def lint(
    graph: ir.Graph, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...], *, dialect: DialectName = "ort"
) -> None:
    """Check the graph against the contract and the operators that keep rows apart.

    Raises `UnsupportedModelError` for an operator that may mix rows, `ExportError` for another name or shape.
    """
    for node in graph:
        if (
            node.op_type not in _ROW_WISE | _ATTENTION[dialect]
            or (node.op_type in _ALONG_AXIS and not _on_last_axis(node))
            or (node.op_type == "DequantizeLinear" and not _is_weight(graph, node.inputs[0]))
            or (node.op_type in _FIXED_SCALE and not _is_constant(graph, node.inputs[_FIXED_SCALE[node.op_type]]))
        ):
            raise UnsupportedModelError(
                f"operator {node.op_type} ({node.name}) may let rows of a call influence each other"
            )
    for what, values, specs in (("input", graph.inputs, inputs), ("output", graph.outputs, outputs)):
        found = [(value.name, _dtype(value), _dims(value)) for value in values]
        wanted = [(spec.name, spec.dtype, len(spec.shape)) for spec in specs]
        if [(name, dtype, len(shape)) for name, dtype, shape in found] != wanted:
            raise ExportError(f"the graph's {what}s are not the contract's: expected {wanted[:8]}, found {found[:8]}")
        for (name, _, shape), spec in zip(found, specs, strict=True):
            fixed = [(ours, theirs) for ours, theirs in zip(shape, spec.shape, strict=True) if isinstance(theirs, int)]
            if any(ours != theirs for ours, theirs in fixed):
                raise ExportError(f"the graph's {what} {name} has shape {shape}, expected {list(spec.shape)}")


def save(
    model: ir.Model, path: Path, on_bytes: Callable[[int], None], *, shared: Sequence[ir.ExternalTensor] = ()
) -> dict[str, str]:
    """Write `path` and `path`.data, one tensor after the other; return the SHA-256 of both files by name.

    `on_bytes` is told of every piece written. At most one weight is held in memory besides the source. What lies in a
    file beside it stays there. shared: tensors in other files beside it; what has their bytes is read from there and
    not written again.
    """
    data = path.with_name(path.name + ".data")
    digest = hashlib.sha256()
    offset = 0
    places: dict[str, tuple[int, int]] = {}
    with data.open("wb") as file:
        for name, value in model.graph.initializers.items():
            tensor = value.const_value
            assert tensor is not None
            if tensor.nbytes <= _INLINE_LIMIT or isinstance(tensor, ir.ExternalTensor):
                continue
            if (same := find_same(tensor, shared)) is not None:
                value.const_value = same
                continue
            key = value.metadata_props.pop(SAME_BYTES, name)
            if key not in places:
                padding, content = bytes(-offset % _ALIGNMENT), tensor.tobytes()
                for piece in (padding, content):
                    file.write(piece)
                    digest.update(piece)
                places[key] = (offset + len(padding), len(content))
                offset += len(padding) + len(content)
                on_bytes(len(content))
            start, length = places[key]
            value.const_value = ir.ExternalTensor(
                data.name,
                start,
                length,
                tensor.dtype,
                shape=ir.Shape(tensor.shape.numpy()),
                name=name,
                base_dir=path.parent,
            )
    ir.save(model, path)
    return {data.name: digest.hexdigest(), path.name: hashlib.sha256(path.read_bytes()).hexdigest()}


def data_bytes(model: ir.Model) -> int:
    """Return how many bytes `save` will write for the weights, alignment left out."""
    sizes = {
        value.metadata_props.get(SAME_BYTES, name): value.const_value.nbytes
        for name, value in model.graph.initializers.items()
        if value.const_value is not None
    }
    return sum(size for size in sizes.values() if size > _INLINE_LIMIT)


def read_bytes(model: ir.Model) -> int:
    """Return the bytes of weights that a call of a saved model reads, each stored value once.

    Tables that are only gathered from (an embedding that is not the output matrix as well) are left out: of them a call
    reads a row per token.
    """
    sizes: dict[str, int] = {}
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        if tensor is not None and {node.op_type for node, _ in value.uses()} - _GATHERS:
            place = f"{tensor.location} {tensor.offset}" if isinstance(tensor, ir.ExternalTensor) else name
            sizes[place] = tensor.nbytes
    return sum(sizes.values())


def _split_fused_products(graph: ir.Graph) -> None:
    """Write products with a table that is also gathered from in standard operators; engines fold the transposition."""
    for node in list(graph):
        if node.op_type == "FusedMatMul":
            flipped = ir.node("Transpose", [node.inputs[1]], {"perm": [1, 0]})
            Editor(graph).replace(node, flipped, ir.node("MatMul", [node.inputs[0], flipped.outputs[0]]))


def _widen_mixed_norms(graph: ir.Graph) -> None:
    """Give norms with weights in fp32 an input in fp32: ONNX Runtime has none that mixes types."""
    for node in list(graph):
        if node.op_type != "RMSNormalization":
            continue
        x, scale = node.inputs[:2]
        if x is not None and scale is not None and x.dtype != scale.dtype == ir.DataType.FLOAT:
            wide = ir.node("Cast", [x], {"to": ir.DataType.FLOAT.value})
            wide.outputs[0].shape, wide.outputs[0].type = x.shape, scale.type
            graph.insert_before(node, wide)
            node.replace_input_with(0, wide.outputs[0])


def _is_constant(graph: ir.Graph, value: ir.Value | None) -> bool:
    """Tell whether a scale is fixed; a scale computed from all rows of a call would make them depend on each other."""
    return (
        value is not None and value.name in graph.initializers and value.shape is not None and value.shape.rank() == 0
    )


def _is_weight(graph: ir.Graph, value: ir.Value | None) -> bool:
    return value is not None and value.name in graph.initializers


def _on_last_axis(node: ir.Node) -> bool:
    axes = [node.attributes.get_int("axis", -1)]
    if node.op_type.startswith("Reduce"):
        given = node.inputs[1].const_value if len(node.inputs) > 1 and node.inputs[1] is not None else None
        axes = [] if given is None else given.numpy().reshape(-1).tolist()
    rank = len(node.inputs[0].shape) if node.inputs[0] is not None and node.inputs[0].shape is not None else 0
    return axes in ([-1], [rank - 1])


def _drop_idle_reshapes(graph: ir.Graph) -> None:
    """Merge chains of reshapes and drop those that give back the shape they were given."""
    for node in list(graph):
        if node.op_type != "Reshape" or node.inputs[0] is None:
            continue
        source = node.inputs[0]
        producer = None if _copies_dims(node) else source.producer()
        while producer is not None and producer.op_type == "Reshape" and producer.inputs[0] is not None:
            source = producer.inputs[0]
            producer = source.producer()
        node.replace_input_with(0, source)
        out = node.outputs[0]
        if source.shape is not None and source.shape == out.shape and out not in graph.outputs:
            out.replace_all_uses_with(source)


def _copies_dims(reshape: ir.Node) -> bool:
    """Tell whether a 0 in the new shape stands for the input's own size there (or might)."""
    shape = reshape.inputs[1].const_value if reshape.inputs[1] is not None else None
    return shape is None or 0 in shape.numpy()


def _remove_unused(model: ir.Model) -> None:
    from onnx_ir.passes import common

    common.RemoveUnusedNodesPass()(model)
    common.RemoveUnusedOpsetsPass()(model)


def _dtype(value: ir.Value) -> str:
    names = {"FLOAT": "float32", "FLOAT16": "float16", "BFLOAT16": "bfloat16", "INT64": "int64", "INT32": "int32",
             "INT8": "int8", "BOOL": "bool"}  # fmt: skip
    return names.get(value.dtype.name, value.dtype.name) if value.dtype is not None else "unknown"


def _dims(value: ir.Value) -> list[int | str]:
    shape = value.shape if value.shape is not None else ()
    return [d if isinstance(d, int) else str(d) for d in shape]
