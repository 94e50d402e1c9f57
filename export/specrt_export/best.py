"""Each row's best tokens, found by the graph itself: all that many steps need of the logits."""

import numpy as np
import onnx_ir as ir

from specrt_export.editor import Editor
from specrt_profiles.tensors import BEST_IDS, BEST_LOGITS, TOP_IDS, TOP_K, TOP_LOGITS

_INTEGERS, _FLOATS = ir.TensorType(ir.DataType.INT64), ir.TensorType(ir.DataType.FLOAT)


def add_best_tokens(graph: ir.Graph) -> None:
    """Give a graph the outputs best_ids and best_logits [B, R] behind its logits [B, R, V].

    Which of several equal logits an engine's ArgMax or TopK takes is its own affair. Here the lowest id wins by
    arithmetic: of the tokens whose logit equals the largest, the one with the largest V - id, which float32 holds
    exactly. A row of NaNs equals nothing, so that its id is V.
    """
    logits = graph.outputs[0]
    assert logits.shape is not None
    batch, rows, size = logits.shape
    assert isinstance(size, int)
    assert size < 1 << 24
    editor = Editor(graph)
    last = editor.constant("best.last_axis", np.array([-1], np.int64))
    countdown = editor.constant("best.countdown", np.arange(size, 0, -1, dtype=np.float32))
    count = editor.constant("best.count", np.array(size, np.float32))
    zero = editor.constant("best.zero", np.array(0, np.float32))
    peak = ir.node("ReduceMax", [logits, last], {"keepdims": 1})
    hits = ir.node("Equal", [logits, peak.outputs[0]])
    scores = ir.node("Where", [hits.outputs[0], countdown, zero])
    winner = ir.node("ReduceMax", [scores.outputs[0], last], {"keepdims": 0})
    number = ir.node("Sub", [count, winner.outputs[0]])
    ids = ir.node("Cast", [number.outputs[0]], {"to": ir.DataType.INT64.value})
    best = ir.node("Squeeze", [peak.outputs[0], last])
    new = [peak, hits, scores, winner, number, ids, best]
    for place, node in enumerate(new):
        node.name = f"best.{place}"
    graph.extend(new)
    _insert(graph, 1, ids.outputs[0], ir.Value(name=BEST_IDS, type=_INTEGERS, shape=ir.Shape([batch, rows])))
    _insert(graph, 2, best.outputs[0], ir.Value(name=BEST_LOGITS, type=_FLOATS, shape=ir.Shape([batch, rows])))


def add_top_tokens(graph: ir.Graph) -> None:
    """Give a graph that says best tokens the outputs top_ids and top_logits [B, R, K] behind them.

    Which of the tokens that tie with the last one are among them is up to the engine; `specrt.sampling` counts on none.
    """
    logits = graph.outputs[0]
    assert logits.shape is not None
    batch, rows, size = logits.shape
    assert isinstance(size, int)
    count = min(TOP_K, size)
    top = ir.node(
        "TopK", [logits, Editor(graph).constant("best.k", np.array([count], np.int64))], num_outputs=2, name="best.top"
    )
    graph.append(top)
    values, ids = top.outputs
    _insert(graph, 3, ids, ir.Value(name=TOP_IDS, type=_INTEGERS, shape=ir.Shape([batch, rows, count])))
    _insert(graph, 4, values, ir.Value(name=TOP_LOGITS, type=_FLOATS, shape=ir.Shape([batch, rows, count])))


def _insert(graph: ir.Graph, place: int, value: ir.Value, described: ir.Value) -> None:
    """Make a value of the graph an output that is described by another one."""
    value.name, value.type, value.shape = described.name, described.type, described.shape
    graph.outputs.insert(place, value)
