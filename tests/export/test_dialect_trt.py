"""The TensorRT dialect: the same model, the same contract, in operators that TensorRT takes as they are written."""

import io
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from click.testing import CliRunner
from numpy.typing import NDArray

import specrt
import tiny
from specrt.cli import main
from specrt_export import dialect_trt
from specrt_export.errors import ExportError, UnsupportedModelError
from specrt_export.lint_trt import lint_tensorrt
from specrt_export.parity import BOUNDS, GraphRunner
from specrt_profiles.manifest import read_manifest

PROFILE = tiny.profile(dialect="tensorrt", draft_precision="fp32")
IDS = [int(token) for token in np.random.default_rng(3).integers(0, tiny.VOCAB_SIZE, 60)]
QUICK = ("gemma2", "gpt2")  # soft cap and window; no rotation, no groups: the Llama has the rest


def operators(artifact: Path) -> Counter[str]:
    graph = onnx.load(artifact / "target.onnx", load_external_data=False).graph
    assert {node.domain for node in graph.node} == {""}
    return Counter(node.op_type for node in graph.node)


def runner(artifact: Path) -> GraphRunner:
    spec = read_manifest(artifact).target
    return GraphRunner(artifact / spec.file, spec.inputs, spec.outputs, PROFILE)


def logits(graph: GraphRunner, width: int, ids: list[int] = IDS) -> NDArray[np.float32]:
    """Return logits [n, V] of `ids` in calls of `width`."""
    return np.concatenate([graph(ids[i : i + width], i, width) for i in range(0, len(ids), width)])


def check_parity(artifact: Path) -> None:
    manifest = read_manifest(artifact)
    parity, bounds = manifest.target.parity, BOUNDS["fp32"]
    assert (manifest.profile.dialect, manifest.target.dialect) == ("tensorrt", "tensorrt")
    assert parity.max_abs_diff <= 1e-4 < bounds.max_abs_diff
    assert parity.mean_kl <= bounds.mean_kl
    assert manifest.target.exact_widths == PROFILE.verify_widths
    model = ir.load(artifact / "target.onnx")
    lint_tensorrt(model)
    onnx.checker.check_model(artifact / "target.onnx", full_check=True)


@pytest.mark.parametrize("family", QUICK)
def test_a_family_is_exported_exactly_and_speculation_is_lossless(tmp_path: Path, family: str) -> None:
    """At fp32; all families at fp16 are in `test_tensorrt_parser`."""
    artifact = tiny.export_tiny(tiny.make_model(family, tmp_path / "source"), tmp_path / "artifact", profile=PROFILE)
    check_parity(artifact)
    tiny.assert_lossless(artifact, tmp_path / "machine")
    found = operators(artifact)
    assert found["Softmax" if family == "gemma2" else "Attention"] == found["TensorScatter"] // 2 > 0


def test_attention_is_rotation_scatter_and_attention(tensorrt_artifact: Path) -> None:
    check_parity(tensorrt_artifact)
    found = operators(tensorrt_artifact)
    assert (found["RotaryEmbedding"], found["TensorScatter"], found["Attention"]) == (4, 4, 2)
    assert found["LessOrEqual"] == 1, "the mask is made once"


def test_both_engines_of_an_artifact_are_of_its_dialect(tensorrt_artifact: Path, machine_cache: Path) -> None:
    assert {engine.dialect for engine in read_manifest(tensorrt_artifact).engines.values()} == {"tensorrt"}
    tiny.assert_lossless(tensorrt_artifact, machine_cache)


def test_logits_are_those_of_the_ort_dialect(tiny_artifact: Path, tensorrt_artifact: Path) -> None:
    ort, trt = runner(tiny_artifact), runner(tensorrt_artifact)
    for width in (2, 6, 16):
        difference = np.abs(logits(ort, width) - logits(trt, width)).max()
        assert 0 < difference < 2e-5


def test_chunks_give_the_bits_of_the_whole(tensorrt_artifact: Path) -> None:
    graph = runner(tensorrt_artifact)
    whole = logits(graph, 60)
    for width in (2, 4, 6, 10, 16):
        np.testing.assert_array_equal(logits(graph, width), whole)


