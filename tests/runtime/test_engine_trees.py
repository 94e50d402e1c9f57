"""Trees on the engines: rows see their ancestors alone, and first branches keep their bits.

GPUs are simulated, see `simulated_cuda`: what is moved on them, and where to, is checked, not what a GPU computes.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import specrt
import tiny
from parts import ListDrafter, grow, run
from simulated_gpu import add_cuda_sessions, add_gpu, open_on_gpu
from simulated_trt import plan_artifact
from specrt.acceptance import Proposal
from specrt.engine import Engine
from specrt.engine_bound import BoundEngine
from specrt.engine_ort import OrtEngine
from specrt.errors import EngineError
from specrt.tree import ancestry
from specrt_export.errors import UnsupportedModelError
from specrt_profiles.manifest import read_manifest
from specrt_profiles.profile import Profile

PROFILES: dict[str, Profile] = {
    "fp32": tiny.profile(trees=True),
    "int8": tiny.profile(trees=True, precision="int8", kv_precision="int8"),
    "tensorrt": tiny.profile(trees=True, dialect="tensorrt"),
}
HALF = tiny.profile(trees=True, precision="fp16")  # what ONNX Runtime has CUDA kernels for
DRIFT = {"fp32": 5e-6, "int8": 0.05, "tensorrt": 5e-6}  # of a logit; integers may round to the next
CONTEXTS = (0, 1, 30, 100)
TREE = (-1, 0, 1, 0, 3, 3, 1, 2, 4, -1)  # the first branch is 0, 1, 2 and ends with 7, far from its slots


def tokens(count: int, *, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, tiny.VOCAB_SIZE, count)]


def open_engine(artifact: Path) -> OrtEngine:
    return OrtEngine(artifact, read_manifest(artifact).target, threads=1)


@pytest.fixture(scope="module")
def artifacts(tiny_source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("trees")
    profiles = {**PROFILES, "fp16": HALF}
    made = {name: tiny.export_tiny(tiny_source, folder / name, profile=profile) for name, profile in profiles.items()}
    return {**made, "plan": plan_artifact(made["tensorrt"], folder / "plan")}


@pytest.fixture(params=PROFILES)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def engine(kind: str, artifacts: dict[str, Path]) -> Iterator[OrtEngine]:
    engine = open_engine(artifacts[kind])
    yield engine
    engine.close()


def kv(engine: OrtEngine) -> list[Any]:
    return [value.numpy() for _, _, value in engine._kv]


def path_to(row: int, parents: Sequence[int] = TREE) -> list[int]:
    return np.flatnonzero(ancestry(parents)[row]).tolist()


def after(engine: Engine, context: int) -> Engine:
    engine.rollback(0)
    engine.prefill(tokens(context))
    return engine


def worst_difference(engine: OrtEngine, context: int) -> float:
    """Return the largest difference of a tree's logits from those of the chains it is made of."""
    ids = tokens(len(TREE), seed=1)
    rows = after(engine, context).verify(ids, TREE).copy()
    assert np.ptp(rows, axis=1).min() > 0.5, "the logits differ enough to be worth comparing"
    chains = [after(engine, context).verify([ids[i] for i in path_to(row)])[-1].copy() for row in range(len(TREE))]
    return float(np.abs(rows - chains).max())


@pytest.mark.parametrize("context", CONTEXTS)
def test_rows_of_a_tree_are_those_of_its_chains(engine: OrtEngine, kind: str, context: int) -> None:
    assert worst_difference(engine, context) < DRIFT[kind]


@pytest.mark.parametrize("family", ["mistral-window", "gemma2", "gpt2"])
@pytest.mark.parametrize("dialect", ["ort", "tensorrt"])
def test_windows_soft_caps_and_learned_positions_know_trees(tmp_path: Path, family: str, dialect: str) -> None:
    profile = tiny.profile(trees=True, dialect=dialect)
    engine = open_engine(
        tiny.export_tiny(tiny.make_model(family, tmp_path / "source"), tmp_path / "out", profile=profile)
    )
    for context in (3, 22, 60):  # windows of 24 tokens begin within the context
        assert worst_difference(engine, context) < 2e-5
    engine.close()


