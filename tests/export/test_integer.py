"""8-bit products: how inputs and weights are rounded, which form is chosen, and that the graph computes it."""

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tiny
from specrt_export import choose, integer, timing
from specrt_export.calibrate import observe, self_written
from specrt_export.integer import KINDS, Form, Kind, plan
from specrt_export.parity import BOUNDS
from specrt_profiles.manifest import read_manifest

FAMILIES = ("llama", "qwen2", "gpt2", "gemma3", "phi3")  # untied, biased and tied, Conv1D, norms with 1 + w, packed


def form(kind: Kind, size: int = 64, scale: float = 0.05) -> Form:
    return Form(kind, np.linspace(0.5, 2.0, size).astype(np.float32), scale)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_rounded_by_itself(kind: Kind) -> None:
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    alone = form(kind).round_input(x)
    loud = torch.cat([x[:3], 100 * x[3:]])
    assert torch.equal(form(kind).round_input(loud)[:3], alone[:3])
    assert 0 < float((alone - x).abs().max()) < 0.2


def test_the_static_form_has_one_step_for_all_rows_and_clips() -> None:
    x = torch.tensor([[0.07, 0.4, 1000.0], [0.0, -0.2, -1000.0]])
    fixed = Form("static", np.ones(3, np.float32), 0.1)
    torch.testing.assert_close(fixed.round_input(x), torch.tensor([[0.1, 0.4, 12.7], [0.0, -0.2, -12.8]]))


def test_the_row_form_takes_the_largest_of_each_row_and_zeros_stay_zeros() -> None:
    x = torch.tensor([[127.0, 1.4, -0.4], [0.0, 0.0, 0.0]])
    rows = Form("row", np.ones(3, np.float32), 99.0)
    torch.testing.assert_close(rows.round_input(x), torch.tensor([[127.0, 1.0, 0.0], [0.0, 0.0, 0.0]]))


def test_smoothing_moves_range_into_the_weights_and_back() -> None:
    weight = np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32)
    found = form("static")
    stored = found.quantize_weight(weight)
    np.testing.assert_allclose(stored.scales, np.abs(weight * found.smooth).max(1) / 127, rtol=1e-6)
    error = np.abs(found.round_weight(weight) - weight) * found.smooth
    assert np.all(error <= stored.scales[:, None] / 2 * 1.001)


@pytest.fixture(scope="module")
def model(tiny_source: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_source).eval()


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    rng = np.random.default_rng(1)
    return rng.integers(4, tiny.VOCAB_SIZE - 60, (2, 40)).tolist()  # type: ignore[no-any-return]


GROUPS = [
    *(tuple(f"model.layers.{i}.self_attn.{name}_proj.weight" for name in "qkv") for i in range(2)),
    *((f"model.layers.{i}.self_attn.o_proj.weight",) for i in range(2)),
    *(tuple(f"model.layers.{i}.mlp.{name}_proj.weight" for name in ("gate", "up")) for i in range(2)),
    *((f"model.layers.{i}.mlp.down_proj.weight",) for i in range(2)),
    ("lm_head.weight",),
]


@pytest.fixture(scope="module")
def seen(model: Any, texts: list[list[int]]) -> Mapping[str, Any]:
    return observe(model, texts, GROUPS)


def clock(**seconds: float) -> Callable[[tuple[int, int], Kind], float]:
    return lambda shape, kind: seconds[kind] * shape[0] * shape[1]


def test_what_products_see_is_what_the_model_computes(model: Any, texts: list[list[int]], seen: Any) -> None:
    hidden = model(input_ids=torch.tensor(texts), output_hidden_states=True).hidden_states
    normed = model.model.layers[0].input_layernorm(hidden[0]).detach()
    found = seen["model.layers.0.self_attn.q_proj.weight"]
    np.testing.assert_allclose(found, normed.abs().amax((0, 1)).numpy(), rtol=1e-4)


@pytest.mark.parametrize("fastest", KINDS)
def test_the_fastest_form_that_is_accurate_enough_is_taken(
    model: Any, texts: list[list[int]], seen: Any, monkeypatch: pytest.MonkeyPatch, fastest: Kind
) -> None:
    monkeypatch.setattr(integer, "TARGET_KL", 1.0)
    seconds = {kind: 1.0 if kind == fastest else 2.0 for kind in KINDS}
    forms, measured = plan(model, GROUPS, seen, texts, clock=clock(**seconds))
    assert Counter(found.kind for found in forms.values()) == {fastest: 15}
    assert set(forms) == {name for group in GROUPS for name in group}
    assert measured < 1.0
    for group in GROUPS:
        assert len({id(forms[name]) for name in group}) == 1, "products with one input need one form"


