"""Weights in integers for TensorRT: what they stand for, how the graph holds them, and that it is the model."""

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto, numpy_helper

import tiny
from specrt_export import parity
from specrt_export.fit import fit_symmetric_matrix, inverse_factor
from specrt_export.lint_trt import lint_tensorrt
from specrt_export.parity import BOUNDS
from specrt_export.quantize import (
    SymmetricBlocks,
    dequantize_rows,
    dequantize_symmetric,
    quantize_rows,
    quantize_symmetric,
)
from specrt_profiles.manifest import read_manifest

WEIGHT = np.random.default_rng(5).standard_normal((48, 128), dtype=np.float32)


def export(folder: Path, family: str, precision: str, **overrides: object) -> Path:
    source = tiny.make_model(family, folder / "source", **overrides)
    return tiny.export_tiny(source, folder / "out", profile=tiny.profile(dialect="tensorrt", precision=precision))


def graph_of(artifact: Path) -> onnx.GraphProto:
    return onnx.load(str(artifact / "target.onnx")).graph


def weights_of(graph: onnx.GraphProto) -> dict[str, onnx.TensorProto]:
    return {tensor.name: tensor for tensor in graph.initializer}


def dequantised(graph: onnx.GraphProto) -> list[tuple[int, list[int], list[int]]]:
    """Return type and shape of the weight and shape of the scales of every DequantizeLinear."""
    weights = weights_of(graph)
    nodes = [node for node in graph.node if node.op_type == "DequantizeLinear"]
    assert all(len(node.input) == 2 for node in nodes), "no zero points"
    assert {weights[node.input[1]].data_type for node in nodes} == {TensorProto.FLOAT16}
    pairs = [(weights[node.input[0]], weights[node.input[1]]) for node in nodes]
    return sorted((values.data_type, list(values.dims), list(scales.dims)) for values, scales in pairs)


def test_symmetric_blocks_are_whole_numbers_times_half_precision_scales() -> None:
    blocks = quantize_symmetric(WEIGHT)
    assert (blocks.values.shape, blocks.scales.shape, blocks.scales.dtype) == ((48, 128), (48, 4), np.float16)
    assert blocks.values.min() == -8
    assert blocks.values.max() == 7
    again = quantize_symmetric(dequantize_symmetric(blocks))
    np.testing.assert_array_equal(dequantize_symmetric(again), dequantize_symmetric(blocks))


def test_a_symmetric_block_is_no_worse_than_its_whole_range_in_16_steps() -> None:
    blocks = WEIGHT.reshape(48, 4, 32)
    step = np.maximum(blocks.max(-1) / 7, -blocks.min(-1) / 8).astype(np.float16).astype(np.float32)[..., None]
    widest = np.clip(np.rint(blocks / step), -8, 7) * step
    ours = dequantize_symmetric(quantize_symmetric(WEIGHT)).reshape(blocks.shape)
    errors = [((found - blocks) ** 2).sum(-1) for found in (ours, widest)]
    assert (errors[0] <= errors[1]).all()
    assert errors[0].sum() < 0.95 * errors[1].sum()


@pytest.mark.parametrize("value", [0.0, 1e-9, 3e-8, -2.0, 60000.0])
def test_scales_are_never_zero_or_infinite(value: float) -> None:
    weight = np.full((2, 32), value, np.float32)
    scales = quantize_symmetric(weight).scales, quantize_rows(weight, in_half=True).scales
    for found, made in zip(scales, (quantize_symmetric(weight), quantize_rows(weight, in_half=True)), strict=True):
        assert np.isfinite(found).all()
        assert (found > 0).all()
        whole = dequantize_symmetric(made) if isinstance(made, SymmetricBlocks) else dequantize_rows(made)
        assert np.abs(whole - weight).max() <= 0.05 * abs(value) + 6e-8


def test_row_scales_in_half_precision_are_within_half_a_step() -> None:
    rows = quantize_rows(WEIGHT, in_half=True)
    np.testing.assert_array_equal(rows.scales, rows.scales.astype(np.float16))
    assert (np.abs(dequantize_rows(rows) - WEIGHT) <= 0.56 * rows.scales[:, None]).all()


