"""Weights as integers that are dequantised where they are used, for TensorRT: products stay products of floats.

Linear weights [N, K] become int8 with one scale per output, or int4 in blocks of 32 inputs with one scale each, all
without zero points, which is what TensorRT takes. The output matrix has 8 bits. The embedding stays as it is, also
where it is tied to the output matrix: TensorRT reads integers through DequantizeLinear alone, and would dequantise the
whole table for the few rows that a call gathers. A product is one node (`MatMulInt8`, `MatMulInt4`) until products with
one input have been packed; then `dequantize_before_products` writes it in standard operators.
"""

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray

from specrt_export.editor import Editor, LazyParts, as_rows, shape_of_rows, weight_operand
from specrt_export.quantize import (
    BLOCK,
    QuantizedRows,
    SymmetricBlocks,
    dequantize_rows,
    dequantize_symmetric,
    in_stored_order,
    quantize_rows,
    quantize_symmetric,
)

_DOMAIN = "specrt"
_OPTIONS: Mapping[str, Mapping[str, int]] = {"MatMulInt8": {"axis": 1}, "MatMulInt4": {"axis": 0, "block_size": BLOCK}}


class WeightOnly:
    """Rewrites the products of one graph; see `attach_weights`."""

    def __init__(
        self, graph: ir.Graph, tensors: Mapping[str, torch.Tensor], fitted: Mapping[str, SymmetricBlocks], *, bits: int
    ) -> None:
        self._editor, self._tensors, self._fitted, self._bits = Editor(graph), tensors, fitted, bits
        self.rounding: dict[str, Callable[[NDArray[np.float32]], NDArray[np.float32]]] = {}
        self.divided: dict[str, NDArray[np.float32]] = {}
        logits = graph.outputs[0].shape
        self._vocab_size = logits[-1] if logits is not None else None

    def rewrite_product(self, node: ir.Node) -> None:
        """Replace a MatMul or Gemm by a weight of the model."""
        weight, stored_transposed = weight_operand(node)
        if weight is None or weight.name not in self._tensors:
            return
        name = str(weight.name)
        rows, columns = shape_of_rows(self._tensors[name], stored_transposed)
        if self._bits == 4 and rows != self._vocab_size and columns % BLOCK == 0:
            new = [self._product_of_blocks(node, name, stored_transposed)]
        else:
            new = [self._product_of_rows(node, name, stored_transposed)]
        if node.op_type == "Gemm" and len(node.inputs) > 2:
            new.append(ir.node("Add", [new[-1].outputs[0], node.inputs[2]]))
        self._editor.replace(node, *new)

    def _product_of_blocks(self, node: ir.Node, name: str, stored_transposed: bool) -> ir.Node:
        tensor, fitted = self._tensors[name], self._fitted.get(name)
        source = LazyParts(
            lambda: _columns(fitted or quantize_symmetric(as_rows(tensor, stored_transposed))), last="scales"
        )
        self.rounding[name] = partial(in_stored_order, partial(_in_blocks, fitted=fitted), transposed=stored_transposed)
        rows, columns = shape_of_rows(tensor, stored_transposed)
        return self._product(
            "MatMulInt4", node, name, source, ir.DataType.INT4, (columns, rows), (columns // BLOCK, rows)
        )

    def _product_of_rows(self, node: ir.Node, name: str, stored_transposed: bool) -> ir.Node:
        tensor = self._tensors[name]
        source = LazyParts(lambda: _columns(_rows(as_rows(tensor, stored_transposed))), last="scales")
        self.rounding[name] = partial(in_stored_order, _in_rows, transposed=stored_transposed)
        rows, columns = shape_of_rows(tensor, stored_transposed)
        return self._product("MatMulInt8", node, name, source, ir.DataType.INT8, (columns, rows), (rows,))

    def _product(
        self, op: str, node: ir.Node, name: str, source: LazyParts, dtype: ir.DataType, shape: tuple[int, ...],
        scales_shape: tuple[int, ...],
    ) -> ir.Node:  # fmt: skip
        kind = self._editor.graph.initializers[name].dtype
        assert kind is not None
        values = self._editor.initializer(f"{name}.values", dtype, shape, partial(source.take, "values"))
        scales = self._editor.initializer(f"{name}.scales", kind, scales_shape, partial(_scales, source, kind))
        return ir.node(op, [node.inputs[0], values, scales], domain=_DOMAIN)


def dequantize_before_products(graph: ir.Graph) -> None:
    """Write products with integer weights in standard operators: DequantizeLinear of the weight, then MatMul."""
    for node in list(graph):
        if node.op_type in _OPTIONS and node.domain == _DOMAIN:
            x, values, scales = node.inputs
            wide = ir.node("DequantizeLinear", [values, scales], _OPTIONS[node.op_type])
            Editor(graph).replace(node, wide, ir.node("MatMul", [x, wide.outputs[0]]))


def _scales(source: LazyParts, kind: ir.DataType) -> NDArray[np.generic]:
    return source.take("scales").astype(kind.numpy())


def _rows(weight: NDArray[np.float32]) -> QuantizedRows:
    return quantize_rows(weight, in_half=True)


def _columns(matrix: QuantizedRows | SymmetricBlocks) -> QuantizedRows | SymmetricBlocks:
    """Return values [K, N], in 4 bits those of blocks, and scales [N] or [K / 32, N]."""
    values = np.ascontiguousarray(matrix.values.T)
    if isinstance(matrix, SymmetricBlocks):
        return SymmetricBlocks(values.astype(ir.DataType.INT4.numpy()), np.ascontiguousarray(matrix.scales.T))
    return QuantizedRows(values, matrix.scales)


def _in_rows(matrix: NDArray[np.float32]) -> NDArray[np.float32]:
    return dequantize_rows(_rows(matrix))


def _in_blocks(matrix: NDArray[np.float32], *, fitted: SymmetricBlocks | None) -> NDArray[np.float32]:
    return dequantize_symmetric(fitted or quantize_symmetric(matrix))
