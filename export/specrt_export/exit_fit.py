"""Early exits: what a model would say after some of its layers, as guesses of what it says after all of them.

An exit reads the state h that enters layer N, after N layers: e = h A + b, then the model's own final norm and output
matrix. With A the identity and b zero this is the logit lens; LayerSkip (arXiv 2404.16710) drafts so with models that
were trained for it. For others A and b, the tuned lens of arXiv 2303.08112, are fitted here in closed form: e is to be
the state that enters the final norm.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import nn

from specrt_export.decoder import decoder_layers
from specrt_export.distill.features import watching
from specrt_export.errors import ExportError, UnsupportedModelError
from specrt_export.parity import as_fp32

_HELD_OUT = 4  # every fourth text is measured on
_PRIOR = 100.0  # rows of mean size that the identity is worth: tried from 1 to 1000 with 1200 rows of SmolLM2-135M
_LONGEST = 15  # guesses of a chain
_CHUNK = 1024  # rows of logits at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitHead:
    """How the state after `layer` layers is read: rows h [.., H] become h @ translator + bias.

    layer: from 1 to one less than the model has. translator: [H, H] float32, None for the identity; bias: [H] float32,
    None for zero.
    """

    layer: int
    translator: torch.Tensor | None
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitMeasure:
    """What an exit is worth.

    agreement: how often its guess is the model's greedy next token, on texts that were held out; plain_agreement: that
    of the same exit without translator. cost: of the weights that a call of the whole model reads (layers and output
    matrix), the share that a guess reads (layers before the exit, translator, output matrix). speedup: predicted, over
    plain decoding, with chains of `k` guesses, the best number.
    """

    layer: int
    agreement: float
    plain_agreement: float
    cost: float
    speedup: float
    k: int


def fit_exits(
    model: Any, texts: Sequence[Sequence[int]], *, layers: Sequence[int] | None = None
) -> tuple[list[ExitHead], list[ExitMeasure]]:
    """Fit and measure the exits after `layers` layers each (1 to one less than all; all of these if left out).

    The model reads the texts once, in fp32; it says the same before and after. An exit that agrees more without a
    translator has none. Raises `ExportError` for layers that there are not and for fewer than two texts,
    `UnsupportedModelError` for a model without a usual list of layers and one final norm.
    """
    chosen, total = check_exits(model, layers), len(decoder_layers(model))
    if len(texts) < 2 or not all(texts):
        raise ExportError(f"expected two texts or more to fit exits on, none of them empty, found {len(texts)}")
    norm = final_norm(model)
    with torch.no_grad(), as_fp32(model):
        states, numbers = _states(model, norm, texts, chosen)
        held = numbers % _HELD_OUT == min(_HELD_OUT, len(texts)) - 1
        wanted = _guesses(model, norm, states[total][held])
        found = []
        for layer in chosen:
            translator, bias = fit_translator(states[layer][~held], states[total][~held])
            given = states.pop(layer)[held]
            plain = _share(_guesses(model, norm, given) == wanted)
            tuned = _share(_guesses(model, norm, given @ translator + bias) == wanted)
            tuning = tuned > plain
            head = ExitHead(layer=layer, translator=translator if tuning else None, bias=bias if tuning else None)
            found.append((head, _measure(model, head, max(plain, tuned), plain)))
    return [head for head, _ in found], [measure for _, measure in found]


def best_exit(measures: Sequence[ExitMeasure]) -> ExitMeasure:
    """Return the exit with the largest predicted speedup, whether that is above 1 or not; the lowest of equals."""
    return max(measures, key=lambda measure: (measure.speedup, -measure.layer))


def check_exits(model: Any, layers: Sequence[int] | None) -> Sequence[int]:
    """Return `layers`, or after how many layers a model may have an exit if they are left out.

    Raises `ExportError` for layers after which there is none, `UnsupportedModelError` for a model that has none at all.
    """
    total = len(decoder_layers(model))
    if total < 2:
        raise UnsupportedModelError(f"an early exit needs a model of 2 layers or more, found {total}")
    final_norm(model)
    if wrong := [layer for layer in layers or () if not 1 <= layer < total]:
        raise ExportError(
            f"expected an early exit after 1 to {total - 1} of the model's {total} layers, found {wrong[0]}"
        )
    return range(1, total) if layers is None else layers


def predicted_speedup(agreement: float, cost: float, k: int) -> float:
    """Return tokens per time of chains of k guesses, relative to plain decoding, where weights are all that takes time.

    With p the agreement of every guess a step gives 1 + p + ... + p^k tokens. Its guesses cost k times c; the call that
    verifies them goes on from the lower layers' states, but those of the last guess are still to be computed, which
    makes the lower layers whole again: 1 + k c in all, as with a draft of cost c (arXiv 2211.17192, theorem 3.8).
    """
    return sum(agreement**length for length in range(k + 1)) / (1 + k * cost)


def best_chain(agreement: float, cost: float) -> tuple[int, float]:
    """Return the number of guesses, at most 15, with the largest predicted speedup, and that."""
    k = max(range(1, _LONGEST + 1), key=lambda k: predicted_speedup(agreement, cost, k))
    return k, predicted_speedup(agreement, cost, k)


def exit_cost(model: Any, layer: int, *, translated: bool) -> float:
    """Return the cost of a guess after `layer` layers, see `ExitMeasure`; translated: with a translator."""
    sizes = [sum(parameter.numel() for parameter in module.parameters()) for module in decoder_layers(model)]
    rows, hidden = model.get_output_embeddings().weight.shape
    return float((sum(sizes[:layer]) + translated * hidden**2 + rows * hidden) / (sum(sizes) + rows * hidden))


def final_norm(model: Any) -> Any:
    """Return what a model has between its last layer and its output matrix, as found by running it on two tokens.

    Raises `UnsupportedModelError` unless that is one module.
    """
    last, matrix = decoder_layers(model)[-1], model.get_output_embeddings()
    outputs: dict[nn.Module, tuple[torch.Tensor, torch.Tensor]] = {}

    def keep(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        output = output[0] if isinstance(output, tuple) else output
        if inputs and isinstance(inputs[0], torch.Tensor) and isinstance(output, torch.Tensor):
            outputs[module] = inputs[0], output

    children = [child for child in model.base_model.children() if not isinstance(child, nn.ModuleList)]
    handles = [module.register_forward_hook(keep) for module in (*children, last, matrix)]
    try:
        with torch.no_grad():
            model(input_ids=torch.tensor([[0, 1]]), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    begin, end = outputs[last][1], outputs[matrix][0]
    for child in children:
        given, made = outputs.get(child, (None, None))
        if given is not None and made is not None and torch.equal(given, begin) and torch.equal(made, end):
            return child
    raise UnsupportedModelError(
        f"{type(model).__name__} has more than a norm between its layers and its output matrix, which early exits need"
    )


def fit_translator(given: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A [H, H] and b [H], float32, that bring given @ A + b near to wanted; both are [n, H].

    Ridge regression towards the identity, in float64. The final norm divides a row by its root mean square, so that
    this is what its error is measured against; without that a few rows with states in the thousands decide all.
    """
    given, change = given.double(), (wanted - given).double()
    weights = wanted.double().pow(2).mean(-1, keepdim=True).clamp(min=1e-12).reciprocal()
    mean, shift = ((weights * rows).sum(0) / weights.sum() for rows in (given, change))
    rows, aims = weights.sqrt() * (given - mean), weights.sqrt() * (change - shift)
    products = rows.T @ rows
    size = len(products)
    products.diagonal().add_(_PRIOR * float(products.trace()) / (len(rows) * size) + 1e-12)
    turn = torch.cholesky_solve(rows.T @ aims, torch.linalg.cholesky(products))
    return (turn + torch.eye(size)).float().contiguous(), (shift - mean @ turn).float()


