"""Rotary embeddings: which pairing a model's formula uses is found by trying it."""

from collections.abc import Callable

import pytest
import torch

from specrt_export.rotary import RotaryTable, match_formula, rotate

Pair = tuple[torch.Tensor, torch.Tensor]
POSITIONS = 12


def angles(size: int) -> torch.Tensor:
    """Return [POSITIONS, size / 2] angles as Su et al. 2021 choose them."""
    return torch.outer(torch.arange(POSITIONS).float(), 10000.0 ** (-torch.arange(0, size, 2) / size))


def twice(size: int) -> Pair:
    """Tables as Llama has them: every angle in both halves."""
    both = torch.cat([angles(size), angles(size)], -1)
    return both.cos(), both.sin()


def repeated(size: int) -> Pair:
    """Tables as Cohere has them: every angle two times in a row."""
    both = angles(size).repeat_interleave(2, -1)
    return both.cos(), both.sin()


def by_complex_numbers(x: torch.Tensor, size: int, rows: slice, *, interleaved: bool) -> torch.Tensor:
    """Rotate the first `size` values of x [1, H, T, D] as complex numbers."""
    part, rest = x[..., :size], x[..., size:]
    pairs = part.unflatten(-1, (-1, 2)) if interleaved else part.unflatten(-1, (2, -1)).transpose(-1, -2)
    turned = torch.view_as_real(
        torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones(()), angles(size))[rows]
    )
    flat = turned.flatten(-2) if interleaved else turned.transpose(-1, -2).flatten(-2)
    return torch.cat([flat, rest], -1)


def formula(name: str) -> Callable[..., Pair]:
    from importlib import import_module

    module = import_module(f"transformers.models.{name}.modeling_{name}")
    return module.apply_rotary_pos_emb  # type: ignore[no-any-return]


@pytest.mark.parametrize("size", [16, 32])
def test_llamas_formula_is_recognised_as_half(size: int) -> None:
    cos, sin = twice(size)
    found = match_formula(formula("llama"), cos, sin, head_dim=size)
    assert found is not None
    assert found.style == "half"
    torch.testing.assert_close(found.cos, angles(size).cos())
    torch.testing.assert_close(found.sin, angles(size).sin())


def test_coheres_formula_is_recognised_as_interleaved() -> None:
    cos, sin = repeated(32)
    found = match_formula(formula("cohere"), cos, sin, head_dim=32)
    assert found is not None
    assert found.style == "interleaved"
    torch.testing.assert_close(found.cos, angles(32).cos())


def test_glms_formula_is_interleaved_over_part_of_a_head() -> None:
    cos, sin = twice(16)
    found = match_formula(formula("glm"), cos, sin, head_dim=32)
    assert found is not None
    assert found.style == "interleaved"
    torch.testing.assert_close(found.sin, angles(16).sin())


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("size", [16, 32])
def test_rotation_is_multiplication_by_complex_numbers(size: int, interleaved: bool) -> None:
    tables, apply = (repeated, "cohere") if interleaved else (twice, "llama")
    found = match_formula(formula(apply), *tables(size), head_dim=size)
    assert found is not None
    x = torch.randn(1, 3, 5, 32)
    rows = slice(2, 7)
    torch.testing.assert_close(rotate(x, found, rows), by_complex_numbers(x, size, rows, interleaved=interleaved))


def llama_but(change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[..., Pair]:
    def apply(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Pair:
        query, rotated = formula("llama")(query, key, cos, sin)
        return query, change(rotated, key)

    return apply


@pytest.mark.parametrize(
    "apply",
    [
        llama_but(lambda rotated, key: key),
        llama_but(lambda rotated, key: -rotated),
        llama_but(lambda rotated, key: rotated + 1e-3),
        lambda query, key, cos, sin: formula("llama")(query, key, cos, -sin),
        lambda query, key, cos, sin: (query * cos[:, None], key * cos[:, None]),
        lambda query, key: (query, key),
        lambda query, key, cos, sin: (query @ cos, key @ cos),
    ],
)
def test_an_unknown_formula_is_left_to_the_model(apply: Callable[..., Pair]) -> None:
    assert match_formula(apply, *twice(32), head_dim=32) is None


def test_tables_of_another_formula_do_not_match() -> None:
    assert match_formula(formula("llama"), *repeated(32), head_dim=32) is None


@pytest.mark.parametrize(("size", "head_dim"), [(8, 32), (24, 32), (16, 24), (64, 32)])
def test_sizes_the_operator_cannot_rotate_are_left_to_the_model(size: int, head_dim: int) -> None:
    assert match_formula(formula("glm"), *twice(size), head_dim=head_dim) is None


class FakeRotary(torch.nn.Module):
    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Pair:
        cos, sin = twice(16)
        return cos[position_ids], sin[position_ids]


def test_tables_repeat_the_last_position_for_padded_rows() -> None:
    table = RotaryTable(FakeRotary(), formula("llama"), capacity=8, slots=12, head_dim=16)
    cos, sin = table(torch.zeros(1), torch.arange(12)[None])
    torch.testing.assert_close(cos[0, :8], twice(16)[0][:8])
    for row in range(8, 12):
        torch.testing.assert_close(cos[0, row], twice(16)[0][7])
        torch.testing.assert_close(sin[0, row], twice(16)[1][7])


def test_a_table_knows_its_own_angles_only() -> None:
    table = RotaryTable(FakeRotary(), formula("llama"), capacity=8, slots=12, head_dim=16)
    cos, _ = table(torch.zeros(1), torch.arange(4)[None])
    found = table.rotary(cos)
    assert found is not None
    assert found.cos.shape == (12, 8)
    assert table.rotary(cos.clone()) is None
