"""Refuse what TensorRT would drop, misread or not build, naming the node and the reason.

TensorRT's parser ignores some inputs without an error (Attention's `nonpad_kv_seqlen`) and its cache update drops what
is out of range, so a graph that parses may still compute something else. The rules are those of the operator tables and
headers of TensorRT 10.15 to 11.4 and of the parser of TensorRT-RTX 1.7; where they differ, the narrower one holds.
Attention in fp32 is allowed: whoever builds the plan has to declare it decomposable there, for which ONNX has no
attribute that ONNX Runtime would accept as well.
"""

from collections.abc import Callable, Iterator, Mapping

import onnx_ir as ir

from specrt_export.errors import UnsupportedModelError

_OPSET = 24
_STANDARD = ("", "ai.onnx")
_NOT_PARSED = ("QLinear", "Bitwise", "Sequence", "Optional", "String", "MatMulInteger", "DynamicQuantizeLinear",
               "ConvInteger", "BitShift", "BitCast", "Compress", "Unique", "CumProd", "Multinomial", "Bernoulli", "Det",
               "DFT", "SwiGLU", "LinearAttention", "CausalConvWithState", "AffineGrid", "CenterCropPad", "Col2Im",
               "ConcatFromSequence", "DeformConv", "ImageDecoder", "MaxRoiPool", "MaxUnpool", "MelWeightMatrix",
               "NegativeLogLikelihoodLoss", "RegexFullMatch", "SoftmaxCrossEntropyLoss", "SplitToSequence",
               "TfIdfVectorizer")  # fmt: skip
_FLOATS = {ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16}
_INTEGER_WEIGHTS = {ir.DataType.INT8, ir.DataType.INT4}
_INDICES = {ir.DataType.INT32, ir.DataType.INT64}
_MAX_TOP_K = 3840
_ATTENTION_DROPS = {
    4: "past_key is not taken: keep the cache with TensorScatter",
    5: "past_value is not taken: keep the cache with TensorScatter",
    6: "nonpad_kv_seqlen is ignored without a word: say it in the mask",
}
_ATTENTION_LACKS = {
    "is_causal": "counts from the first slot, which is wrong over a static cache: say it in the mask",
    "softcap": "is not taken: decompose the attention",
    "softmax_precision": "is not taken",
}


def lint_tensorrt(model: ir.Model) -> None:
    """Check a graph of the TensorRT dialect.

    Raises `UnsupportedModelError` for the first node, input or opset that TensorRT would not compute as it is written.
    """
    found = next(_problems(model), None)
    if found is not None:
        raise UnsupportedModelError(f"TensorRT cannot run this graph: {found}")


def _problems(model: ir.Model) -> Iterator[str]:
    graph = model.graph
    opsets = {domain: version for domain, version in model.opset_imports.items() if version is not None}
    if opsets != {"": _OPSET}:
        yield f"expected opset {_OPSET} of the standard operators alone, found {opsets}"
    for node in graph:
        problem = _general(node) or _RULES.get(node.op_type, _no_problem)(graph, node)
        if problem:
            yield f"{node.op_type} ({node.name}): {problem}"
    for value in graph.initializers.values():
        readers = {node.op_type for node, _ in value.uses()}
        if value.dtype in _INTEGER_WEIGHTS and readers != {"DequantizeLinear"}:
            yield f"weight {value.name}: only DequantizeLinear may read {_type(value)}, found {sorted(readers)}"
    for value in graph.inputs:
        if not value.uses():
            yield f"input {value.name}: no node reads it, and TensorRT drops such inputs without a word"
        if value.is_graph_output():
            yield f"input {value.name}: it is an output as well: the cache goes through TensorScatter"
        if str(value.name).startswith("past_") and {node.op_type for node, _ in value.uses()} - {"TensorScatter"}:
            yield f"input {value.name}: only TensorScatter may read a cache that is updated in place"


def _general(node: ir.Node) -> str | None:
    if node.domain not in _STANDARD:
        return f"its domain {node.domain} is not the standard one"
    if node.op_type.startswith(_NOT_PARSED):
        return "TensorRT's parser does not take this operator"
    return None


def _no_problem(_: ir.Graph, __: ir.Node) -> None:
    return None


