"""A graph of 16-bit floats in fp32 arithmetic: with the rounding it has the graph's own bits, without it fp32's."""

from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from specrt_export.wide import widen

X = np.linspace(-3, 3, 64, dtype=np.float32).reshape(1, 64)
WEIGHT = np.random.default_rng(0).standard_normal(64).astype(np.float32)
HALF = ir.DataType.FLOAT16


def typed(node: ir.Node, name: str, kind: ir.DataType) -> ir.Value:
    out = node.outputs[0]
    out.name, out.shape, out.type = name, ir.Shape([1, 64]), ir.TensorType(kind)
    return out


def model(kind: ir.DataType) -> ir.Model:
    """X in fp32 -> half; * weight; + constant; sign; handed out in fp32; and a buffer that is passed through."""
    x = ir.Value(name="x", shape=ir.Shape([1, 64]), type=ir.TensorType(ir.DataType.FLOAT))
    past = ir.Value(name="past", shape=ir.Shape([1, 64]), type=ir.TensorType(kind))
    tensor = ir.tensor(WEIGHT.astype(kind.numpy()), name="w")
    weight = ir.Value(name="w", shape=ir.Shape([64]), type=ir.TensorType(kind), const_value=tensor)
    third = ir.tensor(np.array(1 / 3, np.float32).astype(kind.numpy()))
    constant = ir.node("Constant", [], {"value": third})
    typed(constant, "third", kind).shape = ir.Shape([])
    narrow = ir.node("Cast", [x], {"to": kind.value})
    product = ir.node("Mul", [typed(narrow, "narrow", kind), weight])
    total = ir.node("Add", [typed(product, "product", kind), constant.outputs[0]])
    wave = ir.node("Neg", [typed(total, "total", kind)])
    wide = ir.node("Cast", [typed(wave, "wave", kind)], {"to": ir.DataType.FLOAT.value})
    present = ir.node("Identity", [past])
    outputs = [typed(wide, "y", ir.DataType.FLOAT), typed(present, "present", kind)]
    nodes = [constant, narrow, product, total, wave, wide, present]
    graph = ir.Graph([x, past], outputs, nodes=nodes, initializers=[weight], opset_imports={"": 23}, name="g")
    return ir.Model(graph, ir_version=11)


def run(built: ir.Model, path: Path, past: np.dtype) -> np.ndarray:
    ir.save(built, path)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    found, _ = session.run(None, {"x": X, "past": np.zeros((1, 64), past)})
    return found


@pytest.mark.parametrize("kind", [HALF, ir.DataType.BFLOAT16])
def test_a_rounded_copy_has_the_bits_of_arithmetic_in_its_type(tmp_path: Path, kind: ir.DataType) -> None:
    half = kind.numpy()
    product = X.astype(half) * WEIGHT.astype(half)
    wanted = -(product + np.array(1 / 3, np.float32).astype(half))
    assert wanted.dtype == half
    copy = model(kind)
    widen(copy.graph, rounded=True)
    found = run(copy, tmp_path / "wide.onnx", np.dtype(np.float32))
    np.testing.assert_array_equal(found, wanted.astype(np.float32))


def test_onnx_runtime_itself_rounds_less(tmp_path: Path) -> None:
    """Why the copy is compared with the source: the CPU provider has no kernels in float16 for most operators."""
    found = run(model(HALF), tmp_path / "half.onnx", np.dtype(np.float16))
    assert (found != found.astype(np.float16)).any()


@pytest.mark.parametrize("kind", [HALF, ir.DataType.BFLOAT16])
def test_an_unrounded_copy_rounds_weights_and_constants_alone(tmp_path: Path, kind: ir.DataType) -> None:
    copy = model(kind)
    widen(copy.graph, rounded=False)
    weight, third = (v.astype(kind.numpy()).astype(np.float32) for v in (WEIGHT, np.array(1 / 3, np.float32)))
    found = run(copy, tmp_path / "wide.onnx", np.dtype(np.float32))
    np.testing.assert_allclose(found, -(X * weight + third), atol=1e-6)
