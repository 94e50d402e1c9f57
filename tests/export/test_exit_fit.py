"""Early exits in closed form: the translator, what is measured of it, and which models have exits."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import tiny
from specrt_export.decoder import decoder_layers
from specrt_export.errors import ExportError, UnsupportedModelError
from specrt_export.exit_fit import (
    ExitMeasure,
    best_exit,
    final_norm,
    fit_exits,
    fit_translator,
    predicted_speedup,
)

LAYERS = 4


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def small(family: str = "llama", *, layers: int = LAYERS, seed: int = 0) -> Any:
    name, settings = tiny.FAMILIES[family]
    if "layer_types" in settings:
        settings = {**settings, "layer_types": (settings["layer_types"] * layers)[:layers]}
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(
        getattr(transformers, name)(**{**settings, "num_hidden_layers": layers})
    )
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(3.0)
    return model.eval()


def written(*lengths: int, seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, tiny.VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


def weaken(layer: Any, share: float) -> None:
    """Make a layer change its rows less, or not at all."""
    layer.self_attn.o_proj.weight.data.mul_(share)
    layer.mlp.down_proj.weight.data.mul_(share)


def weakened() -> Any:
    """Return a model whose layers say more or less the same."""
    model = small()
    for layer in decoder_layers(model):
        weaken(layer, 0.1)
    return model


class Turning(nn.Module):
    """A decoder layer that only turns its rows."""

    def __init__(self, size: int) -> None:
        super().__init__()
        turn, _ = torch.linalg.qr(torch.randn(size, size, generator=torch.Generator().manual_seed(5)))
        self.weight = nn.Parameter(turn)

    def forward(self, states: torch.Tensor, **_: Any) -> torch.Tensor:
        return states @ self.weight


def test_a_translator_is_the_map_between_the_states() -> None:
    generator = torch.Generator().manual_seed(0)
    given = torch.randn(20_000, 12, generator=generator) * torch.linspace(1, 2, 12) + 2
    turn, shift = torch.randn(12, 12, generator=generator), torch.randn(12, generator=generator)
    translator, bias = fit_translator(given, given @ turn + shift)
    assert (translator.dtype, bias.dtype) == (torch.float32, torch.float32)
    assert (given @ translator + bias - given @ turn - shift).abs().max() < 0.2
    assert (translator - turn).abs().max() < 0.05


def test_rows_with_huge_states_do_not_decide() -> None:
    generator = torch.Generator().manual_seed(0)
    given = torch.randn(4000, 12, generator=generator)
    turn, other = (torch.randn(12, 12, generator=generator) for _ in range(2))
    wanted = given @ turn
    wanted[:40] = 1000 * given[:40] @ other
    translator, bias = fit_translator(given, wanted)
    ordinary = given[40:]
    assert (ordinary @ translator + bias - ordinary @ turn).pow(2).mean() < 0.02 * (ordinary @ turn).pow(2).mean()


def test_without_evidence_a_translator_is_the_identity() -> None:
    given = torch.randn(3, 12, generator=torch.Generator().manual_seed(0))
    translator, _ = fit_translator(given, -given)
    assert (translator - torch.eye(12)).abs().max() < 0.2
    translator, bias = fit_translator(given[:1], given[:1] + 1)
    assert torch.equal(translator, torch.eye(12))
    assert torch.allclose(bias, torch.ones(12))


def test_an_exit_before_layers_that_do_nothing_is_always_right_and_needs_no_translator() -> None:
    model = small()
    for layer in decoder_layers(model)[2:]:
        weaken(layer, 0)
    heads, measures = fit_exits(model, written(*[40] * 8))
    assert [head.layer for head in heads] == [measure.layer for measure in measures] == [1, 2, 3]
    assert [measure.plain_agreement for measure in measures[1:]] == [1.0, 1.0]
    assert [head.translator is None and head.bias is None for head in heads[1:]] == [True, True]
    assert measures[0].agreement < 0.9
    sizes = [sum(parameter.numel() for parameter in layer.parameters()) for layer in decoder_layers(model)]
    matrix = model.lm_head.weight.numel()
    best = best_exit(measures)
    assert best == measures[1]
    assert best.cost == pytest.approx((sum(sizes[:2]) + matrix) / (sum(sizes) + matrix))
    assert best.k == 15
    assert best.speedup == pytest.approx(16 / (1 + 15 * best.cost))


def test_a_layer_that_turns_the_states_is_undone() -> None:
    model = small()
    turning = Turning(64)
    decoder_layers(model)[3] = turning
    [head], [measure] = fit_exits(model, written(*[150] * 16), layers=[3])
    assert head.translator is not None
    assert head.bias is not None
    assert head.translator.shape == (64, 64)
    assert (head.translator - turning.weight).norm() < 0.3 * turning.weight.norm()
    assert measure.agreement > 0.7 > 0.1 > measure.plain_agreement
    sizes = [sum(parameter.numel() for parameter in layer.parameters()) for layer in decoder_layers(model)]
    matrix = model.lm_head.weight.numel()
    assert measure.cost == pytest.approx((sum(sizes[:3]) + 64 * 64 + matrix) / (sum(sizes) + matrix))


def test_agreement_is_that_of_texts_which_were_held_out() -> None:
    model = weakened()
    texts = written(*[40] * 8)
    _, measures = fit_exits(model, texts)
    with torch.no_grad():
        for measure in measures:
            right = []
            for text in (texts[3], texts[7]):
                out = model(torch.tensor([text]), output_hidden_states=True)
                guesses = model.lm_head(model.model.norm(out.hidden_states[measure.layer])).argmax(-1)
                right.append((guesses == out.logits.argmax(-1)).float())
            assert measure.plain_agreement == pytest.approx(float(torch.cat(right, 1).mean()))
            assert 0.1 < measure.plain_agreement < 1


def test_what_texts_share_is_read_once() -> None:
    """Else a held-out row would also be fitted to."""
    model = weakened()
    shared, own = written(30, 20)
    ends = [[1], [2], [3], own]
    assert own[0] not in (1, 2, 3)
    _, [measure] = fit_exits(model, [shared + end for end in ends], layers=[1])
    with torch.no_grad():
        out = model(torch.tensor([shared + own]), output_hidden_states=True)
        guesses = model.lm_head(model.model.norm(out.hidden_states[1])).argmax(-1)[:, 30:]
    assert measure.plain_agreement == pytest.approx(float((guesses == out.logits[:, 30:].argmax(-1)).float().mean()))
    assert 0.1 < measure.plain_agreement < 1


def test_the_model_stays_as_it_was() -> None:
    model = small().to(torch.bfloat16)
    hooks = [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()]
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    heads, _ = fit_exits(model, written(20, 20, 20), layers=[2])
    assert heads[0].translator is None or heads[0].translator.dtype == torch.float32
    assert [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()] == hooks
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


@pytest.mark.parametrize("layers", [[0], [1, LAYERS], [-1]])
def test_layers_that_are_no_exit_are_refused(layers: list[int]) -> None:
    with pytest.raises(
        ExportError, match=rf"expected an early exit after 1 to 3 of the model's 4 .* found {layers[-1]}"
    ):
        fit_exits(small(), written(9, 9), layers=layers)


def test_too_little_text_is_refused() -> None:
    for texts in ([], written(9), [[1], []]):
        with pytest.raises(ExportError, match=r"expected two texts or more to fit exits on, none of them empty"):
            fit_exits(small(), texts)


def test_a_model_of_one_layer_has_no_exit() -> None:
    with pytest.raises(UnsupportedModelError, match=r"an early exit needs a model of 2 layers or more, found 1"):
        fit_exits(small(layers=1), written(9, 9))


def test_a_model_without_a_list_of_layers_is_refused() -> None:
    name, settings = tiny.FAMILIES["gpt2"]
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**settings))
    with pytest.raises(UnsupportedModelError, match="GPT2LMHeadModel keeps its layers in a way"):
        fit_exits(model, written(9, 9))


@pytest.mark.parametrize(
    "family", ["llama", "qwen3", "gemma", "gemma3", "phi", "gpt-neox", "cohere", "olmo2", "granite"]
)
def test_the_final_norm_is_found(family: str) -> None:
    model = small(family)
    norm = final_norm(model)
    assert "norm" in next(name for name, module in model.named_modules() if module is norm).rpartition(".")[2]
    with torch.no_grad():
        out = model(torch.tensor([[3, 5, 8]]), output_hidden_states=True)
        assert torch.equal(model.get_output_embeddings()(out.hidden_states[-1]).argmax(-1), out.logits.argmax(-1))
    assert fit_exits(model, written(20, 20, 20), layers=[1])[1][0].cost < 1


def test_a_model_with_more_than_a_norm_at_its_end_is_refused() -> None:
    model = small()
    model.lm_head = nn.Sequential(nn.Linear(64, 64), model.lm_head)
    model.get_output_embeddings = lambda: model.lm_head[1]
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM has more than a norm between its layers and"):
        final_norm(model)


def test_a_model_that_changes_what_its_norm_reads_is_refused() -> None:
    model = small()
    model.model.norm.register_forward_pre_hook(lambda _, inputs: (inputs[0] + 1,))
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM has more than a norm between its layers and"):
        final_norm(model)


def test_the_predicted_speedup_is_tokens_over_cost() -> None:
    assert predicted_speedup(0.5, 0.25, 2) == pytest.approx((1 + 0.5 + 0.25) / 1.5)
    assert predicted_speedup(1.0, 0.5, 4) == pytest.approx(5 / 3)
    assert predicted_speedup(0.0, 0.5, 1) == pytest.approx(1 / 1.5)


def test_the_best_exit_is_the_fastest_even_where_none_pays() -> None:
    def measure(layer: int, speedup: float) -> ExitMeasure:
        return ExitMeasure(layer=layer, agreement=0.5, plain_agreement=0.4, cost=0.5, speedup=speedup, k=1)

    assert best_exit([measure(1, 0.8), measure(2, 0.9), measure(3, 0.9), measure(4, 0.7)]).layer == 2


def test_fits_are_repeatable(tmp_path: Path) -> None:
    first, second = (fit_exits(small(), written(30, 30, 30), layers=[2])[1] for _ in range(2))
    assert first == second
