"""The memory bandwidth that a floor for the time of a call is computed from."""

import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

_CPUS = Path("/sys/devices/system/cpu")
_LEAST = 256 << 20  # bytes
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class MemoryReader:
    """Threads that read memory as fast as NumPy can.

    Each takes the maximum of its own array of 64-bit integers, a reduction that runs without the interpreter's lock.
    All arrays together are `num_bytes` large, at least four times the last-level caches, so that nearly all of a pass
    comes from memory. That is a bandwidth of reading in order, and a lower bound of what the memory gives.
    """

    def __init__(self, threads: int, *, num_bytes: int | None = None) -> None:
        each = max(1, (num_bytes or max(_LEAST, 4 * last_level_cache_bytes())) // threads // 8)
        self._arrays = [np.ones(each, np.int64) for _ in range(threads)]
        self._pool = ThreadPoolExecutor(threads)
        self.threads = threads
        self.num_bytes = 8 * each * threads

    def seconds(self, clock: Callable[[], float]) -> float:
        """Read everything once; return the seconds it took."""
        start = clock()
        list(self._pool.map(np.max, self._arrays))
        return clock() - start

    def close(self) -> None:
        """Release memory and threads."""
        self._arrays = []
        self._pool.shutdown()


def num_cores(cpus: Path = _CPUS) -> int:
    """Return the physical cores this process may run on; logical ones where the system does not tell them apart."""
    numbers = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    siblings = {_read(cpus / f"cpu{number}" / "topology" / "thread_siblings_list") or str(number) for number in numbers}
    return len(siblings)


def last_level_cache_bytes(cpus: Path = _CPUS) -> int:
    """Return the size of all last-level caches together, 0 where the system does not tell."""
    sizes: dict[str, int] = {}  # by the cores that share one
    for cpu in cpus.glob("cpu[0-9]*"):
        levels = sorted((_read(index / "level"), index) for index in (cpu / "cache").glob("index*"))
        if levels and (size := re.fullmatch(r"(\d+)([KMG])", _read(levels[-1][1] / "size"))):
            sizes[_read(levels[-1][1] / "shared_cpu_list")] = int(size.group(1)) * _UNITS[size.group(2)]
    return sum(sizes.values())


def _read(path: Path) -> str:
    try:
        return path.read_text("ascii").strip()
    except (OSError, ValueError):
        return ""
