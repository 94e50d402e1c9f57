"""Bytes of weights that a call reads, against the ONNX library's view of the same files."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from specrt import EngineError
from specrt.graph_weights import weight_bytes


def external(name: str, offset: int, length: int) -> TensorProto:
    """Return an int8 initializer whose content is elsewhere."""
    tensor = TensorProto(name=name, data_type=TensorProto.INT8, dims=[length], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", "w.data"), ("offset", offset), ("length", length)):
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def save(path: Path, nodes: list[tuple[str, list[str]]], weights: list[TensorProto]) -> Path:
    made = [helper.make_node(op, inputs, [f"out{number}"]) for number, (op, inputs) in enumerate(nodes)]
    onnx.save(helper.make_model(helper.make_graph(made, "g", [], [], weights)), path)
    return path


def test_what_is_read_counts_and_what_is_gathered_from_does_not(tmp_path: Path) -> None:
    weights = [external("embedding", 0, 1000), external("scales", 1000, 300), external("matrix", 1300, 70_000)]
    nodes = [("Gather", ["embedding", "ids"]), ("GatherBlockQuantized", ["scales", "ids"]), ("MatMul", ["x", "matrix"])]
    assert weight_bytes(save(tmp_path / "a.onnx", nodes, weights)) == 70_000


def test_a_table_that_is_gathered_from_and_read_counts_once(tmp_path: Path) -> None:
    weights = [external("embedding", 0, 1000), external("matrix", 1000, 70)]
    nodes = [("Gather", ["embedding", "ids"]), ("MatMul", ["x", "matrix"]), ("FusedMatMul", ["x", "embedding"])]
    nodes.append(("MatMul", ["y", "matrix"]))
    assert weight_bytes(save(tmp_path / "a.onnx", nodes, weights)) == 1070


def test_two_names_of_one_region_count_once(tmp_path: Path) -> None:
    weights = [external("flat", 0, 1000), external("packed", 0, 1000), external("other", 1000, 1000)]
    nodes = [("Gather", ["flat", "ids"]), ("MatMulNBits", ["x", "packed", "other"]), ("Transpose", ["flat"])]
    assert weight_bytes(save(tmp_path / "a.onnx", nodes, weights)) == 2000


def test_weights_inside_the_file_and_those_of_subgraphs_count(tmp_path: Path) -> None:
    raw = numpy_helper.from_array(np.ones((5, 4), np.float32), "raw")
    typed = helper.make_tensor("typed", TensorProto.FLOAT, [3], [1.0, 2.0, 3.0])
    assert weight_bytes(save(tmp_path / "a.onnx", [("MatMul", ["x", "raw"])], [raw, typed])) == 80 + 12


def expected_bytes(path: Path) -> int:
    graph = onnx.load(path, load_external_data=False).graph
    regions: dict[tuple[str, str], int] = {}
    for tensor in graph.initializer:
        readers = {node.op_type for node in graph.node if tensor.name in node.input}
        if readers <= {"Gather", "GatherBlockQuantized"}:
            continue
        place = {entry.key: entry.value for entry in tensor.external_data}
        where = (place["location"], place["offset"]) if place else (tensor.name, "")
        regions[where] = int(place["length"]) if place else numpy_helper.to_array(tensor).nbytes
    return sum(regions.values())


@pytest.mark.parametrize("name", ["target", "draft"])
def test_an_artifacts_bytes_are_those_the_onnx_library_finds(tiny_artifact: Path, name: str) -> None:
    path = tiny_artifact / f"{name}.onnx"
    found = weight_bytes(path)
    assert found == expected_bytes(path)
    assert 0 < found < path.with_name(f"{name}.onnx.data").stat().st_size  # its embedding is not its output matrix


@pytest.mark.parametrize("content", [b"\xff" * 40, b"\x3a\x7fabc", b"\x3b", b"\x3a\x04\x0a\x02\x0a\x00"])
def test_a_file_that_is_not_onnx_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.onnx").write_bytes(content)
    with pytest.raises(EngineError, match=r"a\.onnx: expected an ONNX graph, found something else: export"):
        weight_bytes(tmp_path / "a.onnx")


def test_a_file_that_is_not_there_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"a\.onnx: cannot be read: No such file"):
        weight_bytes(tmp_path / "a.onnx")
