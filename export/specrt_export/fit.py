"""Round weights to 4 bits so that products change least on text that the model writes (GPTQ, Frantar et al. 2022).

The weights of a layer are put on grids of 16 values per block of 32, column by column; what a column loses is made up
for by the columns after it, as far as the layer's inputs let it. Matrices that lie on such grids already are left
alone: blocks hold them as they are.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from specrt_export.editor import as_rows
from specrt_export.integer import Group, is_stored_transposed
from specrt_export.quantize import BLOCK, SHRINK, OffsetBlocks, SymmetricBlocks, lies_on_grid, quantize_offset

_DAMPING = 0.05  # of the mean of the diagonal; five times the paper's, because the inputs are few
_LEVELS = 15
_LOWEST = -8  # of the whole numbers that a symmetric block holds
_LEAST_HALF = 2.0**-24

Grid = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def to_round(model: nn.Module, groups: Sequence[Group], *, vocab_size: int, symmetric: bool = False) -> list[Group]:
    """Return of each group the weights that are to be held in blocks of 4 bits, and cannot be as they are.

    The output matrix, with `vocab_size` rows, is not: it gets 8 bits. `symmetric` blocks hold few grids as they are, so
    that all weights are to be rounded.
    """

    def changes(name: str) -> bool:
        rows = _rows(model, name)
        return len(rows) != vocab_size and rows.shape[1] % BLOCK == 0 and (symmetric or not lies_on_grid(rows))

    left = [tuple(name for name in group if changes(name)) for group in groups]
    return [names for names in left if names]


def fit_blocks(
    model: nn.Module, groups: Sequence[Group], inputs: Mapping[str, torch.Tensor], advance: Callable[[int], object]
) -> dict[str, OffsetBlocks]:
    """Return a model's weights as blocks of 4 bits, by parameter name.

    groups: parameter names of products with one input; inputs: what each group saw [n, K], by its first name.
    `advance` is told how many weights are done.
    """
    blocks: dict[str, OffsetBlocks] = {}
    for group in groups:
        factor = inverse_factor(inputs[group[0]].float())
        for name in group:
            fitted = fit_matrix(torch.from_numpy(_rows(model, name).copy()), factor)
            blocks[name] = quantize_offset(fitted.numpy())
            advance(fitted.numel())
    return blocks


def fit_symmetric(
    model: nn.Module, groups: Sequence[Group], inputs: Mapping[str, torch.Tensor], advance: Callable[[int], object]
) -> dict[str, SymmetricBlocks]:
    """Return a model's weights as symmetric blocks of 4 bits, by parameter name; see `fit_blocks`."""
    blocks: dict[str, SymmetricBlocks] = {}
    for group in groups:
        factor = inverse_factor(inputs[group[0]].float())
        for name in group:
            blocks[name] = fit_symmetric_matrix(torch.from_numpy(_rows(model, name).copy()), factor)
            advance(blocks[name].values.size)
    return blocks


def inverse_factor(inputs: torch.Tensor) -> torch.Tensor:
    """Return the upper Cholesky factor [K, K] of the inverse of the inputs' damped second moments."""
    moments = inputs.T @ inputs / len(inputs)
    diagonal = moments.diagonal()
    diagonal += _DAMPING * diagonal.mean() + 1e-12
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(moments))
    factor: torch.Tensor = torch.linalg.cholesky(inverse, upper=True)
    return factor


def fit_symmetric_matrix(weight: torch.Tensor, factor: torch.Tensor) -> SymmetricBlocks:
    """Return a [N, K] matrix as blocks of 32 along K of whole numbers times a scale; `weight` is used up."""
    steps: list[torch.Tensor] = []

    def grid(block: torch.Tensor, importance: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        low, step = _symmetric_grid_of(block, importance)
        steps.append(step)
        return low, step

    fitted = fit_matrix(weight, factor, grid)
    scales = torch.cat(steps, 1)
    values = (fitted / scales.repeat_interleave(BLOCK, 1)).round()
    return SymmetricBlocks(values.to(torch.int8).numpy(), scales.half().numpy())


def fit_matrix(weight: torch.Tensor, factor: torch.Tensor, grid: Grid | None = None) -> torch.Tensor:
    """Return a [N, K] matrix with each block of 32 along K on a grid of 16 values; `weight` is used up.

    grid: gives lowest value and step [N, 1] for a block [N, 32] whose columns count by `importance` [32]; by default
    those that serve it best.
    """
    grid = grid or _grid_of
    for start in range(0, weight.shape[1], BLOCK):
        end = start + BLOCK
        block, local = weight[:, start:end], factor[start:end, start:end]
        low, step = grid(block, 1 / local.diagonal() ** 2)
        errors = torch.empty_like(block)
        for j in range(BLOCK):
            column = block[:, j].clone()
            block[:, j] = _on_grid(column[:, None], low, step)[:, 0]
            errors[:, j] = (column - block[:, j]) / local[j, j]
            block[:, j + 1 :] -= errors[:, j, None] * local[j, j + 1 :]
        weight[:, end:] -= errors @ factor[start:end, end:]
    return weight


def _grid_of(block: torch.Tensor, importance: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return lowest value and step [N, 1] of the grid that serves a block [N, 32] best among shrunken ranges."""
    least, most = block.amin(1, keepdim=True), block.amax(1, keepdim=True)
    middle = (least + most) / 2
    trials = [
        (middle + share * (least - middle), ((most - least) * share / _LEVELS).clamp_min(1e-30)) for share in SHRINK
    ]
    return _best_of(trials, block, importance)


def _symmetric_grid_of(block: torch.Tensor, importance: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return -8 steps and the step [N, 1], a float16 number, that serves a block [N, 32] best."""
    most, least = block.amax(1, keepdim=True), block.amin(1, keepdim=True)
    widest = torch.maximum(most / (_LEVELS + _LOWEST), least / _LOWEST)
    steps = [(widest * share).clamp_min(_LEAST_HALF).half().float() for share in SHRINK]
    return _best_of([(_LOWEST * step, step) for step in steps], block, importance)


def _best_of(
    trials: Sequence[tuple[torch.Tensor, torch.Tensor]], block: torch.Tensor, importance: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return of each row [N, 1] the lowest value and step of the grid with the least error, weighted by importance."""
    low, step = trials[0]
    best = torch.full_like(low, torch.inf)
    for trial_low, trial_step in trials:
        error = ((_on_grid(block, trial_low, trial_step) - block) ** 2 * importance).sum(1, keepdim=True)
        better = error < best
        low, step = torch.where(better, trial_low, low), torch.where(better, trial_step, step)
        best = torch.minimum(best, error)
    return low, step


def _on_grid(values: torch.Tensor, low: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    number: torch.Tensor = ((values - low) / step).round_().clamp_(0, _LEVELS)
    return number * step + low


def _rows(model: nn.Module, name: str) -> NDArray[np.float32]:
    """Return a weight as [N, K]."""
    return as_rows(model.get_parameter(name), is_stored_transposed(model.get_submodule(name.rpartition(".")[0])))
