"""`specrt inspect`: what an artifact holds, without opening an engine."""

import json
from pathlib import Path

import pytest

from copies import copy_artifact, edit_generation
from specrt import engine_ort
from specrt.errors import ManifestError
from specrt.inspect import describe, kv_bytes, show
from specrt_profiles.manifest import read_manifest


def test_the_page_shows_what_matters(tiny_artifact: Path) -> None:
    page = show(tiny_artifact)
    for words in (
        "target",
        "draft",
        "LlamaForCausalLM",
        "fp32), ort dialect",
        "fp32",
        "int4",
        "capacity 128 tokens, KV buffers 0 MB (float32)",
        "verify widths 2, 4, 6, 10, 16",
        "bit-equal when exported: 2, 4, 6, 10, 16",
        "end ids 0",
        "ngram, suffix, model, combined, none; default model, k 3 of at most 15",
        "temperature 0.0 (greedy)",
        "licence not stated",
        "onnxruntime",
    ):
        assert words in page
    assert all(len(line) > 12 for line in page.splitlines())


def test_heads_without_kv_buffers_are_shown(medusa_artifact: Path) -> None:
    page = show(medusa_artifact)
    for words in (
        "head (Medusa, 0.0 M parameters, fp32), ort dialect",
        "3 heads in one call, 384 tokens to guess, no KV buffers",
        "ngram, suffix, medusa, combined, none; default combined, k 3 of at most 15",
    ):
        assert words in page


def test_the_sampling_defaults_that_are_not_neutral_are_shown(tiny_artifact: Path, tmp_path: Path) -> None:
    folder = copy_artifact(tiny_artifact, tmp_path / "copy")
    edit_generation(folder, temperature=0.6, top_k=40)
    (line,) = (line for line in show(folder).splitlines() if line.startswith("sampling"))
    assert "temperature 0.6, top_k 40" in line
    assert "top_p" not in line
    assert "greedy" not in line


def test_the_description_is_json_with_manifest_and_defaults(tiny_artifact: Path) -> None:
    data = json.loads(json.dumps(describe(tiny_artifact)))
    assert data["manifest"] == json.loads((tiny_artifact / "manifest.json").read_text("utf-8"))
    assert data["generation"] == json.loads((tiny_artifact / "generation.json").read_text("utf-8"))


def test_kv_bytes_are_those_of_the_buffers(tiny_artifact: Path) -> None:
    layers, keys_and_values, heads, slots, head_dim = 2, 2, 2, 144, 16
    assert kv_bytes(read_manifest(tiny_artifact).target) == 4 * layers * keys_and_values * heads * slots * head_dim


def test_no_engine_is_opened(tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_ort, "OrtEngine", None)
    monkeypatch.setattr(engine_ort, "open_session", None)
    assert show(tiny_artifact)


def test_a_folder_that_is_no_artifact_is_refused(tmp_path: Path) -> None:
    for call in (show, describe):
        with pytest.raises(ManifestError, match=r"no manifest\.json there"):
            call(tmp_path)
