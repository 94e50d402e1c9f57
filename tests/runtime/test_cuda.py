"""The GPU's memory and stream: found out without risk whether there is one, and everything given back."""

import ctypes
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from simulated_cuda import SimulatedDriver
from specrt import cuda
from specrt.cuda import Gpu, open_gpu, probe_driver
from specrt.errors import EngineError, MissingExtraError


def test_a_machine_without_a_driver_is_told_apart(tmp_path: Path) -> None:
    with pytest.raises(
        EngineError, match=r"^no CUDA driver here \(.*libnone\.so.*\): run it on a machine with an NVIDIA"
    ):
        probe_driver(str(tmp_path / "libnone.so"))


def test_a_driver_that_does_not_start_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(cuInit=lambda flags: 100 + flags))
    with pytest.raises(EngineError, match=r"^the CUDA driver does not start \(cuInit gives error 100\): run it on a"):
        probe_driver()


def test_nothing_that_needs_a_driver_is_imported_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise EngineError("no driver")

    monkeypatch.setattr(cuda, "probe_driver", fail)
    monkeypatch.setitem(sys.modules, "cuda", None)
    with pytest.raises(EngineError, match="no driver"):
        open_gpu(0, extra="gpu")


def test_missing_bindings_name_the_line_that_installs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "probe_driver", lambda: None)
    monkeypatch.setitem(sys.modules, "cuda", None)
    monkeypatch.delitem(sys.modules, "cuda.bindings", raising=False)
    with pytest.raises(MissingExtraError, match=r"^cuda\.bindings not installed: run  pip install 'specrt\[gpu\]'"):
        open_gpu(0, extra="gpu")


def test_copies_arrive_in_stream_order() -> None:
    driver = SimulatedDriver()
    gpu = Gpu(driver, 0)
    with gpu.current():
        address, up, down = gpu.allocate(400), gpu.allocate_pinned(400), gpu.allocate_pinned(400)
        up[:] = np.arange(400) % 251
        gpu.upload(address, up)
        gpu.download(down[:100], address)
        down[:] = 0
        gpu.synchronize()
        assert (down[:100] == up[:100]).all()
        assert not down[100:].any()
    gpu.close()
    assert driver.num_open == 0


def test_memory_starts_as_zeros() -> None:
    gpu = Gpu(SimulatedDriver(), 0)
    with gpu.current():
        rows = gpu.allocate_pinned(64)
        rows[:] = 1
        gpu.download(rows, gpu.allocate(64))
        gpu.synchronize()
    assert not rows.any()


def test_a_failing_stream_gives_the_context_back() -> None:
    driver = SimulatedDriver()
    driver.failing = {"cuStreamCreate": 0}
    with pytest.raises(EngineError, match=r"^cuda:0: cuStreamCreate gives CUDA_ERROR_OUT_OF_MEMORY: free memory on it"):
        Gpu(driver, 0)
    assert (driver.num_open, driver.is_current) == (0, False)


def test_memory_that_there_is_not_is_told_in_megabytes() -> None:
    driver = SimulatedDriver()
    gpu = Gpu(driver, 0)
    driver.failing = {"cuMemAlloc": 0}
    with gpu.current(), pytest.raises(EngineError, match=r"cuMemAlloc for 12\.3 MB gives CUDA_ERROR_OUT_OF_MEMORY"):
        gpu.allocate(12_345_678)
