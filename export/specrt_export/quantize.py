"""Block-wise weight quantisation for MatMulNBits: every row of activations is computed by itself.

Only weights are quantised here, in blocks of 32 input values; activations are quantised by the kernel per row and
block. Per-tensor activation scales are not offered: there a rejected token would change the rows before it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

BLOCK = 32
_ROWS = 4096
_SAMPLE = 16  # rows that tell whether a matrix was 4-bit before
SHRINK = (1.0, 0.95, 0.9, 0.85, 0.8, 0.7)  # of a block's range: values at its ends may be cut for a finer grid
_LEAST_HALF, _MOST_HALF = 2.0**-24, 65504.0
_TOLERANCE = np.float32(4e-6)  # of a block's largest value: what computing scale * q + minimum in fp32 rounds off


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """A [N, K] matrix with one scale per row: w = scale * values; values int8 [N, K], scales float32 [N]."""

    values: NDArray[np.int8]
    scales: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """A [N, K] matrix as blocks along K: w = scale * (q - zero_point).

    packed: uint8 [N, K / 32, 32 * bits / 8], two 4-bit values per byte, lower half first. scales: float32
    [N, K / 32]. zero_points: uint8 [N, ceil(K / 32 * bits / 8)], packed like the values.
    """

    packed: NDArray[np.uint8]
    scales: NDArray[np.float32]
    zero_points: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class OffsetBlocks:
    """A [N, K] matrix as blocks of 32 along K with 4 bits per value: w = scale * (q - 8) + offset.

    packed: uint8 [N, K / 32, 16], two values per byte, lower half first. scales: float32 [N, K / 32]. offsets: float32
    [K / 32, N], as the sums of an input's blocks are multiplied with them.
    """

    packed: NDArray[np.uint8]
    scales: NDArray[np.float32]
    offsets: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class SymmetricBlocks:
    """A [N, K] matrix as blocks of 32 along K with 4 bits per value: w = scale * values.

    values: int8 [N, K], from -8 to 7. scales: float16 [N, K / 32].
    """

    values: NDArray[np.int8]
    scales: NDArray[np.float16]


def in_stored_order(
    function: Callable[[NDArray[np.float32]], NDArray[np.float32]], weight: NDArray[np.float32], *, transposed: bool
) -> NDArray[np.float32]:
    """Apply a function of [N, K] matrices to a weight that is stored as [N, K], if `transposed`, or as [K, N]."""
    return function(weight) if transposed else np.ascontiguousarray(function(np.ascontiguousarray(weight.T)).T)


def quantize_offset(weight: NDArray[np.float32]) -> OffsetBlocks:
    """Round a [N, K] matrix, K a multiple of 32, to 16 values per block, from its minimum to its maximum.

    A block whose values lie on a grid of at most 16 already (a checkpoint that was 4-bit before) keeps them as they
    are. Where the grid contains 0, the offset is 0.
    """
    on_grid = lies_on_grid(weight)
    parts = [_offset_rows(weight[start : start + _ROWS], on_grid) for start in range(0, len(weight), _ROWS)]
    packed, scales, offsets = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return OffsetBlocks(packed, scales, np.ascontiguousarray(offsets.T))


def lies_on_grid(weight: NDArray[np.float32]) -> bool:
    """Tell, from a few rows, whether most blocks of a [N, K] matrix lie on grids of at most 16 values."""
    return bool(_grid(weight[:_SAMPLE].reshape(-1, weight.shape[1] // BLOCK, BLOCK))[1].mean() > 0.5)


def needs_offsets(weight: NDArray[np.float32]) -> bool:
    """Tell whether a block of a [N, K] matrix has an offset; of a checkpoint with scales only (GGUF Q4_0) none has."""
    return bool(quantize_offset(weight[:_SAMPLE]).offsets.any() or quantize_offset(weight).offsets.any())


def dequantize_offset(matrix: OffsetBlocks) -> NDArray[np.float32]:
    """Return the [N, K] matrix that `matrix` stands for."""
    values = _unpack(matrix.packed, 4).astype(np.float32) - 8
    full = values * matrix.scales[..., None] + matrix.offsets.T[..., None]
    return np.ascontiguousarray(full.reshape(len(full), -1))


def _offset_rows(weight: NDArray[np.float32], on_grid: bool) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    values = weight.reshape(len(weight), -1, BLOCK)
    low = values.min(-1)
    scales = (values.max(-1) - low) / np.float32(15)
    if on_grid:
        steps, exact = _grid(values)
        scales = np.where(exact, steps, scales)
    inverse = np.divide(1.0, scales, out=np.zeros_like(scales), where=scales > 0)
    quantized = np.clip(np.rint((values - low[..., None]) * inverse[..., None]), 0, 15)
    zeros = np.rint(-low * inverse)
    shifted = quantized + (8 - zeros)[..., None]
    around_zero = (
        (scales > 0)
        & (np.abs(low + zeros * scales) <= _TOLERANCE * np.abs(values).max(-1))
        & (shifted.min(-1) >= 0)
        & (shifted.max(-1) <= 15)
    )
    quantized = np.where(around_zero[..., None], shifted, quantized)
    offsets = np.where(around_zero, 0, low + 8 * scales)
    return _pack(quantized.astype(np.uint8), 4), scales.astype(np.float32), offsets.astype(np.float32)


def _grid(values: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Return for blocks [..., 32] the step of the grid of at most 16 values they lie on, and whether they do."""
    tolerance = _TOLERANCE * np.abs(values).max(-1, keepdims=True) + np.float32(1e-30)
    above = values - values.min(-1, keepdims=True)
    gaps = np.diff(np.sort(values, axis=-1), axis=-1)
    smallest = np.where(gaps > 2 * tolerance, gaps, np.inf).min(-1, keepdims=True)
    steps, exact = np.zeros_like(smallest), np.zeros(smallest.shape, bool)
    for part in (1, 2, 3):  # neighbours on the grid may both be missing
        step = np.where(np.isinf(smallest), 0, smallest / part)
        count = np.rint(np.divide(above.max(-1, keepdims=True), step, out=np.zeros_like(step), where=step > 0))
        step = np.divide(above.max(-1, keepdims=True), count, out=np.zeros_like(step), where=count > 0)
        number = np.rint(np.divide(above, step, out=np.zeros_like(above), where=step > 0))
        fits = (np.abs(number * step - above) <= tolerance).all(-1, keepdims=True) & (count <= 15)
        steps, exact = np.where(fits & ~exact, step, steps), exact | fits
    return steps[..., 0], exact[..., 0]