def test_what_costs_too_much_accuracy_gets_a_better_form(
    model: Any, texts: list[list[int]], seen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured_for(limit: float) -> tuple[Counter[str], float]:
        monkeypatch.setattr(integer, "TARGET_KL", limit)
        forms, measured = plan(model, GROUPS, seen, texts, clock=clock(static=1.0, row=2.0, block=3.0))
        return Counter(found.kind for found in forms.values()), measured

    kinds, loose = measured_for(1.0)
    assert kinds == {"static": 15}
    kinds, tight = measured_for(0.75 * loose)
    assert tight <= 0.75 * loose
    assert kinds["row"] + kinds["block"] > 0
    kinds, best = measured_for(0.0)
    assert kinds["block"] > 0
    assert best < 0.75 * loose, "the most accurate form of each type is the last resort"


def test_a_machine_without_exact_integer_products_gets_blocks(
    tiny_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose, "integer_products_are_exact", lambda: False)
    artifact = tiny.export_tiny(tiny_source, tmp_path / "out", profile=tiny.profile(precision="int8"))
    assert "MatMulIntegerToFloat" not in operators(artifact)


@pytest.mark.parametrize("kind", ["static", "row"])
@pytest.mark.parametrize(
    "family", [name if name == "qwen2" else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)
def test_the_graph_computes_the_chosen_form_and_stays_lossless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, kind: Kind
) -> None:
    """The export itself compares the graph with the source that computes with the same rounded weights."""

    def all_of(model: Any, groups: Any, seen: Any, texts: Any, **_: Any) -> tuple[dict[str, Form], float]:
        trial = integer._Trial(model, texts)
        forms = {group: integer._form(trial, group, seen[group[0]], kind, 0.5) for group in groups}
        return {name: found for group, found in forms.items() for name in group}, trial.kl(forms)

    monkeypatch.setattr(choose, "plan", all_of)
    artifact = tiny.export_tiny(
        tiny.make_model(family, tmp_path / "source"), tmp_path / "out", profile=tiny.profile(precision="int8")
    )
    names = operators(artifact)
    assert "MatMulNBits" not in names
    assert names["MatMulIntegerToFloat"] > 4
    assert names["QuantizeLinear"] == names["MatMulIntegerToFloat"], "products with one input are one"
    target = read_manifest(artifact).target
    assert 1e-7 < target.parity.mean_kl <= BOUNDS["int8"].mean_kl
    assert target.exact_widths == tiny.TINY_PROFILE.verify_widths
    tiny.assert_lossless(artifact, tmp_path / "machine")


def operators(artifact: Path) -> Counter[str]:
    import onnx

    graph = onnx.load(str(artifact / "target.onnx"), load_external_data=False).graph
    return Counter(node.op_type for node in graph.node)


def test_a_wrong_scale_in_the_graph_fails_the_export(
    tiny_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specrt_export.errors import ExportError
    from specrt_export.products import _LazyRows

    right = _LazyRows.scales
    monkeypatch.setattr(_LazyRows, "scales", lambda self: right(self) * np.float32(1.01))
    monkeypatch.setattr(choose, "product_seconds", lambda shape, kind, *, widths: {"block": 9.0}.get(kind, 1.0))
    monkeypatch.setattr(integer, "TARGET_KL", 1.0)
    with pytest.raises(ExportError, match="with rounded weights does not match its source"):
        tiny.export_tiny(tiny_source, tmp_path / "out", profile=tiny.profile(precision="int8"))


def test_products_take_time_in_every_form() -> None:
    for kind in KINDS:
        assert timing.product_seconds((96, 64), kind, widths=(2, 4)) > 0


def test_products_that_saturate_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Saturating:
        """A processor that adds pairs of products in 16 bits."""

        def run(self, _: None, feed: Mapping[str, Any]) -> list[Any]:
            pairs = np.minimum((feed["x"].astype(int) + 128) * 127 * 2, 32767) - 128 * 127 * 2
            return [np.full((len(pairs), 32), pairs[:, ::2].sum(1)[:, None], np.float32)]

    monkeypatch.setattr(timing, "_session", lambda parts, columns: Saturating())
    assert not timing.integer_products_are_exact()


def test_a_model_writes_the_same_text_each_time(model: Any, tiny_source: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_source)
    first, second = (self_written(model, tokenizer, longest=60) for _ in range(2))
    assert first == second
    assert {len(text) for text in first} == {60}
    assert len({tuple(text) for text in first}) > 8
    chat = tokenizer.encode("<|user|>")
    assert [text[: len(chat)] for text in first[8:]] == [chat] * 8, "conversations begin as the template begins them"


def test_a_model_without_a_template_writes_plain_text_only(model: Any, tiny_source: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_source)
    tokenizer.chat_template = None
    assert len(self_written(model, tokenizer, longest=40)) == 8
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    assert len(self_written(model, tokenizer, longest=40)) == 8
