"""8-bit products: integers on both sides, scaled and chosen by what the model itself writes.

An input x [W, K] that several products share is computed in one of three forms, cheapest first:

static  x / smooth is rounded with one scale for all rows, fixed here
row     with a scale per row: its largest magnitude / 127
block   MatMulNBits: scales per row and 32 values, for inputs and weights, at a higher price per row

`smooth` [K] moves range from the channels of the input into the weights (Xiao et al. 2023, eq. 4); weights have one
scale per output. In every form a row is rounded by itself, so that no row of a call depends on another.
"""

import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from specrt_export.parity import as_fp32
from specrt_export.quantize import (
    QuantizedRows,
    dequantize,
    dequantize_rows,
    in_stored_order,
    quantize,
    quantize_rows,
)

Kind = Literal["static", "row", "block"]
KINDS: tuple[Kind, ...] = ("static", "row", "block")
Array = NDArray[np.float32]
Group = tuple[str, ...]  # parameter names of the products that share an input

TARGET_KL = 0.016  # nats; parity, on other texts, then finds at most 0.02
_EXPONENTS: dict[Kind, tuple[float, ...]] = {"static": (0.6, 0.7, 0.8), "row": (0.5, 0.6, 0.7), "block": (0.5,)}
_SUM_MARGIN = 0.75  # types cost less together than the sum of what each costs by itself; then as measured
_MOST_TRIALS, _MOST_TYPES = 6, 8
_LEAST = 1e-5


