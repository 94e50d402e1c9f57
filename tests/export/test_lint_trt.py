"""What TensorRT would drop, misread or not build is refused by node and reason."""

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest

from specrt_export.errors import UnsupportedModelError
from specrt_export.lint_trt import lint_tensorrt

SLOTS = 32
HEAD: tuple[int | str, ...] = (1, 2, "width", 16)
CACHE: tuple[int | str, ...] = (1, 2, SLOTS, 16)


def value(name: str, shape: tuple[int | str, ...], dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Value:
    return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))


def node(
    op: str, inputs: list[ir.Value | None], out: str, shape: tuple[int | str, ...], **attributes: object
) -> ir.Node:
    made = ir.node(op, inputs, attributes, name=f"the {op}")  # type: ignore[arg-type]
    made.outputs[0].name, made.outputs[0].shape = out, ir.Shape(shape)
    made.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    return made


class Block:
    """One layer's attention as the dialect emits it; a test changes what it is about before `model` is called."""

    def __init__(self) -> None:
        self.opsets = {"": 24}
        floats = {"q": HEAD, "k": HEAD, "v": HEAD, "cos": (SLOTS, 8), "sin": (SLOTS, 8)}
        caches = {"past_key.0": CACHE, "past_value.0": CACHE}
        self.inputs = {name: value(name, shape) for name, shape in (floats | caches).items()}
        self.inputs["mask"] = value("mask", (1, 1, "width", SLOTS), ir.DataType.BOOL)
        self.inputs["position_ids"] = value("position_ids", (1, "width"), ir.DataType.INT64)
        self.inputs["write_indices"] = value("write_indices", (1,), ir.DataType.INT64)
        i = self.inputs
        self.rotary = node("RotaryEmbedding", [i["q"], i["cos"], i["sin"], i["position_ids"]], "rotated", HEAD)
        start = i["write_indices"]
        self.store_key = node("TensorScatter", [i["past_key.0"], i["k"], start], "present_key.0", CACHE, axis=-2)
        self.store_value = node("TensorScatter", [i["past_value.0"], i["v"], start], "present_value.0", CACHE, axis=-2)
        key, val = self.store_key.outputs[0], self.store_value.outputs[0]
        self.attention = node("Attention", [self.rotary.outputs[0], key, val, i["mask"]], "y", HEAD, scale=0.25)
        self.nodes = [self.rotary, self.store_key, self.store_value, self.attention]
        self.outputs = [self.attention.outputs[0], key, val]

    def add(self, op: str, inputs: list[ir.Value | None], **attributes: object) -> ir.Node:
        """Put one more node in front, whose result is an output."""
        made = node(op, inputs, "more", HEAD, **attributes)
        self.nodes.insert(0, made)
        self.outputs.append(made.outputs[0])
        return made

    def constant(self, array: np.ndarray, dtype: ir.DataType | None = None) -> ir.Value:
        tensor = ir.tensor(array, dtype=dtype, name="constant")
        made = ir.Value(
            name="constant", const_value=tensor, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype)
        )
        self.constants = [made]
        return made

    def set(self, where: ir.Node, **attributes: object) -> None:
        for name, content in attributes.items():
            where.attributes[name] = ir.convenience.convert_attribute(name, content)  # type: ignore[arg-type]

    def give(self, where: ir.Node, place: int, new: ir.Value) -> None:
        where.resize_inputs(max(place + 1, len(where.inputs)))
        where.replace_input_with(place, new)
        self.inputs.setdefault(new.name, new)

    def model(self) -> ir.Model:
        graph = ir.Graph(
            list(self.inputs.values()), self.outputs, nodes=self.nodes, initializers=getattr(self, "constants", []),
            opset_imports=self.opsets, name="block",
        )  # fmt: skip
        return ir.Model(graph, ir_version=11)


def test_the_dialects_own_form_passes() -> None:
    lint_tensorrt(Block().model())


def later_input(place: int) -> Callable[[Block], None]:
    return lambda b: b.give(b.attention, place, value("extra", CACHE))


def of_type(name: str, dtype: ir.DataType) -> Callable[[Block], None]:
    return lambda b: setattr(b.inputs[name], "type", ir.TensorType(dtype))