def quantize_rows(weight: NDArray[np.float32], *, in_half: bool = False) -> QuantizedRows:
    """Round a [N, K] matrix to -127 .. 127 times its rows' largest magnitudes / 127.

    in_half: with scales that are float16 numbers above 0.
    """
    largest = np.maximum(weight.max(-1), -weight.min(-1)) if weight.shape[-1] else np.zeros(len(weight), np.float32)
    scales = half_scales(largest / 127).astype(np.float32) if in_half else (largest / 127).astype(np.float32)
    inverse = np.divide(1.0, scales, out=np.zeros_like(scales), where=scales > 0)
    values = np.empty(weight.shape, np.int8)
    for start in range(0, len(weight), _ROWS):
        part = slice(start, start + _ROWS)
        values[part] = np.rint(np.clip(weight[part] * inverse[part, None], -127, 127))
    return QuantizedRows(values, scales)


def half_scales(scales: NDArray[np.floating[Any]]) -> NDArray[np.float16]:
    """Return the nearest float16 numbers above 0."""
    halves: NDArray[np.float16] = np.clip(scales, _LEAST_HALF, _MOST_HALF).astype(np.float16)
    return halves


def quantize_symmetric(weight: NDArray[np.float32]) -> SymmetricBlocks:
    """Round a [N, K] matrix, K a multiple of 32, to -8 .. 7 times a scale per block, the one of least squared error."""
    blocks = weight.reshape(len(weight), -1, BLOCK)
    widest = np.maximum(blocks.max(-1) / 7, -blocks.min(-1) / 8)
    best = np.full(widest.shape, np.inf, np.float32)
    values, scales = np.zeros(blocks.shape, np.int8), half_scales(widest)
    for share in SHRINK:
        trial = half_scales(widest * np.float32(share))
        step = trial.astype(np.float32)[..., None]
        rounded = np.clip(np.rint(blocks / step), -8, 7)
        error = ((rounded * step - blocks) ** 2).sum(-1)
        better = error < best
        values[better], scales[better], best[better] = rounded[better], trial[better], error[better]
    return SymmetricBlocks(values.reshape(weight.shape), scales)


