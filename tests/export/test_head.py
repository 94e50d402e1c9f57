"""Heads as files and as graphs: published layouts, what is refused, and the target that gives features."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import tiny
from specrt_export.cli import export_command
from specrt_export.distill.head import Layout
from specrt_export.errors import ExportError
from specrt_export.head_file import read_head
from specrt_export.head_tensors import token_ids
from specrt_export.shared import stored
from specrt_profiles.manifest import read_manifest
from tiny import drop, export_tiny, make_head, put

LAYERS = 8
LAYOUTS: tuple[Layout, ...] = ("eagle", "eagle3")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_model("llama", tmp_path_factory.mktemp("target"), num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def config(source: Path) -> Any:
    return transformers.AutoConfig.from_pretrained(source)


def read(path: Path, config: Any) -> Any:
    return read_head(path, config, vocab_size=tiny.VOCAB_SIZE)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("d2t", [True, False])
@pytest.mark.parametrize("own_matrix", [True, False])
def test_published_layouts_are_read(
    source: Path, config: Any, tmp_path: Path, layout: Layout, d2t: bool, own_matrix: bool
) -> None:
    path = make_head(source, tmp_path / "head.safetensors", layout, d2t=d2t, own_matrix=own_matrix)
    found = read(path, config)
    assert (found.layout, found.ffn, found.card) == (layout, 96, None)
    assert (found.matrix is not None) == own_matrix
    if d2t:
        assert found.token_ids.tolist() == list(range(0, tiny.VOCAB_SIZE, 2))
    else:
        assert found.token_ids is None


def test_names_with_a_prefix_and_heads_without_bias_are_read(source: Path, config: Any, tmp_path: Path) -> None:
    tensors = load_file(make_head(source, tmp_path / "a.safetensors", "eagle", d2t=False))
    del tensors["fc.bias"]
    tensors["embed_tokens.weight"] = torch.zeros(tiny.VOCAB_SIZE, 64)
    save_file({f"model.{name}": tensor for name, tensor in tensors.items()}, tmp_path / "b.safetensors")
    assert not read(tmp_path / "b.safetensors", config).tensors["fc.bias"].any()


@pytest.mark.parametrize(
    ("stored_ids", "known", "expected"),
    [
        ([3, 3, 5], None, [3, 4, 7]),  # offsets
        ([0, 0, 0], None, [0, 1, 2]),
        ([7, 2, 9], None, [7, 3, 11]),
        ([9, 2, 11], None, [9, 2, 11]),  # ids: the last offset leads out of the vocabulary
        ([2, 4, 6], [2, 4, 6], [2, 4, 6]),  # ids by t2d, which offsets would not give
    ],
)
def test_which_tokens_d2t_stands_for(stored_ids: list[int], known: list[int] | None, expected: list[int]) -> None:
    tensors = {"d2t": torch.tensor(stored_ids)}
    if known is not None:
        tensors["t2d"] = torch.isin(torch.arange(12), torch.tensor(known))
    found = token_ids(Path("head"), tensors, vocab_size=12)
    assert found is not None
    assert found.tolist() == expected


@pytest.mark.parametrize("wrong", [[0, 12, 13], [-1, 0, 0], [4, 4, 2], [0.5, 1.0], [[1, 2]], []])
def test_d2t_out_of_range_is_refused(wrong: Any) -> None:
    with pytest.raises(ExportError, match="d2t: expected"):
        token_ids(Path("head"), {"d2t": torch.tensor(wrong)}, vocab_size=5)


@pytest.mark.parametrize(
    ("layout", "change", "text"),
    [
        ("eagle", drop("fc.weight"), r"expected fc.weight \[64, 128\], found no such tensor"),
        ("eagle", drop("layers.0.mlp.gate_proj.weight"), "found no such tensor"),
        ("eagle", put("fc.weight", (64, 64)), r"expected fc.weight \[64, 128\], found \[64, 64\]"),
        ("eagle3", put("fc.weight", (64, 128)), r"expected fc.weight \[64, 192\], found \[64, 128\]"),
        ("eagle3", put("midlayer.self_attn.q_proj.weight", (64, 64)), r"q_proj.weight \[64, 128\], found \[64, 64\]"),
        ("eagle3", put("lm_head.weight", (5, 64)), r"expected lm_head.weight \[192, 64\], found \[5, 64\]"),
        ("eagle", put("layers.1.mlp.up_proj.weight", (96, 64)), "found layers.1.mlp.up_proj.weight as well"),
        ("eagle", lambda tensors: tensors.clear(), "expected the layer of an EAGLE head"),
    ],
)
def test_wrong_tensors_are_named(
    source: Path, config: Any, tmp_path: Path, layout: Layout, change: Any, text: str
) -> None:
    tensors = load_file(make_head(source, tmp_path / "good.safetensors", layout))
    change(tensors)
    save_file(tensors, tmp_path / "head.safetensors")
    with pytest.raises(ExportError, match=text) as error:
        read(tmp_path / "head.safetensors", config)
    assert "\n" not in str(error.value)


def test_files_that_are_no_heads_are_refused(source: Path, config: Any, tmp_path: Path) -> None:
    path = make_head(source, tmp_path / "head.safetensors", "eagle")
    path.write_bytes(path.read_bytes()[:-100])
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    for name, text in (
        ("head.safetensors", "not readable as safetensors"),
        ("none.safetensors", "not readable as safetensors"),
        ("pytorch_model.bin", "expected .safetensors, found a PyTorch file: convert it with  python -c"),
    ):
        with pytest.raises(ExportError, match=text) as error:
            read(tmp_path / name, config)
        assert "\n" not in str(error.value)


def test_a_damaged_card_is_refused(source: Path, config: Any, tmp_path: Path) -> None:
    path = make_head(source, tmp_path / "head.safetensors", "eagle")
    for text, complaint in (("{", "not readable as a head's card"), ("{}", "head.json: the key 'target' is missing")):
        (tmp_path / "head.json").write_text(text, "utf-8")
        with pytest.raises(ExportError, match=complaint):
            read(path, config)


def card(layout: str, weights: str) -> str:
    return json.dumps({
        "layout": layout, "target": {"name": "another", "vocabulary": "0" * 64, "weights": weights}, "layers": [],
        "ffn": 96, "vocabulary_size": 192, "coverage": 0.9, "tokens": 1, "updates": 1, "planned_updates": 1,
        "loss": 1.0, "agreement": [0.5], "block_efficiency": 1.5, "command": "", "tools": {},
        "training": {
            "epochs": 1, "batch": 1, "steps": 5, "chains": 0.25, "learning_rate": 0.1, "weight_decay": 0.1,
            "warmup": 1, "regression": 1.0, "decay": 0.8, "averaging": 0.9, "seed": 0,
        },
    })  # fmt: skip


def test_a_head_for_another_target_is_refused_and_nothing_is_left(source: Path, tmp_path: Path) -> None:
    head = make_head(source, tmp_path / "head.safetensors", "eagle")
    (tmp_path / "head.json").write_text(card("eagle", "0" * 64), "utf-8")
    with pytest.raises(ExportError, match="made for another with other weights than"):
        export_tiny(source, tmp_path / "out", draft=None, heads=(head,))
    (tmp_path / "head.json").write_text(card("eagle3", "0" * 64), "utf-8")
    with pytest.raises(ExportError, match=r"head.json: expected the card of an eagle head, found eagle3"):
        export_tiny(source, tmp_path / "out", draft=None, heads=(head,))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["head.json", "head.safetensors"]


def test_where_no_head_runs_it_is_refused(source: Path, tmp_path: Path) -> None:
    head = make_head(source, tmp_path / "head.safetensors", "eagle")
    with pytest.raises(ExportError, match="--head: expected --dialect ort, found tensorrt"):
        export_tiny(source, tmp_path / "out", draft=None, heads=(head,), profile=tiny.profile(dialect="tensorrt"))
    assert "--head" in {option for parameter in export_command.params for option in parameter.opts}


@pytest.fixture(scope="module", params=LAYOUTS)
def with_head(request: pytest.FixtureRequest, source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    head = make_head(source, folder / "head.safetensors", request.param)
    return export_tiny(source, folder / "out", draft=None, heads=(head,), profile=tiny.profile(draft_precision="fp32"))


@pytest.fixture(scope="module")
def without_head(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_tiny(source, tmp_path_factory.mktemp("plain") / "out")


def test_the_manifest_describes_the_head(with_head: Path) -> None:
    manifest = read_manifest(with_head)
    assert manifest.default_drafter == "combined"
    assert manifest.drafters["eagle"].engine == "eagle"
    head = manifest.heads["eagle"]
    assert (head.vocab_size, head.slots) == (192, manifest.target.slots)
    assert sum(tensor.name.startswith("past_") for tensor in head.inputs) == 2
    assert head.parity.max_abs_diff < 1e-3


def run_graph(folder: Path, names: list[str]) -> list[np.ndarray]:
    """Return outputs of a prefill call of 16 rows."""
    spec = read_manifest(folder).target
    call = {
        "input_ids": np.arange(16)[None] + 20, "position_ids": np.arange(16)[None],
        "seqlens_k": np.array([15], np.int32), "total_sequence_length": np.array(16, np.int32),
        "logits_indices": np.arange(16),
    }  # fmt: skip
    kv = [tensor for tensor in spec.inputs if tensor.name.startswith("past_")]
    session = onnxruntime.InferenceSession(str(folder / spec.file), providers=["CPUExecutionProvider"])
    zeros = {tensor.name: np.zeros([int(dim) for dim in tensor.shape], np.float32) for tensor in kv}
    return list(session.run(names, call | zeros))


def test_features_cost_no_bit_and_are_what_the_model_computes(
    with_head: Path, without_head: Path, source: Path
) -> None:  # fmt: skip
    logits, features = run_graph(with_head, ["logits", "features"])
    (plain,) = run_graph(without_head, ["logits"])
    np.testing.assert_array_equal(logits, plain)
    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    with torch.no_grad():
        states = model(torch.arange(16)[None] + 20, output_hidden_states=True).hidden_states
    wanted = states[-1] if features.shape[-1] == 64 else torch.cat([states[layer] for layer in (2, 4, 5)], -1)
    np.testing.assert_allclose(features, wanted, atol=2e-4, rtol=1e-4)


def test_without_a_head_there_are_no_features(without_head: Path) -> None:
    manifest = read_manifest(without_head)
    assert "features" not in {tensor.name for tensor in manifest.target.outputs}
    assert not manifest.heads


def test_the_embedding_is_not_stored_again(with_head: Path) -> None:
    places = {tensor.location: tensor for tensor in stored(with_head / "eagle.onnx")}
    assert set(map(str, places)) == {"eagle.onnx.data", "target.onnx.data"}
    shared = [tensor for tensor in stored(with_head / "eagle.onnx") if str(tensor.location) == "target.onnx.data"]
    assert [list(tensor.shape.numpy()) for tensor in shared] == [[tiny.VOCAB_SIZE, 64]]
