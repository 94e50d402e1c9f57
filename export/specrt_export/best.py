"""Each row's best tokens, found by the graph itself: all that many steps need of the logits."""

import numpy as np
import onnx_ir as ir

from specrt_export.editor import Editor
from specrt_profiles.tensors import BEST_IDS, BEST_LOGITS, TOP_IDS, TOP_K, TOP_LOGITS, TOP_LOGSUMEXP


def add_best_tokens(graph: ir.Graph) -> None:
    """Give a graph the outputs best_ids and best_logits [B, R] behind its logits [B, R, V].

    Which of several equal logits an engine's ArgMax or TopK takes is its own affair. Here the lowest id wins by
    arithmetic: of the tokens whose logit equals the largest, the one with the largest V - id, which float32 holds
    exactly. A row of NaNs equals nothing, so that its id is V.
    """
    logits, size = graph.outputs[0], _vocab_size(graph)
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
    _add_output(graph, 1, ids.outputs[0], BEST_IDS, ir.DataType.INT64)
    _add_output(graph, 2, best.outputs[0], BEST_LOGITS, ir.DataType.FLOAT)


def add_top_tokens(graph: ir.Graph) -> None:
    """Give a graph that says best tokens the outputs top_ids, top_logits [B, R, K] and top_logsumexp [B, R], too.

    Which of the tokens that tie with the last one are among them is up to the engine; `specrt.best` counts on none.
    """
    size = min(TOP_K, _vocab_size(graph))
    count = Editor(graph).constant("best.k", np.array([size], np.int64))
    top = ir.node("TopK", [graph.outputs[0], count], num_outputs=2, name="best.top")
    graph.append(top)
    values, ids = top.outputs
    _add_output(graph, 3, ids, TOP_IDS, ir.DataType.INT64, size)
    _add_output(graph, 4, values, TOP_LOGITS, ir.DataType.FLOAT, size)
    _add_output(graph, 5, _logsumexp(graph), TOP_LOGSUMEXP, ir.DataType.FLOAT)


def _logsumexp(graph: ir.Graph) -> ir.Value:
    """Return log sum exp over each row of logits, relative to its peak: no term is above 1, whoever computes it."""
    logits, best = graph.outputs[0], graph.outputs[2]
    squeeze = best.producer()
    assert squeeze is not None
    peak, last = squeeze.inputs
    below = ir.node("Sub", [logits, peak])
    shares = ir.node("Exp", [below.outputs[0]])
    total = ir.node("ReduceSum", [shares.outputs[0], last], {"keepdims": 0})
    log = ir.node("Log", [total.outputs[0]])
    result = ir.node("Add", [log.outputs[0], best])
    new = [below, shares, total, log, result]
    for place, node in enumerate(new):
        node.name = f"best.logsumexp.{place}"
    graph.extend(new)
    return result.outputs[0]


def _vocab_size(graph: ir.Graph) -> int:
    shape = graph.outputs[0].shape
    assert shape is not None
    size = shape[2]
    assert isinstance(size, int)
    return size


def _add_output(graph: ir.Graph, place: int, value: ir.Value, name: str, dtype: ir.DataType, *last: int) -> None:
    """Make a value [B, R, *last] an output of the graph."""
    shape = graph.outputs[0].shape
    assert shape is not None
    value.name, value.type, value.shape = name, ir.TensorType(dtype), ir.Shape([*shape[:2], *last])
    graph.outputs.insert(place, value)
