"""Products that share their input are merged, and still compute the same."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import numpy_helper, parser

from specrt_export.packing import pack_products

HEAD = '<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]> g '
X = np.random.default_rng(0).standard_normal((1, 6, 64)).astype(np.float32)


def build(text: str, **weights: NDArray[Any]) -> onnx.ModelProto:
    model = parser.parse_model(HEAD + text)
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    return onnx.shape_inference.infer_shapes(model)


def packed(model: onnx.ModelProto) -> onnx.ModelProto:
    inner = ir.from_proto(model)
    pack_products(inner.graph)
    return ir.to_proto(inner)


def run(model: onnx.ModelProto) -> list[NDArray[np.float32]]:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": X})  # type: ignore[no-any-return]


def operators(model: onnx.ModelProto) -> Counter[str]:
    return Counter(node.op_type for node in model.graph.node)


def normal(*shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def assert_same(model: onnx.ModelProto, **counts: int) -> onnx.ModelProto:
    merged = packed(model)
    onnx.checker.check_model(merged)
    for ours, wanted in zip(run(merged), run(model), strict=True):
        np.testing.assert_allclose(ours, wanted, rtol=1e-5, atol=1e-5)
    found = operators(merged)
    assert {name: found[name] for name in counts} == counts
    return merged


def test_products_and_biases_of_one_input_become_one() -> None:
    text = """(float[1, 6, 64] x) => (float[1, 6, 32] y) {
        a = MatMul(x, wa)  b = MatMul(x, wb)  c = MatMul(x, wc)
        p = Add(a, ba)  q = Add(b, bb)  r = Add(bc, c)
        s = Sigmoid(p)  t = Mul(s, q)  u = Sub(r, p)  y = Concat<axis = -1>(t, u)
    }"""
    weights = {"wa": normal(64, 16), "wb": normal(64, 16), "wc": normal(64, 16)}
    biases = {"ba": normal(16), "bb": normal(16) + 1, "bc": normal(16) + 2}
    assert_same(build(text, **weights, **biases), MatMul=1, Add=1, Split=1)


def test_parts_of_other_sizes_keep_their_order() -> None:
    text = """(float[1, 6, 64] x) => (float[1, 6, 8] y, float[1, 6, 24] z) {
        b = MatMul(x, wb)  a = MatMul(x, wa)  y = Relu(a)  z = Relu(b)
    }"""
    assert_same(build(text, wa=normal(64, 8), wb=normal(64, 24)), MatMul=1, Split=1, Relu=2)


def test_a_scale_per_row_is_applied_before_the_split() -> None:
    text = """(float[1, 6, 64] x) => (float[1, 6, 8] y, float[1, 6, 16] z) {
        row = ReduceMax<keepdims = 1>(x, last)
        a = MatMul(x, wa)  b = MatMul(x, wb)  c = Mul(a, row)  d = Mul(b, row)  y = Relu(c)  z = Relu(d)
    }"""
    model = build(text, wa=normal(64, 8), wb=normal(64, 16), last=np.array([-1]))
    assert_same(model, MatMul=1, Mul=1, Split=1)


def test_one_factor_for_all_that_is_no_scale_per_row_stays_behind_the_split() -> None:
    text = """(float[1, 6, 64] x) => (float[1, 6, 8] y, float[1, 6, 8] z) {
        a = MatMul(x, wa)  b = MatMul(x, wb)  c = Mul(a, f)  d = Mul(b, f)  y = Relu(c)  z = Relu(d)
    }"""
    assert_same(build(text, wa=normal(64, 8), wb=normal(64, 8) + 1, f=normal(8)), MatMul=1, Mul=2, Split=1)


@pytest.mark.parametrize("bits", [4, 8])
def test_blocks_and_their_offsets_become_one(bits: int) -> None:
    text = f"""(float[1, 6, 64] x) => (float[1, 6, 8] y, float[1, 6, 16] z) {{
        blocks = Reshape(x, split)  sums = ReduceSum<keepdims = 0>(blocks, last)
        a = com.microsoft.MatMulNBits<K = 64, N = 8, bits = {bits}, block_size = 32, accuracy_level = 4>(x, pa, sa)
        b = com.microsoft.MatMulNBits<K = 64, N = 16, bits = {bits}, block_size = 32, accuracy_level = 4>(x, pb, sb)
        c = MatMul(sums, oa)  d = MatMul(sums, ob)  e = Add(a, c)  f = Add(b, d)  y = Relu(e)  z = Relu(f)
    }}"""
    rng, weights = np.random.default_rng(1), {}
    for name, rows in (("a", 8), ("b", 16)):
        weights[f"p{name}"] = rng.integers(0, 256, (rows, 2, 4 * bits)).astype(np.uint8)
        weights[f"s{name}"] = rng.random((rows, 2)).astype(np.float32)
        weights[f"o{name}"] = normal(2, rows)
    model = build(text, **weights, split=np.array([1, -1, 2, 32]), last=np.array([-1]))
    assert_same(model, MatMulNBits=1, MatMul=1, Add=1, Split=1, Relu=2)


def test_weights_that_are_used_elsewhere_or_differ_in_kind_are_left_alone() -> None:
    text = """(float[1, 6, 64] x) => (float[1, 6, 64] y, float[1, 6, 64] z, float[1, 6, 64] v) {
        a = MatMul(x, wa)  y = MatMul(a, wa)
        b = MatMul(x, wb)  z = Relu(b)
        v = MatMul(x, wc)
    }"""
    model = build(text, wa=normal(64, 64), wb=normal(64, 64) + 1, wc=normal(1, 64, 64))
    assert_same(model, MatMul=4, Split=0)


def test_attention_takes_what_is_packed(tiny_artifact: Path) -> None:
    graph = onnx.load(str(tiny_artifact / "target.onnx"), load_external_data=False).graph
    attention = [node for node in graph.node if node.op_type == "GroupQueryAttention"]
    assert len(attention) == 2
    assert all(list(node.input[1:3]) == ["", ""] for node in attention)
    assert operators(onnx.load(str(tiny_artifact / "target.onnx"), load_external_data=False))["Split"] == 2
