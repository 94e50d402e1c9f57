"""Build one engine of an artifact: load, take reference logits, trace, write, and prove parity."""

import contextlib
import gc
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from specrt_export import graph, parity
from specrt_export.best import add_best_tokens, add_top_tokens
from specrt_export.calibrate import inputs_of, observe, self_written
from specrt_export.checkpoint import Checkpoint
from specrt_export.decoder import weights_of
from specrt_export.errors import CheckpointError, ExportError
from specrt_export.fit import fit_blocks, fit_symmetric, to_round
from specrt_export.head_engine import HeadRequest, TargetParts, check_target, parts_of
from specrt_export.integer import KINDS, Form, is_linear, plan
from specrt_export.kv import Scales, kv_scales
from specrt_export.lint_trt import lint_tensorrt
from specrt_export.parity import Round
from specrt_export.progress import Progress
from specrt_export.quantize import OffsetBlocks, SymmetricBlocks
from specrt_export.support import load_model
from specrt_export.timing import integer_products_are_exact, product_seconds
from specrt_export.weights import Chosen, product_groups
from specrt_profiles.exactness import find_exact_widths
from specrt_profiles.files import FileEntry
from specrt_profiles.manifest import EngineSpec, ModelInfo, Parity
from specrt_profiles.profile import Profile
from specrt_profiles.reference import write_reference
from specrt_profiles.tensors import DecoderDims, graph_inputs, graph_outputs