def dequantize_symmetric(matrix: SymmetricBlocks) -> NDArray[np.float32]:
    """Return the [N, K] matrix that `matrix` stands for."""
    blocks = matrix.values.reshape(*matrix.scales.shape, BLOCK)
    full: NDArray[np.float32] = blocks * matrix.scales.astype(np.float32)[..., None]
    return full.reshape(matrix.values.shape)


def dequantize_rows(matrix: QuantizedRows) -> NDArray[np.float32]:
    """Return the [N, K] matrix that `matrix` stands for."""
    product: NDArray[np.float32] = matrix.values * matrix.scales[:, None]
    return product


def quantize(weight: NDArray[np.float32], *, bits: int) -> QuantizedMatrix:
    """Round a [N, K] matrix to `bits` (4 or 8) per value between each block's minimum and maximum.

    The range always contains 0, so that zeros stay zeros. A block that holds whole multiples of a 127th of its
    largest magnitude (GGUF Q8_0) keeps its values at 8 bits. K is padded with zeros to a multiple of 32. Works
    through a few rows at a time, so that it needs little more memory than its result.
    """
    parts = [_quantize_rows(weight[start : start + _ROWS], bits) for start in range(0, len(weight), _ROWS)]
    return QuantizedMatrix(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def _quantize_rows(weight: NDArray[np.float32], bits: int) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    rows, columns = weight.shape
    blocks = -(-columns // BLOCK)
    padded = np.zeros((rows, blocks * BLOCK), np.float32)
    padded[:, :columns] = weight
    values = padded.reshape(rows, blocks, BLOCK)
    top = 2**bits - 1
    low = np.minimum(values.min(-1), 0.0)
    high = np.maximum(values.max(-1), 0.0)
    scales = ((high - low) / top).astype(np.float32)
    inverse = np.divide(1.0, scales, out=np.zeros_like(scales), where=scales > 0)
    zeros = np.clip(np.rint(-low * inverse), 0, top)
    if bits == 8:
        steps = np.maximum(high, -low) / np.float32(127)
        multiples = np.divide(values, steps[..., None], out=np.zeros_like(values), where=steps[..., None] > 0)
        exact = np.abs(multiples - np.rint(multiples)).max(-1) <= 127 * _TOLERANCE
        scales, zeros = np.where(exact, steps, scales), np.where(exact, 128, zeros)
        inverse = np.divide(1.0, scales, out=np.zeros_like(scales), where=scales > 0)
    quantized = np.clip(np.rint(values * inverse[..., None]) + zeros[..., None], 0, top).astype(np.uint8)
    return _pack(quantized, bits), scales, _pack(zeros.astype(np.uint8), bits)


def dequantize(matrix: QuantizedMatrix, *, bits: int, columns: int) -> NDArray[np.float32]:
    """Return the [N, columns] matrix that `matrix` stands for."""
    rows, blocks, _ = matrix.packed.shape
    values = _unpack(matrix.packed, bits).reshape(rows, blocks, BLOCK).astype(np.float32)
    zeros = _unpack(matrix.zero_points, bits)[:, :blocks].astype(np.float32)
    full = (values - zeros[..., None]) * matrix.scales[..., None]
    return np.ascontiguousarray(full.reshape(rows, -1)[:, :columns])


def _pack(values: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    if bits == 8:
        return values
    if values.shape[-1] % 2:
        values = np.concatenate([values, np.zeros((*values.shape[:-1], 1), np.uint8)], axis=-1)
    packed: NDArray[np.uint8] = values[..., 0::2] | (values[..., 1::2] << np.uint8(4))
    return packed


def _unpack(packed: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    if bits == 8:
        return packed
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