def test_fitted_blocks_change_products_less_than_the_nearest() -> None:
    generator = torch.Generator().manual_seed(1)
    seen = torch.randn(900, 8, generator=generator) @ torch.randn(8, 128, generator=generator)
    seen, unseen = (seen + 0.3 * torch.randn(900, 128, generator=generator)).split(600)
    fitted = fit_symmetric_matrix(torch.from_numpy(WEIGHT.copy()), inverse_factor(seen))
    assert fitted.values.min() >= -8
    assert fitted.values.max() <= 7

    def error(blocks: SymmetricBlocks) -> float:
        off = torch.from_numpy(dequantize_symmetric(blocks) - WEIGHT)
        return float((off @ unseen.T).square().mean())

    assert error(fitted) < 0.4 * error(quantize_symmetric(WEIGHT))


def test_int4_blocks_lie_along_the_inputs_and_products_with_one_input_are_packed(tmp_path: Path) -> None:
    artifact = export(tmp_path, "llama", "int4")
    four, eight = TensorProto.INT4, TensorProto.INT8
    layer = [
        (four, [64, 64], [2, 64]), (four, [64, 128], [2, 128]), (four, [64, 192], [2, 192]), (four, [96, 64], [3, 64]),
    ]  # fmt: skip
    output = (eight, [64, tiny.VOCAB_SIZE], [tiny.VOCAB_SIZE])
    assert dequantised(graph_of(artifact)) == sorted([*layer, *layer, output])
    target = read_manifest(artifact).target
    assert 1e-6 < target.parity.mean_kl <= 0.02 < BOUNDS["int4"].mean_kl
    assert {tensor.dtype for tensor in target.inputs if tensor.name.startswith("past_")} == {"float16"}
    lint_tensorrt(ir.load(artifact / "target.onnx"))
    onnx.checker.check_model(artifact / "target.onnx", full_check=True)
    tiny.assert_lossless(artifact, tmp_path / "machine")


def test_the_embedding_of_a_tied_model_stays_and_the_output_matrix_is_rounded(tmp_path: Path) -> None:
    """The export proves that both are what the source computes with, though they are one matrix there."""
    artifact = export(tmp_path, "qwen2", "int8")
    graph = graph_of(artifact)
    tables = {name: t for name, t in weights_of(graph).items() if tiny.VOCAB_SIZE in t.dims and len(t.dims) == 2}
    assert sorted((t.data_type, list(t.dims)) for t in tables.values()) == [
        (TensorProto.INT8, [64, tiny.VOCAB_SIZE]), (TensorProto.FLOAT16, [tiny.VOCAB_SIZE, 64]),
    ]  # fmt: skip
    (embedding,), (output,) = (
        [numpy_helper.to_array(t) for t in tables.values() if t.data_type == kind]
        for kind in (TensorProto.FLOAT16, TensorProto.INT8)
    )
    rows = quantize_rows(embedding.astype(np.float32), in_half=True)
    assert np.abs(rows.values.T.astype(int) - output.astype(int)).max() <= 1
    assert read_manifest(artifact).target.parity.mean_kl <= 1e-3 < BOUNDS["int8"].mean_kl
    tiny.assert_lossless(artifact, tmp_path / "machine")


def test_a_graph_with_other_weights_than_the_source_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding hides a small mistake from the comparison with the source, not from that with its rounded weights."""
    from specrt_export import weight_only

    def swapped(weight: np.ndarray) -> np.ndarray:
        rounded = dequantize_rows(quantize_rows(weight, in_half=True))
        rounded[0] *= 1.02
        return rounded

    monkeypatch.setattr(weight_only, "_in_rows", swapped)
    with pytest.raises(parity.ExportError, match="with rounded weights"):
        export(tmp_path, "llama", "int8")


@pytest.mark.slow
@pytest.mark.parametrize(("family", "precision"), [("gpt2", "int4"), ("gemma2", "int4"), ("phi", "int8")])
def test_biases_and_other_layouts(tmp_path: Path, family: str, precision: str) -> None:
    artifact = export(tmp_path, family, precision)
    assert read_manifest(artifact).target.parity.mean_kl <= 0.02
    tiny.assert_lossless(artifact, tmp_path / "machine")


@pytest.mark.slow
def test_sizes_that_fill_no_whole_block_get_eight_bits(tmp_path: Path) -> None:
    sizes = {"hidden_size": 80, "num_attention_heads": 5, "num_key_value_heads": 1, "intermediate_size": 96}
    found = dequantised(graph_of(export(tmp_path, "llama", "int4", **sizes)))
    assert [(kind, dims[0]) for kind, dims, _ in found].count((TensorProto.INT4, 96)) == 2
    assert all(kind == TensorProto.INT8 for kind, dims, _ in found if dims[0] == 80)
