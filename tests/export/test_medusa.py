"""Medusa heads as files, as graphs and as trees: both published layouts, what is refused, the best tree."""

import io
import itertools
import json
import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import tiny
from specrt.engine import open_parallel_heads
from specrt_export.dialect_ort import OrtDialect
from specrt_export.distill.card import MedusaCard, fingerprint_of
from specrt_export.errors import ExportError
from specrt_export.head_engine import build_head, parts_of
from specrt_export.head_file import read_head
from specrt_export.heads import prepare_readers
from specrt_export.medusa_engine import heads_module
from specrt_export.medusa_file import MedusaFile
from specrt_export.medusa_tree import Node, best_tree, published_tree
from specrt_export.progress import Progress
from specrt_export.shared import stored
from specrt_export.weights import Chosen
from specrt_profiles.drafter import DrafterSpec
from specrt_profiles.manifest import EngineSpec, read_manifest
from specrt_profiles.tensors import DecoderDims
from tiny import drop, export_tiny, make_head, make_medusa, put

V, H = tiny.VOCAB_SIZE, 64
DIMS = DecoderDims(num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, hidden_size=H, vocab_size=V)
RANKS = [[0.5, 0.2], [0.4, 0.3], [0.1, 0.1]]
EVEN = list(range(0, V, 2))
LAYOUTS: dict[str, dict[str, Any]] = {
    "the paper's": {},
    "the paper's, a checkpoint of the whole": {"prefix": "medusa_head.", "blocks": 2},
    "vLLM's": {"vllm": True, "blocks": 2, "bias": False},
    "vLLM's, few tokens": {"vllm": True, "d2t": True},
    "the target's output matrix": {"matrices": 0},
    "some of its rows": {"matrices": 0, "d2t": True},
    "one matrix for all": {"vllm": True, "matrices": 1},
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_model("llama", tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def config(source: Path) -> Any:
    return transformers.AutoConfig.from_pretrained(source)


@pytest.fixture(scope="module")
def matrix(source: Path) -> np.ndarray:
    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    weight: np.ndarray = model.get_output_embeddings().weight.detach().numpy()
    return weight


def read(path: Path, config: Any) -> MedusaFile:
    head = read_head(path, config, vocab_size=V)
    assert isinstance(head, MedusaFile)
    return head


def published(path: Path, feature: np.ndarray, matrix: np.ndarray, layout: dict[str, Any]) -> np.ndarray:
    """Return the logits [M, V] by the published definition, in float64, from the tensors as they are stored."""
    stored = {name.removeprefix("medusa_head."): t.double().numpy() for name, t in load_file(path).items()}
    ids = EVEN if layout.get("d2t") else slice(None)
    blocks, found = layout.get("blocks", 1), []
    for head in range(3):
        x = feature.astype(np.float64)
        for block in range(blocks):
            name = f"blocks.{head}.layers.{block}" if layout.get("vllm") else f"{head}.{block}.linear"
            z = stored[f"{name}.weight"] @ x + stored.get(f"{name}.bias", 0.0)
            x = x + z / (1 + np.exp(-z))
        owner = 0 if layout.get("matrices") == 1 else head
        name = f"lm_heads.{owner}.weight" if layout.get("vllm") else f"{owner}.{blocks}.weight"
        found.append((stored[name] if name in stored else matrix[ids].astype(np.float64)) @ x)
    return np.stack(found)


@pytest.fixture(scope="module")
def exported(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact of a target that takes trees, with heads whose card tells how good they are."""
    folder = tmp_path_factory.mktemp("exported")
    path = make_medusa(source, folder / "head.safetensors")
    weights = fingerprint_of(transformers.AutoModelForCausalLM.from_pretrained(source))
    target = {"name": "tiny", "vocabulary": "0" * 64, "weights": weights}
    path.with_suffix(".json").write_text(card(target=target), "utf-8")
    profile = tiny.profile(draft_precision="fp32", trees=True)
    return export_tiny(source, folder / "out", draft=None, heads=(path,), profile=profile)


class Build:
    """Builds heads beside the target of an artifact."""

    def __init__(self, source: Path, artifact: Path, config: Any) -> None:
        model = transformers.AutoModelForCausalLM.from_pretrained(source).eval()
        rng = np.random.default_rng(0)
        texts = [rng.integers(0, V, length).tolist() for length in (20, 31)]
        self.parts = parts_of(model, (), texts, Chosen())
        self._artifact, self._config = artifact, config

    def __call__(self, path: Path, precision: Any = "fp32", **changes: Any) -> tuple[Path, EngineSpec]:
        profile = tiny.profile(draft_precision=precision, **changes)
        (request,) = prepare_readers([path], None, self._config, DIMS, profile, OrtDialect(profile)).heads
        for name in ("target.onnx", "target.onnx.data"):
            shutil.copy(self._artifact / name, path.parent)
        spec, files = build_head(request, self.parts, path.parent, Progress(stream=io.StringIO()))
        assert files.keys() == {"medusa.onnx", "medusa.onnx.data"}
        return path.parent, spec


@pytest.fixture(scope="module")
def build(source: Path, exported: Path, config: Any) -> Build:
    return Build(source, exported, config)


@pytest.mark.parametrize("name", LAYOUTS)
def test_exported_heads_compute_what_was_published(
    source: Path, matrix: np.ndarray, build: Build, name: str, tmp_path: Path
) -> None:
    layout = LAYOUTS[name]
    path = make_medusa(source, tmp_path / "head.safetensors", **layout)
    folder, spec = build(path)
    few = bool(layout.get("d2t"))
    assert np.load(folder / "medusa.tokens.npy").tolist() == (EVEN if few else list(range(V)))
    heads = open_parallel_heads(folder, spec, threads=1)
    assert (heads.num_heads, heads.vocab_size) == (3, len(EVEN) if few else V)
    rng = np.random.default_rng(0)
    for _ in range(3):
        feature = rng.standard_normal(H).astype(np.float32)
        wanted = published(path, feature, matrix, layout)
        np.testing.assert_allclose(heads.guess(feature), wanted, atol=1e-4, rtol=1e-4)
        best = np.exp(wanted - wanted.max(1, keepdims=True))
        np.testing.assert_allclose(heads.confidence, best.max(1) / best.sum(1), atol=1e-5)
    heads.close()


@pytest.mark.parametrize("precision", ["int8", "int4", "fp16"])
def test_heads_at_other_precisions_agree_with_their_source(
    source: Path, build: Build, precision: str, tmp_path: Path
) -> None:
    _, spec = build(make_medusa(source, tmp_path / "head.safetensors", matrices=0), precision)
    assert (spec.precision, spec.model.architecture, spec.vocab_size) == (precision, "Medusa", V)
    assert spec.parity.top1_agreement > 0.9


def test_a_call_of_heads_allocates_nothing(source: Path, build: Build, tmp_path: Path) -> None:
    folder, spec = build(make_medusa(source, tmp_path / "head.safetensors", matrices=0))
    heads = open_parallel_heads(folder, spec, threads=1)
    first = heads.guess(np.zeros(H, np.float32))
    kept = first.copy()
    second = heads.guess(np.ones(H, np.float32))
    assert np.shares_memory(first, second)
    assert not np.array_equal(second, kept)


def test_an_output_matrix_that_the_target_stores_is_not_stored_again(
    source: Path, config: Any, build: Build, tmp_path: Path
) -> None:
    """Both are 98 kB in fp32; heads' own blocks are half of that."""
    folder, _ = build(make_medusa(source, tmp_path / "head.safetensors", matrices=0))
    shared = [tensor for tensor in stored(folder / "medusa.onnx") if str(tensor.location) == "target.onnx.data"]
    assert [sorted(tensor.shape.numpy()) for tensor in shared] == [[H, V]]


def test_the_manifest_describes_the_heads(exported: Path) -> None:
    manifest = read_manifest(exported)
    assert manifest.default_drafter == "combined"
    assert manifest.drafters == {
        "medusa": DrafterSpec(
            kind="medusa", engine="medusa", vocabulary=manifest.vocabulary.fingerprint, tokens="medusa.tokens.npy",
            tree=best_tree(RANKS, size=15),
        )
    }  # fmt: skip
    head = manifest.heads["medusa"]
    assert [tensor.name for tensor in head.inputs] == ["features"]
    assert [(tensor.name, tensor.shape) for tensor in head.outputs] == [
        ("logits", (1, 3, V)), ("confidence", (1, 3)),
    ]  # fmt: skip
    assert head.parity.max_abs_diff < 1e-3
    assert "tree_mask" in {tensor.name for tensor in manifest.target.inputs}


def test_a_token_map_picks_rows_of_whole_matrices(source: Path, config: Any, tmp_path: Path) -> None:
    tensors = load_file(make_medusa(source, tmp_path / "a.safetensors", vllm=True))
    tensors["token_map"] = torch.tensor([7, 3, 200])
    save_file(tensors, tmp_path / "b.safetensors")
    head = read(tmp_path / "b.safetensors", config)
    assert head.token_ids is not None
    assert head.token_ids.tolist() == [7, 3, 200]
    torch.testing.assert_close(head.matrices[1], tensors["lm_heads.1.weight"][[7, 3, 200]])


def test_config_json_says_how_many_heads_there_are(source: Path, config: Any, tmp_path: Path) -> None:
    path = make_medusa(source, tmp_path / "medusa_lm_head.safetensors")
    for heads, blocks, fine in (
        (3, 1, True),
        (2, 1, True),
        (4, 1, False),
        (3, 2, False),
        ("3", 1, False),
        (0, 1, False),
    ):
        (tmp_path / "config.json").write_text(json.dumps({"medusa_num_heads": heads, "medusa_num_layers": blocks}))
        if fine:
            head = read(path, config)
            assert (head.num_heads, len(head.matrices), heads_module(head).num_heads) == (heads, heads, heads)
        else:
            with pytest.raises(ExportError, match=rf"expected {heads} heads of {blocks} blocks, as config.json says"):
                read(path, config)
    for text in ('{"model_type": "llama"}', "[]"):
        (tmp_path / "config.json").write_text(text)
        assert read(path, config).num_heads == 3
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ExportError, match=r"config.json: not readable"):
        read(path, config)


@pytest.mark.parametrize(
    ("layout", "change", "text"),
    [
        ({}, drop("1.0.linear.weight"), r"expected 1.0.linear.weight \[64, 64\], found no such tensor"),
        ({}, drop("1.0.linear.bias"), r"expected 1.0.linear.bias \[64\], found no such tensor"),
        ({}, drop("2.1.weight"), r"expected 2.1.weight \[384, 64\], found no such tensor"),
        ({"vllm": True}, drop("lm_heads.1.weight"), r"expected lm_heads.1.weight \[384, 64\], found no such tensor"),
        ({}, put("0.0.linear.weight", (64, 32)), r"expected 0.0.linear.weight \[64, 64\], found \[64, 32\]"),
        ({}, put("2.1.weight", (9, 64)), r"expected 2.1.weight \[384, 64\], found \[9, 64\]: made for another"),
        ({"d2t": True}, put("2.1.weight", (9, 64)), r"expected 2.1.weight \[192, 64\], found \[9, 64\]"),
        ({}, put("model.norm.weight", (64,)), "expected the tensors of Medusa heads, found norm.weight as well"),
        ({"vllm": True}, put("token_map", (3,)), "token_map: expected different tokens below 384"),
        ({"d2t": True}, put("d2t", (3, 2)), "d2t: expected"),
        ({}, lambda tensors: tensors.clear(), "expected the layer of an EAGLE head or Medusa heads"),
    ],
)  # fmt: skip
def test_wrong_tensors_are_named(
    source: Path, config: Any, tmp_path: Path, layout: dict[str, Any], change: Callable[[Any], None], text: str
) -> None:
    tensors = load_file(make_medusa(source, tmp_path / "good.safetensors", **layout))
    change(tensors)
    save_file(tensors, tmp_path / "head.safetensors")
    with pytest.raises(ExportError, match=text) as error:
        read(tmp_path / "head.safetensors", config)
    assert "\n" not in str(error.value)


def card(**changes: Any) -> str:
    data = {
        "layout": "medusa", "target": {"name": "another", "vocabulary": "0" * 64, "weights": "0" * 64}, "heads": 3,
        "blocks": 1, "vocabulary_size": V, "coverage": 0.9, "tokens": 1, "updates": 1, "planned_updates": 1,
        "loss": 1.0, "agreement": [0.5], "block_efficiency": 1.5, "command": "", "tools": {},
        "ranks": RANKS,
        "training": {
            "epochs": 1, "batch": 1, "steps": 5, "chains": 0.25, "learning_rate": 0.1, "weight_decay": 0.1,
            "warmup": 1, "regression": 1.0, "decay": 0.8, "averaging": 0.9, "seed": 0,
        },
    }  # fmt: skip
    return json.dumps(data | changes)


def test_files_that_are_no_heads_for_this_target_leave_nothing(source: Path, tmp_path: Path) -> None:
    good = make_medusa(source, tmp_path / "good.safetensors")
    for name, content, its_card, text in (
        ("head.safetensors", good.read_bytes()[:-100], None, "not readable as safetensors"),
        ("medusa_lm_head.pt", b"", None, "expected .safetensors, found a PyTorch file: convert it with  python -c"),
        ("head.safetensors", good.read_bytes(), card(), "made for another with other weights than"),
        ("head.safetensors", good.read_bytes(), "{", "not readable as a head's card"),
        ("head.safetensors", good.read_bytes(), card(heads="3"), "head.json.heads: expected a whole number"),
    ):
        path = tmp_path / name
        path.write_bytes(content)
        if its_card is not None:
            path.with_suffix(".json").write_text(its_card, "utf-8")
        with pytest.raises(ExportError, match=text) as error:
            export_tiny(source, tmp_path / "out", draft=None, heads=(path,))
        assert "\n" not in str(error.value)
        path.unlink()
        path.with_suffix(".json").unlink(missing_ok=True)
    assert [path.name for path in tmp_path.iterdir()] == ["good.safetensors"]


def test_cards_and_heads_of_different_kinds_do_not_go_together(config: Any, source: Path, tmp_path: Path) -> None:
    medusa = make_medusa(source, tmp_path / "medusa.safetensors")
    eagle = make_head(source, tmp_path / "eagle.safetensors", "eagle")
    (tmp_path / "eagle.json").write_text(card(), "utf-8")
    with pytest.raises(ExportError, match="expected the card of an eagle head, found medusa"):
        read_head(eagle, config, vocab_size=V)
    other = json.loads(card(layout="eagle", layers=[], ffn=96))
    del other["heads"], other["blocks"], other["ranks"]
    (tmp_path / "medusa.json").write_text(json.dumps(other), "utf-8")
    with pytest.raises(ExportError, match="expected the card of a medusa head, found eagle"):
        read_head(medusa, config, vocab_size=V)


def test_only_targets_that_take_trees_get_one(source: Path, config: Any, tmp_path: Path) -> None:
    path = make_medusa(source, tmp_path / "head.safetensors")
    for changes, wanted in (
        ({}, None),
        ({"trees": True}, published_tree(num_heads=3, size=15)),
        ({"trees": True, "verify_widths": (2, 4)}, published_tree(num_heads=3, size=3)),
    ):
        profile = tiny.profile(**changes)
        (head,) = prepare_readers([path], None, config, DIMS, profile, OrtDialect(profile)).heads
        assert head.tree == wanted


def test_the_published_tree() -> None:
    tree = published_tree(num_heads=5, size=100)
    assert len(tree) == len(set(tree)) == 63
    assert tree[:5] == ((0,), (0, 0), (1,), (0, 1), (2,))
    assert all(node[:-1] in {(), *tree[:index]} for index, node in enumerate(tree))
    assert published_tree(num_heads=1, size=4) == ((0,), (1,), (2,), (3,))


def all_trees(size: int, num_heads: int, num_ranks: int) -> set[frozenset[tuple[int, ...]]]:
    """Return every tree of so many nodes."""
    found = {frozenset[tuple[int, ...]]()}
    for _ in range(size):
        found = {
            tree | {(*node, rank)}
            for tree in found
            for node, rank in itertools.product([(), *tree], range(num_ranks))
            if len(node) < num_heads and (*node, rank) not in tree
        }
    return found


def expected_accepted(tree: Sequence[Node], ranks: Sequence[Sequence[float]]) -> float:
    """Return how many tokens of a tree are accepted on average if ranks are right independently of each other."""
    return sum(
        math.prod(head[rank] if rank < len(head) else 0.0 for head, rank in zip(ranks, node, strict=False))
        for node in tree
    )


@pytest.mark.parametrize("seed", range(6))
def test_no_other_tree_is_better(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ranks = (rng.dirichlet(np.full(4, 0.7), size=3)[:, :3]).tolist()
    if seed == 0:
        ranks = [[0.5, 0.5, 0.0], [1.0, 0.0, 0.0], [0.25, 0.25, 0.25]]
    whole = best_tree(ranks, size=5)
    for size in range(1, 6):
        tree = best_tree(ranks, size=size)
        assert tree == whole[:size]
        assert all(node[:-1] in {(), *tree[:index]} for index, node in enumerate(tree))
        best = max(expected_accepted(sorted(other), ranks) for other in all_trees(size, 3, 3))
        assert expected_accepted(tree, ranks) == pytest.approx(best, abs=1e-12)


def test_guesses_without_a_chance_are_not_in_the_tree() -> None:
    assert best_tree([[0.5, 0.0], [0.0, 0.2]], size=9) == ((0,), (0, 1))
    assert best_tree([], size=3) == ()


def test_what_a_tree_gives() -> None:
    tree = [(0,), (1,), (0, 1)]
    assert expected_accepted(tree, [[0.5, 0.25], [0.5, 0.125]]) == pytest.approx(0.5 + 0.25 + 0.5 * 0.125)


def test_a_card_is_what_it_is_read_as(source: Path, config: Any, tmp_path: Path) -> None:
    path = make_medusa(source, tmp_path / "head.safetensors")
    path.with_suffix(".json").write_text(card(), "utf-8")
    found = read(path, config).card
    assert isinstance(found, MedusaCard)
    assert found.ranks[1] == (0.4, 0.3)
