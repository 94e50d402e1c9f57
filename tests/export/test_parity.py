"""Parity: what is compared, which distances fail an export, and wrong graphs that it must notice."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from numpy.typing import NDArray

import tiny
from specrt_export import engine, parity, rotary, support, weights
from specrt_export.checkpoint import resolve
from specrt_export.dialect_ort import OrtDialect
from specrt_export.errors import CheckpointError, ExportError
from specrt_export.parity import (
    BOUNDS,
    Bounds,
    check,
    compare,
    graph_logits,
    most_rows,
    reference_tokens,
    source_logits,
)
from specrt_export.tokenizer import load_tokenizer
from specrt_profiles.exactness import Exactness
from specrt_profiles.manifest import Parity, read_manifest

Rows = NDArray[np.float32]
GOOD = {"num_rows": 9, "max_abs_diff": 1e-5, "mean_kl": 1e-9, "max_kl": 1e-8, "top1_agreement": 1.0}
GOOD |= {"perplexity": 9.0, "source_perplexity": 9.0}


def test_comparison_measures_kl_in_nats_and_the_largest_difference() -> None:
    source = np.log(np.array([[0.5, 0.25, 0.25], [0.5, 0.25, 0.25]], np.float32))
    graph = np.log(np.array([[0.125, 0.75, 0.125], [0.5, 0.25, 0.25]], np.float32))
    found = compare([source], [graph + np.array([[0.0], [3.0]], np.float32)], [[2, 1]])
    assert found.num_rows == 2
    assert found.max_abs_diff == pytest.approx(3.0)
    assert found.max_kl == pytest.approx(0.5 * np.log(4) - 0.25 * np.log(3) + 0.25 * np.log(2), rel=1e-6)
    assert found.mean_kl == pytest.approx(found.max_kl / 2, rel=1e-6)
    assert found.top1_agreement == 0.5
    assert found.source_perplexity == pytest.approx(4.0), "the first row tells the second token; the last row none"
    assert found.perplexity == pytest.approx(4 / 3)


def test_large_logits_do_not_overflow() -> None:
    rows = np.array([[3e4, -3e4, 2.9e4]], np.float32)
    assert compare([rows], [rows], [[0]]).mean_kl == 0.0


def test_a_distance_within_the_bounds_passes() -> None:
    for precision in BOUNDS:
        check(Parity(**GOOD), BOUNDS[precision], f"model at {precision}")


@pytest.mark.parametrize(
    ("precision", "change", "text"),
    [
        ("fp32", {"mean_kl": 1e-5}, r"mean KL 1e-05 \(at most 1e-06\)"),
        ("fp32", {"mean_kl": float("nan")}, "mean KL nan"),
        ("fp32", {"top1_agreement": 0.98}, r"top-1 agreement 0.980 \(at least 0.99\)"),
        ("fp32", {"max_abs_diff": 0.01}, r"largest logit difference 0.01 \(at most 0.005\)"),
        ("fp32", {"max_abs_diff": float("nan")}, "largest logit difference nan"),
        ("int8", {"mean_kl": 0.06}, r"mean KL 0.06 \(at most 0.05\)"),
        ("int4", {"mean_kl": 1.1}, r"mean KL 1.1 \(at most 1\)"),
    ],
)
def test_a_distance_beyond_a_bound_is_an_error_with_both_numbers(precision: Any, change: Any, text: str) -> None:
    with pytest.raises(ExportError, match=f"^model at {precision} does not match its source: .*{text}"):
        check(Parity(**{**GOOD, **change}), BOUNDS[precision], f"model at {precision}")


def test_the_graph_is_called_as_a_generation_would_call_it() -> None:
    calls: list[tuple[int, int, list[int]]] = []

    def runner(token_ids: Sequence[int], start: int, width: int) -> Rows:
        calls.append((start, width, list(token_ids)))
        return np.repeat(np.arange(start, start + len(token_ids), dtype=np.float32)[:, None], 3, axis=1)

    ids = list(range(100, 190))
    rows = graph_logits(runner, ids, tiny.TINY_PROFILE)  # type: ignore[arg-type]
    assert rows[:, 0].tolist() == list(range(90))
    assert calls[0] == (0, 16, ids[:16])
    assert {width for _, width, _ in calls[1:]} == set(tiny.TINY_PROFILE.verify_widths)
    for rejected, kept in zip(calls[1::2], calls[2::2], strict=True):
        assert rejected[:2] == kept[:2]
        assert kept[2] == ids[kept[0] : kept[0] + kept[1]]
        assert rejected[2] != kept[2]


class WordTokenizer:
    def encode(self, text: str) -> list[int]:
        return [len(word) for word in text.split()]


def test_reference_texts_are_cut_to_96_tokens_and_to_the_capacity() -> None:
    lengths = [len(ids) for ids in reference_tokens(WordTokenizer(), tiny.profile(capacity=20))]
    assert max(lengths) == 20
    long = [len(ids) for ids in reference_tokens(WordTokenizer(), tiny.profile(capacity=2000))]
    assert max(long) <= 96
    assert len(long) >= 3


def test_one_reference_text_is_long_enough_for_a_sliding_window() -> None:
    wide = tiny.profile(capacity=2000)
    first, *others = reference_tokens(WordTokenizer(), wide, window=500)
    assert len(first) == 532
    assert max(map(len, others)) <= 96
    assert most_rows(wide, window=500) >= 532 + sum(map(len, others))
    assert most_rows(tiny.profile(capacity=510), window=500) == 510 + 3 * 96


def test_source_logits_of_a_half_precision_model_are_computed_in_fp32() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**tiny.FAMILIES["llama"][1])
    model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    found = source_logits(model, [[3, 1, 4, 1, 5]])[0]
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    with torch.no_grad():
        expected = model.float()(input_ids=torch.tensor([[3, 1, 4, 1, 5]])).logits[0].numpy()
    np.testing.assert_allclose(found, expected, atol=2e-6)


def refuse(source: Path, out: Path, text: str, error: type[ExportError] = ExportError) -> None:
    """Export, expect a refusal, and see that nothing is left."""
    before = sorted(out.parent.iterdir())
    with pytest.raises(error, match=text) as caught:
        tiny.export_tiny(source, out)
    assert "\n" not in str(caught.value)
    assert sorted(out.parent.iterdir()) == before


def test_a_wrong_rotary_table_fails_the_export(
    tiny_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = rotary.RotaryTable.rotary

    def late(self: rotary.RotaryTable, cos: torch.Tensor) -> rotary.Rotary | None:
        found = right(self, cos)
        assert found is not None
        return rotary.Rotary(found.cos.roll(1, 0), found.sin.roll(1, 0), "interleaved")

    monkeypatch.setattr(rotary.RotaryTable, "rotary", late)
    refuse(tiny_source, tmp_path / "out", "at fp32 does not match its source: mean KL")


@pytest.mark.parametrize(("name", "option"), [("target", "--precision"), ("draft", "--draft-precision")])
def test_a_precision_that_costs_too_much_names_its_option(
    tiny_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, option: str
) -> None:
    monkeypatch.setitem(BOUNDS, "int4", Bounds(mean_kl=1e-9))
    precision = {"target": "precision", "draft": "draft_precision"}[name]
    profile = replace(tiny.TINY_PROFILE, **{"precision": "fp32", "draft_precision": "fp32", precision: "int4"})
    with pytest.raises(ExportError, match=rf"at int4 does not match its source: .*: choose another {option}$"):
        tiny.export_tiny(tiny_source, tmp_path / "out", draft=str(tiny_source), profile=profile)


def test_a_precision_of_keys_and_values_that_costs_too_much_names_its_option(
    tiny_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BOUNDS, "int8", Bounds(mean_kl=1e-9))
    profile = replace(tiny.TINY_PROFILE, precision="fp32", kv_precision="int8")
    with pytest.raises(ExportError, match=r"does not match its source: .*: choose another --kv-precision$"):
        tiny.export_tiny(tiny_source, tmp_path / "out", profile=profile)


@pytest.mark.slow
def test_a_wrong_weight_fails_the_export(tiny_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = weights.fp32

    def off(tensor: torch.Tensor) -> Rows:
        array = right(tensor)
        return array + np.float32(0.01) if array.shape == (96, 64) else array

    monkeypatch.setattr(weights, "fp32", off)
    refuse(tiny_source, tmp_path / "out", "does not match its source: .*largest logit difference")


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_a_wrong_structure_fails_the_export_at_every_precision(
    tiny_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    """Scaling the scores a little is less than what quantisation does to the logits, and yet wrong."""
    right = OrtDialect.attention

    def wrong(self: OrtDialect, call: Any, layer: int, qkv: Any, options: Any) -> Any:
        return right(self, call, layer, qkv, replace(options, scale=options.scale * 1.05))

    monkeypatch.setattr(OrtDialect, "attention", wrong)
    with pytest.raises(ExportError, match="with rounded weights does not match its source"):
        tiny.export_tiny(tiny_source, tmp_path / "out", profile=tiny.profile(precision=precision))
    assert not list(tmp_path.iterdir())


def test_logits_that_are_no_numbers_are_said_to_be_none() -> None:
    with pytest.raises(ExportError, match="not numbers"):
        compare([np.zeros((1, 3), np.float32)], [np.array([[0, np.nan, 1]], np.float32)], [[0]])


@pytest.fixture(scope="module")
def prove(tiny_source: Path, tiny_artifact: Path) -> Callable[[], tuple[Parity, tuple[int, ...]]]:
    """A function that compares the tiny artifact's target with its source once more."""
    checkpoint = resolve(str(tiny_source), revision=None, cache_dir=tiny_source, on_bytes=lambda _: None)
    dims = support.decoder_dims(support.load_config(checkpoint))
    traced = ir.Model(ir.Graph([], [], nodes=[]), ir_version=10)  # the graph is written already
    request = engine.EngineRequest(
        name="target", checkpoint=checkpoint, dims=dims, traced=traced, profile=tiny.TINY_PROFILE, window=None,
        num_bytes=0,
    )  # fmt: skip
    texts = reference_tokens(load_tokenizer(checkpoint), tiny.TINY_PROFILE)
    source = source_logits(support.load_model(checkpoint), texts)
    return lambda: engine._prove(request, tiny_artifact / "target.onnx", texts, source)[:2]


