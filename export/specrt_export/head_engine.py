"""Build a head of an artifact: trace, write beside the target it reads from, and prove parity."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from torch import nn

from specrt_export import graph, parity
from specrt_export.distill.features import check_output, watching
from specrt_export.distill.head import Head
from specrt_export.distill.unroll import unrolling
from specrt_export.errors import UnsupportedModelError
from specrt_export.head_file import HeadFile
from specrt_export.head_graph import weights
from specrt_export.integer import Form
from specrt_export.progress import Progress
from specrt_export.shared import stored
from specrt_export.weights import Chosen
from specrt_profiles.files import FileEntry
from specrt_profiles.manifest import EngineSpec, ModelInfo
from specrt_profiles.profile import Profile
from specrt_profiles.reference import write_reference
from specrt_profiles.tensors import DecoderDims, head_inputs, head_outputs

HEAD = "eagle"
TOKENS_FILE = f"{HEAD}.tokens.npy"
_ARCHITECTURES = {"eagle": "EAGLE", "eagle3": "EAGLE-3"}
Rows = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadRequest:
    """What to build: a head that was read, its own sizes and profile, its graph so far, the target's configuration."""

    head: HeadFile
    config: Any
    taps: tuple[int, ...]
    dims: DecoderDims
    profile: Profile
    traced: ir.Model


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


def check_target(request: HeadRequest, model: Any, name: str, token_ids: Sequence[int]) -> None:
    """Raise `ExportError` for a target that the head is not made for, or that no head can be made for."""
    request.head.check_target(model, name)
    check_output(model, token_ids)
    if type(model.get_input_embeddings()) is not nn.Embedding:
        raise UnsupportedModelError(f"{name} changes what it reads from its embedding, which heads are not made for")


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
    head, dims, profile = request.head, request.dims, request.profile
    rows = head.matrix if head.matrix is not None else parts.matrix
    if head.matrix is None and head.token_ids is not None:
        rows = rows[torch.from_numpy(head.token_ids)]
    inputs, outputs = head_inputs(dims, profile), head_outputs(dims, profile)
    path, reference = folder / f"{HEAD}.onnx", folder / f"{HEAD}.reference.npz"
    with progress.step(f"{HEAD}: fuse and write the graph"):
        chosen = Chosen() if parts.form is None else Chosen(forms={"decoder.embed.weight": parts.form})
        graph.finish(request.traced, weights(head, parts.embedding, rows), profile.precision, chosen)
        graph.lint(request.traced.graph, inputs, outputs)
        hashes = graph.save(request.traced, path, lambda _: None, shared=stored(folder / "target.onnx"))
    ids = np.arange(dims.vocab_size) if head.token_ids is None else head.token_ids
    np.save(folder / TOKENS_FILE, ids, allow_pickle=False)
    with progress.step(f"{HEAD}: parity"):
        source = _source_logits(request, parts, rows)
        texts = [text[1:] for text in parts.texts]
        write_reference(reference, texts, source)
        runner = parity.GraphRunner(path, inputs, outputs, profile)
        found = [_graph_logits(runner, *pair, dims, profile) for pair in zip(texts, parts.features, strict=True)]
        # what a head guesses has no text of its own: likelihoods are those of its own best guesses
        measured = parity.compare(source, found, [[0, *logits.argmax(-1)[:-1].tolist()] for logits in source])
        parity.check(measured, parity.BOUNDS[profile.precision], f"{head.path.name} at {profile.precision}")
    files = {name: FileEntry(size=(folder / name).stat().st_size, sha256=digest) for name, digest in hashes.items()}
    own = sum(entry.size for entry in files.values()) / 1e6
    progress.say(
        f"    max |diff| {measured.max_abs_diff:.2g}, mean KL {measured.mean_kl:.2g}, top-1 "
        f"{measured.top1_agreement:.1%}; {own:.1f} MB of its own"
    )
    spec = EngineSpec(
        dialect=profile.dialect, file=path.name, weights=f"{path.name}.data", reference=reference.name,
        model=_info(request), precision=profile.precision, capacity=profile.capacity, slots=profile.slots,
        prefill_width=profile.prefill_width, verify_widths=profile.verify_widths, vocab_size=dims.vocab_size,
        weight_bytes=graph.read_bytes(request.traced), inputs=inputs, outputs=outputs, parity=measured,
        exact_widths=(),
    )  # fmt: skip
    return spec, files


def head_module(head: HeadFile, config: Any) -> Head:
    """Return a head in torch, in fp32."""
    module = Head(config, head.layout, ffn=head.ffn)
    module.load_state_dict({name: tensor.float() for name, tensor in head.tensors.items()}, strict=False)
    return module.eval()


def _source_logits(request: HeadRequest, parts: TargetParts, rows: torch.Tensor) -> list[Rows]:
    """Return the head's logits [n - 1, V] over each text, computed by torch in fp32."""
    module, found = head_module(request.head, request.config), []
    with torch.inference_mode(), unrolling(module) as unroll:
        for ids, features in zip(parts.texts, parts.features, strict=True):
            embeddings = nn.functional.embedding(torch.tensor([list(ids[1:])]), parts.embedding).float()
            none = torch.zeros(0, dtype=torch.int64)
            (out,) = unroll(embeddings, torch.from_numpy(features[None, :-1]), none, steps=1)
            found.append(module.logits(out, rows.float())[0].numpy())
    return found


def _graph_logits(
    runner: parity.GraphRunner, ids: Sequence[int], features: Rows, dims: DecoderDims, profile: Profile
) -> Rows:
    """Return the graph's logits over a text, in calls of every width."""
    found: list[Rows] = []
    start, widths = 0, (profile.prefill_width, *profile.verify_widths)
    own = np.zeros((1, 0, dims.hidden_size), np.float32)
    while start < len(ids):
        width = widths[len(found) % len(widths)]
        piece = ids[start : start + width]
        read = np.zeros((1, width, dims.feature_size), np.float32)
        read[0, : len(piece)] = features[start : start + len(piece)]
        found.append(runner(piece, start, width, {"features": read, "hidden": own}))
        start += len(piece)
    return np.concatenate(found)


def _info(request: HeadRequest) -> ModelInfo:
    head = request.head
    return ModelInfo(
        name=head.path.stem, source=head.path.name, revision=None, architecture=_ARCHITECTURES[head.layout],
        licence=None, num_parameters=sum(tensor.numel() for tensor in head.tensors.values()),
    )  # fmt: skip
