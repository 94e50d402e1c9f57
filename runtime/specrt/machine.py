"""What was measured about an artifact on this machine, kept beside it and never in it.

One JSON file per (artifact, engine version, processor, threads) in a cache directory. A cache that cannot be
read or written costs a new measurement, nothing else.
"""

import hashlib
import json
import logging
import os
import platform
import tempfile
from collections.abc import Callable
from pathlib import Path

from specrt_profiles.manifest import MANIFEST_FILE, sha256_of

_log = logging.getLogger(__name__)


def default_cache_dir() -> Path:
    """Return the folder for measured facts: ~/.cache/specrt/machine, or one for temporary files without a home."""
    try:
        return Path.home() / ".cache" / "specrt" / "machine"
    except RuntimeError:
        return Path(tempfile.gettempdir()) / "specrt" / "machine"


def remembered_widths(
    artifact: Path, *, engine: str, threads: int | None, cache_dir: Path, measure: Callable[[], tuple[int, ...]]
) -> tuple[int, ...]:
    """Return the bit-equal call widths of an artifact's target here, measuring them if they are not known yet."""
    key = {"artifact": sha256_of(artifact / MANIFEST_FILE), "engine": engine, "cpu": processor(), "threads": threads}
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    path = cache_dir / f"{name}.json"
    try:
        facts = json.loads(path.read_text("utf-8"))
        if facts["key"] == key:
            return tuple(int(width) for width in facts["exact_widths"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    widths = measure()
    _write(path, {"key": key, "exact_widths": list(widths)})
    return widths


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
