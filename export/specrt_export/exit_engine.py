"""The early exit of a target: where it is, what is written, and what it has to agree with."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from specrt_export import graph, parity
from specrt_export.decoder import decoder_layers
from specrt_export.errors import ExportError
from specrt_export.exit_file import ExitFile
from specrt_export.exit_fit import ExitHead, best_exit, fit_exits
from specrt_export.exit_graph import Marks, cut
from specrt_export.progress import Progress
from specrt_profiles.exit import ABOVE, BELOW, EXIT_PICKED, OUTPUT, PICKED, STATE, ExitSpec, Part, parts_of
from specrt_profiles.profile import Profile
from specrt_profiles.tensors import DecoderDims, TensorSpec

_Rows = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitRequest:
    """After how many layers a target can be left, None for what promises most; `file` holds a trained exit."""

    layer: int | None = None
    file: ExitFile | None = None

    def check(self, dims: DecoderDims) -> None:
        """Raise `ExportError` for a layer that the model does not have."""
        if self.layer is not None and not 1 <= self.layer < dims.num_layers:
            raise ExportError(f"--early-exit: expected auto or 1 to {dims.num_layers - 1} layers, found {self.layer}")


def choose_exit(request: ExitRequest, model: Any, texts: Sequence[Sequence[int]], progress: Progress) -> ExitHead:
    """Return the trained exit, or fit one to `texts`, which the model wrote."""
    if request.file is not None:
        return request.file.head
    layers = None if request.layer is None else [request.layer]
    with progress.step("target: fit early exits" if layers is None else "target: fit the early exit"):
        heads, measures = fit_exits(model, [list(ids) for ids in texts], layers=layers)
    best = best_exit(measures)
    progress.say(
        f"    exit after layer {best.layer} of {len(decoder_layers(model))}: its guess is right in "
        f"{best.agreement:.0%} ({best.plain_agreement:.0%} unfitted), {best.cost:.0%} of a call; at best "
        f"{best.speedup:.2f} x plain decoding, with k = {best.k}"
    )
    return next(head for head in heads if head.layer == best.layer)


def write_parts(
    traced: ir.Model, marks: Marks, head: ExitHead, tables: tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]],
    dims: DecoderDims, folder: Path,
) -> tuple[ExitSpec, dict[str, str]]:  # fmt: skip
    """Write a saved graph once more in three parts over the same weights; return what they are, and hashes by name."""
    files = {name: f"target.{name}.onnx" for name in (BELOW, ABOVE, OUTPUT)}
    spec = ExitSpec(layer=head.layer, hidden_size=dims.hidden_size, **files)
    hashes: dict[str, str] = {}
    for name, part in cut(traced, marks, head, parts_of(spec, *tables)).items():
        path = folder / getattr(spec, name)
        if name == BELOW and head.translator is not None:
            hashes |= graph.save(part, path, lambda _: None)
        else:
            ir.save(part, path)
            hashes[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return spec, hashes


class PartsRunner:
    """Runs the parts one after the other; see `parity.GraphRunner`."""

    def __init__(self, folder: Path, spec: ExitSpec, parts: Mapping[str, Part], profile: Profile) -> None:
        self._parts = {
            name: parity.GraphRunner(folder / getattr(spec, name), part.inputs, part.outputs, profile)
            for name, part in parts.items()
        }
        self.exit_logits: dict[int, _Rows] = {}  # of the last call from each position

    def __call__(self, token_ids: Sequence[int], start: int, width: int) -> _Rows:
        """Feed tokens from `start` on, padded to `width`; return logits [len(token_ids), V], and keep the exit's."""
        below = self._parts[BELOW].run(token_ids, start, width)
        above = self._parts[ABOVE].run(token_ids, start, width, {STATE: below[STATE]})
        output = self._parts[OUTPUT]
        logits, guessed = (
            output.run(token_ids, start, width, {PICKED: rows})["logits"][0, : len(token_ids)].copy()
            for rows in (above[PICKED], below[EXIT_PICKED])
        )
        self.exit_logits[start] = guessed
        return logits


def prove_parts(
    runner: PartsRunner, whole: Sequence[_Rows], texts: Sequence[Sequence[int]], profile: Profile, name: str
) -> tuple[bool, float]:  # fmt: skip
    """Compare the parts with the whole graph; return whether all bits are the same, and how often the exit agrees.

    Raises `ExportError` beyond what another order of operations may cost.
    """
    found, agreed = [], []
    for ids in texts:
        runner.exit_logits.clear()
        logits = parity.graph_logits(runner, ids, profile)
        found.append(logits)
        guessed = np.concatenate(list(runner.exit_logits.values()))
        agreed.append(guessed.argmax(-1) == logits.argmax(-1))
    parity.check(
        parity.compare(whole, found, [list(ids) for ids in texts]), parity.STRUCTURE_BOUNDS["float32"],
        f"{name} in parts",
    )  # fmt: skip
    same = all(np.array_equal(a, b) for a, b in zip(whole, found, strict=True))
    return same, float(np.mean(np.concatenate(agreed)))
