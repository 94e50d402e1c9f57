"""The graph that ships: only operators that keep rows apart, the contract's names and shapes, one file of weights."""

import hashlib
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch

from specrt_export import graph
from specrt_export.errors import ExportError, UnsupportedModelError
from specrt_profiles.manifest import read_manifest
from specrt_profiles.profile import DialectName
from specrt_profiles.tensors import TensorSpec

INPUTS = (TensorSpec(name="x", dtype="float32", shape=(1, "width", 4)),)
OUTPUTS = (TensorSpec(name="y", dtype="float32", shape=(1, "width", 4)),)


def value(
    name: str, shape: tuple[int | str, ...] = (1, "width", 4), dtype: ir.DataType = ir.DataType.FLOAT
) -> ir.Value:
    return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))


def constant(name: str, array: np.ndarray) -> ir.Value:
    return ir.Value(name=name, const_value=ir.tensor(array, name=name), shape=ir.Shape(array.shape))


def small_graph(*ops: str, x: ir.Value | None = None, y: ir.Value | None = None, **attributes: int) -> ir.Graph:
    """Return x -> ops -> y."""
    x = x or value("x")
    nodes, last = [], x
    for op in ops:
        nodes.append(ir.node(op, [last], attributes))
        last = nodes[-1].outputs[0]
        last.shape, last.type = x.shape, x.type
    y = y or value("y")
    last.name, last.shape, last.type = y.name, y.shape, y.type
    return ir.Graph([x], [last], nodes=nodes, opset_imports={"": 23})


def test_row_wise_operators_pass() -> None:
    graph.lint(small_graph("Sigmoid", "Tanh", "Neg"), INPUTS, OUTPUTS)


@pytest.mark.parametrize(
    "op", ["DynamicQuantizeLinear", "DynamicQuantizeMatMul", "CumSum", "Conv", "ArgMax", "BatchNormalization", "If"]
)
def test_an_operator_that_may_mix_rows_is_refused_by_name(op: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"operator {op} .* may let rows of a call influence each other"):
        graph.lint(small_graph("Tanh", op, "Neg"), INPUTS, OUTPUTS)


@pytest.mark.parametrize(
    ("op", "dialect", "other"),
    [("GroupQueryAttention", "ort", "tensorrt"), *((op, "tensorrt", "ort") for op in ("Attention", "TensorScatter"))],
)
def test_attention_is_that_of_the_dialect(op: str, dialect: DialectName, other: DialectName) -> None:
    graph.lint(small_graph("Tanh", op), INPUTS, OUTPUTS, dialect=dialect)
    with pytest.raises(UnsupportedModelError, match=f"operator {op} .* may let rows"):
        graph.lint(small_graph("Tanh", op), INPUTS, OUTPUTS, dialect=other)


@pytest.mark.parametrize("scale", ["constant", "vector", "computed"])
def test_inputs_are_rounded_with_one_fixed_scale(scale: str) -> None:
    """A scale taken from a call's rows is per-tensor dynamic quantisation: rows would depend on each other."""
    x, zero = value("x"), constant("zero", np.array(128, np.uint8))
    size = ir.node("Abs", [x])
    size.outputs[0].shape, size.outputs[0].type = x.shape, x.type
    fixed = constant("scale", np.array([1.0] * 4 if scale == "vector" else 1.0, np.float32))
    rounded = ir.node("QuantizeLinear", [x, size.outputs[0] if scale == "computed" else fixed, zero])
    back = ir.node("Cast", [rounded.outputs[0]], {"to": 1})
    out = back.outputs[0]
    out.name, out.shape, out.type = "y", x.shape, x.type
    made = ir.Graph([x], [out], nodes=[size, rounded, back], initializers=[zero, fixed], opset_imports={"": 23})
    if scale == "constant":
        graph.lint(made, INPUTS, OUTPUTS)
        return
    with pytest.raises(UnsupportedModelError, match=r"operator QuantizeLinear .* may let rows of a call influence"):
        graph.lint(made, INPUTS, OUTPUTS)


@pytest.mark.parametrize("op", ["Softmax", "TopK"])
@pytest.mark.parametrize(("axis", "fine"), [(-1, True), (2, True), (1, False), (0, False)])
def test_operators_along_an_axis_pass_on_the_last_one_only(op: str, axis: int, fine: bool) -> None:
    if fine:
        graph.lint(small_graph(op, axis=axis), INPUTS, OUTPUTS)
    else:
        with pytest.raises(UnsupportedModelError, match=op):
            graph.lint(small_graph(op, axis=axis), INPUTS, OUTPUTS)


