"""Every family's graph through TensorRT-RTX's own parser and builder, which need no GPU."""

from pathlib import Path

import pytest

import tiny
from specrt_export.builder import Builder, BuildOptions
from specrt_profiles.manifest import read_manifest
from specrt_profiles.plan import call_shapes

pytest.importorskip("tensorrt_rtx", reason="not installed: pip install 'specrt[tensorrt-rtx]'")
QUICK = {"gemma2", "gpt2"}
FAMILIES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in tiny.FAMILIES]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_familys_graph_is_parsed_and_built(tmp_path: Path, family: str) -> None:
    check(tmp_path, family)


@pytest.mark.parametrize("family", ["gemma2", "llama"])
def test_a_graph_that_takes_trees_is_parsed_and_built(tmp_path: Path, family: str) -> None:
    check(tmp_path, family, trees=True)


@pytest.mark.parametrize(("family", "output"), [("gemma2", "argmax"), ("llama", "top-k")])
def test_a_graph_that_finds_the_best_tokens_is_parsed_and_built(tmp_path: Path, family: str, output: str) -> None:
    check(tmp_path, family, output=output)


def check(folder: Path, family: str, **changes: object) -> None:
    """Export and build; the builder checks tensors and in-place updates itself, and refuses a graph it warns of."""
    profile = tiny.profile(dialect="tensorrt", precision="fp16", **changes)
    artifact = tiny.export_tiny(tiny.make_model(family, folder / "source"), folder / "artifact", profile=profile)
    spec = read_manifest(artifact).target
    builder = Builder(BuildOptions(builder="tensorrt-rtx"))
    shapes = call_shapes(spec.prefill_width, spec.verify_widths, with_decode=True)
    assert builder.build(spec, artifact / spec.file, shapes, lambda _: None).nbytes > spec.weight_bytes
    warnings = [text for text in builder._log.warnings if "Int64 binding" not in text]
    assert (builder._log.errors, warnings) == ([], [])