Texts = list[list[int]]
Blocks = TypeVar("Blocks", OffsetBlocks, SymmetricBlocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """What to build: `name` is `target` or `draft`, `profile.precision` is this engine's, `traced` its graph so far.

    `window` is the width of a sliding window narrower than the capacity, or None; `num_bytes` the estimated size;
    `head` what reads its features.
    """

    name: str
    checkpoint: Checkpoint
    dims: DecoderDims
    traced: ir.Model
    profile: Profile
    window: int | None
    num_bytes: int
    head: HeadRequest | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltEngine:
    """The manifest entry and files of an engine, the generation config of its source, and what its head needs."""

    spec: EngineSpec
    files: dict[str, FileEntry]
    generation_config: Any
    parts: TargetParts | None


def build_engine(request: EngineRequest, tokenizer: Any, folder: Path, progress: Progress) -> BuiltEngine:
    """Write the engine's files into `folder`.

    Raises `ExportError` when the graph does not match its source within the precision's bounds.
    """
    name, profile = request.name, request.profile
    with progress.step(f"{name}: load {request.checkpoint.name}"):
        model = load_model(request.checkpoint)
    generation_config, architecture = model.generation_config, type(model).__name__
    texts = parity.reference_tokens(tokenizer, profile, window=request.window)
    _check_tokens(texts, request)
    if request.head is not None:
        check_target(request.head, model, request.checkpoint.name, texts[0])
    reference = folder / f"{name}.reference.npz"
    with progress.step(f"{name}: reference logits from the source"):
        source = parity.source_logits(model, texts)
        write_reference(reference, texts, source)
    path = folder / f"{name}.onnx"
    chosen = _choose(model, request, tokenizer, progress)
    parts = None if request.head is None else parts_of(model, request.head.taps, texts, chosen)
    hashes, rounding = _write_graph(model, request, chosen, path, progress)
    weight_bytes = graph.read_bytes(request.traced)
    rounded = None
    if rounding or chosen.kv:
        with progress.step(f"{name}: logits of the source with rounded weights"):
            rounded = parity.source_logits(model, texts[:1], rounding)
    del model, chosen, rounding
    gc.collect()  # the session that checks parity may need the memory
    with progress.step(f"{name}: parity and row exactness"):
        if rounded is not None:
            _prove_structure(request, path, texts[:1], rounded)
        measured, exact = _prove(request, path, texts, source)
    progress.say(
        f"    max |diff| {measured.max_abs_diff:.2g}, mean KL {measured.mean_kl:.2g}, "
        f"top-1 {measured.top1_agreement:.1%}, perplexity {measured.perplexity:.2f} (source "
        f"{measured.source_perplexity:.2f}); bit-equal widths {', '.join(map(str, exact))}"
    )
    spec = EngineSpec(
        dialect=profile.dialect, file=path.name, weights=f"{path.name}.data", reference=reference.name,
        precision=profile.precision,
        model=_model_info(request.checkpoint, architecture), capacity=profile.capacity, slots=profile.slots,
        prefill_width=profile.prefill_width, verify_widths=profile.verify_widths, vocab_size=request.dims.vocab_size,
        weight_bytes=weight_bytes, inputs=graph_inputs(request.dims, profile),
        outputs=graph_outputs(request.dims, profile), parity=measured, exact_widths=exact,
    )  # fmt: skip
    files = {file: FileEntry(size=(folder / file).stat().st_size, sha256=digest) for file, digest in hashes.items()}
    return BuiltEngine(spec=spec, files=files, generation_config=generation_config, parts=parts)


def _check_tokens(texts: list[list[int]], request: EngineRequest) -> None:
    largest, rows = max((max(ids) for ids in texts), default=-1), request.dims.vocab_size
    if not 0 <= largest < rows:
        raise CheckpointError(
            f"{request.checkpoint.name}: its tokenizer does not belong to its weights: it gives token {largest} where "
            f"the embedding has {rows} rows"
        )


def _choose(model: Any, request: EngineRequest, tokenizer: Any, progress: Progress) -> Chosen:
    """Find out by measuring what the precisions leave open; the text that takes is written once."""
    profile = request.profile
    kind = (profile.dialect, profile.precision)
    written = cache(partial(_self_written, model, request, tokenizer, progress))
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


def _self_written(model: Any, request: EngineRequest, tokenizer: Any, progress: Progress) -> Texts:
    with progress.step(f"{request.name}: write text to calibrate on"):
        return self_written(model, tokenizer, longest=request.profile.capacity)


def _linear_groups(model: Any, request: EngineRequest) -> list[tuple[str, ...]]:
    """Return the names of the linear layers' weights that are multiplied with the same value, for each such value."""
    named = product_groups(request.traced.graph, weights_of(model))
    groups = [tuple(name.removeprefix("decoder.") for name in group) for group in named]
    return [group for group in groups if all(is_linear(model, name) for name in group)]


def _write_graph(
    model: Any, request: EngineRequest, chosen: Chosen, path: Path, progress: Progress
) -> tuple[dict[str, str], dict[str, Round]]:
    """Fuse and write the graph with its weights; return each file's SHA-256, and the rounding by parameter name."""
    profile, traced = request.profile, request.traced
    with progress.step(f"{request.name}: fuse the graph"):
        rounding = graph.finish(traced, weights_of(model), profile.precision, chosen, dialect=profile.dialect)
        if profile.output != "logits":
            add_best_tokens(traced.graph)
        if profile.output == "top-k":
            add_top_tokens(traced.graph)
        if profile.dialect == "tensorrt":
            lint_tensorrt(traced)
        inputs, outputs = graph_inputs(request.dims, profile), graph_outputs(request.dims, profile)
        graph.lint(traced.graph, inputs, outputs, dialect=profile.dialect)
    with progress.bar(f"{request.name}: write weights as {profile.precision}", graph.data_bytes(traced)) as advance:
        hashes = graph.save(traced, path, advance)
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    named = {name.removeprefix("decoder."): function for name, function in rounding.items()}
    return hashes, {name: function for name, function in named.items() if name in parameters}


def _prove_structure(
    request: EngineRequest, path: Path, texts: list[list[int]], rounded: list[NDArray[np.float32]]
) -> None:
    """Compare the graph, with products in fp32, with the source that computes with the same rounded weights."""
    with _in_fp32_arithmetic(request, path) as runner:
        logits = [parity.graph_logits(runner, ids, request.profile) for ids in texts]
    measured = parity.compare(rounded, logits, texts)
    bounds = parity.STRUCTURE_BOUNDS[request.profile.float_type]
    parity.check(measured, bounds, f"{request.checkpoint.name} with rounded weights")


@contextlib.contextmanager
def _in_fp32_arithmetic(request: EngineRequest, path: Path, *, rounded: bool = False) -> Iterator[parity.GraphRunner]:
    """Open a copy of a written graph that computes in fp32; see `graph.save_in_fp32_arithmetic`."""
    twin = path.with_name(f"{request.name}-fp32-arithmetic.onnx")
    profile = replace(
        request.profile, precision="fp32", kv_precision=request.profile.kv_precision if rounded else "same"
    )
    graph.save_in_fp32_arithmetic(path, twin, rounded=rounded)
    try:
        yield parity.GraphRunner(
            twin, graph_inputs(request.dims, profile), graph_outputs(request.dims, profile), profile, as_written=True
        )
    finally:
        twin.unlink()


def _prove(
    request: EngineRequest, path: Path, texts: list[list[int]], source: list[NDArray[np.float32]]
) -> tuple[Parity, tuple[int, ...]]:
    """Compare the written graph with the source, and find the widths that give equal bits."""
    profile = request.profile
    with _opened(request, path, rounded=profile.float_type != "float32") as runner:
        measured = parity.compare(source, [parity.graph_logits(runner, ids, profile) for ids in texts], texts)
    is_rounded_most_in_kv = profile.kv_precision == "int8" and profile.precision in ("fp32", "fp16")
    bounds = parity.BOUNDS["int8" if is_rounded_most_in_kv else profile.precision]
    parity.check(measured, bounds, f"{request.checkpoint.name} at {profile.precision}")
    widths = sorted({*profile.verify_widths, profile.prefill_width})
    with _opened(request, path, rounded=profile.float_type == "bfloat16") as runner:
        exact = find_exact_widths(runner, widths, vocab_size=request.dims.vocab_size, capacity=profile.capacity)
    ladder = exact.ladder(profile.verify_widths)
    if not ladder:
        raise ExportError(
            f"{request.checkpoint.name}: rows of a call influence each other at every width: not lossless"
        )
    return measured, ladder


def _opened(
    request: EngineRequest, path: Path, *, rounded: bool
) -> contextlib.AbstractContextManager[parity.GraphRunner]:
    """Open a written graph, or a copy that rounds as the graph's type does; see `wide`."""
    if rounded:
        return _in_fp32_arithmetic(request, path, rounded=True)
    inputs, outputs = graph_inputs(request.dims, request.profile), graph_outputs(request.dims, request.profile)
    return contextlib.nullcontext(parity.GraphRunner(path, inputs, outputs, request.profile))


def _model_info(checkpoint: Checkpoint, architecture: str) -> ModelInfo:
    return ModelInfo(
        name=checkpoint.name, source=checkpoint.source, revision=checkpoint.revision, architecture=architecture,
        licence=checkpoint.licence, num_parameters=checkpoint.num_parameters,
    )  # fmt: skip