def of_shape(name: str, *shape: int | str) -> Callable[[Block], None]:
    return lambda b: setattr(b.inputs[name], "shape", ir.Shape(shape))


def attribute(where: str, name: str, content: object) -> Callable[[Block], None]:
    return lambda b: b.set(getattr(b, where), **{name: content})


def second_output(b: Block) -> None:
    b.attention.resize_outputs(2)
    b.attention.outputs[1].name = "present"


def without_a_mask(b: Block) -> None:
    b.attention.replace_input_with(3, None)
    del b.inputs["mask"]


def cache_made_by_a_node(b: Block) -> None:
    made = node("Neg", [b.inputs["past_key.0"]], "negative", CACHE)
    b.nodes.insert(0, made)
    b.store_key.replace_input_with(0, made.outputs[0])


def result_kept_inside(b: Block) -> None:
    b.outputs.remove(b.store_key.outputs[0])


def buffers_swapped(b: Block) -> None:
    b.store_key.replace_input_with(0, b.inputs["past_value.0"])
    b.store_value.replace_input_with(0, b.inputs["past_key.0"])


def cache_read_by_another_node(b: Block) -> None:
    b.add("Neg", [b.inputs["past_key.0"]])


def input_handed_through(b: Block) -> None:
    b.outputs.append(b.inputs["q"])


def without_write_indices(b: Block) -> None:
    for where in (b.store_key, b.store_value):
        where.replace_input_with(2, None)
    del b.inputs["write_indices"]


def dequantize(zero: int | None, dtype: ir.DataType) -> Callable[[Block], None]:
    def change(b: Block) -> None:
        b.inputs["w"], b.inputs["s"] = value("w", (16, 16), dtype), value("s", (16,))
        zeros = [] if zero is None else [b.constant(np.full(16, zero, np.int8))]
        b.add("DequantizeLinear", [b.inputs["w"], b.inputs["s"], *zeros], axis=1)

    return change


def integers_gathered_from(b: Block) -> None:
    table = b.constant(np.zeros((4, 16), np.int8))
    b.add("Gather", [table, b.inputs["write_indices"]])


def top_k(k: int) -> Callable[[Block], None]:
    return lambda b: setattr(b, "made", b.add("TopK", [b.inputs["q"], b.constant(np.array([k]))]))


def operator(op: str, **attributes: object) -> Callable[[Block], None]:
    return lambda b: setattr(b, "made", b.add(op, [b.inputs["q"]], **attributes))


def of_microsoft(b: Block) -> None:
    b.add("FusedMatMul", [b.inputs["q"], b.inputs["k"]]).domain = "com.microsoft"


