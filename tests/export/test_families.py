"""Every documented family: the graph is the model, and speculation changes nothing."""

from pathlib import Path

import pytest

import tiny
from specrt_export.parity import BOUNDS
from specrt_profiles.manifest import read_manifest

# the others run with the slow tests
QUICK = {"llama", "qwen2"}
FAMILIES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in tiny.FAMILIES]


def check_fp32(artifact: Path) -> None:
    target = read_manifest(artifact).target
    assert target.parity.max_abs_diff <= BOUNDS["fp32"].max_abs_diff
    assert target.parity.mean_kl <= BOUNDS["fp32"].mean_kl
    assert target.parity.top1_agreement >= BOUNDS["fp32"].top1_agreement
    assert target.exact_widths == tiny.TINY_PROFILE.verify_widths


def test_a_llama_drafted_by_itself_is_exported_exactly_and_lossless(tiny_artifact: Path, machine_cache: Path) -> None:
    check_fp32(tiny_artifact)
    tiny.assert_lossless(tiny_artifact, machine_cache)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_exported_exactly_and_speculation_is_lossless(tmp_path: Path, family: str) -> None:
    source = tiny.make_model(family, tmp_path / "source")
    artifact = tiny.export_tiny(source, tmp_path / "artifact")
    check_fp32(artifact)
    tiny.assert_lossless(artifact, tmp_path / "machine")


# constants that a half-precision source rounds, formulas that look at a type
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=pytest.mark.slow) for name in ("gemma", "gemma2", "gemma3")]
)
def test_a_bfloat16_source_is_exported_exactly(tmp_path: Path, family: str) -> None:
    source = tiny.make_model(family, tmp_path / "source", dtype="bfloat16")
    check_fp32(tiny.export_tiny(source, tmp_path / "artifact"))


def test_a_gguf_file_is_exported_like_a_directory(tmp_path: Path) -> None:
    artifact = tiny.export_tiny(tiny.make_gguf(tmp_path / "tiny.gguf"), tmp_path / "artifact")
    manifest = read_manifest(artifact)
    assert manifest.target.model.licence == "apache-2.0"
    assert manifest.target.model.source == "tiny.gguf"
    assert manifest.target.parity.max_abs_diff <= BOUNDS["fp32"].max_abs_diff
    assert (artifact / "chat_template.jinja").read_text("utf-8") == tiny.TEMPLATE
    assert "general.name: Tiny" in (artifact / "README-model.txt").read_text("utf-8")
    tiny.assert_lossless(artifact, tmp_path / "machine")
