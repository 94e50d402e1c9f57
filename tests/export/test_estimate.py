"""The size stated before an export is the size afterwards."""

from dataclasses import replace
from pathlib import Path

import pytest

import tiny
from specrt_export.checkpoint import Checkpoint, resolve
from specrt_export.estimate import estimate, show_bytes
from specrt_export.support import decoder_dims, load_config
from specrt_profiles.manifest import read_manifest
from specrt_profiles.tensors import DecoderDims

BIGGER = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "head_dim": 64}


@pytest.fixture(scope="module", params=["qwen2", pytest.param("llama", marks=pytest.mark.slow)])
def bigger(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bool]:
    family = request.param
    return tiny.make_model(family, tmp_path_factory.mktemp("bigger"), **BIGGER), family == "qwen2"


def look(source: Path) -> tuple[Checkpoint, DecoderDims]:
    checkpoint = resolve(str(source), revision=None, cache_dir=source, on_bytes=lambda _: None)
    return checkpoint, decoder_dims(load_config(checkpoint))


@pytest.mark.parametrize(
    "precision",
    ["int4", pytest.param("int8", marks=pytest.mark.slow), pytest.param("fp32", marks=pytest.mark.slow)],
)
def test_the_estimate_is_within_a_tenth_of_the_artifact(
    bigger: tuple[Path, bool], tmp_path: Path, precision: str
) -> None:
    profile = tiny.profile(precision=precision)
    source, tied = bigger
    out = tiny.export_tiny(source, tmp_path / "out", profile=profile)
    files = read_manifest(out).files
    weights = files["target.onnx.data"].size + files["target.onnx"].size
    assert estimate(*look(source), profile, tied=tied, num_rows=400).artifact == pytest.approx(weights, rel=0.1)


def test_kv_buffers_are_counted_with_their_padding(tiny_source: Path) -> None:
    found = estimate(*look(tiny_source), tiny.TINY_PROFILE, tied=True, num_rows=400)
    assert found.kv == 2 * 4 * 2 * 2 * 16 * tiny.TINY_PROFILE.slots


def test_peak_memory_covers_loading_and_checking(tiny_source: Path) -> None:
    checkpoint, dims = look(tiny_source)
    large = replace(checkpoint, num_parameters=10**10, weight_bytes=2 * 10**10)
    found = estimate(large, dims, tiny.TINY_PROFILE, tied=True, num_rows=400)
    assert found.artifact == pytest.approx(4e10, rel=0.01)
    assert found.peak_memory > 2 * found.artifact
    small = estimate(large, dims, tiny.profile(precision="int4"), tied=True, num_rows=400)
    assert small.artifact == pytest.approx(0.75e10, rel=0.01)
    assert small.peak_memory > large.weight_bytes
    more = estimate(large, dims, tiny.TINY_PROFILE, tied=True, num_rows=10**7)
    assert more.peak_memory - found.peak_memory > 2 * 4 * dims.vocab_size * (10**7 - 400)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 MB"),
        (1_000_000, "1 MB"),
        (98_362_432, "98 MB"),
        (999_000_000, "999 MB"),
        (1_117_320_768, "1.1 GB"),
        (16_000_000_000, "16.0 GB"),
    ],
)
def test_bytes_are_shown_in_the_unit_that_fits(count: int, text: str) -> None:
    assert show_bytes(count) == text