def _attention(_: ir.Graph, node: ir.Node) -> str | None:
    for place, reason in _ATTENTION_DROPS.items():
        if _input(node, place) is not None:
            return reason
    for name, reason in _ATTENTION_LACKS.items():
        if name in node.attributes and node.attributes[name].value:
            return f"{name} {reason}"
    if len([out for out in node.outputs if out.name]) != 1:
        return f"expected one output, found {len(node.outputs)}"
    if _input(node, 3) is None:
        return "expected a mask: without one, rows see slots that were never written"
    for place, name in enumerate(("query", "key", "value", "mask")):
        if _rank(_input(node, place)) != 4:
            return f"expected a {name} of 4 dimensions, found {_shown(_input(node, place))}"
    return None


def _tensor_scatter(graph: ir.Graph, node: ir.Node) -> str | None:
    cache, start = _input(node, 0), _input(node, 2)
    if cache is None or cache not in graph.inputs:
        return "expected the cache to be an input of the graph itself: it is updated in place"
    if not node.outputs[0].is_graph_output():
        return "expected its result to be an output of the graph: it is updated in place"
    if str(node.outputs[0].name) != str(cache.name).replace("past_", "present_", 1):
        return f"expected the output of {cache.name}, found {node.outputs[0].name}: the two share their memory"
    if node.attributes.get_int("axis", -2) != -2:
        return f"expected axis -2, found {node.attributes.get_int('axis', -2)}"
    if node.attributes.get_string("mode", "linear") != "linear":
        return f"expected mode linear, found {node.attributes.get_string('mode', 'linear')}"
    if cache.shape is None or len(cache.shape) != 4 or not all(isinstance(dim, int) for dim in cache.shape):
        return f"expected a cache of 4 fixed dimensions, found {_shown(cache)}"
    if cache.dtype not in _FLOATS:
        return f"expected a cache of floats, found {_type(cache)}"
    if start is None or start.dtype not in _INDICES:
        return f"expected write_indices of int32 or int64, found {_type(start)}"
    return None


def _rotary(_: ir.Graph, node: ir.Node) -> str | None:
    positions = _input(node, 3)
    if positions is None or positions.dtype != ir.DataType.INT64:
        return f"expected position_ids of int64, found {_type(positions)}"
    if _rank(_input(node, 0)) != 4:
        return f"expected an input of 4 dimensions, found {_shown(_input(node, 0))}"
    return None


def _dequantize(_: ir.Graph, node: ir.Node) -> str | None:
    values, zero = _input(node, 0), _input(node, 2)
    if values is not None and values.dtype in (ir.DataType.UINT4, ir.DataType.UINT2):
        return f"expected symmetric int4, found {_type(values)}"
    if zero is not None and (zero.const_value is None or zero.const_value.numpy().any()):
        return "expected zero points that are all 0"
    return None


def _norm(_: ir.Graph, node: ir.Node) -> str | None:
    found = node.attributes.get_int("stash_type", 1)
    return None if found == 1 else f"expected stash_type 1 (sums in fp32), found {found}"


def _top_k(_: ir.Graph, node: ir.Node) -> str | None:
    count = _input(node, 1)
    known = count.const_value if count is not None else None
    if known is None or known.numpy().max() >= _MAX_TOP_K:
        return f"expected a fixed k below {_MAX_TOP_K}"
    return None


_RULES: Mapping[str, Callable[[ir.Graph, ir.Node], str | None]] = {
    "Attention": _attention,
    "DequantizeLinear": _dequantize,
    "QuantizeLinear": _dequantize,
    "RMSNormalization": _norm,
    "RotaryEmbedding": _rotary,
    "TensorScatter": _tensor_scatter,
    "TopK": _top_k,
}


def _input(node: ir.Node, place: int) -> ir.Value | None:
    return node.inputs[place] if place < len(node.inputs) else None


def _rank(value: ir.Value | None) -> int | None:
    return None if value is None or value.shape is None else len(value.shape)


def _shown(value: ir.Value | None) -> str:
    return "none" if value is None or value.shape is None else str([str(dim) for dim in value.shape])


def _type(value: ir.Value | None) -> str:
    return "none" if value is None or value.dtype is None else value.dtype.name.lower()
