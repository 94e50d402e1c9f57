"""Rounding to 4 bits: on grids that are stored exactly, and better than rounding to the nearest."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

import tiny
from specrt_export import choose
from specrt_export.calibrate import inputs_of
from specrt_export.fit import fit_blocks, fit_matrix, inverse_factor, to_round
from specrt_export.quantize import OffsetBlocks, dequantize_offset, lies_on_grid, quantize_offset

DOWN = "model.layers.1.mlp.down_proj.weight"


def correlated(rows: int, columns: int) -> torch.Tensor:
    """Return inputs as layers see them: a few directions carry most, and channels differ in size."""
    generator = torch.Generator().manual_seed(1)
    strong = torch.randn(rows, 8, generator=generator) @ torch.randn(8, columns, generator=generator)
    noise = 0.3 * torch.randn(rows, columns, generator=generator)
    return (strong + noise) * torch.logspace(-1, 1, columns)


def weights(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(2))


def nearest(weight: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(dequantize_offset(quantize_offset(weight.numpy())))


def test_products_change_less_than_by_rounding_to_the_nearest() -> None:
    weight, seen, unseen = weights(48, 128), *correlated(900, 128).split(600)
    fitted = fit_matrix(weight.clone(), inverse_factor(seen))

    def error(rounded: torch.Tensor) -> float:
        return float(((rounded - weight) @ unseen.T).square().mean())

    assert error(fitted) < 0.35 * error(nearest(weight))


def test_what_is_fitted_is_stored_exactly() -> None:
    fitted = fit_matrix(weights(48, 128), inverse_factor(correlated(600, 128)))
    assert lies_on_grid(fitted.numpy())
    assert float((nearest(fitted) - fitted).abs().max()) <= 4e-6 * float(fitted.abs().max())


@pytest.mark.parametrize("count", [1, 20])
def test_fewer_inputs_than_channels_and_channels_without_input_are_no_trouble(count: int) -> None:
    seen = correlated(count, 128)
    seen[:, 17] = 0
    weight = weights(8, 128)
    fitted = fit_matrix(weight.clone(), inverse_factor(seen))
    assert bool(fitted.isfinite().all())
    assert float((fitted - weight).abs().max()) < 3.0
    assert bool(fit_matrix(weight.clone(), inverse_factor(torch.zeros(4, 128))).isfinite().all())


def test_blocks_of_one_value_keep_it() -> None:
    weight = weights(4, 64)
    weight[1], weight[2, :32] = 0.0, 0.25
    factor = torch.eye(64)
    fitted = fit_matrix(weight.clone(), factor)
    assert torch.equal(fitted[1], weight[1])
    torch.testing.assert_close(fitted[2, :32], weight[2, :32])


@pytest.fixture
def model(tiny_source: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_source, dtype=torch.bfloat16).eval()


def test_only_matrices_that_are_not_4_bit_already_are_rounded(model: Any) -> None:
    groups = [
        (DOWN,),
        ("model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("lm_head.weight",),
    ]
    up = model.get_parameter(groups[1][1])
    up.data = nearest(up.data.float())
    left = to_round(model, groups, vocab_size=tiny.VOCAB_SIZE)
    assert left == [(DOWN,), groups[1][:1]]
    before = {name: parameter.data.clone() for name, parameter in model.named_parameters()}
    texts = np.random.default_rng(0).integers(4, 300, (4, 40)).tolist()
    seen = inputs_of(model, texts, left)
    assert {name: tuple(rows.shape) for name, rows in seen.items()} == {
        DOWN: (160, model.config.intermediate_size), groups[1][0]: (160, model.config.hidden_size),
    }  # fmt: skip
    done: list[int] = []
    blocks = fit_blocks(model, left, seen, done.append)
    assert done == [model.get_parameter(name).numel() for (name,) in left]
    assert list(blocks) == [name for (name,) in left]
    assert all(torch.equal(parameter.data, before[name]) for name, parameter in model.named_parameters())
    rows, weight = seen[DOWN].float(), before[DOWN].float()
    fitted = torch.from_numpy(dequantize_offset(blocks[DOWN]))
    errors = [float(((rounded - weight) @ rows.T).square().mean()) for rounded in (fitted, nearest(weight))]
    assert errors[0] < 0.7 * errors[1]


@pytest.mark.parametrize("family", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_the_graph_holds_the_fitted_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """gpt2's weights are stored the other way round."""
    made: dict[str, OffsetBlocks] = {}

    def fit(*given: Any) -> dict[str, OffsetBlocks]:
        made.update(fit_blocks(*given))
        return made

    monkeypatch.setattr(choose, "fit_blocks", fit)
    source = tiny.make_model(family, tmp_path / "source")
    artifact = tiny.export_tiny(source, tmp_path / "out", profile=tiny.profile(precision="int4"))
    graph = onnx.load(str(artifact / "target.onnx")).graph
    stored = {t.name: numpy_helper.to_array(t) for t in graph.initializer}
    packed = np.concatenate([a.reshape(-1) for name, a in stored.items() if ".packed" in name and "wte" not in name])
    assert made
    for blocks in made.values():
        assert blocks.packed.tobytes() in packed.tobytes()
