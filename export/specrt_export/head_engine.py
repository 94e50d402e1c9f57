"""Build a head of an artifact: write it beside the target it reads from, and prove parity."""

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray

from specrt_export import graph, parity
from specrt_export.distill.features import check_output, watching
from specrt_export.head_tensors import HeadFile
from specrt_export.integer import Form
from specrt_export.medusa_tree import Node
from specrt_export.progress import Progress
from specrt_export.shared import stored
from specrt_export.weights import Chosen
from specrt_profiles.drafter import DrafterKind, DrafterSpec
from specrt_profiles.files import FileEntry
from specrt_profiles.manifest import EngineSpec, ModelInfo, Parity
from specrt_profiles.profile import Profile
from specrt_profiles.reference import write_reference
from specrt_profiles.tensors import DecoderDims, TensorSpec

Rows = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetParts:
    """What a head needs of its target: embedding and output matrix [V, H], and features [n, F] of texts.

    form: how the target's graph stores an embedding that is its output matrix as well; None for blocks or floats.
    """

    embedding: torch.Tensor
    matrix: torch.Tensor
    texts: Sequence[Sequence[int]]
    features: Sequence[Rows]
    form: Form | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadRequest(abc.ABC):
    """What to build: a head that was read, its own sizes and profile, its graph so far.

    taps: the target's layers whose inputs are its features. tree: of its drafter; see `DrafterSpec`.
    """

    head: HeadFile
    taps: tuple[int, ...]
    dims: DecoderDims
    profile: Profile
    traced: ir.Model
    tree: tuple[Node, ...] | None = None

    @property
    @abc.abstractmethod
    def kind(self) -> DrafterKind:
        """The drafter that it is for, which its files are named after."""

    @property
    @abc.abstractmethod
    def architecture(self) -> str:
        """What it is."""

    @property
    @abc.abstractmethod
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The graph's inputs."""

    @property
    @abc.abstractmethod
    def outputs(self) -> tuple[TensorSpec, ...]:
        """The graph's outputs."""

    @abc.abstractmethod
    def check_embedding(self, model: Any, name: str) -> None:
        """Raise `UnsupportedModelError` for a target whose embedding the head cannot read."""

    @abc.abstractmethod
    def weights(self, parts: TargetParts) -> dict[str, torch.Tensor]:
        """Return all weights by their names in the graph."""

    @abc.abstractmethod
    def chosen(self, parts: TargetParts) -> Chosen:
        """Return how to store those that the target stores as well."""

    @abc.abstractmethod
    def read(self, parts: TargetParts) -> list[list[int]]:
        """Return the token of each row of `source_logits`."""

    @abc.abstractmethod
    def source_logits(self, parts: TargetParts) -> list[Rows]:
        """Return the head's logits over each text, computed by torch in fp32."""

    @abc.abstractmethod
    def graph_logits(self, runner: parity.GraphRunner, parts: TargetParts) -> list[Rows]:
        """Return the same of the graph."""

    def output_rows(self, parts: TargetParts) -> torch.Tensor:
        """Return the rows of the target's output matrix that the head can guess."""
        ids = self.head.token_ids
        return parts.matrix if ids is None else parts.matrix[torch.from_numpy(ids)]


def check_target(request: HeadRequest, model: Any, name: str, token_ids: Sequence[int]) -> None:
    """Raise `ExportError` for a target that the head is not made for, or that no head can be made for."""
    request.head.check_target(model, name)
    check_output(model, token_ids)
    request.check_embedding(model, name)


def parts_of(
    model: Any, taps: Sequence[int], texts: Sequence[Sequence[int]], chosen: Chosen
) -> TargetParts:  # fmt: skip
    """Return what a head needs of a target; features are computed in fp32."""
    embedding, matrix = model.get_input_embeddings().weight.data, model.get_output_embeddings().weight.data
    features: list[Rows] = []
    with torch.inference_mode(), parity.as_fp32(model), watching(model, taps, logits=False) as seen:
        for ids in texts:
            model(input_ids=torch.tensor([list(ids)]), use_cache=False)
            names = [str(layer) for layer in taps] or ["last"]
            features.append(torch.cat([seen[name][0] for name in names], -1).float().numpy())
    named = model.named_parameters(remove_duplicate=False)
    tied = [f"decoder.{name}" for name, p in named if p.data_ptr() == embedding.data_ptr()]
    form = next((chosen.forms[name] for name in tied if name in chosen.forms), None)
    return TargetParts(embedding=embedding, matrix=matrix, texts=texts, features=features, form=form)


