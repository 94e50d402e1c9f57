"""Editing a traced graph: initializers whose content is made when they are written, and replaced nodes."""

from collections.abc import Callable
from functools import cached_property

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray

from specrt_export.errors import UnsupportedModelError


class Editor:
    """Adds initializers to a graph and replaces its nodes."""

    def __init__(self, graph: ir.Graph) -> None:
        self.graph = graph

    def initializer(
        self, name: str, dtype: ir.DataType, shape: tuple[int, ...], make: Callable[[], NDArray[np.generic]]
    ) -> ir.Value:
        """Add an initializer; `make` is called when it is written."""
        value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))
        value.const_value = lazy(name, shape, make, dtype)
        self.graph.register_initializer(value)
        return value

    def constant(self, name: str, content: NDArray[np.generic]) -> ir.Value:
        """Return the initializer of that name, adding it at its first use."""
        if name not in self.graph.initializers:
            tensor = ir.tensor(content, name=name)
            value = ir.Value(name=name, shape=ir.Shape(content.shape), type=ir.TensorType(tensor.dtype))
            value.const_value = tensor
            self.graph.register_initializer(value)
        return self.graph.initializers[name]

    def replace(self, node: ir.Node, *new: ir.Node) -> ir.Value:
        """Put nodes in the place of one; the last one's output takes over its output, and is returned."""
        old, out = node.outputs[0], new[-1].outputs[0]
        out.name, out.shape, out.type = old.name, old.shape, old.type
        ir.convenience.replace_nodes_and_values(self.graph, node, [node], list(new), [old], [out])
        return out


def lazy(
    name: str, shape: torch.Size | tuple[int, ...], make: Callable[[], NDArray[np.generic]],
    dtype: ir.DataType = ir.DataType.FLOAT,
) -> ir.LazyTensor:  # fmt: skip
    """Return a tensor that is made each time it is read."""
    return ir.LazyTensor(lambda: ir.tensor(make()), dtype=dtype, shape=ir.Shape(tuple(shape)), name=name)


def fp32(tensor: torch.Tensor) -> NDArray[np.float32]:
    """Return a tensor of any float type as an array."""
    array: NDArray[np.float32] = tensor.detach().float().cpu().numpy()
    return array


def as_stored(make: Callable[[], NDArray[np.float32]], dtype: ir.DataType) -> NDArray[np.generic]:
    """Return what `make` gives in a float type."""
    content = make()
    return content if dtype == ir.DataType.FLOAT else content.astype(dtype.numpy())


def check_range(name: str, tensor: torch.Tensor, dtype: ir.DataType) -> None:
    """Raise `UnsupportedModelError` for a weight with values that its type in the graph cannot hold."""
    if dtype == ir.DataType.FLOAT16 and tensor.numel() and float(tensor.abs().max()) > float(np.finfo(np.float16).max):
        raise UnsupportedModelError(f"{name}: has values beyond the range of float16: choose bf16 or fp32")


def as_rows(tensor: torch.Tensor, stored_transposed: bool) -> NDArray[np.float32]:
    """Return a weight as [N, K], whichever way it is stored."""
    return fp32(tensor) if stored_transposed else np.ascontiguousarray(fp32(tensor).T)


def shape_of_rows(tensor: torch.Tensor, stored_transposed: bool) -> tuple[int, ...]:
    """Return N and K of a weight."""
    return tuple(tensor.shape if stored_transposed else reversed(tensor.shape))


def weight_operand(node: ir.Node) -> tuple[ir.Value | None, bool]:
    """Return the initializer behind the second operand of a MatMul or Gemm, and whether it is stored as [N, K]."""
    operand = node.inputs[1]
    flipped = node.op_type == "Gemm" and node.attributes.get_int("transB", 0) == 1
    producer = operand.producer() if operand is not None else None
    if producer is not None and producer.op_type == "Transpose" and producer.inputs[0] is not None:
        return producer.inputs[0], not flipped
    return operand, flipped


def is_embedding(node: ir.Node) -> bool:
    """Tell whether a node gathers rows by the input `input_ids`, possibly reshaped."""
    ids = node.inputs[1] if node.op_type == "Gather" else None
    while ids is not None and (reshape := ids.producer()) is not None and reshape.op_type == "Reshape":
        ids = reshape.inputs[0]
    return ids is not None and ids.name == "input_ids"


def is_plain_gemm(node: ir.Node) -> bool:
    """Tell whether a Gemm is a product with an untransposed input, plus a bias."""
    attributes = node.attributes
    return (
        attributes.get_float("alpha", 1.0) == attributes.get_float("beta", 1.0) == 1.0
        and attributes.get_int("transA", 0) == 0
    )


class LazyParts:
    """Quantises one weight when its first part is written, and forgets it with the last."""

    def __init__(self, make: Callable[[], object], *, last: str) -> None:
        self._make, self._last = make, last

    def take(self, part: str) -> NDArray[np.generic]:
        """Return an attribute of the quantised weight."""
        array: NDArray[np.generic] = getattr(self._quantized, part)
        if part == self._last:
            del self._quantized
        return array

    @cached_property
    def _quantized(self) -> object:
        return self._make()
