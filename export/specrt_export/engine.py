"""Build one engine of an artifact: load, take reference logits, trace, write, and prove parity."""

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from specrt_export import graph, parity
from specrt_export.best import add_best_tokens, add_top_tokens
from specrt_export.checkpoint import Checkpoint
from specrt_export.choose import choose, write_text
from specrt_export.decoder import weights_of
from specrt_export.engine_request import EngineRequest
from specrt_export.errors import CheckpointError, ExportError
from specrt_export.exit_engine import PartsRunner, choose_exit, prove_parts, write_parts
from specrt_export.exit_graph import Marks, take_marks
from specrt_export.head_engine import TargetParts, check_target, parts_of
from specrt_export.lint_trt import lint_tensorrt
from specrt_export.parity import Round
from specrt_export.progress import Progress
from specrt_export.quantize import OffsetBlocks, SymmetricBlocks
from specrt_export.support import load_model
from specrt_export.trimmed import trim_output
from specrt_export.weights import Chosen
from specrt_profiles.exactness import find_exact_widths
from specrt_profiles.exit import ExitSpec
from specrt_profiles.exit import parts_of as exit_parts
from specrt_profiles.files import FileEntry
from specrt_profiles.manifest import EngineSpec, ModelInfo, Parity
from specrt_profiles.reference import write_reference
from specrt_profiles.tensors import graph_inputs, graph_outputs

