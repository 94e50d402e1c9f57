"""Block-wise quantisation: error bounds, and that ONNX Runtime reads the blocks as we do."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from specrt_export.quantize import (
    BLOCK,
    dequantize,
    dequantize_offset,
    dequantize_rows,
    quantize,
    quantize_offset,
    quantize_rows,
)

Array = NDArray[np.float32]


def matrix(rows: int, columns: int, *, seed: int = 0) -> Array:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((rows, columns)) * rng.lognormal(0, 2, (rows, 1))).astype(np.float32)


def steps(weight: Array, bits: int) -> Array:
    """Return the distance between neighbouring values [N, K] of each weight's block."""
    rows, columns = weight.shape
    padded = np.zeros((rows, -(-columns // BLOCK) * BLOCK), np.float32)
    padded[:, :columns] = weight
    blocks = padded.reshape(rows, -1, BLOCK)
    spans = np.maximum(blocks.max(-1), 0) - np.minimum(blocks.min(-1), 0)
    result: Array = np.repeat(spans / (2**bits - 1), BLOCK, axis=-1)[:, :columns]
    return result


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("columns", [1, 31, 32, 33, 64, 96, 160, 200])
def test_no_value_is_off_by_more_than_a_step(bits: int, columns: int) -> None:
    weight = matrix(7, columns)
    error = np.abs(dequantize(quantize(weight, bits=bits), bits=bits, columns=columns) - weight)
    assert np.all(error <= 1.001 * steps(weight, bits) + 1e-12)
    assert error.mean() <= 0.3 * steps(weight, bits).mean()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("sign", [-1, 1])
def test_blocks_of_one_sign_are_no_exception(bits: int, sign: int) -> None:
    weight = sign * (5 + np.random.default_rng(0).random((4, 64), np.float32))
    error = np.abs(dequantize(quantize(weight, bits=bits), bits=bits, columns=64) - weight)
    assert np.all(error <= 0.51 * steps(weight, bits))


@pytest.mark.parametrize("bits", [4, 8])
def test_zeros_stay_zeros(bits: int) -> None:
    weight = matrix(5, 96)
    weight[:, ::3] = 0
    weight[2] = 0
    weight[3, :32] = 5 + np.abs(weight[3, :32])
    weight[3, 7] = 0
    weight[4, 32:64] = -5 - np.abs(weight[4, 32:64])
    weight[4, 40] = 0
    found = dequantize(quantize(weight, bits=bits), bits=bits, columns=96)
    assert np.all(found[weight == 0] == 0)
    assert np.all(np.isfinite(found))


@pytest.mark.parametrize("bits", [4, 8])
def test_the_largest_and_smallest_of_a_block_are_within_half_a_step(bits: int) -> None:
    weight = matrix(9, 64)
    found = dequantize(quantize(weight, bits=bits), bits=bits, columns=64).reshape(9, 2, 32)
    blocks, half = weight.reshape(9, 2, 32), 0.51 * steps(weight, bits).reshape(9, 2, 32)[..., 0]
    assert np.all(np.abs(found.max(-1) - np.maximum(blocks.max(-1), 0)) <= half)
    assert np.all(np.abs(found.min(-1) - np.minimum(blocks.min(-1), 0)) <= half)


@pytest.mark.parametrize(("bits", "bound"), [(4, 0.09), (8, 0.006)])
def test_more_bits_mean_smaller_errors(bits: int, bound: float) -> None:
    weight = np.random.default_rng(1).standard_normal((64, 256)).astype(np.float32)
    error = dequantize(quantize(weight, bits=bits), bits=bits, columns=256) - weight
    assert np.linalg.norm(error) / np.linalg.norm(weight) <= bound


@pytest.mark.parametrize(("columns", "packed", "zero_points"), [(32, 1, 1), (64, 2, 1), (70, 3, 2), (160, 5, 3)])
def test_four_bit_shapes_hold_for_odd_numbers_of_blocks(columns: int, packed: int, zero_points: int) -> None:
    blocks = quantize(matrix(3, columns), bits=4)
    assert blocks.packed.shape == (3, packed, 16)
    assert blocks.scales.shape == (3, packed)
    assert blocks.zero_points.shape == (3, zero_points)


def run(op: str, inputs: dict[str, NDArray[Any]], constants: dict[str, NDArray[Any]], **attributes: int) -> Array:
    """Run one operator of com.microsoft on ONNX Runtime."""
    import onnx
    import onnxruntime as ort
    from onnx import helper, numpy_helper

    node = helper.make_node(op, [*inputs, *constants], ["y"], domain="com.microsoft", **attributes)
    if op == "GatherBlockQuantized":
        node.input[:] = ["data", "ids", "scales", "zero_points"]
    values = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for n, a in inputs.items()
    ]
    graph = helper.make_graph(
        [node],
        "one",
        values,
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    result: Array = session.run(None, inputs)[0]
    return result


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("columns", [32, 64, 70, 160])
@pytest.mark.parametrize(("accuracy_level", "tolerance"), [(0, 1e-5), (4, 0.02)])
def test_onnx_runtime_multiplies_by_what_we_dequantise(
    bits: int, columns: int, accuracy_level: int, tolerance: float
) -> None:
    weight, x = matrix(24, columns), matrix(6, columns, seed=1)
    blocks = quantize(weight, bits=bits)
    constants = {"packed": blocks.packed, "scales": blocks.scales, "zero_points": blocks.zero_points}
    found = run(
        "MatMulNBits", {"x": x}, constants, K=columns, N=24, bits=bits, block_size=BLOCK, accuracy_level=accuracy_level
    )
    dequantized = dequantize(blocks, bits=bits, columns=columns)
    scale = np.abs(x).max(-1, keepdims=True) * np.abs(dequantized).sum(-1)
    assert np.all(np.abs(found - x @ dequantized.T) <= tolerance * scale)


@pytest.mark.parametrize("columns", [32, 64, 70])
def test_onnx_runtime_gathers_the_rows_we_dequantise(columns: int) -> None:
    weight = matrix(24, columns)
    blocks = quantize(weight, bits=8)
    ids = np.array([[3, 0, 23, 3]])
    constants = {
        "data": blocks.packed.reshape(24, -1),
        "scales": blocks.scales,
        "zero_points": blocks.zero_points,
    }
    found = run(
        "GatherBlockQuantized", {"ids": ids}, constants, bits=8, block_size=BLOCK, gather_axis=0, quantize_axis=1
    )
    np.testing.assert_array_equal(found[..., :columns], dequantize(blocks, bits=8, columns=columns)[ids])


def test_rows_are_within_half_a_step_and_zeros_stay_zeros() -> None:
    weight = np.random.default_rng(0).standard_normal((5, 40)).astype(np.float32)
    weight[2] = 0
    weight[3, 7] = -50
    found = quantize_rows(weight)
    assert found.values.dtype == np.int8
    assert np.all(np.abs(dequantize_rows(found) - weight) <= found.scales[:, None] / 2 * 1.0001)
    assert np.abs(found.values).max(1).tolist() == [127, 127, 0, 127, 127]


def four_bit(rows: int, blocks: int, *, centred: bool, levels: int = 16) -> Array:
    """Return a matrix as a 4-bit checkpoint gives it: scale * q + minimum, both in half precision, per block."""
    rng = np.random.default_rng(2)
    scale = rng.lognormal(-4, 1, (rows, blocks, 1)).astype(np.float16).astype(np.float32)
    low = -8 * scale if centred else -(scale * rng.uniform(2, 14, scale.shape)).astype(np.float16).astype(np.float32)
    q = rng.integers(0, levels, (rows, blocks, BLOCK)).astype(np.float32)
    return (scale * q + low).astype(np.float32).reshape(rows, -1)


@pytest.mark.parametrize("centred", [True, False])
def test_a_matrix_that_was_4_bit_before_keeps_its_values(centred: bool) -> None:
    weight = four_bit(40, 6, centred=centred)
    found = quantize_offset(weight)
    assert np.abs(dequantize_offset(found) - weight).max() <= 4e-6 * np.abs(weight).max()
    if centred:
        assert not found.offsets.any(), "a grid that contains 0 needs no offset"


def test_a_matrix_that_was_8_bit_before_keeps_its_values_to_the_bit() -> None:
    rng = np.random.default_rng(3)
    scale = rng.lognormal(-4, 1, (40, 3, 1)).astype(np.float16).astype(np.float32)
    values = rng.integers(-127, 128, (40, 3, BLOCK)).astype(np.float32)
    values[..., 5] = 127 * rng.choice([-1, 1], (40, 3))  # as GGUF Q8_0 makes its blocks
    values[7] = 0
    weight = (scale * values).reshape(40, -1)
    np.testing.assert_array_equal(dequantize(quantize(weight, bits=8), bits=8, columns=96), weight)
    weight[2, 40] *= 1.01  # off the grid: rounded, and only its block
    error = np.abs(dequantize(quantize(weight, bits=8), bits=8, columns=96) - weight)
    assert error[2, 32:64].any()
    error[2, 32:64] = 0
    assert not error.any()


def test_blocks_that_use_few_of_their_values_are_kept_too() -> None:
    weight = four_bit(20, 4, centred=False, levels=3)
    weight[3, :BLOCK] = 0.25
    weight[4] = 0
    found = dequantize_offset(quantize_offset(weight))
    assert np.abs(found - weight).max() <= 4e-6 * np.abs(weight).max()


def test_other_matrices_are_within_half_a_step_of_their_blocks_range() -> None:
    weight = matrix(9, 96)
    blocks = weight.reshape(9, 3, BLOCK)
    step = (blocks.max(-1) - blocks.min(-1)) / 15
    error = np.abs(dequantize_offset(quantize_offset(weight)).reshape(blocks.shape) - blocks)
    assert np.all(error <= step[..., None] / 2 * 1.001)


def test_one_block_off_the_grid_is_rounded_and_the_others_are_kept() -> None:
    weight = four_bit(30, 2, centred=False)
    weight[7, :BLOCK] = matrix(1, BLOCK)
    error = np.abs(dequantize_offset(quantize_offset(weight)) - weight)
    assert error[7, :BLOCK].max() > 1e-4
    error[7, :BLOCK] = 0
    assert error.max() <= 4e-6 * np.abs(weight).max()