@pytest.mark.parametrize(
    ("axes", "fine"), [([-1], True), ([2], True), ([1], False), ([1, 2], False), ([0], False), (None, False)]
)
def test_reductions_pass_on_the_last_axis_only(axes: list[int] | None, fine: bool) -> None:
    reduced = small_graph("ReduceMean")
    if axes is not None:
        reduced[0].resize_inputs(2)
        reduced[0].replace_input_with(1, constant("axes", np.array(axes)))
    if fine:
        graph.lint(reduced, INPUTS, OUTPUTS)
    else:
        with pytest.raises(UnsupportedModelError, match="ReduceMean"):
            graph.lint(reduced, INPUTS, OUTPUTS)


@pytest.mark.parametrize(
    "x",
    [
        value("other"),
        value("x", dtype=ir.DataType.FLOAT16),
        value("x", dtype=ir.DataType.INT64),
        value("x", (1, "width")),
        value("x", (1, "width", 5)),
        value("x", ("batch", "width", 4)),
    ],
)
def test_another_name_type_or_shape_than_the_contracts_is_refused(x: ir.Value) -> None:
    with pytest.raises(ExportError, match="input"):
        graph.lint(small_graph("Neg", x=x), INPUTS, OUTPUTS)
    y = value("z" if x.name == "other" else "y", tuple(x.shape or ()), x.dtype or ir.DataType.FLOAT)
    with pytest.raises(ExportError, match="output"):
        graph.lint(small_graph("Neg", y=y), INPUTS, OUTPUTS)


def test_a_missing_or_additional_input_is_refused() -> None:
    with pytest.raises(ExportError, match="the graph's inputs are not the contract's"):
        graph.lint(small_graph("Neg"), (), OUTPUTS)
    with pytest.raises(ExportError, match="the graph's inputs are not the contract's"):
        graph.lint(small_graph("Neg"), (*INPUTS, TensorSpec(name="z", dtype="int64", shape=(1,))), OUTPUTS)


def test_a_shipped_graph_passes_the_lint_and_is_only_what_it_needs(tiny_artifact: Path) -> None:
    manifest = read_manifest(tiny_artifact)
    for spec in manifest.engines.values():
        model = ir.load(tiny_artifact / spec.file)
        graph.lint(model.graph, spec.inputs, spec.outputs)
        used = {id(v) for node in model.graph for v in node.inputs if v is not None}
        assert all(id(v) in used for v in model.graph.initializers.values())
        operators = [node.op_type for node in model.graph]
        assert operators.count("GroupQueryAttention") == 2
        assert "Transpose" not in operators


def model_with(**arrays: np.ndarray) -> ir.Model:
    initializers = [constant(name, array) for name, array in arrays.items()]
    node = ir.node("Sum", initializers)
    out = node.outputs[0]
    out.name, out.type, out.shape = "y", ir.TensorType(ir.DataType.FLOAT), ir.Shape(["n"])
    inner = ir.Graph([], [out], nodes=[node], initializers=initializers, opset_imports={"": 23}, name="g")
    return ir.Model(inner, ir_version=10)


def test_weights_are_written_aligned_once_and_hashed(tmp_path: Path) -> None:
    arrays = {"a": np.arange(1000, dtype=np.float32), "b": np.ones(3, np.float32), "c": np.full(70, 2, np.float32)}
    model = model_with(**arrays)
    expected = graph.data_bytes(model)
    written: list[int] = []
    hashes = graph.save(model, tmp_path / "m.onnx", written.append)
    assert sum(written) == expected == 4 * 1070
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(hashes) == ["m.onnx", "m.onnx.data"]
    for name, digest in hashes.items():
        assert hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() == digest
    assert (tmp_path / "m.onnx.data").stat().st_size == 4096 + 4 * 70
    loaded = ir.load(tmp_path / "m.onnx").graph.initializers
    for name, array in arrays.items():
        tensor = loaded[name].const_value
        assert tensor is not None
        np.testing.assert_array_equal(tensor.numpy(), array)
        assert isinstance(tensor, ir.ExternalTensor) == (name != "b")