Texts = list[list[int]]
Blocks = TypeVar("Blocks", OffsetBlocks, SymmetricBlocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltEngine:
    """The manifest entry and files of an engine, the generation config of its source, and what its heads need."""

    spec: EngineSpec
    files: dict[str, FileEntry]
    generation_config: Any
    parts: TargetParts | None


def build_engine(request: EngineRequest, tokenizer: Any, folder: Path, progress: Progress) -> BuiltEngine:
    """Write the engine's files into `folder`.

    Raises `ExportError` when the graph does not match its source within the precision's bounds.
    """
    name = request.name
    model, texts = _load(request, tokenizer, progress)
    generation_config, architecture = model.generation_config, type(model).__name__
    written = cache(partial(write_text, model, request, tokenizer, progress))
    if request.token_ids is not None:
        written()  # while it can say all tokens
        trim_output(model, request.token_ids)
    with progress.step(f"{name}: reference logits from the source"):
        source = parity.source_logits(model, texts)
        write_reference(folder / f"{name}.reference.npz", texts, source)
    path = folder / f"{name}.onnx"
    chosen = choose(model, request, written, progress)
    exit_head = None if request.exit is None else choose_exit(request.exit, model, written(), progress)
    parts = parts_of(model, request.heads[0].taps, texts, chosen) if request.heads else None
    hashes, rounding, marks = _write_graph(model, request, chosen, path, progress)
    weight_bytes = graph.read_bytes(request.traced)
    exit_spec, more = None, dict[str, str]()
    if exit_head is not None and marks is not None:
        exit_spec, more = write_parts(request.traced, marks, exit_head, request.tables, request.dims, folder)
    rounded = None
    if rounding or chosen.kv:
        with progress.step(f"{name}: logits of the source with rounded weights"):
            rounded = parity.source_logits(model, texts[:1], rounding)
    del model, chosen, rounding
    gc.collect()  # the session that checks parity may need the memory
    with progress.step(f"{name}: parity and row exactness"):
        if rounded is not None:
            _prove_structure(request, path, texts[:1], rounded)
        measured, exact, found = _prove(request, path, texts, source)
        exit_line = None if exit_spec is None else _prove_parts(request, folder, exit_spec, texts, found)
    progress.say(
        f"    max |diff| {measured.max_abs_diff:.2g}, mean KL {measured.mean_kl:.2g}, "
        f"top-1 {measured.top1_agreement:.1%}, perplexity {measured.perplexity:.2f} (source "
        f"{measured.source_perplexity:.2f}); bit-equal widths {', '.join(map(str, exact))}"
    )
    if exit_line is not None:
        progress.say(exit_line)
    spec = _spec(request, path, architecture, weight_bytes, measured, exact, exit_spec)
    files = {
        file: FileEntry(size=(folder / file).stat().st_size, sha256=digest) for file, digest in (hashes | more).items()
    }
    return BuiltEngine(spec=spec, files=files, generation_config=generation_config, parts=parts)


def _load(request: EngineRequest, tokenizer: Any, progress: Progress) -> tuple[Any, list[list[int]]]:
    """Load the source, and check what belongs to it; return it, and the texts that the graph is compared on."""
    name = request.checkpoint.name
    with progress.step(f"{request.name}: load {name}"):
        model = load_model(request.checkpoint)
    texts = parity.reference_tokens(tokenizer, request.profile, window=request.window)
    _check_tokens(texts, name, num_rows=len(model.get_input_embeddings().weight))
    for head in request.heads:
        check_target(head, model, name, texts[0])
    if request.exit is not None and request.exit.file is not None:
        request.exit.file.check_target(model, name)
    return model, texts


def _spec(
    request: EngineRequest, path: Path, architecture: str, weight_bytes: int, measured: Parity, exact: tuple[int, ...],
    exit_spec: ExitSpec | None,
) -> EngineSpec:  # fmt: skip
    """Return the manifest's entry of a written graph."""
    profile, (inputs, outputs) = request.profile, request.tables
    return EngineSpec(
        dialect=profile.dialect, file=path.name, weights=f"{path.name}.data", reference=f"{request.name}.reference.npz",
        precision=profile.precision, model=_model_info(request.checkpoint, architecture), capacity=profile.capacity,
        slots=profile.slots, prefill_width=profile.prefill_width, verify_widths=profile.verify_widths,
        vocab_size=request.dims.vocab_size, weight_bytes=weight_bytes, inputs=inputs, outputs=outputs, parity=measured,
        exact_widths=exact, exit=exit_spec,
    )  # fmt: skip


def _check_tokens(texts: list[list[int]], name: str, *, num_rows: int) -> None:
    largest = max((max(ids) for ids in texts), default=-1)
    if not 0 <= largest < num_rows:
        raise CheckpointError(
            f"{name}: its tokenizer does not belong to its weights: it gives token {largest} where the embedding has "
            f"{num_rows} rows"
        )


def _write_graph(
    model: Any, request: EngineRequest, chosen: Chosen, path: Path, progress: Progress
) -> tuple[dict[str, str], dict[str, Round], Marks | None]:
    """Fuse and write the graph with its weights.

    Returns each file's SHA-256, the rounding by parameter name, and the marks for an exit, if there will be one.
    """
    profile, traced = request.profile, request.traced
    with progress.step(f"{request.name}: fuse the graph"):
        rounding = graph.finish(traced, weights_of(model), profile.precision, chosen, dialect=profile.dialect)
        marks = None if request.exit is None else take_marks(traced.graph)
        if profile.output != "logits":
            add_best_tokens(traced.graph)
        if profile.output == "top-k":
            add_top_tokens(traced.graph)
        if profile.dialect == "tensorrt":
            lint_tensorrt(traced)
        graph.lint(traced.graph, *request.tables, dialect=profile.dialect)
    with progress.bar(f"{request.name}: write weights as {profile.precision}", graph.data_bytes(traced)) as advance:
        hashes = graph.save(traced, path, advance)
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    named = {name.removeprefix("decoder."): function for name, function in rounding.items()}
    return hashes, {name: function for name, function in named.items() if name in parameters}, marks


def _prove_structure(
    request: EngineRequest, path: Path, texts: list[list[int]], rounded: list[NDArray[np.float32]]
) -> None:
    """Compare the graph, with products in fp32, with the source that computes with the same rounded weights."""
    with _in_fp32_arithmetic(request, path) as runner:
        logits = [parity.graph_logits(runner, ids, request.profile) for ids in texts]
    measured = parity.compare(rounded, logits, _said(request, texts, rounded))
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


def _said(
    request: EngineRequest, texts: list[list[int]], source: list[NDArray[np.float32]]
) -> list[list[int]]:  # fmt: skip
    """Return texts to take likelihoods of: what the source would say next, if it does not know all tokens."""
    if request.token_ids is None:
        return texts
    return [[0, *logits.argmax(-1)[:-1].tolist()] for logits in source]


def _prove(
    request: EngineRequest, path: Path, texts: list[list[int]], source: list[NDArray[np.float32]]
) -> tuple[Parity, tuple[int, ...], list[NDArray[np.float32]]]:
    """Compare the written graph with the source, and find the widths that give equal bits; return the logits too."""
    profile = request.profile
    with _opened(request, path, rounded=profile.float_type != "float32") as runner:
        found = [parity.graph_logits(runner, ids, profile) for ids in texts]
    measured = parity.compare(source, found, _said(request, texts, source))
    is_rounded_most_in_kv = profile.kv_precision == "int8" and profile.precision in ("fp32", "fp16")
    bounds = parity.BOUNDS["int8" if is_rounded_most_in_kv else profile.precision]
    option = "--precision" if request.name == "target" else "--draft-precision"
    if is_rounded_most_in_kv:
        option = "--kv-precision"
    elif profile.precision == "fp32":
        option = ""
    parity.check(measured, bounds, f"{request.checkpoint.name} at {profile.precision}", option=option)
    widths = sorted({*profile.verify_widths, profile.prefill_width})
    with _opened(request, path, rounded=profile.float_type == "bfloat16") as runner:
        exact = find_exact_widths(runner, widths, vocab_size=request.dims.vocab_size, capacity=profile.capacity)
    ladder = exact.ladder(profile.verify_widths)
    if not ladder:
        raise ExportError(
            f"{request.checkpoint.name}: rows of a call influence each other at every width: not lossless"
        )
    return measured, ladder, found


def _prove_parts(
    request: EngineRequest, folder: Path, spec: ExitSpec, texts: list[list[int]], whole: list[NDArray[np.float32]]
) -> str:
    """Compare the parts at an exit with the whole graph; return what to say of it."""
    runner = PartsRunner(folder, spec, exit_parts(spec, *request.tables), request.profile)
    same, agreement = prove_parts(runner, whole, texts, request.profile, request.checkpoint.name)
    bits = "the same bits" if same else "the same but for rounding"
    return (
        f"    in parts, with an exit after layer {spec.layer}: {bits}; the exit's best token is the model's in "
        f"{agreement:.0%} of these rows"
    )


def _opened(
    request: EngineRequest, path: Path, *, rounded: bool
) -> contextlib.AbstractContextManager[parity.GraphRunner]:
    """Open a written graph, or a copy that rounds as the graph's type does; see `wide`."""
    if rounded:
        return _in_fp32_arithmetic(request, path, rounded=True)
    return contextlib.nullcontext(parity.GraphRunner(path, *request.tables, request.profile))


def _model_info(checkpoint: Checkpoint, architecture: str) -> ModelInfo:
    return ModelInfo(
        name=checkpoint.name, source=checkpoint.source, revision=checkpoint.revision, architecture=architecture,
        licence=checkpoint.licence, num_parameters=checkpoint.num_parameters,
    )  # fmt: skip
