"""TensorRT-RTX's own parser and builder, where it is installed: neither needs a GPU."""

from pathlib import Path
from typing import Any

import pytest

import tiny
from specrt_profiles.manifest import EngineSpec, read_manifest

trt: Any = pytest.importorskip("tensorrt_rtx", reason="not installed: pip install tensorrt-rtx==1.7.1.116")
PROFILE = tiny.profile(dialect="tensorrt")
QUICK = {"gemma2", "gpt2"}
FAMILIES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in tiny.FAMILIES]


class Log(trt.ILogger):  # type: ignore[misc]
    """Keeps warnings and errors."""

    def __init__(self) -> None:
        trt.ILogger.__init__(self)
        self.lines: list[str] = []

    def log(self, severity: Any, message: str) -> None:
        if int(severity) <= int(trt.ILogger.Severity.WARNING) and "Int64 binding" not in message:
            self.lines.append(message)


def check(folder: Path) -> None:
    """Parse and build a graph; every input, cache and attention arrives as what it is meant to be."""
    spec, log = read_manifest(folder).target, Log()
    builder = trt.Builder(log)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, log)
    parsed = parser.parse_from_file(str(folder / spec.file))
    assert (parsed, [parser.get_error(i).desc() for i in range(parser.num_errors)], log.lines) == (True, [], [])
    assert [network.get_input(i).name for i in range(network.num_inputs)] == [tensor.name for tensor in spec.inputs]
    layers = [network.get_layer(i) for i in range(network.num_layers)]
    updates = [layer for layer in layers if layer.type == trt.LayerType.KV_CACHE_UPDATE]
    assert {layer.get_input(0).name: layer.get_output(0).name for layer in updates} == pairs(spec)
    for layer in layers:
        if layer.type == trt.LayerType.ATTENTION_OUTPUT:
            layer.__class__ = trt.IAttentionOutputLayer
            layer.attention.decomposable = True  # there is no fused kernel for fp32
    assert builder.build_serialized_network(network, config(builder, spec)) is not None, log.lines


def pairs(spec: EngineSpec) -> dict[str, str]:
    past = [tensor.name for tensor in spec.inputs if tensor.name.startswith("past_")]
    return {name: name.replace("past_", "present_") for name in past}


def config(builder: Any, spec: EngineSpec) -> Any:
    made = builder.create_builder_config()
    for width, rows in ((spec.prefill_width, 0), *((width, width) for width in spec.verify_widths)):
        shapes = builder.create_optimization_profile()
        for name in ("input_ids", "position_ids"):
            shapes.set_shape(name, *[(1, width)] * 3)
        shapes.set_shape("logits_indices", *[(rows,)] * 3)
        assert made.add_optimization_profile(shapes) >= 0
    return made


def test_a_graph_is_parsed_and_built(tensorrt_artifact: Path) -> None:
    check(tensorrt_artifact)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_familys_graph_is_parsed_and_built(tmp_path: Path, family: str) -> None:
    check(tiny.export_tiny(tiny.make_model(family, tmp_path / "source"), tmp_path / "artifact", profile=PROFILE))
