"""What precisions leave open, found out by measuring on text that the model itself writes."""

from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

from specrt_export.calibrate import inputs_of, observe, self_written
from specrt_export.decoder import weights_of
from specrt_export.engine_request import EngineRequest
from specrt_export.fit import fit_blocks, fit_symmetric, to_round
from specrt_export.integer import KINDS, Form, is_linear, plan
from specrt_export.kv import Scales, kv_scales
from specrt_export.progress import Progress
from specrt_export.quantize import OffsetBlocks, SymmetricBlocks
from specrt_export.timing import integer_products_are_exact, product_seconds
from specrt_export.weights import Chosen, product_groups

Texts = list[list[int]]
Blocks = TypeVar("Blocks", OffsetBlocks, SymmetricBlocks)


def choose(model: Any, request: EngineRequest, written: Callable[[], Texts], progress: Progress) -> Chosen:
    """Find out by measuring what the precisions leave open; `written` gives what the model itself writes."""
    profile = request.profile
    kind = (profile.dialect, profile.precision)
    return Chosen(
        forms=_choose_forms(model, request, written, progress) if kind == ("ort", "int8") else {},
        blocks=_fitted(fit_blocks, model, request, written, progress) if kind == ("ort", "int4") else {},
        symmetric=_fitted(fit_symmetric, model, request, written, progress) if kind == ("tensorrt", "int4") else {},
        kv=_kv_scales(model, request, written, progress) if profile.kv_precision == "int8" else {},
    )


def _choose_forms(
    model: Any, request: EngineRequest, written: Callable[[], Texts], progress: Progress
) -> dict[str, Form]:
    """Scale and choose integer products by what the model itself writes; return their forms by initializer name.

    Products that belong to no linear layer have no form, and none has where the processor's integer products saturate.
    """
    if not integer_products_are_exact():
        progress.say("    integer products saturate on this processor: int8 in blocks")
        return {}
    texts = written()
    with progress.step(f"{request.name}: choose integer products"):
        groups = _linear_groups(model, request)
        forms, _ = plan(
            model, groups, observe(model, texts, groups), texts[:4],
            clock=lambda shape, kind: product_seconds(shape, kind, widths=request.profile.verify_widths),
        )  # fmt: skip
    counts = Counter(form.kind for form in forms.values())
    progress.say("    products: " + ", ".join(f"{counts[kind]} {kind}" for kind in KINDS))
    return {f"decoder.{name}": form for name, form in forms.items()}


def _fitted(
    fit: Callable[..., dict[str, Blocks]], model: Any, request: EngineRequest, written: Callable[[], Texts],
    progress: Progress,
) -> dict[str, Blocks]:  # fmt: skip
    """Round the weights that blocks of 4 bits cannot hold as they are, on what the model itself writes."""
    groups = _linear_groups(model, request)
    left = to_round(model, groups, vocab_size=request.dims.vocab_size, symmetric=fit is fit_symmetric)
    count = sum(map(len, left))
    kept = sum(map(len, groups)) - count
    progress.say(f"    {count} matrices to round to 4 bits; {kept} keep their values or 8 bits")
    if not left:
        return {}
    texts = written()
    with progress.step(f"{request.name}: read it"):
        inputs = inputs_of(model, texts, left)
    size = sum(model.get_parameter(name).numel() for group in left for name in group)
    with progress.bar(f"{request.name}: round weights to 4 bits", size) as advance:
        blocks = fit(model, left, inputs, advance)
    return {f"decoder.{name}": block for name, block in blocks.items()}


def _kv_scales(model: Any, request: EngineRequest, written: Callable[[], Texts], progress: Progress) -> Scales:
    texts = written()
    with progress.step(f"{request.name}: scale keys and values"):
        return kv_scales(model, texts)


def write_text(model: Any, request: EngineRequest, tokenizer: Any, progress: Progress) -> Texts:
    """Let the model write the text that is measured on."""
    with progress.step(f"{request.name}: write text to calibrate on"):
        return self_written(model, tokenizer, longest=request.profile.capacity)


def _linear_groups(model: Any, request: EngineRequest) -> list[tuple[str, ...]]:
    """Return the names of the linear layers' weights that are multiplied with the same value, for each such value."""
    named = product_groups(request.traced.graph, weights_of(model))
    groups = [tuple(name.removeprefix("decoder.") for name in group) for group in named]
    return [group for group in groups if all(is_linear(model, name) for name in group)]