def test_a_rollback_leaves_no_trace(tensorrt_artifact: Path) -> None:
    graph = runner(tensorrt_artifact)
    graph(IDS[:16], 0, 16)
    clean = graph(IDS[16:20], 16, 4).copy()
    for rejected in (IDS[30:46], IDS[5:9], IDS[40:42]):
        graph(rejected, 16, len(rejected))
    np.testing.assert_array_equal(graph(IDS[16:20], 16, 4), clean)


def test_both_dialects_say_the_same(tiny_artifact: Path, tensorrt_artifact: Path, machine_cache: Path) -> None:
    texts = []
    for folder in (tiny_artifact, tensorrt_artifact):
        with specrt.load(folder, cache_dir=machine_cache) as model:
            how: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True}
            texts += [[model.generate(IDS[:n], k=k, **how).token_ids for n in (1, 7, 60) for k in (0, 5)]]
    assert texts[0] == texts[1]


def test_a_window_narrower_than_the_context_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the window the graph is another model, and the export's own comparison says so."""
    monkeypatch.setattr(dialect_trt, "seen_slots", widest_mask(dialect_trt.seen_slots))
    source = tiny.make_model("mistral-window", tmp_path / "source")
    with pytest.raises(ExportError, match="does not match its source"):
        tiny.export_tiny(source, tmp_path / "artifact", profile=PROFILE)


def widest_mask(original: Any) -> Any:
    return lambda inputs, *, slots, window: original(inputs, slots=slots, window=None)


def test_an_export_is_linted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A soft cap as an attribute is right on ONNX Runtime, which the comparison runs on, but not taken by TensorRT."""

    def capped(*qkv_and_mask: torch.Tensor, scale: float, softcap: float) -> torch.Tensor:
        like, options = qkv_and_mask[0], {"scale": scale, "softcap": softcap}
        return torch.onnx.ops.symbolic("Attention", qkv_and_mask, options, dtype=like.dtype, shape=like.shape)

    monkeypatch.setattr(dialect_trt, "_capped", capped)
    source = tiny.make_model("gemma2", tmp_path / "source")
    with pytest.raises(UnsupportedModelError, match=r"^TensorRT cannot run this graph: Attention \(.*softcap is not"):
        tiny.export_tiny(source, tmp_path / "artifact", profile=PROFILE)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["tensorrt", "--kv-precision", "int8"], "expected --kv-precision same for --dialect tensorrt, found int8"),
        (["ort", "--precision", "bf16"], "expected --precision fp32, fp16, int8 or int4 for --dialect ort, found bf16"),
        (
            ["ort", "--draft", "no-such-model", "--draft-precision", "bf16"],
            "expected --draft-precision fp32, fp16, int8 or int4 for --dialect ort, found bf16",
        ),
        (
            ["tensorrt", "--precision", "fp16", "--kv-precision", "fp32"],
            "profile cpu: kv_precision: expected same or int8 beside precision fp16, found fp32",
        ),
    ],
)
def test_what_a_dialect_does_not_have_is_refused_first(tmp_path: Path, options: list[str], text: str) -> None:
    arguments = ["export", "no-such-model", "-o", str(tmp_path / "out"), "--dialect", *options]
    result = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: {text}")
    assert result.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("precision", ["fp16", pytest.param("bf16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", ["gemma2", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_a_family_in_half_precision_is_within_its_bounds(tmp_path: Path, family: str, precision: str) -> None:
    """gemma2's norms have weights in fp32, and its attention is decomposed."""
    profile = tiny.profile(dialect="tensorrt", precision=precision)
    artifact = tiny.export_tiny(tiny.make_model(family, tmp_path / "source"), tmp_path / "artifact", profile=profile)
    target = read_manifest(artifact).target
    assert 1e-9 < target.parity.mean_kl <= BOUNDS[target.precision].mean_kl
    assert target.exact_widths == PROFILE.verify_widths
    kinds = {tensor.name.partition(".")[0]: tensor.dtype for tensor in (*target.inputs, *target.outputs)}
    buffers = {kinds[f"{when}_{what}"] for when in ("past", "present") for what in ("key", "value")}
    assert buffers == {profile.float_type}
    assert kinds["logits"] == "float32"
    lint_tensorrt(ir.load(artifact / "target.onnx"))
    onnx.checker.check_model(artifact / "target.onnx", full_check=True)


