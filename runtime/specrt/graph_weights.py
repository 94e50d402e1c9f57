"""How many bytes of weights a call of an ONNX graph reads: the few fields of the file that tell, and nothing else.

The run time has no ONNX library, and ONNX Runtime does not say which weights a graph holds. The file is a protocol
buffer; the field numbers are those of onnx.proto (https://github.com/onnx/onnx/blob/main/onnx/onnx.proto).
"""

from collections.abc import Iterator
from pathlib import Path

from specrt.errors import EngineError

_GRAPH = 7  # ModelProto
_NODE, _INITIALIZER = 1, 5  # GraphProto
_INPUT, _OP_TYPE = 1, 4  # NodeProto
_NAME, _EXTERNAL = 8, 13  # TensorProto
_DATA = {4, 5, 6, 7, 9, 10, 11}  # TensorProto: its values, where they are in the file itself
_KEY, _VALUE = 1, 2  # StringStringEntryProto
_GATHERS = {"Gather", "GatherBlockQuantized"}
_Region = tuple[str, int, int]  # file or name, offset, length in bytes


def weight_bytes(path: Path) -> int:
    """Return the bytes of weights that one call of the graph in `path` reads.

    Every stored region counts once, however many operators read it. Tables that are only gathered from (an embedding
    that is not also the output matrix) are left out: a call reads one row per token of them. Raises `EngineError` for a
    file that is not ONNX.
    """
    try:
        graphs = _messages(memoryview(path.read_bytes()), _GRAPH)
        return sum(length for _, _, length in {region for graph in graphs for region in _regions(graph)})
    except OSError as error:
        raise EngineError(f"{path}: cannot be read: {error.strerror}") from None
    except (IndexError, ValueError, KeyError):
        raise EngineError(f"{path}: expected an ONNX graph, found something else: export the artifact again") from None


def _regions(graph: memoryview) -> Iterator[_Region]:
    """Yield where the weights are that some operator reads as a whole."""
    uses: dict[str, set[str]] = {}
    for node in _messages(graph, _NODE):
        (op_type,) = _messages(node, _OP_TYPE)
        for name in _messages(node, _INPUT):
            uses.setdefault(_text(name), set()).add(_text(op_type))
    for tensor in _messages(graph, _INITIALIZER):
        (name,) = _messages(tensor, _NAME)
        read_by = uses.get(_text(name), set())
        if not read_by or read_by - _GATHERS:  # without a reader here, it is read in a subgraph
            yield _region(tensor, _text(name))


def _region(tensor: memoryview, name: str) -> _Region:
    fields = (dict(_fields(entry)) for entry in _messages(tensor, _EXTERNAL))
    external = {_text(entry[_KEY]): _text(entry[_VALUE]) for entry in fields}
    if external:
        return external["location"], int(external.get("offset", 0)), int(external["length"])
    inside = (value for number, value in _fields(tensor) if number in _DATA)
    return f"inside: {name}", 0, sum(len(value) for value in inside if isinstance(value, memoryview))


def _messages(data: memoryview, number: int) -> list[memoryview]:
    return [value for found, value in _fields(data) if found == number and isinstance(value, memoryview)]


def _fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yield number and value of the fields of a message, in order; see https://protobuf.dev/programming-guides/encoding."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if kind == 2:
            size, at = _varint(data, at)
        else:
            size = {1: 8, 5: 4}[kind]
        if at + size > len(data):
            raise ValueError("the message ends inside a field")
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at


def _text(value: int | memoryview) -> str:
    if isinstance(value, int):
        raise ValueError("expected a text, found a number")
    return bytes(value).decode("utf-8")