def test_trees_at_fp16(artifacts: dict[str, Path]) -> None:
    engine = open_engine(artifacts["fp16"])
    assert worst_difference(engine, 30) < 5e-3
    engine.close()


@pytest.mark.parametrize("dialect", ["ort", "tensorrt"])
def test_a_window_narrower_than_a_tree_is_refused(tmp_path: Path, dialect: str) -> None:
    source = tiny.make_model("mistral-window", tmp_path / "source")  # 24 tokens
    wide = {"verify_widths": (2, 26), "dialect": dialect}
    with pytest.raises(
        UnsupportedModelError, match="window of 24 tokens: expected at least the widest verify call, 26"
    ):
        tiny.export_tiny(source, tmp_path / "out", profile=tiny.profile(trees=True, **wide))
    assert not (tmp_path / "out").exists()
    tiny.export_tiny(source, tmp_path / "chains", profile=tiny.profile(**wide))


def test_other_branches_change_no_bit(engine: OrtEngine) -> None:
    ids = tokens(len(TREE), seed=1)
    rows = after(engine, 30).verify(ids, TREE).copy()
    for row in range(len(TREE)):
        others = [token if i in path_to(row) else (token + 7) % 384 for i, token in enumerate(ids)]
        np.testing.assert_array_equal(after(engine, 30).verify(others, TREE)[row], rows[row])


def test_padding_changes_no_bit(engine: OrtEngine) -> None:
    ids, found = tokens(len(TREE), seed=1), set()
    for seed in range(2):
        after(engine, 30).verify(tokens(10, seed=seed))  # what the padded rows of the next call hold
        found.add(after(engine, 30).verify(ids[:7], TREE[:7]).tobytes())
    assert len(found) == 1


@pytest.mark.parametrize("context", CONTEXTS)
def test_the_first_branch_has_the_bits_of_a_chain(engine: OrtEngine, context: int) -> None:
    ids = tokens(len(TREE), seed=1)
    chain = after(engine, context).verify(ids[:3]).copy()
    slots = [values[:, :, : context + 3].copy() for values in kv(engine)]
    rows = after(engine, context).verify(ids, TREE)
    np.testing.assert_array_equal(rows[:3], chain)
    for values, wanted in zip(kv(engine), slots, strict=True):
        np.testing.assert_array_equal(values[:, :, : context + 3], wanted)


def test_calls_after_a_tree_are_chains_again(engine: OrtEngine) -> None:
    ids = tokens(10, seed=4)
    clean = after(engine, 30).verify(ids).copy()
    after(engine, 30).verify(tokens(10, seed=1), TREE)
    engine.rollback(30)
    np.testing.assert_array_equal(engine.verify(ids), clean)


def test_chains_have_the_bits_they_have_without_trees(artifacts: dict[str, Path], tiny_artifact: Path) -> None:
    plain, engine = open_engine(tiny_artifact), open_engine(artifacts["fp32"])
    for context in CONTEXTS:
        for count in (1, 4, 10, 16):
            ids = tokens(count, seed=count)
            np.testing.assert_array_equal(after(engine, context).verify(ids), after(plain, context).verify(ids))
            for ours, theirs in zip(kv(engine), kv(plain), strict=True):
                np.testing.assert_array_equal(ours[:, :, : context + count], theirs[:, :, : context + count])


@pytest.mark.parametrize("row", [5, 6, 7, 8])
def test_what_follows_a_kept_path_is_what_follows_its_chain(engine: OrtEngine, kind: str, row: int) -> None:
    ids, path, more = tokens(len(TREE), seed=1), path_to(row), tokens(6, seed=5)
    after(engine, 30).verify([ids[i] for i in path])
    wanted = engine.verify(more).copy()
    slots = [values[:, :, : 30 + len(path)].astype(np.float32) for values in kv(engine)]
    after(engine, 30).verify(ids, TREE)
    engine.keep(path)
    assert engine.kv_length == 30 + len(path)
    for values, chain in zip(kv(engine), slots, strict=True):
        difference = np.abs(values[:, :, : 30 + len(path)].astype(np.float32) - chain).max()
        assert difference <= (1 if kind == "int8" else 5e-6)
    assert np.abs(engine.verify(more) - wanted).max() < DRIFT[kind]


