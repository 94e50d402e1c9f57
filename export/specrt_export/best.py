"""Each row's best token, found by the graph itself: all that a greedy step needs of the logits."""

import numpy as np
import onnx_ir as ir

from specrt_export.editor import Editor
from specrt_profiles.tensors import BEST_IDS, BEST_LOGITS


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
    for place, (node, name, kind) in enumerate(
        ((ids, BEST_IDS, ir.DataType.INT64), (best, BEST_LOGITS, ir.DataType.FLOAT)), start=1
    ):
        out = node.outputs[0]
        out.name, out.type, out.shape = name, ir.TensorType(kind), ir.Shape([batch, rows])
        graph.outputs.insert(place, out)