def test_a_call_reads_weights_once_and_only_rows_of_what_is_gathered_from(tmp_path: Path) -> None:
    arrays = {name: np.zeros(size, np.float32) for name, size in (("table", 500), ("a", 1000), ("b", 1000), ("c", 3))}
    model = model_with(**arrays)
    ids = ir.Value(name="ids")
    weights = model.graph.initializers
    weights["b"].metadata_props[graph.SAME_BYTES] = "a"
    last = model.graph[-1]
    gathers = [ir.node(op, [weights[name], ids]) for op, name in (("Gather", "table"), ("GatherBlockQuantized", "b"))]
    model.graph.insert_before(last, gathers)
    last.replace_input_with(list(last.inputs).index(weights["table"]), None)
    last.replace_input_with(list(last.inputs).index(weights["b"]), None)
    graph.save(model, tmp_path / "m.onnx", lambda _: None)
    assert graph.read_bytes(model) == 4000 + 12
    last.replace_input_with(0, weights["table"])
    assert graph.read_bytes(model) == 4000 + 12 + 2000


def test_two_names_of_the_same_bytes_are_written_once(tmp_path: Path) -> None:
    model = model_with(a=np.arange(1000, dtype=np.float32), b=np.arange(1000, dtype=np.float32).reshape(10, 100))
    model.graph.initializers["b"].metadata_props[graph.SAME_BYTES] = "a"
    assert graph.data_bytes(model) == 4000
    graph.save(model, tmp_path / "m.onnx", lambda _: None)
    assert (tmp_path / "m.onnx.data").stat().st_size == 4000
    loaded = ir.load(tmp_path / "m.onnx").graph.initializers["b"].const_value
    assert loaded is not None
    np.testing.assert_array_equal(loaded.numpy().reshape(-1), np.arange(1000))


def test_chains_of_reshapes_are_merged_and_idle_ones_dropped() -> None:
    x = value("x")
    there = ir.node("Reshape", [x, constant("s", np.array([1, -1, 2, 2]))])
    there.outputs[0].shape, there.outputs[0].type = ir.Shape([1, "width", 2, 2]), x.type
    back = ir.node("Reshape", [there.outputs[0], constant("t", np.array([1, -1, 4]))])
    back.outputs[0].shape, back.outputs[0].type = x.shape, x.type
    last = ir.node("Neg", [back.outputs[0]])
    inner = ir.Graph([x], last.outputs, nodes=[there, back, last], opset_imports={"": 23})
    graph._drop_idle_reshapes(inner)
    assert last.inputs[0] is x


def test_a_reshape_that_copies_sizes_of_its_input_is_not_merged() -> None:
    x = value("x")
    there = ir.node("Reshape", [x, constant("s", np.array([-1, 4]))])
    there.outputs[0].shape, there.outputs[0].type = ir.Shape(["width", 4]), x.type
    back = ir.node("Reshape", [there.outputs[0], constant("t", np.array([0, 2, 2]))])  # width, not x's first size
    last = ir.node("Neg", [back.outputs[0]])
    inner = ir.Graph([x], last.outputs, nodes=[there, back, last], opset_imports={"": 23})
    graph._drop_idle_reshapes(inner)
    assert back.inputs[0] is there.outputs[0]


def test_weights_of_a_half_precision_source_are_written_in_fp32(tmp_path: Path) -> None:
    from specrt_export.weights import attach_weights

    model = model_with(a=np.zeros(100, np.float32))
    tensor = torch.arange(100).to(torch.bfloat16)
    attach_weights(model.graph, {"a": tensor}, "fp32")
    graph.save(model, tmp_path / "m.onnx", lambda _: None)
    np.testing.assert_array_equal(np.fromfile(tmp_path / "m.onnx.data", np.float32), np.arange(100))


def test_two_weights_of_one_storage_become_one_initializer() -> None:
    from specrt_export.weights import attach_weights

    model = model_with(a=np.zeros(100, np.float32), b=np.zeros(100, np.float32), c=np.zeros(100, np.float32))
    tensor = torch.arange(100.0)
    attach_weights(model.graph, {"a": tensor, "b": tensor, "c": tensor.clone()}, "fp32")
    assert list(model.graph.initializers) == ["a", "c"]
    assert [value.name for value in model.graph[0].inputs if value is not None] == ["a", "a", "c"]
