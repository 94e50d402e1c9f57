"""Weights at 8 and 4 bits, in bfloat16 checkpoints, and shared ones: what is stored, and how far it is off."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny
from specrt_export.parity import BOUNDS
from specrt_profiles.manifest import EngineSpec, read_manifest

Export = Callable[..., Path]
TABLE = tiny.VOCAB_SIZE * 64  # values of an embedding


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Export:
    """A function that exports a family at a precision, once per combination."""
    done: dict[object, Path] = {}

    def get(family: str, precision: str, **overrides: Any) -> Path:
        key = (family, precision, *sorted(overrides.items()))
        if key not in done:
            folder = tmp_path_factory.mktemp("precision")
            source = tiny.make_model(family, folder / "source", **overrides)
            profile = tiny.profile(precision=precision)
            done[key] = tiny.export_tiny(source, folder / "artifact", profile=profile)
        return done[key]

    return get


def target_of(artifact: Path) -> EngineSpec:
    return read_manifest(artifact).target


def stored(artifact: Path) -> dict[str, tuple[tuple[int, ...], int, int]]:
    """Return shape, offset and length of every tensor outside the graph file."""
    import onnx

    graph = onnx.load(str(artifact / "target.onnx"), load_external_data=False).graph
    places = {t.name: ({e.key: e.value for e in t.external_data}, tuple(t.dims)) for t in graph.initializer}
    assert {place["location"] for place, _ in places.values() if place} == {"target.onnx.data"}
    return {
        name: (shape, int(place["offset"]), int(place["length"])) for name, (place, shape) in places.items() if place
    }


def operators(artifact: Path) -> list[str]:
    import onnx

    return [node.op_type for node in onnx.load(str(artifact / "target.onnx"), load_external_data=False).graph.node]


@pytest.mark.parametrize(
    ("family", "precision"),
    [
        ("qwen2", "int4"),
        pytest.param("gpt2", "int8", marks=pytest.mark.slow),
        pytest.param("qwen2", "int8", marks=pytest.mark.slow),
        pytest.param("llama", "int4", marks=pytest.mark.slow),
        pytest.param("llama", "int8", marks=pytest.mark.slow),
        pytest.param("gpt2", "int4", marks=pytest.mark.slow),
    ],
)
def test_quantised_weights_stay_within_their_bounds_and_lossless(
    export: Export, tmp_path: Path, family: str, precision: str
) -> None:
    artifact = export(family, precision)
    target = target_of(artifact)
    assert target.precision == precision
    assert 1e-6 < target.parity.mean_kl <= BOUNDS[target.precision].mean_kl
    assert target.exact_widths == tiny.TINY_PROFILE.verify_widths
    assert {"MatMulNBits", "MatMulIntegerToFloat"} & set(operators(artifact))
    assert ("MatMul" in operators(artifact)) == (precision == "int4"), "block sums times offsets, nothing else"
    tiny.assert_lossless(artifact, tmp_path / "machine")


@pytest.mark.slow
def test_sizes_that_fill_no_whole_block_are_quantised_too(export: Export, tmp_path: Path) -> None:
    artifact = export(
        "llama", "int4", hidden_size=80, num_attention_heads=5, num_key_value_heads=1, intermediate_size=90
    )
    assert target_of(artifact).parity.mean_kl <= BOUNDS["int4"].mean_kl
    tiny.assert_lossless(artifact, tmp_path / "machine")


@pytest.mark.slow
def test_a_tied_model_is_exported_exactly_and_lossless(export: Export, tmp_path: Path) -> None:
    artifact = export("qwen2", "fp32")
    assert target_of(artifact).parity.max_abs_diff <= BOUNDS["fp32"].max_abs_diff
    tiny.assert_lossless(artifact, tmp_path / "machine")


@pytest.mark.slow
def test_a_bfloat16_checkpoint_is_as_close_as_an_fp32_one(export: Export) -> None:
    parity = target_of(export("llama", "fp32", dtype="bfloat16")).parity
    assert parity.max_abs_diff <= BOUNDS["fp32"].max_abs_diff
    assert parity.mean_kl <= BOUNDS["fp32"].mean_kl
    assert parity.top1_agreement == 1.0


def test_a_draft_has_its_own_precision(tiny_artifact: Path) -> None:
    manifest = read_manifest(tiny_artifact)
    assert manifest.target.precision == "fp32"
    assert manifest.engines["draft"].precision == manifest.profile.draft_precision == "int4"
    assert 1e-6 < manifest.engines["draft"].parity.mean_kl <= BOUNDS["int4"].mean_kl


def test_weights_lie_in_one_file_each_value_once(tiny_artifact: Path) -> None:
    weights = stored(tiny_artifact)
    num_parameters = target_of(tiny_artifact).model.num_parameters
    rotary, inline = 2 * (tiny.TINY_PROFILE.slots * 8), 5 * 64  # norms are too short for the data file
    assert sum(length for _, _, length in weights.values()) == 4 * (num_parameters + rotary - inline)
    assert len({offset for _, offset, _ in weights.values()}) == len(weights)


def test_fp32_weights_are_stored_to_the_bit(tiny_source: Path, tiny_artifact: Path) -> None:
    from safetensors.numpy import load_file

    data = (tiny_artifact / "target.onnx.data").read_bytes()
    columns: dict[bytes, str] = {}  # of every matrix, by content
    for name, (shape, offset, length) in stored(tiny_artifact).items():
        array = np.frombuffer(data[offset : offset + length], np.float32).reshape(shape)
        columns |= {column.tobytes(): name for column in (array.T if array.ndim == 2 else [])}
        columns |= {row.tobytes(): name for row in (array if "embed" in name else [])}
    for name, tensor in load_file(tiny_source / "model.safetensors").items():
        if tensor.ndim == 2:
            places = {columns.get(row.tobytes()) for row in tensor}
            assert len(places) == 1, f"the rows of {name} lie side by side"
            assert None not in places


def test_an_untied_table_is_stored_twice_and_a_tied_one_once(export: Export, tiny_artifact: Path) -> None:
    def tables(artifact: Path) -> int:
        return sum(sorted(shape) == [64, tiny.VOCAB_SIZE] for shape, _, _ in stored(artifact).values())

    assert tables(tiny_artifact) == 2
    assert tables(export("qwen2", "fp32")) == 1
    assert "FusedMatMul" in operators(export("qwen2", "fp32"))


def test_a_tied_table_is_counted_and_written_once(export: Export) -> None:
    artifact = export("qwen2", "fp32")
    size = (artifact / "target.onnx.data").stat().st_size
    weights = stored(artifact)
    assert size <= sum(length for _, _, length in weights.values()) + 4096 * len(weights)
    assert size < 4 * (target_of(artifact).model.num_parameters + TABLE)


def test_a_tied_quantised_table_shares_its_bytes(export: Export) -> None:
    artifact = export("qwen2", "int4")
    places: dict[int, list[tuple[int, ...]]] = {}
    for shape, offset, length in stored(artifact).values():
        if length == TABLE:
            places.setdefault(offset, []).append(shape)
    assert list(places.values()) == [[(384, 2, 32), (384, 64)]] or list(places.values()) == [[(384, 64), (384, 2, 32)]]


def test_every_tensor_starts_at_a_page(export: Export) -> None:
    assert all(offset % 4096 == 0 for _, offset, _ in stored(export("qwen2", "fp32")).values())


def test_blocks_without_offsets_cost_no_second_product_and_are_kept(tiny_source: Path, tmp_path: Path) -> None:
    """As in a checkpoint that was GGUF Q4_0: a scale per block, and whole numbers from -8 to 7 around 0."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tiny_source)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "proj" in name:
            blocks = torch.randint(-8, 8, (parameter.numel() // 32, 32), generator=generator).float()
            scales = (0.01 + 0.02 * torch.rand(len(blocks), 1, generator=generator)).half().float()
            parameter.data = (blocks * scales).reshape(parameter.shape)
    model.save_pretrained(tmp_path / "source")
    AutoTokenizer.from_pretrained(tiny_source).save_pretrained(tmp_path / "source")
    artifact = tiny.export_tiny(tmp_path / "source", tmp_path / "out", profile=tiny.profile(precision="int4"))
    found = operators(artifact)
    assert found.count("MatMulNBits") == 9
    assert "MatMul" not in found
    assert "ReduceSum" not in found
    assert target_of(artifact).parity.mean_kl < 1e-3
