"""What was measured about an artifact on this machine, kept beside it and never in it.

One JSON file per (artifact, engine version, processor, threads) in a cache directory. A cache that cannot be
read or written costs a new measurement, nothing else.
"""

import hashlib
import json
import logging
import os
import platform
import statistics
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from specrt.check import is_as_exported, mean_kl
from specrt.engine import Engine, measurable_widths
from specrt.errors import EngineError, RequestError
from specrt_profiles.exactness import find_exact_widths
from specrt_profiles.files import sha256_of
from specrt_profiles.manifest import MANIFEST_FILE, EngineSpec

_log = logging.getLogger(__name__)
_CALLS, _CONTEXT = 5, 128


def default_cache_dir() -> Path:
    """Return the folder for measured facts: ~/.cache/specrt/machine, or one for temporary files without a home."""
    try:
        return Path.home() / ".cache" / "specrt" / "machine"
    except RuntimeError:
        return Path(tempfile.gettempdir()) / "specrt" / "machine"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What a request that says nothing else drafts with: `none` for plain decoding; see `specrt tune`.

    tree: guesses may branch, and the text keeps its bits (`strict`).
    """

    drafter: str
    k: int | Literal["auto"]
    max_step_ms: float | None = None
    tree: bool = False


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """What is known about an artifact on this machine.

    exact_widths: verify widths whose rows have the same bits. call_s: seconds of a call, by verify width. choice: the
    tuned one, if there is any. exact_prefill: prefill calls give the bits of those widths too.
    """

    exact_widths: tuple[int, ...]
    call_s: Mapping[int, float]
    choice: Choice | None = None
    exact_prefill: bool = False


class MachineFile:
    """The file of an artifact, an engine version, this processor and a number of threads."""

    def __init__(self, artifact: Path, *, engine: str, threads: int | None, cache_dir: Path) -> None:
        self._key = {
            "artifact": sha256_of(artifact / MANIFEST_FILE), "engine": engine, "cpu": processor(), "threads": threads
        }  # fmt: skip
        name = hashlib.sha256(json.dumps(self._key, sort_keys=True).encode()).hexdigest()[:32]
        self.path = cache_dir / f"{name}.json"

    def facts(self, measure: Callable[[], MachineFacts]) -> MachineFacts:
        """Return what is known, measuring it if that is nothing."""
        known = self._read()
        if known is not None:
            return known
        facts = measure()
        try:
            self._write(facts)
        except OSError as error:
            folder = self.path.parent
            _log.warning("cannot remember what was measured in %s (%s); it will be measured again", folder, error)
        return facts

    def choose(self, choice: Choice | None) -> None:
        """Remember a choice, or forget it; raises `RequestError` if the file cannot be written."""
        facts = self._read()
        try:
            if facts is None:
                raise OSError("it holds nothing that was measured")
            self._write(replace(facts, choice=choice))
        except OSError as error:
            raise RequestError(f"cannot keep the choice in {self.path}: {error}: name another cache folder") from None

    def _read(self) -> MachineFacts | None:
        try:
            found = json.loads(self.path.read_text("utf-8"))
            if found["key"] != self._key:
                return None
            facts = MachineFacts(
                tuple(int(width) for width in found["exact_widths"]),
                {int(width): float(seconds) for width, seconds in found["call_s"].items()},
                Choice(**found["choice"]) if found.get("choice") else None,
                exact_prefill=bool(found["exact_prefill"]),
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        whole = set(facts.exact_widths) == set(facts.call_s) and all(s > 0 for s in facts.call_s.values())
        return facts if whole else None

    def _write(self, facts: MachineFacts) -> None:
        """Write so that a reader sees all of it or none."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        part.write_text(json.dumps({"key": self._key, **asdict(facts)}), "utf-8")
        part.replace(self.path)


def measure_facts(target: Engine, spec: EngineSpec, folder: Path, *, clock: Callable[[], float]) -> MachineFacts:
    """Find out which verify widths share one arithmetic, and what calls of them take.

    Raises `EngineError` if the engine's logits are not what they were at export, or if trees cost first branches their
    bits.
    """
    found = mean_kl(target, spec, folder)
    if not is_as_exported(found, spec.parity.mean_kl):
        raise EngineError(
            f"{folder}: on this machine its logits are not what they were at export (mean KL {found:.3g}, "
            f"then {spec.parity.mean_kl:.3g}): export it here, or at another --precision"
        )
    exact = find_exact_widths(
        target.forward, measurable_widths(spec), vocab_size=target.vocab_size, capacity=target.capacity
    )
    target.verify_widths = exact.ladder(spec.verify_widths)
    if not target.verify_widths:
        return MachineFacts((), {})
    if target.takes_trees and not first_branches_are_exact(target):
        raise EngineError(
            f"{folder}: on this machine a tree's first branch has not the bits of a chain: leave --trees out"
        )
    return MachineFacts(
        target.verify_widths,
        time_calls(target, context=_CONTEXT, calls=_CALLS, clock=clock),
        exact_prefill=exact.agree({*target.verify_widths, spec.prefill_width}),
    )


def first_branches_are_exact(target: Engine) -> bool:
    """Tell whether a chain has the same bits when other branches follow it in the call; what is strict rests on it."""
    rng = np.random.default_rng(0)
    for context in (3, min(130, target.capacity - target.verify_widths[-1])):
        target.rollback(0)
        target.prefill(rng.integers(0, target.vocab_size, context).tolist())
        for width in target.verify_widths:
            ids, length = rng.integers(0, target.vocab_size, width).tolist(), width // 2
            chain = np.array(target.verify(ids[:length]))
            target.rollback(context)
            rows = np.asarray(target.verify(ids, [*range(-1, length - 1), *[0] * (width - length)]))
            if not np.array_equal(rows[:length], chain):
                return False
            target.rollback(context)
    return True


def time_calls(target: Engine, *, context: int, calls: int, clock: Callable[[], float]) -> dict[int, float]:
    """Return the median seconds of a verify call by width, behind `context` tokens; widths take turns."""
    widths = target.verify_widths
    context = max(0, min(context, target.capacity - widths[-1]))
    target.rollback(0)
    target.prefill([0] * context)
    seconds: dict[int, list[float]] = {width: [] for width in widths}
    for turn in range(calls + 1):
        for width in widths:
            target.rollback(context)
            started = clock()
            target.verify([0] * min(width, target.capacity - context))
            if turn:  # the first one binds and warms up
                seconds[width].append(clock() - started)
    return {width: max(1e-9, statistics.median(times)) for width, times in seconds.items()}  # a clock may be coarse


def processor() -> str:
    """Return the processor's model name and how many cores of it this process may use."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        lines = cpuinfo.read_text("utf-8", "replace").splitlines()
        wanted = ("model name", "CPU part", "flags", "Features")
        facts = {
            line.partition(":")[0].strip(): line.partition(":")[2].strip()
            for line in reversed(lines)
            if line.startswith(wanted)
        }
        flags = hashlib.sha256((facts.pop("flags", "") + facts.pop("Features", "")).encode()).hexdigest()[:8]
        name = " ".join([*facts.values(), flags])
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{name}, {cores} cores"
