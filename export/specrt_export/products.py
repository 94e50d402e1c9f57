"""Integer products in the graph: an input rounded once for all products that share it, and int8 weights.

x -> [/ smooth] -> [/ row maximum] -> QuantizeLinear -> MatMulIntegerToFloat -> [* row maximum]

The division by `smooth` costs nothing where it can move into what comes before: the weight of a norm, or the output
scales of the product that x is a factor of. MatMulIntegerToFloat takes unsigned inputs around 128 and signed weights,
the pair that processors multiply fastest.
"""

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray

from specrt_export.editor import Editor, as_rows, shape_of_rows, weight_operand
from specrt_export.integer import Form
from specrt_export.quantize import QuantizedRows

_MS = "com.microsoft"
_ZERO = 128


class IntegerProducts:
    """Rewrites the products and the embedding of one graph whose weights have an integer form."""

    def __init__(self, editor: Editor, tensors: Mapping[str, torch.Tensor], forms: Mapping[str, Form]) -> None:
        self._editor, self._tensors, self._forms = editor, tensors, forms
        self._inputs: dict[ir.Value, tuple[ir.Value, ir.Value | None]] = {}
        self._weights: dict[str, _LazyRows] = {}
        self._made_by: dict[ir.Value, _LazyRows] = {}
        self.divided: dict[str, NDArray[np.float32]] = {}  # norm weights, by name, and what they are divided by

    def product(self, node: ir.Node, weight: ir.Value, stored_transposed: bool) -> None:
        """Replace a MatMul or Gemm by an integer product."""
        name = str(weight.name)
        form = self._forms[name]
        new: list[ir.Node] = []
        quantized, row = self._input(node.inputs[0], form, new)
        source = self._weight(name, stored_transposed)
        matrix = self._matrix(name, source, weight, new)
        bias = node.inputs[2] if node.op_type == "Gemm" and len(node.inputs) > 2 else None
        scales = self._editor.initializer(f"{name}.scales", ir.DataType.FLOAT, source.shape[:1], source.scales)
        operands = [quantized, matrix, self._scale(form), scales, self._zero_point(), None]
        new.append(ir.node("MatMulIntegerToFloat", operands + ([bias] if bias and row is None else []), domain=_MS))
        if row is not None:
            new.append(ir.node("Mul", [new[-1].outputs[0], row]))
            if bias is not None:
                new.append(ir.node("Add", [new[-1].outputs[0], bias]))
        out = self._editor.replace(node, *new)
        if bias is None:
            self._made_by[out] = source

    def embedding(self, node: ir.Node) -> None:
        """Replace a Gather of rows of a table that is also multiplied by."""
        table, ids = node.inputs
        assert table is not None
        name = str(table.name)
        source, form = self._weight(name, True), self._forms[name]
        scales = self._editor.initializer(
            f"{name}.row_scales", ir.DataType.FLOAT, (source.shape[0], 1), lambda: source.scales()[:, None]
        )
        smooth = self._editor.constant(f"{name}.unsmooth", 1 / form.smooth)
        rows = ir.node("Gather", [self._rows(name, source), ids])
        floats = ir.node("Cast", [rows.outputs[0]], {"to": ir.DataType.FLOAT.value})
        factors = ir.node("Gather", [scales, ids])
        scaled = ir.node("Mul", [floats.outputs[0], factors.outputs[0]])
        self._editor.replace(node, rows, floats, factors, scaled, ir.node("Mul", [scaled.outputs[0], smooth]))

    def _input(self, x: ir.Value | None, form: Form, new: list[ir.Node]) -> tuple[ir.Value, ir.Value | None]:
        """Return the rounded input, and the rows' maxima where the form has them; made at its first use."""
        assert x is not None
        if x in self._inputs:
            return self._inputs[x]
        value = x
        if not self._fold(x, form):
            inverse = self._editor.constant(f"{x.name}.unsmooth", 1 / form.smooth)
            new.append(ir.node("Mul", [x, inverse]))
            value = new[-1].outputs[0]
        row = None
        if form.kind == "row":
            least = self._editor.constant("integer.least", np.array(1e-30, np.float32))
            last = self._editor.constant("integer.last_axis", np.array([-1]))
            size = ir.node("Abs", [value])
            peak = ir.node("ReduceMax", [size.outputs[0], last], {"keepdims": 1})
            peak_or_least = ir.node("Max", [peak.outputs[0], least])
            row = peak_or_least.outputs[0]
            row.shape = None if x.shape is None else ir.Shape([*list(x.shape)[:-1], 1])
            new += [size, peak, peak_or_least, ir.node("Div", [value, row])]
            value = new[-1].outputs[0]
        new.append(ir.node("QuantizeLinear", [value, self._scale(form), self._zero_point()]))
        self._inputs[x] = new[-1].outputs[0], row
        return self._inputs[x]

    def _fold(self, x: ir.Value, form: Form) -> bool:
        """Divide by `smooth` in what makes x, if nothing else reads x."""
        producer = x.producer()
        ours = all(self._form_of(node) is form for node, _ in x.uses())
        if producer is None or producer.op_type != "Mul" or not ours:
            return False
        for operand in producer.inputs:
            if operand is None or len(operand.uses()) > 1:
                continue
            if str(operand.name) in self._tensors and self._tensors[str(operand.name)].shape == form.smooth.shape:
                self.divided[str(operand.name)] = form.smooth
                return True
            if operand in self._made_by:
                self._made_by[operand].divide_outputs(form.smooth)
                return True
        return False

    def _form_of(self, node: ir.Node) -> Form | None:
        weight = weight_operand(node)[0] if node.op_type in ("MatMul", "Gemm") else None
        return None if weight is None else self._forms.get(str(weight.name))

    def _weight(self, name: str, stored_transposed: bool) -> "_LazyRows":
        if name not in self._weights:
            self._weights[name] = _LazyRows(self._tensors[name], stored_transposed, self._forms[name])
        return self._weights[name]

    def _rows(self, name: str, source: "_LazyRows") -> ir.Value:
        if f"{name}.rows" in self._editor.graph.initializers:
            return self._editor.graph.initializers[f"{name}.rows"]
        return self._editor.initializer(f"{name}.rows", ir.DataType.INT8, source.shape, source.rows)

    def _matrix(self, name: str, source: "_LazyRows", weight: ir.Value, new: list[ir.Node]) -> ir.Value:
        """Return [K, N]; of a table that is also read by rows, the engine makes it when it is loaded."""
        if f"{name}.rows" in self._editor.graph.initializers or any(n.op_type == "Gather" for n, _ in weight.uses()):
            new.append(ir.node("Transpose", [self._rows(name, source)], {"perm": [1, 0]}))
            return new[-1].outputs[0]
        return self._editor.initializer(
            f"{name}.columns", ir.DataType.INT8, source.shape[::-1], lambda: np.ascontiguousarray(source.rows().T)
        )

    def _scale(self, form: Form) -> ir.Value:
        return self._editor.constant(f"integer.scale.{form.input_scale:.9g}", np.array(form.input_scale, np.float32))

    def _zero_point(self) -> ir.Value:
        return self._editor.constant("integer.zero_point", np.array(_ZERO, np.uint8))


class _LazyRows:
    """A [N, K] matrix with one scale per row, rounded when it is written."""

    def __init__(self, tensor: torch.Tensor, stored_transposed: bool, form: Form) -> None:
        self._tensor, self._stored_transposed, self._form = tensor, stored_transposed, form
        self._divisor: NDArray[np.float32] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """N and K."""
        return shape_of_rows(self._tensor, self._stored_transposed)

    def divide_outputs(self, divisor: NDArray[np.float32]) -> None:
        """Divide each of the N outputs."""
        self._divisor = divisor

    def rows(self) -> NDArray[np.int8]:
        """Return the integers [N, K]."""
        return self._rounded().values

    def scales(self) -> NDArray[np.float32]:
        """Return the scales [N]."""
        scales = self._rounded().scales
        return scales if self._divisor is None else scales / self._divisor

    def _rounded(self) -> QuantizedRows:
        return self._form.quantize_weight(as_rows(self._tensor, self._stored_transposed))