ATTENTION, SCATTER, ROTARY = (
    r"Attention \(the Attention\)",
    r"TensorScatter \(the TensorScatter\)",
    r"RotaryEmbedding \(",
)
REFUSED: dict[str, tuple[Callable[[Block], None], str]] = {
    "integers": (integers_gathered_from, "weight constant: only DequantizeLinear may read int8, found \\['Gather'\\]"),
    "past key": (later_input(4), f"{ATTENTION}: past_key is not taken: keep the cache with TensorScatter"),
    "past value": (later_input(5), f"{ATTENTION}: past_value is not taken"),
    "lengths": (later_input(6), f"{ATTENTION}: nonpad_kv_seqlen is ignored without a word: say it in the mask"),
    "causal": (attribute("attention", "is_causal", 1), f"{ATTENTION}: is_causal counts from the first slot"),
    "soft cap": (attribute("attention", "softcap", 2.0), f"{ATTENTION}: softcap is not taken: decompose"),
    "softmax": (attribute("attention", "softmax_precision", 1), f"{ATTENTION}: softmax_precision is not taken"),
    "two outputs": (second_output, f"{ATTENTION}: expected one output, found 2"),
    "no mask": (without_a_mask, f"{ATTENTION}: expected a mask: without one, rows see slots that were never written"),
    "flat mask": (of_shape("mask", "width", SLOTS), rf"{ATTENTION}: expected a mask of 4 dimensions, found \['width'"),
    "flat query": (
        lambda b: b.attention.replace_input_with(0, b.inputs.setdefault("f", value("f", (1, "width", 32)))),
        f"{ATTENTION}: expected a query of 4 dimensions",
    ),
    "cache of a node": (cache_made_by_a_node, f"{SCATTER}: expected the cache to be an input of the graph itself"),
    "result inside": (result_kept_inside, f"{SCATTER}: expected its result to be an output of the graph"),
    "crossed buffers": (buffers_swapped, rf"{SCATTER}: expected the output of past_value\.0, found present_key\.0"),
    "axis": (attribute("store_key", "axis", 1), f"{SCATTER}: expected axis -2, found 1"),
    "ring": (attribute("store_key", "mode", "circular"), f"{SCATTER}: expected mode linear, found circular"),
    "dynamic cache": (of_shape("past_key.0", 1, 2, "slots", 16), f"{SCATTER}: expected a cache of 4 fixed dimensions"),
    "flat cache": (of_shape("past_key.0", 1, SLOTS, 32), f"{SCATTER}: expected a cache of 4 fixed dimensions"),
    "int8 cache": (of_type("past_key.0", ir.DataType.INT8), f"{SCATTER}: expected a cache of floats, found int8"),
    "no indices": (without_write_indices, f"{SCATTER}: expected write_indices of int32 or int64, found none"),
    "float indices": (
        of_type("write_indices", ir.DataType.FLOAT),
        f"{SCATTER}: expected write_indices of int32 or int64",
    ),
    "int32 positions": (
        of_type("position_ids", ir.DataType.INT32),
        f"{ROTARY}.*expected position_ids of int64, found int32",
    ),
    "flat rotation": (of_shape("q", 1, "width", 32), f"{ROTARY}.*expected an input of 4 dimensions"),
    "uint4": (dequantize(None, ir.DataType.UINT4), r"DequantizeLinear \(.*expected symmetric int4, found uint4"),
    "zero point": (dequantize(3, ir.DataType.INT8), r"DequantizeLinear \(.*expected zero points that are all 0"),
    "half sums": (
        operator("RMSNormalization", stash_type=10),
        r"RMSNormalization \(.*expected stash_type 1 .*found 10",
    ),
    "large k": (top_k(3840), r"TopK \(.*expected a fixed k below 3840"),
    "other domain": (of_microsoft, r"FusedMatMul \(.*its domain com\.microsoft is not the standard one"),
    "MatMulInteger": (operator("MatMulInteger"), r"MatMulInteger \(.*TensorRT's parser does not take this operator"),
    "QLinearMatMul": (operator("QLinearMatMul"), "QLinearMatMul .*does not take this operator"),
    "DynamicQuantizeLinear": (operator("DynamicQuantizeLinear"), "DynamicQuantizeLinear .*does not take this operator"),
    "BitwiseAnd": (operator("BitwiseAnd"), "BitwiseAnd .*does not take this operator"),
    "opset": (lambda b: b.opsets.update({"": 23}), r"expected opset 24 of the standard .* found \{'': 23\}"),
    "imported domain": (lambda b: b.opsets.update({"com.microsoft": 1}), "expected opset 24 of the standard"),
    "idle input": (
        lambda b: b.inputs.update(n=value("n", (1,))),
        "input n: no node reads it, and TensorRT drops such inputs",
    ),
    "cache read twice": (cache_read_by_another_node, r"input past_key\.0: only TensorScatter may read a cache"),
    "input as output": (input_handed_through, "input q: it is an output as well"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_graph_that_tensorrt_would_not_compute_as_written_is_refused(what: str) -> None:
    change, reason = REFUSED[what]
    block = Block()
    change(block)
    with pytest.raises(UnsupportedModelError, match=f"^TensorRT cannot run this graph: {reason}") as caught:
        lint_tensorrt(block.model())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        dequantize(0, ir.DataType.INT8), dequantize(None, ir.DataType.INT4), top_k(64),
        operator("RMSNormalization", stash_type=1), attribute("attention", "is_causal", 0),
        attribute("store_key", "mode", "linear"), of_type("write_indices", ir.DataType.INT32),
        of_type("past_key.0", ir.DataType.FLOAT16),
    ],
)  # fmt: skip
def test_what_is_near_to_that_and_fine_passes(change: Callable[[Block], None]) -> None:
    block = Block()
    change(block)
    lint_tensorrt(block.model())
