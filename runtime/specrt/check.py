"""`specrt check`: does an artifact compute here what its source computed, and which call widths share their bits?"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specrt.engine import Engine, measurable_widths, open_engine
from specrt.errors import EngineError
from specrt.rows import Row, logsumexp_error, top_of
from specrt_profiles.exactness import Exactness, find_exact_widths
from specrt_profiles.files import check_hashes
from specrt_profiles.manifest import EngineSpec, read_manifest
from specrt_profiles.reference import ReferenceText, logsumexp, read_reference

_SLACK = 2.0  # other processors round differently: up to twice the distance measured at export is accepted
_FLOOR_KL, _FLOOR_DIFF = 1e-6, 1e-3
_SPARE = 2  # a device's sums are to be so many times better here than the sampler takes them to be in any row


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCheck:
    """Distance of one engine from its source over the reference rows, and its bit-equal widths, on this machine.

    `max_abs_diff` is over the 64 most probable tokens of each row and all tokens of the rows kept whole, `mean_kl`
    over the 64 and the rest taken as one (at most the KL over all tokens). `exact_prefill`: prefill calls have the bits
    of the ladder, too.
    """

    name: str
    num_rows: int
    max_abs_diff: float
    mean_kl: float
    top1_agreement: float
    exported_max_abs_diff: float
    exported_mean_kl: float
    groups: tuple[tuple[int, ...], ...]
    dependent: tuple[int, ...]
    ladder: tuple[int, ...]
    exact_prefill: bool
    needs_exact_rows: bool

    @property
    def problems(self) -> list[str]:
        """What is wrong, in words."""
        found = []
        if not is_as_exported(self.mean_kl, self.exported_mean_kl):
            found.append(f"{self.name}: mean KL {self.mean_kl:.3g}, at export {self.exported_mean_kl:.3g}")
        if not self.max_abs_diff <= _SLACK * self.exported_max_abs_diff + _FLOOR_DIFF:
            found.append(
                f"{self.name}: logits off by up to {self.max_abs_diff:.3g}, at export {self.exported_max_abs_diff:.3g}"
            )
        if self.needs_exact_rows and not self.ladder:
            found.append(f"{self.name}: rows of a call influence each other at every width")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """The result of a check."""

    artifact: str
    num_files: int
    engines: tuple[EngineCheck, ...] = field(default=())

    @property
    def problems(self) -> list[str]:
        """What is wrong, in words; empty if nothing is."""
        return [problem for engine in self.engines for problem in engine.problems]

    def to_dict(self) -> dict[str, Any]:
        """Return the report for JSON."""
        names = EngineCheck.__dataclass_fields__
        engines = [{name: getattr(engine, name) for name in names} for engine in self.engines]
        return {"artifact": self.artifact, "num_files": self.num_files, "engines": engines, "problems": self.problems}


def check_artifact(folder: Path, *, device: str | None = None, threads: int | None = None) -> CheckReport:
    """Verify every hash, replay the reference of every engine, and group call widths by the bits they give.

    device and threads are those of `specrt.load`. Raises `ManifestError` for a damaged artifact; a distance that is too
    large is reported, not raised.
    """
    manifest = read_manifest(folder)
    check_hashes(folder, manifest.files)
    engines = []
    for name, spec in manifest.engines.items():
        engine = open_engine(folder, spec, threads=threads, device=device)
        try:
            engines.append(_check_engine(name, engine, spec, folder))
        finally:
            engine.close()
    return CheckReport(artifact=str(folder), num_files=len(manifest.files), engines=tuple(engines))


def mean_kl(engine: Engine, spec: EngineSpec, folder: Path) -> float:
    """Replay the reference and return the mean KL in nats from the source; see `EngineCheck`."""
    _, kls, _ = _distances(engine, spec, folder)
    return float(kls.mean())


def is_as_exported(found: float, exported: float) -> bool:
    """Tell whether a mean KL is about what it was when the engine was exported; one that is no number is not."""
    return found <= _SLACK * exported + _FLOOR_KL


def _distances(engine: Engine, spec: EngineSpec, folder: Path) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    texts = read_reference(folder / spec.reference)
    found = [_distance(text, replay(engine, text.ids.tolist())) for text in texts]
    diffs, kls, same = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return diffs, kls, same


def _check_engine(name: str, engine: Engine, spec: EngineSpec, folder: Path) -> EngineCheck:
    diffs, kls, same = _distances(engine, spec, folder)
    exact: Exactness = find_exact_widths(
        engine.forward, measurable_widths(spec), vocab_size=engine.vocab_size, capacity=engine.capacity
    )
    ladder = exact.ladder(spec.verify_widths)
    return EngineCheck(
        name=name, num_rows=len(kls), max_abs_diff=float(diffs.max()), mean_kl=float(kls.mean()),
        top1_agreement=float(same.mean()), exported_max_abs_diff=spec.parity.max_abs_diff,
        exported_mean_kl=spec.parity.mean_kl, groups=exact.groups, dependent=exact.dependent,
        ladder=ladder, exact_prefill=exact.agree({*ladder, spec.prefill_width}), needs_exact_rows=name == "target",
    )  # fmt: skip


def replay(engine: Engine, ids: Sequence[int]) -> NDArray[np.float32]:
    """Return the logits [n - s, V] of all tokens after a prefill of s = max(1, n // 3), in verify calls of every width.

    Each call is made twice: first with the text's tokens shifted by one, as if a proposal had been rejected, then
    after a rollback with the right ones.
    """
    start = max(1, len(ids) // 3)
    engine.rollback(0)
    engine.prefill(ids[:start])
    rows, number = [], 0
    while start < len(ids):
        width = engine.verify_widths[number % len(engine.verify_widths)]
        piece = ids[start : start + width]
        engine.verify([*piece[1:], piece[0]])
        engine.rollback(start)
        found = engine.verify(piece)
        rows.append(np.array(found))
        if not all(_is_true_of(found[row], logits) for row, logits in enumerate(rows[-1])):
            raise EngineError(
                "the best tokens or the sums that the device finds are not those of its logits: "
                "export with --output logits"
            )
        start, number = start + len(piece), number + 1
    return np.concatenate(rows)


def _is_true_of(row: Row, logits: NDArray[np.float32]) -> bool:
    """Tell whether what is known of a row without its values is so."""
    top = top_of(row)
    if top is not None:
        ids = set(top.ids.tolist())
        if len(ids) < len(top.ids) or not ids.issubset(range(len(logits))):
            return False
        falling = np.sort(logits)[: -len(top.logits) - 1 : -1]
        if not (np.array_equal(top.logits, falling) and np.array_equal(top.logits, logits[top.ids])):
            return False
        true = float(logsumexp(logits))
        if not abs(top.logsumexp - true) <= logsumexp_error(true) / _SPARE:
            return False
    return int(row.argmax()) == logits.argmax()


def _rest(log_p: NDArray[np.float64], log_q: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return what all other tokens, taken as one, add to the KL; without it the sum could be anything."""
    p, q = (np.maximum(1 - np.exp(logs).sum(-1), 1e-12) for logs in (log_p, log_q))
    rest: NDArray[np.float64] = p * np.log(p / q)
    return rest


def _distance(text: ReferenceText, rows: NDArray[np.float32]) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return per row: largest logit difference, KL with all but the top tokens taken as one, same best token."""
    first = len(text.ids) - len(rows)
    top_ids, top = text.top_ids[first:], text.top[first:].astype(np.float64)
    ours = np.take_along_axis(rows, top_ids, -1).astype(np.float64)
    log_p = top - text.logsumexp[first:, None]
    log_q = ours - logsumexp(rows)[:, None]
    diffs = np.abs(ours - top).max(-1)
    for row, full in zip(text.full_rows, text.full, strict=True):
        if row >= first:
            diffs[row - first] = np.abs(rows[row - first] - full).max()
    kl = (np.exp(log_p) * (log_p - log_q)).sum(-1) + _rest(log_p, log_q)
    best = np.take_along_axis(top_ids, top.argmax(-1)[:, None], -1)[:, 0]
    return diffs, kl, rows.argmax(-1) == best
