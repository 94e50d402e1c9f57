"""Best tokens found by the graph: the lowest id on ties, whatever the engine, and none among NaNs."""

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from specrt_export.best import add_best_tokens, add_top_tokens
from specrt_profiles.tensors import BEST_IDS, BEST_LOGITS, TOP_IDS, TOP_K, TOP_LOGITS

SIZE = 1000


def graph_bytes(opset: int, *, top: bool = False) -> bytes:
    """Return a graph that does nothing else."""
    kind, shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape([1, "rows", SIZE])
    given = ir.Value(name="given", type=kind, shape=shape)
    node = ir.node("Identity", [given])
    logits = node.outputs[0]
    logits.name, logits.type, logits.shape = "logits", kind, shape
    graph = ir.Graph([given], [logits], nodes=[node], opset_imports={"": opset}, name="best")
    add_best_tokens(graph)
    if top:
        add_top_tokens(graph)
    assert [value.name for value in graph.outputs][:3] == ["logits", BEST_IDS, BEST_LOGITS]
    content: bytes = ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString()
    return content


def best_of(rows: NDArray[np.float32], opset: int = 24) -> tuple[list[int], NDArray[np.float32]]:
    """Return ids and logits that the graph says."""
    session = ort.InferenceSession(graph_bytes(opset), providers=["CPUExecutionProvider"])
    ids, values = session.run([BEST_IDS, BEST_LOGITS], {"given": rows[None]})
    assert ids.shape == values.shape == (1, len(rows))
    return ids[0].tolist(), values[0]


@pytest.mark.parametrize("opset", [23, 24])
def test_the_best_token_is_that_of_numpy(opset: int) -> None:
    rows = np.random.default_rng(0).standard_normal((50, SIZE)).astype(np.float32)
    ids, values = best_of(rows, opset)
    assert ids == rows.argmax(-1).tolist()
    np.testing.assert_array_equal(values, rows.max(-1))


def test_the_lowest_id_wins_a_tie() -> None:
    rng = np.random.default_rng(1)
    rows = rng.integers(-3, 4, (50, SIZE)).astype(np.float32)  # hundreds tie in each
    rows[0], rows[1, [7, SIZE - 1]], rows[2, [0, 1]] = -5, 9, 9
    rows[3] = -0.0
    rows[3, 500:] = 0.0
    ids, values = best_of(rows)
    assert ids == rows.argmax(-1).tolist()
    assert ids[:4] == [0, 7, 0, 0]
    np.testing.assert_array_equal(values, rows.max(-1))


def test_no_rows_and_rows_without_a_best_token() -> None:
    assert best_of(np.empty((0, SIZE), np.float32))[0] == []
    rows = np.full((2, SIZE), np.nan, np.float32)
    rows[1] = -np.inf
    ids, values = best_of(rows)
    assert ids == [SIZE, 0]
    assert not np.isfinite(values).any()


def test_the_top_tokens_come_by_falling_logits() -> None:
    rows = np.random.default_rng(2).permuted(np.arange(3 * SIZE, dtype=np.float32).reshape(3, SIZE), axis=-1)
    session = ort.InferenceSession(graph_bytes(24, top=True), providers=["CPUExecutionProvider"])
    ids, values = session.run([TOP_IDS, TOP_LOGITS], {"given": rows[None]})
    assert ids.shape == values.shape == (1, 3, TOP_K)
    np.testing.assert_array_equal(ids[0], np.argsort(-rows, -1)[:, :TOP_K])
    np.testing.assert_array_equal(values[0], -np.sort(-rows, -1)[:, :TOP_K])