def test_a_kept_first_branch_has_the_bits_of_a_cold_start_and_a_moved_row_has_not(engine: OrtEngine) -> None:
    engine.contents.exact_widths = (2, 4, 6, 10, 16)
    for path, cold in (((0, 1, 2, 7), 3), ((0, 3, 4, 8), 1), ((0, 1), 2)):
        ids = tokens(len(TREE), seed=1)
        after(engine, 32).verify(ids, TREE)
        engine.keep(path)
        assert engine.contents.token_ids(32, engine.kv_length) == tuple(ids[row] for row in path)
        assert engine.contents.length(engine.kv_length, cold_bits=True) == 32 + cold


def test_first_branches_are_tried_on_the_machine_at_hand(
    artifacts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leaky(parents: Sequence[int]) -> Any:
        seen = ancestry(parents)
        seen[1, 0] = False  # as if a row lost its parent
        return seen

    specrt.load(artifacts["fp32"], cache_dir=tmp_path / "right").close()
    monkeypatch.setattr("specrt.engine_bound.ancestry", leaky)
    with pytest.raises(EngineError, match="a tree's first branch has not the bits of a chain: leave --trees out"):
        specrt.load(artifacts["fp32"], cache_dir=tmp_path / "wrong")
    assert not (tmp_path / "wrong").exists()


def test_a_graph_without_trees_takes_none(tiny_artifact: Path) -> None:
    engine = open_engine(tiny_artifact)
    assert not engine.takes_trees
    with pytest.raises(EngineError, match="found a tree: export with --trees"):
        engine.verify([1, 2], (-1, -1))
    assert engine.kv_length == 0


def test_a_draft_model_is_exported_without(tiny_source: Path, tmp_path: Path) -> None:
    folder = tiny.export_tiny(tiny_source, tmp_path / "out", draft=str(tiny_source), profile=PROFILES["fp32"])
    manifest = read_manifest(folder)
    inputs = {name: {tensor.name for tensor in spec.inputs} for name, spec in manifest.engines.items()}
    assert ("tree_mask" in inputs["target"], "tree_mask" in inputs["draft"]) == (True, False)


def second_branch(plain: Sequence[int], prompt: int) -> ListDrafter:
    """Guess what plain decoding says, always in second place: every accepted path has to be moved or recomputed."""

    def guess(known: Sequence[int], limit: int) -> Proposal:
        def children(path: list[int]) -> list[int]:
            at = len(known) - prompt + len(path)
            right = plain[at] if at < len(plain) else 0
            return [(right + 5) % 384, right]

        return grow(children, (2, 2, 2), limit)

    return ListDrafter(guess)


PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "gumbel": {"temperature": 0.9, "seed": 5, "repetition_penalty": 1.1},
    "rejection": {"temperature": 0.9, "seed": 5, "coupling": "rejection"},
}


@pytest.mark.parametrize("name", PARAMS)
def test_strict_requests_have_the_bits_of_plain_decoding(engine: OrtEngine, name: str) -> None:
    params: dict[str, Any] = {"prompt": tokens(20), "max_tokens": 60, "logprobs": 3, **PARAMS[name]}
    ids, _, plain = run(engine, **params)
    _, loop, strict = run(engine, second_branch(ids, 20), k=14, strict=True, **params)
    assert strict == plain
    assert loop.stats.num_accepted > 40
    assert loop.stats.num_recomputed >= loop.stats.num_steps - 2, "all but the last steps, which have no room"


