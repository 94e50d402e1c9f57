"""Every family's graph in the TensorRT dialect: it is the model, and TensorRT-RTX's own parser and builder take it.

They need no GPU.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import pytest

import tiny
from specrt_export.builder import Builder, BuildOptions
from specrt_export.errors import UnsupportedModelError
from specrt_export.lint_trt import lint_tensorrt
from specrt_export.parity import BOUNDS
from specrt_profiles.manifest import read_manifest
from specrt_profiles.plan import call_shapes

trt: Any = pytest.importorskip("tensorrt_rtx", reason="not installed: pip install 'specrt[tensorrt-rtx]'")
QUICK = {"gemma2", "gpt2"}
FAMILIES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in tiny.FAMILIES]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_exported_closely_and_lossless_and_its_graph_is_parsed_and_built(
    tmp_path: Path, family: str
) -> None:
    artifact = check(tmp_path, family)
    target = read_manifest(artifact).target
    assert (target.dialect, target.exact_widths) == ("tensorrt", tiny.TINY_PROFILE.verify_widths)
    assert target.parity.max_abs_diff <= 1e-2
    assert 0 < target.parity.mean_kl <= 1e-6 < BOUNDS["fp16"].mean_kl
    onnx.checker.check_model(artifact / "target.onnx", full_check=True)
    nodes = onnx.load(artifact / "target.onnx", load_external_data=False).graph.node
    assert {node.domain for node in nodes} == {""}
    found = Counter(node.op_type for node in nodes)
    assert found["Softmax" if family == "gemma2" else "Attention"] == found["TensorScatter"] // 2 > 0
    tiny.assert_lossless(artifact, tmp_path / "machine")


@pytest.mark.parametrize("family", ["gemma2", "llama"])
def test_a_graph_that_takes_trees_is_parsed_and_built(tmp_path: Path, family: str) -> None:
    check(tmp_path, family, trees=True)


@pytest.mark.parametrize(("family", "output"), [("gemma2", "argmax"), ("llama", "top-k")])
def test_a_graph_that_finds_the_best_tokens_is_parsed_and_built(tmp_path: Path, family: str, output: str) -> None:
    check(tmp_path, family, output=output)


def test_the_lint_refuses_every_operator_that_the_parser_lacks() -> None:
    builder = Builder(BuildOptions(builder="tensorrt-rtx"))
    network = builder._builder.create_network(1)
    parser = trt.OnnxParser(network, builder._log)
    names = {schema.name for schema in onnx.defs.get_all_schemas() if schema.domain == ""}
    lacking = sorted(name for name in names if not parser.supports_operator(name))
    assert len(lacking) > 30
    for name in lacking:
        node = ir.node(name, [])
        graph = ir.Graph([], node.outputs, nodes=[node], opset_imports={"": 24})
        with pytest.raises(UnsupportedModelError, match=rf"{name} .*TensorRT's parser does not take this operator"):
            lint_tensorrt(ir.Model(graph, ir_version=11))


def check(folder: Path, family: str, **changes: object) -> Path:
    """Export and build; the builder checks tensors and in-place updates itself, and refuses a graph it warns of."""
    profile = tiny.profile(dialect="tensorrt", precision="fp16", **changes)
    artifact = tiny.export_tiny(tiny.make_model(family, folder / "source"), folder / "artifact", profile=profile)
    spec = read_manifest(artifact).target
    builder = Builder(BuildOptions(builder="tensorrt-rtx"))
    shapes = call_shapes(spec.prefill_width, spec.verify_widths, with_decode=True)
    assert builder.build(spec, artifact / spec.file, shapes, lambda _: None).nbytes > spec.weight_bytes
    warnings = [text for text in builder._log.warnings if "Int64 binding" not in text]
    assert (builder._log.errors, warnings) == ([], [])
    return artifact
