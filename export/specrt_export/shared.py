"""Weights that one graph reads from another's file: what is stored already is not stored again."""

from collections.abc import Sequence
from pathlib import Path

import onnx_ir as ir

_WORTH = 1 << 16  # bytes; smaller weights are not looked for


def stored(path: Path) -> list[ir.ExternalTensor]:
    """Return the weights of a graph that lie in a file beside it."""
    values = ir.load(path).graph.initializers.values()
    return [tensor for value in values if isinstance(tensor := value.const_value, ir.ExternalTensor)]


def find_same(tensor: ir.TensorProtocol, among: Sequence[ir.ExternalTensor]) -> ir.ExternalTensor | None:
    """Return the stored weight with the same bytes, under the name, type and shape that `tensor` has."""
    likely = [other for other in among if other.nbytes == tensor.nbytes >= _WORTH]
    content = tensor.tobytes() if likely else b""
    same = next((other for other in likely if other.tobytes() == content), None)
    if same is None:
        return None
    return ir.ExternalTensor(
        same.location, same.offset, same.length, tensor.dtype, shape=ir.Shape(tensor.shape.numpy()),
        name=str(tensor.name), base_dir=same.base_dir,
    )  # fmt: skip