@dataclass(frozen=True, slots=True, eq=False)
class Form:
    """How products with one input are computed; `smooth` float32 [K] and `scale` belong to the integer forms."""

    kind: Kind
    smooth: Array
    scale: float

    @property
    def input_scale(self) -> float:
        """What one step of the rounded input stands for: of x / smooth, or of that over the row's maximum."""
        return 1 / 127 if self.kind == "row" else self.scale

    def round_weight(self, weight: Array) -> Array:
        """Return the [N, K] matrix that the graph computes with."""
        if self.kind == "block":
            return dequantize(quantize(weight, bits=8), bits=8, columns=weight.shape[1])
        return dequantize_rows(self.quantize_weight(weight)) / self.smooth

    def quantize_weight(self, weight: Array) -> QuantizedRows:
        """Return a [N, K] matrix as the integers that meet the smoothed input."""
        return quantize_rows(weight * self.smooth)

    def round_input(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the graph makes of an input [..., K]."""
        if self.kind == "block":
            padded = nn.functional.pad(x, (0, -x.shape[-1] % 32))
            blocks = padded.reshape(*padded.shape[:-1], -1, 32)
            scales = (blocks.abs().amax(-1, keepdim=True) / 127).clamp_min(1e-30)
            rounded: torch.Tensor = ((blocks / scales).round() * scales).flatten(-2)
            return rounded[..., : x.shape[-1]]
        smooth = torch.from_numpy(self.smooth)
        scaled = x / smooth
        scale = scaled.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127 if self.kind == "row" else self.scale
        result: torch.Tensor = (scaled / scale).round().clamp(-128, 127) * scale * smooth
        return result


class Clock(Protocol):
    """Tells what products cost here."""

    def __call__(self, shape: tuple[int, int], kind: Kind) -> float:
        """Return the seconds of a product [N, K]."""
        ...


@dataclass(frozen=True, slots=True)
class _Option:
    """One way to compute all products of a type: the KL in nats that it costs, and its seconds per call."""

    forms: dict[Group, Form]
    kl: float
    seconds: float


def plan(
    model: nn.Module, groups: Sequence[Group], seen: Mapping[str, Array], texts: Sequence[Sequence[int]], *,
    clock: Clock,
) -> tuple[dict[str, Form], float]:  # fmt: skip
    """Choose the fastest forms whose mean KL to the model, in nats over `texts` of equal length, is small enough.

    Every type of product (the same place in each layer) is rounded by itself in each form; combinations whose
    KLs add up to little enough are then tried as a whole, fastest first. Returns the form of each product by parameter
    name, and the KL measured. `seen`: the largest magnitudes [K] of each group's input, by its first product. The last
    resort is the most accurate form of each type.
    """
    trial = _Trial(model, texts)
    options = [_options(trial, peers, seen, clock) for peers in _by_type(groups)]
    combinations = sorted(itertools.product(*options), key=lambda chosen: sum(option.seconds for option in chosen))
    ratio, trials = _SUM_MARGIN, 0
    most_accurate = tuple(min(of_type, key=lambda option: option.kl) for of_type in options)
    for chosen in (*combinations, most_accurate):
        total = sum(option.kl for option in chosen)
        if chosen is not most_accurate and (trials == _MOST_TRIALS or ratio * total > TARGET_KL):
            continue
        forms = {group: form for option in chosen for group, form in option.forms.items()}
        measured = trial.kl(forms)
        if measured <= TARGET_KL:
            break
        ratio, trials = measured / total, trials + 1
    return {name: form for group, form in forms.items() for name in group}, measured


def _options(trial: "_Trial", peers: Sequence[Group], seen: Mapping[str, Array], clock: Clock) -> list[_Option]:
    """Return the best option of each kind for the groups of one type."""
    found = []
    shapes = [trial.shape(name) for name in peers[0]]
    packed = sum(n for n, _ in shapes), shapes[0][1]  # products with one input are one product in the graph
    for kind in KINDS:
        forms = [{group: _form(trial, group, seen[group[0]], kind, e) for group in peers} for e in _EXPONENTS[kind]]
        tried = [_Option(form, trial.kl(form), 0.0) for form in forms]
        best = min(tried, key=lambda option: option.kl)
        found.append(replace(best, seconds=len(peers) * clock(packed, kind)))
    return found


def _by_type(groups: Sequence[Group]) -> list[list[Group]]:
    types = defaultdict(list)
    for group in groups:
        types[re.sub(r"\d+", "", group[0])].append(group)
    if len(types) <= _MOST_TYPES:
        return list(types.values())
    return [list(groups)]  # a model of another build: one choice for all of it


def _form(trial: "_Trial", group: Group, largest: Array, kind: Kind, exponent: float) -> Form:
    largest = np.maximum(largest, _LEAST)
    columns = np.maximum(np.max([trial.largest_weight(name) for name in group], axis=0), _LEAST)
    smooth = np.maximum(largest**exponent / columns ** (1 - exponent), _LEAST).astype(np.float32)
    return Form(kind, smooth, float((largest / smooth).max() / 127))


class _Trial:
    """Measures the mean KL between a model and itself with some of its products rounded."""

    def __init__(self, model: nn.Module, texts: Sequence[Sequence[int]]) -> None:
        self._model, self._ids = model, torch.tensor([list(ids) for ids in texts])
        self.weights = dict(model.named_parameters(remove_duplicate=False))
        self._wanted = self._logprobs({})

    def shape(self, name: str) -> tuple[int, int]:
        """Return N and K of a product."""
        rows, columns = self.weights[name].shape
        return (rows, columns) if is_stored_transposed(self._owner(name)) else (columns, rows)

    def largest_weight(self, name: str) -> Array:
        """Return the largest magnitude [K] that a product's weights have for each input."""
        weight = self.weights[name].data
        axis = 0 if is_stored_transposed(self._owner(name)) else 1
        largest: Array = weight.abs().amax(axis).float().numpy()
        return largest

    def kl(self, forms: Mapping[Group, Form]) -> float:
        """Return KL(model || model with some of its products rounded) in nats per token."""
        found = self._logprobs(forms)
        total = sum(float((p.exp() * (p - q)).sum()) for p, q in zip(self._wanted, found, strict=True))
        return total / len(found)

    def _rounding(self, name: str, form: Form) -> Callable[[Array], Array]:
        return partial(in_stored_order, form.round_weight, transposed=is_stored_transposed(self._owner(name)))

    def _owner(self, name: str) -> nn.Module:
        return self._model.get_submodule(name.rpartition(".")[0])

    def _logprobs(self, forms: Mapping[Group, Form]) -> torch.Tensor:
        """Return log-probabilities [n, V] of all tokens."""
        named = [(name, form) for group, form in forms.items() for name in group]
        rounding = {name: self._rounding(name, form) for name, form in named}
        hooks = [self._owner(name).register_forward_pre_hook(_rounded_input(form)) for name, form in named]
        try:
            with torch.no_grad(), as_fp32(self._model, rounding):
                logits = self._model(input_ids=self._ids, use_cache=False).logits.flatten(0, 1).float()
        finally:
            for hook in hooks:
                hook.remove()
        return torch.log_softmax(logits, -1)


def is_linear(model: nn.Module, name: str) -> bool:
    """Tell whether a parameter is the weight of a layer that does nothing but multiply its input by it."""
    owner, _, leaf = name.rpartition(".")
    return leaf == "weight" and type(model.get_submodule(owner)).__name__ in ("Linear", "Conv1D")


def is_stored_transposed(module: nn.Module) -> bool:
    """Tell whether a module's weight is [N, K], as nn.Linear has it, and not [K, N], as GPT-2's Conv1D."""
    return type(module).__name__ != "Conv1D"


def _rounded_input(form: Form) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]:
    def hook(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return form.round_input(inputs[0].float()), *inputs[1:]

    return hook
