"""Put the real weights into a traced graph, lazily: in fp32, or as blocks of 8 or 4 bits.

Every multiplication by a weight W [N, K] ends as one of
  MatMul(x, W^T)              fp32; transposed while the file is written
  FusedMatMul(x, W)           fp32, the output matrix of a model that ties it to the embedding: stored once
  MatMulNBits(x, blocks)      int8, int4; the embedding reads blocks through GatherBlockQuantized, the same ones if tied
  MatMulIntegerToFloat        int8; see products.py
  MatMul(x, DequantizeLinear) int8, int4 of the TensorRT dialect; see weight_only.py
At int4 blocks have a scale and an offset each, w = scale (q - 8) + offset. The offsets, where there are any, are
multiplied with the sums of the input's blocks: zero points that are not whole numbers would make the kernel many times
slower. Products with one input are merged afterwards, see packing.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray

from specrt_export.editor import (
    Editor,
    LazyParts,
    as_rows,
    as_stored,
    check_range,
    fp32,
    is_embedding,
    is_plain_gemm,
    lazy,
    shape_of_rows,
    weight_operand,
)
from specrt_export.integer import Form
from specrt_export.kv import Scales
from specrt_export.parity import Round
from specrt_export.products import IntegerProducts
from specrt_export.quantize import (
    BLOCK,
    OffsetBlocks,
    SymmetricBlocks,
    dequantize,
    dequantize_offset,
    in_stored_order,
    needs_offsets,
    quantize,
    quantize_offset,
)
from specrt_export.weight_only import WeightOnly
from specrt_profiles.profile import DialectName, Precision

SAME_BYTES = "specrt.same_bytes_as"
_MS = "com.microsoft"
_FLOATS = ("fp32", "fp16", "bf16")  # precisions that round no further than to a float type
_EMBEDDING_BITS = 8  # embedding and output matrix: 4 bits cost more quality there than they save bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """What was found by measuring and is not in the weights themselves, by initializer.

    forms: how to compute int8 products; those it leaves out are computed in blocks. blocks: weights [N, K] as 4 bits;
    those it leaves out are rounded to the nearest values; `symmetric` likewise for TensorRT. kv: scales of int8 keys
    and values.
    """

    forms: Mapping[str, Form] = field(default_factory=dict)
    blocks: Mapping[str, OffsetBlocks] = field(default_factory=dict)
    symmetric: Mapping[str, SymmetricBlocks] = field(default_factory=dict)
    kv: Scales = field(default_factory=dict)


def product_groups(graph: ir.Graph, tensors: Mapping[str, torch.Tensor]) -> list[tuple[str, ...]]:
    """Return the names of the weights that are multiplied with the same value, for each such value."""
    groups: dict[ir.Value, list[str]] = {}
    for node in graph:
        is_product = node.op_type == "MatMul" or (node.op_type == "Gemm" and is_plain_gemm(node))
        weight = weight_operand(node)[0] if is_product else None
        if weight is not None and weight.name in tensors and node.inputs[0] is not None:
            groups.setdefault(node.inputs[0], []).append(str(weight.name))
    return [tuple(names) for names in groups.values()]


def attach_weights(
    graph: ir.Graph, tensors: dict[str, torch.Tensor], precision: Precision, chosen: Chosen | None = None, *,
    dialect: DialectName = "ort",
) -> dict[str, Round]:  # fmt: skip
    """Give the placeholder initializers of `graph` their source `tensors` (by name, any float type).

    Tensors that share storage become one initializer, but not at int8 and int4 in the TensorRT dialect, where the
    embedding stays as it is. Nothing is kept or converted before the file is written. Returns what happens to the
    values of each tensor that is rounded, by name: a function from the stored matrix to the one that the graph computes
    with.
    """
    chosen = chosen or Chosen()
    forms = dict(chosen.forms)
    store: _Store | WeightOnly
    if dialect == "tensorrt" and precision not in _FLOATS:
        tensors = {name: tensor for name, tensor in tensors.items() if name in graph.initializers}
        store = WeightOnly(graph, tensors, chosen.symmetric, bits=8 if precision == "int8" else 4)
    else:
        tensors = _merge_tied(graph, tensors, forms)
        store = _Store(graph, tensors, precision, replace(chosen, forms=forms))
    for node in list(graph):
        if node.op_type == "MatMul" or (node.op_type == "Gemm" and (precision in _FLOATS or is_plain_gemm(node))):
            store.rewrite_product(node)
        elif isinstance(store, _Store) and precision not in _FLOATS and is_embedding(node):
            store.rewrite_embedding(node)
    for name, tensor in tensors.items():
        value = graph.initializers[name]
        dtype = value.dtype or (value.const_value.dtype if value.const_value is not None else ir.DataType.FLOAT)
        check_range(name, tensor, dtype)
        content = partial(_divided, tensor, store.divided.get(name))
        value.const_value = lazy(name, tensor.shape, partial(as_stored, content, dtype), dtype)
        if dtype != ir.DataType.FLOAT:
            store.rounding.setdefault(name, partial(_in_type, dtype=dtype))
    return store.rounding


class _Store:
    """Rewrites nodes of one graph and keeps one set of blocks per quantised weight."""

    def __init__(self, graph: ir.Graph, tensors: dict[str, torch.Tensor], precision: Precision, chosen: Chosen) -> None:
        self._editor = Editor(graph)
        self._tensors = tensors
        self._integer = {name: form for name, form in chosen.forms.items() if form.kind != "block"}
        self._fitted = chosen.blocks
        self.products = IntegerProducts(self._editor, tensors, self._integer)
        self._precision = precision
        self._blocks: dict[str, list[ir.Value]] = {}
        self._sums: dict[ir.Value, ir.Value] = {}  # of blocks of 32, by the value they are of
        self.rounding: dict[str, Round] = {}
        self.divided = self.products.divided
        logits = graph.outputs[0].shape
        self._vocab_size = logits[-1] if logits is not None else None

    def rewrite_product(self, node: ir.Node) -> None:
        weight, stored_transposed = weight_operand(node)
        if weight is None or weight.name not in self._tensors:
            return
        if self._precision in _FLOATS:
            self._rewrite_float(node, weight, stored_transposed)
        elif weight.name in self._integer:
            form = self._integer[weight.name]
            self.rounding[weight.name] = partial(in_stored_order, form.round_weight, transposed=stored_transposed)
            self.products.product(node, weight, stored_transposed)
        else:
            self._rewrite_blocks(node, weight, stored_transposed)

    def _rewrite_float(self, node: ir.Node, weight: ir.Value, stored_transposed: bool) -> None:
        if not stored_transposed or node.inputs[1] is weight:
            return  # the operand is used as it is stored
        if len(weight.uses()) > 1 and node.op_type == "MatMul":
            self._editor.replace(node, ir.node("FusedMatMul", [node.inputs[0], weight], {"transB": 1}, domain=_MS))
            return
        name, tensor, dtype = str(weight.name), self._tensors[str(weight.name)], weight.dtype
        assert dtype is not None
        content = partial(as_stored, lambda: np.ascontiguousarray(fp32(tensor).T), dtype)
        flipped = self._editor.initializer(f"{name}.T", dtype, tuple(reversed(tensor.shape)), content)
        node.replace_input_with(1, flipped)

    def _rewrite_blocks(self, node: ir.Node, weight: ir.Value, stored_transposed: bool) -> None:
        tensor = self._tensors[str(weight.name)]
        rows, columns = shape_of_rows(tensor, stored_transposed)
        bits = _EMBEDDING_BITS if rows == self._vocab_size or self._precision == "int8" else 4
        attributes = {"K": columns, "N": rows, "bits": bits, "block_size": BLOCK, "accuracy_level": 4}
        x = node.inputs[0]
        assert x is not None
        if bits == 4 and columns % BLOCK == 0 and x.shape is not None:
            new = self._offset_product(x, str(weight.name), stored_transposed, attributes)
        else:
            blocks = self._blocks_of(str(weight.name), stored_transposed, bits)
            new = [ir.node("MatMulNBits", [x, *blocks], attributes, domain=_MS)]
        if node.op_type == "Gemm" and len(node.inputs) > 2:
            new.append(ir.node("Add", [new[-1].outputs[0], node.inputs[2]]))
        self._editor.replace(node, *new)

    def _offset_product(
        self, x: ir.Value, name: str, stored_transposed: bool, attributes: dict[str, int]
    ) -> list[ir.Node]:
        """Return nodes for x [.., K] times blocks with offsets: an integer product, and block sums times offsets.

        Whether there are any offsets is looked up in the weight, once.
        """
        tensor = self._tensors[name]
        rows, blocks = attributes["N"], attributes["K"] // BLOCK
        fitted = self._fitted.get(name)
        offset = fitted.offsets.any() if fitted else needs_offsets(as_rows(tensor, stored_transposed))
        last = "offsets" if offset else "scales"
        source = LazyParts(lambda: fitted or quantize_offset(as_rows(tensor, stored_transposed)), last=last)
        in_blocks = partial(_in_offset_blocks, fitted=fitted)
        self.rounding[name] = partial(in_stored_order, in_blocks, transposed=stored_transposed)
        parts = [
            ("packed", ir.DataType.UINT8, (rows, blocks, BLOCK // 2)),
            ("scales", ir.DataType.FLOAT, (rows, blocks)),
        ]
        parts += [("offsets", ir.DataType.FLOAT, (blocks, rows))] if offset else []
        packed, scales, *offsets = (
            self._editor.initializer(f"{name}.{part}", kind, shape, partial(source.take, part))
            for part, kind, shape in parts
        )
        new = [ir.node("MatMulNBits", [x, packed, scales], attributes, domain=_MS)]
        if not offsets:
            return new
        if x not in self._sums:
            assert x.shape is not None
            rank = x.shape.rank()
            shape = self._editor.constant(f"blocks.{rank}.{blocks}", np.array([1] * (rank - 2) + [-1, blocks, BLOCK]))
            split = ir.node("Reshape", [x, shape])
            axis = self._editor.constant("blocks.last_axis", np.array([-1]))
            new += [split, ir.node("ReduceSum", [split.outputs[0], axis], {"keepdims": 0})]
            self._sums[x] = new[-1].outputs[0]
        shift = ir.node("MatMul", [self._sums[x], *offsets])
        return [*new, shift, ir.node("Add", [new[0].outputs[0], shift.outputs[0]])]

    def rewrite_embedding(self, node: ir.Node) -> None:
        table, ids = node.inputs
        if table is None or table.name not in self._tensors:
            return
        if table.name in self._integer:
            self.products.embedding(node)
            return
        packed, *rest = self._blocks_of(table.name, True, _EMBEDDING_BITS)
        flat = self._flattened(packed)
        attributes = {"bits": _EMBEDDING_BITS, "block_size": BLOCK, "gather_axis": 0, "quantize_axis": 1}
        rows = ir.node("GatherBlockQuantized", [flat, ids, *rest], attributes, domain=_MS)
        columns = self._tensors[table.name].shape[1]
        if columns % BLOCK == 0:
            self._editor.replace(node, rows)
            return
        bounds = [
            self._editor.initializer(f"{table.name}.{part}", ir.DataType.INT64, (1,), partial(np.array, [value]))
            for part, value in (("start", 0), ("end", columns), ("axis", -1))
        ]
        filled = ir.node("Slice", [rows.outputs[0], *bounds])  # without what fills the last block
        self._editor.replace(node, rows, filled)

    def _blocks_of(self, name: str, stored_transposed: bool, bits: int) -> list[ir.Value]:
        if name not in self._blocks:
            tensor = self._tensors[name]
            source = LazyParts(lambda: quantize(as_rows(tensor, stored_transposed), bits=bits), last="zero_points")
            self.rounding[name] = partial(in_stored_order, partial(_in_blocks, bits=bits), transposed=stored_transposed)
            rows, columns = shape_of_rows(tensor, stored_transposed)
            blocks = -(-columns // BLOCK)
            self._blocks[name] = [
                self._editor.initializer(f"{name}.{part}", kind, shape, partial(source.take, part))
                for part, kind, shape in (
                    ("packed", ir.DataType.UINT8, (rows, blocks, BLOCK * bits // 8)),
                    ("scales", ir.DataType.FLOAT, (rows, blocks)),
                    ("zero_points", ir.DataType.UINT8, (rows, -(-blocks * bits // 8))),
                )
            ]
        return self._blocks[name]

    def _flattened(self, packed: ir.Value) -> ir.Value:
        """Return blocks [N, K / 32, B] as [N, K / 32 * B]: the same bytes under another name and shape."""
        assert packed.shape is not None
        assert packed.const_value is not None
        rows, blocks, size = packed.shape.numpy()
        shape, content = (rows, blocks * size), packed.const_value
        flat = self._editor.initializer(
            f"{packed.name}.flat", ir.DataType.UINT8, shape, lambda: content.numpy().reshape(shape)
        )
        flat.metadata_props[SAME_BYTES] = str(packed.name)
        return flat


def _in_offset_blocks(matrix: NDArray[np.float32], *, fitted: OffsetBlocks | None) -> NDArray[np.float32]:
    return dequantize_offset(fitted or quantize_offset(matrix))


def _in_blocks(matrix: NDArray[np.float32], *, bits: int) -> NDArray[np.float32]:
    return dequantize(quantize(matrix, bits=bits), bits=bits, columns=matrix.shape[1])


def _in_type(weight: NDArray[np.float32], *, dtype: ir.DataType) -> NDArray[np.float32]:
    return weight.astype(dtype.numpy()).astype(np.float32)


def _divided(tensor: torch.Tensor, divisor: NDArray[np.float32] | None) -> NDArray[np.float32]:
    return fp32(tensor) if divisor is None else fp32(tensor) / divisor


def _merge_tied(graph: ir.Graph, tensors: dict[str, torch.Tensor], forms: dict[str, Form]) -> dict[str, torch.Tensor]:
    """Let all names of one storage use one initializer, and its form; return the tensors that the graph still has."""
    first: dict[tuple[int, torch.Size], str] = {}
    for name, tensor in tensors.items():
        if name not in graph.initializers:
            continue
        kept = first.setdefault((tensor.data_ptr(), tensor.shape), name)
        if kept != name:
            graph.initializers[name].replace_all_uses_with(graph.initializers[kept])
            del graph.initializers[name]
            if name in forms:
                forms[kept] = forms[name]
    return {name: tensors[name] for name in first.values()}