def build_head(
    request: HeadRequest, parts: TargetParts, folder: Path, progress: Progress
) -> tuple[EngineSpec, dict[str, FileEntry]]:  # fmt: skip
    """Write the head's files into `folder`, where the target's lie; return its manifest entry and new files.

    Raises `ExportError` when the graph does not match the head within the precision's bounds.
    """
    kind, profile = request.kind, request.profile
    path = folder / f"{kind}.onnx"
    with progress.step(f"{kind}: fuse and write the graph"):
        graph.finish(request.traced, request.weights(parts), profile.precision, request.chosen(parts))
        graph.lint(request.traced.graph, request.inputs, request.outputs)
        hashes = graph.save(request.traced, path, lambda _: None, shared=stored(folder / "target.onnx"))
    known = request.head.token_ids
    ids = np.arange(request.dims.vocab_size) if known is None else known
    np.save(folder / _tokens_file(kind), ids, allow_pickle=False)
    with progress.step(f"{kind}: parity"):
        measured = _prove(request, parts, path)
    files = {name: FileEntry(size=(folder / name).stat().st_size, sha256=digest) for name, digest in hashes.items()}
    own = sum(entry.size for entry in files.values()) / 1e6
    progress.say(
        f"    max |diff| {measured.max_abs_diff:.2g}, mean KL {measured.mean_kl:.2g}, top-1 "
        f"{measured.top1_agreement:.1%}; {own:.1f} MB of its own"
    )
    spec = EngineSpec(
        dialect=profile.dialect, file=path.name, weights=f"{path.name}.data", reference=_reference(path).name,
        model=_info(request), precision=profile.precision, capacity=profile.capacity, slots=profile.slots,
        prefill_width=profile.prefill_width, verify_widths=profile.verify_widths, vocab_size=request.dims.vocab_size,
        weight_bytes=graph.read_bytes(request.traced), inputs=request.inputs, outputs=request.outputs, parity=measured,
        exact_widths=(),
    )  # fmt: skip
    return spec, files


def drafter_of(request: HeadRequest, vocabulary: str) -> DrafterSpec:
    """Return the manifest's entry of a head's drafter; vocabulary: the target's fingerprint."""
    kind = request.kind
    return DrafterSpec(kind=kind, engine=kind, vocabulary=vocabulary, tokens=_tokens_file(kind), tree=request.tree)


def _prove(request: HeadRequest, parts: TargetParts, path: Path) -> Parity:
    """Compare a written graph with the head in torch, whose logits are kept as reference."""
    source = request.source_logits(parts)
    write_reference(_reference(path), request.read(parts), source)
    found = request.graph_logits(parity.GraphRunner(path, request.inputs, request.outputs, request.profile), parts)
    # what a head guesses has no text of its own: likelihoods are those of its own best guesses
    measured = parity.compare(source, found, [[0, *logits.argmax(-1)[:-1].tolist()] for logits in source])
    precision = request.profile.precision
    option = "" if precision == "fp32" else "--draft-precision"
    parity.check(measured, parity.BOUNDS[precision], f"{request.head.path.name} at {precision}", option=option)
    return measured


def _tokens_file(kind: DrafterKind) -> str:
    return f"{kind}.tokens.npy"


def _reference(path: Path) -> Path:
    return path.with_suffix(".reference.npz")


def _info(request: HeadRequest) -> ModelInfo:
    head = request.head
    return ModelInfo(
        name=head.path.stem, source=head.path.name, revision=None, architecture=request.architecture, licence=None,
        num_parameters=sum(tensor.numel() for tensor in head.tensors.values()),
    )  # fmt: skip