def test_a_right_graph_passes(prove: Callable[[], tuple[Parity, tuple[int, ...]]], tiny_artifact: Path) -> None:
    target = read_manifest(tiny_artifact).target
    measured, exact = prove()
    assert exact == target.exact_widths
    assert measured.num_rows == target.parity.num_rows
    assert measured.max_abs_diff == pytest.approx(target.parity.max_abs_diff, rel=0.5)


def test_positions_that_are_off_by_one_fail(prove: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    right = parity.GraphRunner.__call__

    def late(self: parity.GraphRunner, token_ids: Sequence[int], start: int, width: int) -> Rows:
        return right(self, token_ids, start + (start > 0), width)

    monkeypatch.setattr(parity.GraphRunner, "__call__", late)
    with pytest.raises(ExportError, match="does not match its source"):
        prove()


def test_rejected_tokens_that_survive_a_rollback_fail(
    prove: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = parity.GraphRunner.__call__
    fed: dict[int, list[int]] = {}

    def first_wins(self: parity.GraphRunner, token_ids: Sequence[int], start: int, width: int) -> Rows:
        kept = fed.setdefault(start, list(token_ids))[: len(token_ids)]
        return right(self, kept, start, width)

    monkeypatch.setattr(parity.GraphRunner, "__call__", first_wins)
    with pytest.raises(ExportError, match="does not match its source"):
        prove()


def test_rows_that_influence_each_other_fail(prove: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "find_exact_widths", lambda _, widths, **__: Exactness((), tuple(widths)))
    with pytest.raises(ExportError, match="rows of a call influence each other at every width: not lossless"):
        prove()


def test_tightened_bounds_fail(prove: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BOUNDS, "fp32", Bounds(mean_kl=0.0, max_abs_diff=0.0))
    with pytest.raises(ExportError, match=r"largest logit difference .* \(at most 0\)"):
        prove()


def test_a_tokenizer_with_more_tokens_than_the_embedding_is_refused(tmp_path: Path) -> None:
    source = tiny.make_model("llama", tmp_path / "source", vocab_size=300)
    refuse(source, tmp_path / "out", "the embedding has 300 rows", CheckpointError)


def test_a_weight_that_is_missing_is_refused_and_not_drawn_at_random(tiny_source: Path, tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    source = tmp_path / "source"
    source.mkdir()
    for path in tiny_source.iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    stored = load_file(source / "model.safetensors")
    del stored["model.layers.1.mlp.up_proj.weight"]
    save_file(stored, source / "model.safetensors", metadata={"format": "pt"})
    refuse(source, tmp_path / "out", r"1 weights are missing \(model.layers.1.mlp.up_proj.weight\)", CheckpointError)


def test_the_reference_that_ships_is_the_sources(tiny_source: Path, tiny_artifact: Path) -> None:
    from transformers import LlamaForCausalLM

    from specrt_profiles.reference import read_reference

    model = LlamaForCausalLM.from_pretrained(tiny_source).eval()
    texts = read_reference(tiny_artifact / read_manifest(tiny_artifact).target.reference)
    assert len(texts) == len(parity.TEXTS)
    for text in texts:
        with torch.no_grad():
            logits = model(input_ids=torch.from_numpy(text.ids)[None]).logits[0]
        np.testing.assert_allclose(text.full, logits[text.full_rows].numpy(), atol=1e-5)
        np.testing.assert_allclose(text.logsumexp, logits.double().logsumexp(-1).numpy(), atol=1e-5)
