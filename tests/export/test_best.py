"""Best tokens found by the graph: the lowest id on ties, whatever the engine, and none among NaNs."""

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from specrt.rows import logsumexp_error
from specrt_export.best import add_best_tokens, add_top_tokens
from specrt_profiles.tensors import BEST_IDS, BEST_LOGITS, TOP_IDS, TOP_K, TOP_LOGITS, TOP_LOGSUMEXP

SIZE = 1000


def graph_bytes(opset: int, *, top: bool = False, size: int = SIZE) -> bytes:
    """Return a graph that does nothing else."""
    kind, shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape([1, "rows", size])
    given = ir.Value(name="given", type=kind, shape=shape)
    node = ir.node("Identity", [given])
    logits = node.outputs[0]
    logits.name, logits.type, logits.shape = "logits", kind, shape
    graph = ir.Graph([given], [logits], nodes=[node], opset_imports={"": opset}, name="best")
    add_best_tokens(graph)
    if top:
        add_top_tokens(graph)
    assert [value.name for value in graph.outputs][:3] == ["logits", BEST_IDS, BEST_LOGITS]
    assert "ReduceLogSumExp" not in {node.op_type for node in graph}, "TensorRT may leave the peak out of it"
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


def logsumexps_of(rows: NDArray[np.float32], opset: int = 24) -> NDArray[np.float32]:
    """Return the logsumexp of each row that the graph says."""
    content = graph_bytes(opset, top=True, size=rows.shape[-1])
    session = ort.InferenceSession(content, providers=["CPUExecutionProvider"])
    (found,) = session.run([TOP_LOGSUMEXP], {"given": rows[None]})
    assert (found.shape, found.dtype) == ((1, len(rows)), np.float32)
    values: NDArray[np.float32] = found[0]
    return values


@pytest.mark.parametrize("opset", [23, 24])
def test_the_logsumexp_is_that_of_all_logits_however_large(opset: int) -> None:
    rng = np.random.default_rng(3)
    spread, place = np.append(rng.uniform(0, 6, 20), [0, 0, 1, 1]), np.append(np.zeros(20), [0, 300, -400, 1000])
    rows = (spread[:, None] * rng.standard_normal((24, 1 << 17)) + place[:, None]).astype(np.float32)
    rows[0, 5:] = -np.inf
    wide = rows.astype(np.float64)
    peaks = wide.max(-1)
    true = peaks + np.log(np.exp(wide - peaks[:, None]).sum(-1))
    assert (np.abs(logsumexps_of(rows, opset) - true) <= [logsumexp_error(value) / 2 for value in true]).all()


def test_no_rows_and_rows_that_hold_no_numbers_have_no_logsumexp() -> None:
    assert len(logsumexps_of(np.empty((0, SIZE), np.float32))) == 0
    rows = np.random.default_rng(4).standard_normal((4, SIZE)).astype(np.float32)
    rows[0, 7], rows[1, 7], rows[2], rows[3, 1:] = np.nan, np.inf, -np.inf, -np.inf
    found = logsumexps_of(rows)
    assert not np.isfinite(found[:3]).any()
    assert found[3] == rows[3, 0]
