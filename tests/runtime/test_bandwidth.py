"""The reading of memory that floors are computed from. No test asserts a speed."""

import os
from pathlib import Path

import numpy as np
import pytest

from specrt import bandwidth
from specrt.bandwidth import MemoryReader, last_level_cache_bytes, num_cores


def cpu(folder: Path, number: int, *, siblings: str, caches: dict[int, tuple[str, str]]) -> None:
    """Write what Linux says about a core: caches by level, their size and who shares them."""
    topology = folder / f"cpu{number}" / "topology"
    topology.mkdir(parents=True)
    (topology / "thread_siblings_list").write_text(f"{siblings}\n")
    for level, (size, shared) in caches.items():
        cache = folder / f"cpu{number}" / "cache" / f"index{level}"
        cache.mkdir(parents=True)
        for name, value in (("level", level), ("size", size), ("shared_cpu_list", shared)):
            (cache / name).write_text(f"{value}\n")


@pytest.fixture
def four_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two cores with two threads each, and a last-level cache per core."""
    for number, siblings in enumerate(("0,2", "1,3", "0,2", "1,3")):
        cpu(
            tmp_path,
            number,
            siblings=siblings,
            caches={1: ("48K", siblings), 2: ("1024K", siblings), 3: ("32M", siblings)},
        )
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    return tmp_path


def test_threads_of_one_core_count_once_and_only_where_this_process_may_run(
    four_cpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert num_cores(four_cpus) == 2
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 3}, raising=False)
    assert num_cores(four_cpus) == 1


def test_every_last_level_cache_counts_once(four_cpus: Path) -> None:
    assert last_level_cache_bytes(four_cpus) == 2 * 32 * 2**20


def test_a_system_that_tells_nothing_has_logical_cores_and_no_caches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 5}, raising=False)
    assert (num_cores(tmp_path), last_level_cache_bytes(tmp_path)) == (3, 0)
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    assert num_cores(tmp_path) == 7


def test_a_pass_reads_every_byte_once_between_two_looks_at_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    def record(array: np.ndarray) -> None:
        read.append(array.nbytes)

    monkeypatch.setattr(bandwidth.np, "max", record)
    reader = MemoryReader(3, num_bytes=24_000)
    times = iter([1.0, 1.5])
    assert reader.seconds(lambda: (read.append(0), next(times))[1]) == 0.5
    assert read == [0, 8000, 8000, 8000, 0]
    assert (reader.threads, reader.num_bytes) == (3, 24_000)
    reader.close()


@pytest.mark.parametrize(("caches", "expected"), [(0, 256), (32, 256), (96, 384)])
def test_what_is_read_is_four_times_the_caches_and_at_least_256_mib(
    monkeypatch: pytest.MonkeyPatch, caches: int, expected: int
) -> None:
    monkeypatch.setattr(bandwidth, "last_level_cache_bytes", lambda: caches * 2**20)
    monkeypatch.setattr(bandwidth.np, "ones", lambda n, _: np.empty(0))
    reader = MemoryReader(2)
    assert reader.num_bytes == expected * 2**20
    reader.close()