@pytest.mark.parametrize("name", PARAMS)
def test_other_requests_have_plain_decodings_text_but_for_near_ties(engine: OrtEngine, kind: str, name: str) -> None:
    params: dict[str, Any] = {"prompt": tokens(20), "max_tokens": 60, "logprobs": 3, **PARAMS[name]}
    ids, _, plain = run(engine, **params)
    found, loop, trees = run(engine, second_branch(ids, 20), k=14, **params)
    assert loop.stats.num_accepted > 0
    same = next((i for i, (a, b) in enumerate(zip(ids, found, strict=True)) if a != b), len(ids))
    assert same == len(ids) or kind == "int8", "no tie is that near in fp32 here"
    for one, other in zip(plain[:same], trees[:same], strict=True):
        assert one.logprob is not None
        assert other.logprob is not None
        assert abs(one.logprob.logprob - other.logprob.logprob) < 2 * DRIFT[kind]


# On GPUs

ON_GPU = {"TensorRT": ("tensorrt", "plan"), "ONNX Runtime": ("tensorrt", "tensorrt"), "fp16": ("fp16", "fp16")}
PATHS = [path_to(row) for row in (5, 6, 7, 8)] + [[0, 1, 2], [0], [9], []]


@pytest.fixture(params=ON_GPU)
def pair(
    request: pytest.FixtureRequest, artifacts: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[OrtEngine, BoundEngine]]:
    """Engines of the same graph on the CPU and on a GPU."""
    source, folder = (artifacts[name] for name in ON_GPU[request.param])
    on_cpu = open_engine(source)
    driver = add_gpu(monkeypatch)
    if source == folder:
        add_cuda_sessions(monkeypatch)
    on_gpu = open_on_gpu(folder)
    yield on_cpu, on_gpu
    on_gpu.close()
    on_cpu.close()
    assert driver.num_open == 0


def kept(engine: Engine, path: Sequence[int]) -> tuple[Any, ...]:
    """Return the bits of a tree's rows, and of what follows after one of its paths was kept."""
    rows = np.array(after(engine, 30).verify(tokens(len(TREE), seed=1), TREE))
    engine.keep(path)
    more = np.array(engine.verify(tokens(6, seed=5)))
    return rows.tobytes(), more.tobytes(), engine.kv_length


def test_trees_on_a_gpu_have_the_bits_of_the_cpu(pair: tuple[OrtEngine, BoundEngine]) -> None:
    on_cpu, on_gpu = pair
    assert on_gpu.takes_trees
    for path in PATHS:
        assert kept(on_gpu, path) == kept(on_cpu, path)


def test_keeping_a_path_moves_its_own_rows_on_the_device_and_nothing_else(
    pair: tuple[OrtEngine, BoundEngine],
) -> None:
    on_cpu, on_gpu = pair
    copies = on_gpu._gpu._driver.copies  # type: ignore[attr-defined]
    row = 16 * kv(on_cpu)[0].itemsize  # bytes of a head's slot
    for path in PATHS:
        after(on_gpu, 30).verify(tokens(len(TREE), seed=1), TREE)
        copies.clear()
        on_gpu.keep(path)
        num_moved = sum(place != node for place, node in enumerate(path))
        assert copies == [("across", row)] * (2 * 2 * 2 * num_moved), "keys and values, two layers, two heads"


def test_generations_with_trees_on_a_gpu_have_the_tokens_of_the_cpu(pair: tuple[OrtEngine, BoundEngine]) -> None:
    for params in PARAMS.values():
        how: dict[str, Any] = {"prompt": tokens(20), "max_tokens": 60, "logprobs": 3, **params}
        ids, _, _ = run(pair[0], **how)
        found = [run(engine, second_branch(ids, 20), k=14, **how) for engine in pair]
        assert found[0][2] == found[1][2]
        assert found[1][1].stats.num_accepted > 20


def test_a_request_for_strict_trees_is_served_on_a_gpu(
    artifacts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_gpu(monkeypatch)
    with specrt.load(artifacts["plan"], cache_dir=tmp_path) as model:
        plain = run(model.target, prompt=tokens(20), max_tokens=30, logprobs=2)
        strict = run(
            model.target, second_branch(plain[0], 20), prompt=tokens(20), max_tokens=30, logprobs=2, k=14, strict=True
        )
    assert strict[2] == plain[2]
    assert strict[1].stats.num_recomputed > 0
