"""KV buffers in int8: what is stored, that the output stays lossless, and that the graph is proved in floats."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import numpy_helper

import tiny
from specrt.check import check_artifact
from specrt.inspect import kv_bytes
from specrt_export import graph
from specrt_export.kv import kv_scales
from specrt_export.parity import GraphRunner, source_logits
from specrt_profiles.manifest import read_manifest

PROFILE = tiny.profile(precision="fp32", kv_precision="int8")
IDS = list(range(5, 29))


@pytest.fixture(scope="module")
def artifact(tiny_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.export_tiny(tiny_source, tmp_path_factory.mktemp("kv") / "artifact", profile=PROFILE)


@pytest.fixture(scope="module")
def source(tiny_source: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_source).eval()


def scales_of(artifact: Path) -> dict[str, Any]:
    model = onnx.load(str(artifact / "target.onnx"))
    return {t.name: numpy_helper.to_array(t) for t in model.graph.initializer if t.name.endswith(".scale")}


def test_buffers_hold_the_models_keys_and_values_within_half_a_step(artifact: Path, source: Any) -> None:
    spec = read_manifest(artifact).target
    runner = GraphRunner(artifact / "target.onnx", spec.inputs, spec.outputs, PROFILE)
    runner(IDS, 0, 64)
    buffers = {name: value.numpy() for name, value in runner._past}
    with torch.no_grad():
        cache = source(input_ids=torch.tensor([IDS]), use_cache=True).past_key_values
    scales = scales_of(artifact)
    for layer, kept in enumerate(cache.layers):
        for part, wanted in (("key", kept.keys), ("value", kept.values)):
            step, stored = scales[f"{part}.{layer}.scale"], buffers[f"past_{part}.{layer}"][:, :, : len(IDS)]
            assert stored.dtype == np.int8
            assert np.abs(stored).max() > 60, "the integers' range is used"
            inside = np.abs(wanted.numpy()) < 127 * step  # the rest is cut
            error = np.abs(stored * step - wanted.numpy())
            # a layer computes with rounded keys and values, so the next ones see other inputs
            assert np.all(error[inside] <= (0.5 * step + 0.02 * (layer + 0.01)).repeat(len(IDS), 2)[inside])
            assert inside.mean() > 0.95


def test_scales_come_from_the_largest_keys_and_values_of_all_texts(source: Any) -> None:
    texts = [IDS, IDS[::-1]]
    found, first = kv_scales(source, texts), kv_scales(source, texts[:1])
    with torch.no_grad():
        caches = [source(input_ids=torch.tensor([ids]), use_cache=True).past_key_values for ids in texts]
    peak = torch.stack([cache.layers[1].keys.abs().amax(2) for cache in caches]).amax(0)
    np.testing.assert_allclose(found["key.1"][:, :, 0], 1.1 * peak.numpy() / 127, rtol=1e-4)
    assert all(np.all(found[name] >= first[name]) for name in found)
    assert any(np.any(found[name] > first[name]) for name in found)


@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma2", "gpt2", "qwen3"))]
)
def test_output_is_the_same_with_speculation(family: str, artifact: Path, tmp_path: Path) -> None:
    if family != "llama":
        profile = tiny.profile(precision="int8", kv_precision="int8")
        artifact = tiny.export_tiny(tiny.make_model(family, tmp_path / "source"), tmp_path / "out", profile=profile)
    target = read_manifest(artifact).target
    assert 1e-9 < target.parity.mean_kl < 1e-3
    assert target.exact_widths == PROFILE.verify_widths
    tiny.assert_lossless(artifact, tmp_path / "machine")


@pytest.mark.parametrize("trees", [False, True])
def test_at_fp16_the_buffers_cost_what_they_cost_at_fp32(
    artifact: Path, tiny_source: Path, tmp_path: Path, trees: bool
) -> None:
    """It is measured on a copy in fp32; had that its buffers in floats, no machine would find what the export says."""
    profile = tiny.profile(precision="fp16", kv_precision="int8", trees=trees)
    half = tiny.export_tiny(tiny_source, tmp_path / "out", profile=profile)
    expected, found = (read_manifest(folder).target.parity.mean_kl for folder in (artifact, half))
    assert found == pytest.approx(expected, rel=0.2)
    assert check_artifact(half).problems == []
    tiny.assert_lossless(half, tmp_path / "machine")


def test_buffers_take_a_quarter_of_the_memory(artifact: Path, tiny_artifact: Path) -> None:
    ours, floats = (read_manifest(folder).target for folder in (artifact, tiny_artifact))
    assert 4 * kv_bytes(ours) == kv_bytes(floats)


def test_the_proof_of_the_structure_runs_with_float_buffers(
    artifact: Path, source: Any, tiny_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounded keys and values would hide a wrong graph; without the rounding it equals its source to fp32 accuracy."""
    twins: list[Path] = []
    write = graph.save_in_fp32_arithmetic

    def keep(written: Path, path: Path, *, rounded: bool) -> None:
        write(written, path, rounded=rounded)
        twins.append(path.rename(path.with_name("kept.onnx")))
        profile = replace(PROFILE, kv_precision="fp32")
        spec = read_manifest(artifact).target
        kv = ("past_", "present_")
        inputs, outputs = (
            tuple(replace(t, dtype="float32") if t.name.startswith(kv) else t for t in tensors)
            for tensors in (spec.inputs, spec.outputs)
        )
        (wanted,) = source_logits(source, [IDS])
        found = GraphRunner(twins[0], inputs, outputs, profile, as_written=True)(IDS, 0, 64)
        assert 0 < np.abs(found - wanted).max() < 1e-4
        twins[0].rename(path)

    monkeypatch.setattr(graph, "save_in_fp32_arithmetic", keep)
    tiny.export_tiny(tiny_source, tmp_path / "out", profile=PROFILE)
    assert twins


def test_onnx_runtime_takes_the_buffers_in_place(artifact: Path) -> None:
    session = ort.InferenceSession(str(artifact / "target.onnx"), providers=["CPUExecutionProvider"])
    kv = [t for t in (*session.get_inputs(), *session.get_outputs()) if t.name.startswith(("past_", "present_"))]
    assert len(kv) == 8
    assert {t.type for t in kv} == {"tensor(int8)"}
