"""How long 8-bit products take on this machine in each form, and whether its integer products are exact."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from specrt_export.integer import Kind

Shape = tuple[int, int]  # N, K

_MS = "com.microsoft"
_BYTES = 32_000_000  # of weights per measurement, so that small products do not stay in the cache
_COPIES = 12
_REPEATS = 9


def product_seconds(shape: Shape, kind: Kind, *, widths: Sequence[int]) -> float:
    """Return the seconds that a product takes, the mean over call widths, of the fastest of a few runs."""
    copies = max(1, min(_COPIES, _BYTES // (shape[0] * shape[1])))
    session = _session([_product(shape, kind, f"{copy}.") for copy in range(copies)], shape[1])
    rng = np.random.default_rng(0)
    total = 0.0
    for width in widths:
        x = rng.standard_normal((width, shape[1]), dtype=np.float32)
        seconds = []
        for _ in range(_REPEATS):
            started = time.perf_counter()
            session.run(None, {"x": x})
            seconds.append(time.perf_counter() - started)
        total += min(seconds)  # what disturbs a measurement only adds to it
    return total / len(widths) / copies


def integer_products_are_exact() -> bool:
    """Tell whether sums of the largest products come out right.

    Processors without dot-product instructions add pairs of them in 16 bits, which saturate.
    """
    session = _session([_product((32, 256), "static", "", weight=127)], 256)
    found: NDArray[np.float32] = session.run(None, {"x": np.full((2, 256), 127, np.float32)})[0]
    return bool(np.all(found == 127 * 127 * 256))


def _product(
    shape: Shape, kind: Kind, name: str, *, weight: int | None = None
) -> tuple[list[onnx.NodeProto], dict[str, NDArray[Any]], str]:
    """Return nodes, initializers and output of a product as it is exported."""
    rng = np.random.default_rng(0)
    n, k = shape
    out = f"{name}y"
    if kind == "block":
        blocks = -(-k // 32)
        weights: dict[str, NDArray[Any]] = {
            f"{name}w": rng.integers(0, 256, (n, blocks, 32)).astype(np.uint8),
            f"{name}s": np.ones((n, blocks), np.float32),
        }
        options: dict[str, Any] = {"K": k, "N": n, "bits": 8, "block_size": 32, "accuracy_level": 4}
        return [helper.make_node("MatMulNBits", ["x", *weights], [out], domain=_MS, **options)], weights, out
    values = rng.integers(-127, 128, (k, n)) if weight is None else np.full((k, n), weight)
    weights = {
        f"{name}w": values.astype(np.int8), f"{name}s": np.ones(n, np.float32),
        "one": np.array(1, np.float32), "zero": np.array(128, np.uint8), "last": np.array([-1]),
    }  # fmt: skip
    before: list[onnx.NodeProto] = []
    if kind == "row":
        before = [
            helper.make_node("Abs", ["x"], [f"{name}abs"]),
            helper.make_node("ReduceMax", [f"{name}abs", "last"], [f"{name}row"], keepdims=1),
            helper.make_node("Div", ["x", f"{name}row"], [f"{name}scaled"]),
        ]
    source, plain = ("x", out) if kind == "static" else (f"{name}scaled", f"{name}p")
    operands = [f"{name}q", f"{name}w", "one", f"{name}s", "zero"]
    nodes = [
        *before,
        helper.make_node("QuantizeLinear", [source, "one", "zero"], [f"{name}q"]),
        helper.make_node("MatMulIntegerToFloat", operands, [plain], domain=_MS),
    ]
    return nodes + ([helper.make_node("Mul", [plain, f"{name}row"], [out])] if kind == "row" else []), weights, out


def _session(parts: Sequence[tuple[list[onnx.NodeProto], dict[str, NDArray[Any]], str]], columns: int) -> Any:
    import onnxruntime as ort

    weights = {name: array for _, arrays, _ in parts for name, array in arrays.items()}
    graph = helper.make_graph(
        [node for nodes, _, _ in parts for node in nodes],
        "products",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["width", columns])],
        [helper.make_tensor_value_info(y, TensorProto.FLOAT, None) for _, _, y in parts],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(_MS, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = ort.SessionOptions()
    options.log_severity_level = 3
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
