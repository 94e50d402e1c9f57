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
from dataclasses import dataclass
from pathlib import Path

from specrt.check import is_as_exported, mean_kl
from specrt.engine import Engine
from specrt.errors import EngineError
from specrt_profiles.exactness import find_exact_widths
from specrt_profiles.manifest import MANIFEST_FILE, EngineSpec, sha256_of

_log = logging.getLogger(__name__)
_TIMED_CALLS, _TIMED_CONTEXT = 5, 128


def default_cache_dir() -> Path:
    """Return the folder for measured facts: ~/.cache/specrt/machine, or one for temporary files without a home."""
    try:
        return Path.home() / ".cache" / "specrt" / "machine"
    except RuntimeError:
        return Path(tempfile.gettempdir()) / "specrt" / "machine"


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """What is known about an artifact on this machine.

    exact_widths: verify widths whose rows have the same bits; call_s: seconds of a call, by verify width.
    """

    exact_widths: tuple[int, ...]
    call_s: Mapping[int, float]


def remembered_facts(
    artifact: Path, *, engine: str, threads: int | None, cache_dir: Path, measure: Callable[[], MachineFacts]
) -> MachineFacts:
    """Return what is known about an artifact's target here, measuring it if nothing is known yet."""
    key = {"artifact": sha256_of(artifact / MANIFEST_FILE), "engine": engine, "cpu": processor(), "threads": threads}
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    path = cache_dir / f"{name}.json"
    try:
        found = json.loads(path.read_text("utf-8"))
        if found["key"] == key:
            call_s = {int(width): float(seconds) for width, seconds in found["call_s"].items()}
            facts = MachineFacts(tuple(int(width) for width in found["exact_widths"]), call_s)
            if set(facts.exact_widths) == set(call_s) and all(seconds > 0 for seconds in call_s.values()):
                return facts
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    facts = measure()
    _write(path, {"key": key, "exact_widths": list(facts.exact_widths), "call_s": dict(facts.call_s)})
    return facts


def measure_facts(target: Engine, spec: EngineSpec, folder: Path, *, clock: Callable[[], float]) -> MachineFacts:
    """Find out which verify widths share one arithmetic, and what calls of them take.

    Raises `EngineError` if the engine's logits are not what they were at export.
    """
    found = mean_kl(target, spec, folder)
    if not is_as_exported(found, spec.parity.mean_kl):
        raise EngineError(
            f"{folder}: on this machine its logits are not what they were at export (mean KL {found:.3g}, "
            f"then {spec.parity.mean_kl:.3g}): export it here, or at another --precision"
        )
    widths = sorted({*spec.verify_widths, spec.prefill_width})
    exact = find_exact_widths(target.forward, widths, vocab_size=target.vocab_size, capacity=target.capacity)
    ladder = exact.ladder(spec.verify_widths)
    return MachineFacts(ladder, {width: _call_s(target, width, clock) for width in ladder})


def _call_s(target: Engine, width: int, clock: Callable[[], float]) -> float:
    """Return the median seconds of a verify call behind a short text."""
    tokens = [0] * min(width, target.capacity)
    start = min(_TIMED_CONTEXT, target.capacity - len(tokens), target.kv_length)
    seconds = []
    for _ in range(_TIMED_CALLS):
        started = clock()
        target.forward(tokens, start, width)
        seconds.append(clock() - started)
    return max(1e-9, statistics.median(seconds))  # a clock may be coarse


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


def _write(path: Path, facts: dict[str, object]) -> None:
    """Write a small file so that a reader sees all of it or none."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{os.getpid()}")
        part.write_text(json.dumps(facts), "utf-8")
        part.replace(path)
    except OSError as error:
        _log.warning("cannot remember what was measured in %s (%s); it will be measured again", path.parent, error)
