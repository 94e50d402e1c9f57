"""Cut a finished graph at an early exit; see `specrt_profiles.exit` for the parts.

Nodes are those of the whole graph, so that its logits keep their bits. The exit reads the state through the translator
it was given, then the model's own last norm and output matrix.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir
import torch

from specrt_export.editor import Editor, fp32
from specrt_export.errors import UnsupportedModelError
from specrt_export.exit_fit import ExitHead
from specrt_profiles.exit import ABOVE, BELOW, OUTPUT, PICKED, STATE, Part
from specrt_profiles.tensors import ROWS, WIDTH, DecoderDims, TensorSpec

_KV = ("past_", "present_")
_MARK = "exit."
_STATE = f"{_MARK}state."
_PICKED = f"{_MARK}rows"


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """Values of a traced graph: the state after each number of layers, and the rows that the output matrix reads."""

    states: Mapping[int, ir.Value]
    picked: ir.Value


def mark_specs(dims: DecoderDims) -> tuple[TensorSpec, ...]:
    """Return the outputs by which a graph is traced for an exit that is chosen later."""
    size = (dims.hidden_size,)
    states = [(f"{_STATE}{layer}", (1, WIDTH, *size)) for layer in range(1, dims.num_layers + 1)]
    named = [*states, (_PICKED, (1, ROWS, *size))]
    return tuple(TensorSpec(name=name, dtype="float32", shape=shape) for name, shape in named)


def take_marks(graph: ir.Graph) -> Marks:
    """Return the values that were traced as outputs of `mark_specs`, which are outputs no longer."""
    marks = {str(value.name): value for value in graph.outputs if str(value.name).startswith(_MARK)}
    for value in marks.values():
        graph.outputs.remove(value)
    states = {int(name.removeprefix(_STATE)): value for name, value in marks.items() if name != _PICKED}
    return Marks(states=states, picked=marks[_PICKED])


def cut(model: ir.Model, marks: Marks, head: ExitHead, parts: Mapping[str, Part]) -> dict[str, ir.Model]:
    """Return the parts of a finished graph as models, whose initializers are those of the whole.

    Raises `UnsupportedModelError` for a graph in which more than the state crosses the exit.
    """
    state, last = marks.states[head.layer], marks.states[max(marks.states)]
    named = {value.name: value for value in (*model.graph.inputs, *model.graph.outputs)}
    known = {STATE: state, PICKED: marks.picked}

    def part(name: str, outputs: Sequence[ir.Value]) -> ir.Model:
        inputs = [known.get(spec.name) or named[spec.name] for spec in parts[name].inputs]
        return _extract(model, inputs, outputs)

    kv = {name: [named[s.name] for s in p.outputs if s.name.startswith(_KV)] for name, p in parts.items()}
    features = [named["features"]] if "features" in named else []
    below = part(BELOW, [state, *kv[BELOW]])
    above = part(ABOVE, [marks.picked, *features, *kv[ABOVE]])
    output = part(OUTPUT, [named["logits"]])
    _add_exit(below.graph, _norm(model, last, marks.picked), head)
    for cut_model, spec in ((below, parts[BELOW]), (above, parts[ABOVE]), (output, parts[OUTPUT])):
        _rename(cut_model.graph, spec)
    return {BELOW: below, ABOVE: above, OUTPUT: output}


def _extract(model: ir.Model, inputs: Sequence[ir.Value], outputs: Sequence[ir.Value]) -> ir.Model:
    try:
        graph = ir.convenience.extract(model.graph, inputs, outputs)
    except ValueError:
        raise UnsupportedModelError(
            "more than a layer's input crosses the exit in this model: leave out --early-exit"
        ) from None
    used = {domain for node in graph for domain in [node.domain]}
    graph.opset_imports.update({name: v for name, v in model.opset_imports.items() if name in {"", *used}})
    return ir.Model(graph, ir_version=model.ir_version)


def _norm(model: ir.Model, last: ir.Value, picked: ir.Value) -> ir.Graph:
    """Return what stands between the last layer and the output matrix, over rows that are picked already."""
    gather = picked.producer()
    if gather is None or gather.op_type != "Gather" or gather.inputs[0] is None:
        raise UnsupportedModelError("the output matrix of this model does not read picked rows: leave out --early-exit")
    return _extract(model, [last], [gather.inputs[0]]).graph


def _add_exit(graph: ir.Graph, norm: ir.Graph, head: ExitHead) -> None:
    """Let the graph below the exit give the exit's rows as its first output."""
    state = graph.outputs[0]
    editor, prefix = Editor(graph), "exit."
    indices = next(value for value in graph.inputs if value.name == "logits_indices")
    picked = _append(graph, ir.node("Gather", [state, indices], {"axis": 1}), like=state)
    if head.translator is not None and head.bias is not None:
        tensors = [("translator", head.translator), ("bias", head.bias)]
        matrix, bias = (_weight(editor, f"{prefix}{name}", tensor) for name, tensor in tensors)
        product = _append(graph, ir.node("MatMul", [picked, matrix]), like=state)
        picked = _append(graph, ir.node("Add", [product, bias]), like=state)
    values: dict[ir.Value | None, ir.Value | None] = {None: None, norm.inputs[0]: picked}
    for name, value in norm.initializers.items():
        if name not in graph.initializers:
            copy = ir.Value(name=name, shape=value.shape, type=value.type, const_value=value.const_value)
            graph.register_initializer(copy)
        values[value] = graph.initializers[name]
    for node in norm:
        inputs = [values[value] for value in node.inputs]
        new = ir.Node(node.domain, node.op_type, inputs, list(node.attributes.values()), num_outputs=len(node.outputs))
        graph.append(new)
        for old, out in zip(node.outputs, new.outputs, strict=True):
            out.name, out.type, out.shape = f"{prefix}{old.name}", old.type, old.shape
            values[old] = out
    rows = values[norm.outputs[0]]
    assert rows is not None
    graph.outputs.insert(0, rows)


def _append(graph: ir.Graph, node: ir.Node, *, like: ir.Value) -> ir.Value:
    out = node.outputs[0]
    out.type = like.type
    out.name = f"exit.{node.op_type.lower()}"
    graph.append(node)
    return out


def _weight(editor: Editor, name: str, tensor: torch.Tensor) -> ir.Value:
    return editor.initializer(name, ir.DataType.FLOAT, tuple(tensor.shape), lambda: fp32(tensor))


def _rename(graph: ir.Graph, part: Part) -> None:
    """Give inputs and outputs the names and shapes of the contract."""
    for values, specs in ((graph.inputs, part.inputs), (graph.outputs, part.outputs)):
        for value, spec in zip(values, specs, strict=True):
            value.name = spec.name
            value.shape = ir.Shape(spec.shape)