def _states(
    model: Any, norm: nn.Module, texts: Sequence[Sequence[int]], layers: Sequence[int]
) -> tuple[dict[int, torch.Tensor], torch.Tensor]:
    """Return the states [n, H] that enter each layer and, as the last layer's successor, the norm; each row's text."""
    total = len(decoder_layers(model))
    parts: dict[int, list[torch.Tensor]] = {layer: [] for layer in (*layers, total)}
    numbers = []
    handle = norm.register_forward_pre_hook(lambda _, inputs: parts[total].append(inputs[0][0]))
    try:
        with watching(model, layers, logits=False) as seen:
            for number, (text, begin) in enumerate(zip(texts, _news(texts), strict=True)):
                model(input_ids=torch.tensor([list(text)]), use_cache=False)
                parts[total][-1] = parts[total][-1][begin:]
                for layer in layers:
                    parts[layer].append(seen[str(layer)][0, begin:])
                numbers.append(torch.full((len(text) - begin,), number))
    finally:
        handle.remove()
    return {layer: torch.cat(rows) for layer, rows in parts.items()}, torch.cat(numbers)


def _news(texts: Sequence[Sequence[int]]) -> Iterator[int]:
    """Yield of each text how many tokens it begins with like one before: their rows would be there twice."""
    for number, text in enumerate(texts):
        pairs = (zip(text, other, strict=False) for other in texts[:number])
        yield max((sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both)) for both in pairs), default=0)


def _guesses(model: Any, norm: nn.Module, states: torch.Tensor) -> torch.Tensor:
    """Return the token ids [n] that the output matrix makes of states [n, H]."""
    matrix, begins = model.get_output_embeddings(), range(0, len(states), _CHUNK)
    return torch.cat([matrix(norm(states[begin : begin + _CHUNK])).argmax(-1) for begin in begins])


def _share(right: torch.Tensor) -> float:
    return float(right.float().mean())


def _measure(model: Any, head: ExitHead, agreement: float, plain: float) -> ExitMeasure:
    cost = exit_cost(model, head.layer, translated=head.translator is not None)
    k, speedup = best_chain(agreement, cost)
    return ExitMeasure(
        layer=head.layer, agreement=agreement, plain_agreement=plain, cost=cost, speedup=speedup, k=k
    )  # fmt: skip