@pytest.fixture(scope="module")
def half_artifact(tiny_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Llama in fp16, with itself at int4 as draft."""
    profile = tiny.profile(dialect="tensorrt", precision="fp16")
    out = tmp_path_factory.mktemp("half") / "tiny"
    return tiny.export_tiny(tiny_source, out, draft=str(tiny_source), profile=profile)


def test_half_precision_is_exact_by_rows_and_lossless(half_artifact: Path, machine_cache: Path) -> None:
    graph = runner(half_artifact)
    whole = logits(graph, 60)
    for width in (2, 6, 16):
        np.testing.assert_array_equal(logits(graph, width), whole)
    graph(IDS[30:46], 16, 16)  # rejected
    np.testing.assert_array_equal(graph(IDS[16:20], 16, 4), whole[16:20])
    tiny.assert_lossless(half_artifact, machine_cache)


def test_a_draft_has_its_own_precision_in_this_dialect_too(half_artifact: Path) -> None:
    manifest = read_manifest(half_artifact)
    assert [(e.dialect, e.precision) for e in manifest.engines.values()] == [("tensorrt", "fp16"), ("tensorrt", "int4")]


def test_weights_beyond_the_range_of_half_precision_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    source = tiny.make_model("llama", tmp_path / "source")
    weights = load_file(source / "model.safetensors")
    weights["model.layers.0.mlp.down_proj.weight"][0, 0] = torch.tensor(1e5)
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=r"down_proj.*beyond the range of float16: choose bf16 or fp32"):
        tiny.export_tiny(source, tmp_path / "out", profile=tiny.profile(dialect="tensorrt", precision="fp16"))
    assert not (tmp_path / "out").exists()


def test_activations_beyond_the_range_of_half_precision_are_refused(tmp_path: Path) -> None:
    """ONNX Runtime's CPU provider would not notice: it computes between products in fp32."""
    from safetensors.torch import load_file, save_file

    source = tiny.make_model("llama", tmp_path / "source")
    weights = load_file(source / "model.safetensors")
    for name, scale in (("gate", 3e3), ("up", 3e3), ("down", 1e-6)):
        weights[f"model.layers.0.mlp.{name}_proj.weight"] *= scale
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ExportError, match="the graph gives logits that are not numbers"):
        tiny.export_tiny(source, tmp_path / "out", profile=tiny.profile(dialect="tensorrt", precision="fp16"))


def test_the_ort_dialect_has_fp16_too(tiny_source: Path, tmp_path: Path) -> None:
    artifact = tiny.export_tiny(tiny_source, tmp_path / "out", profile=tiny.profile(precision="fp16"))
    target = read_manifest(artifact).target
    assert 1e-9 < target.parity.mean_kl <= BOUNDS["fp16"].mean_kl
    assert {tensor.dtype for tensor in target.inputs if tensor.name.startswith("past_")} == {"float16"}
    tiny.assert_lossless(artifact, tmp_path / "machine")


def test_a_draft_that_is_added_has_the_dialect_of_the_artifact(tensorrt_artifact: Path, tmp_path: Path) -> None:
    from specrt_export.artifact import ExportRequest, export
    from specrt_export.progress import Progress

    request = ExportRequest(
        model=None, draft="no-such-model", profile=tiny.profile(draft_precision="bf16"), out=tmp_path / "out",
        cache_dir=tmp_path, add_to=tensorrt_artifact,
    )  # fmt: skip
    with pytest.raises(ExportError, match="no-such-model"):  # bf16 itself is refused in the other dialect
        export(request, Progress(stream=io.StringIO()))
