"""Memory, one stream and copies on a GPU, through the CUDA driver alone.

Whether there is a driver at all is found out before any library that needs one is imported: without one, some of them
crash. The device's primary context is made current for each use and put back after it, so that any thread may call,
and whatever else uses CUDA in the process keeps its own device.
"""

import contextlib
import ctypes
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from specrt.errors import EngineError
from specrt_profiles.extras import require
from specrt_profiles.tensors import ELEMENT_BYTES

ALIGNMENT = 256  # bytes: what TensorRT asks of every address; the driver's own allocations have it
_LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
_RELOAD = "close the artifact and load it again"
_NO_DEVICE = "run it on a machine with an NVIDIA GPU and its driver, or load an artifact of ONNX graphs with device cpu"


def probe_driver(library: str = _LIBRARY) -> None:
    """Raise `EngineError` unless the CUDA driver is installed and starts."""
    try:
        driver = ctypes.CDLL(library)
    except OSError as error:
        raise EngineError(f"no CUDA driver here ({error}): {_NO_DEVICE}") from None
    code = driver.cuInit(0)
    if code:
        raise EngineError(f"the CUDA driver does not start (cuInit gives error {code}): {_NO_DEVICE}")


def open_gpu(index: int, *, extra: str) -> "Gpu":
    """Open GPU number `index`; `extra` is what installs the Python side of the driver if it is missing.

    Raises `EngineError` without a driver or such a GPU, `MissingExtraError` without cuda-bindings.
    """
    probe_driver()
    require(extra, "cuda.bindings")
    from cuda.bindings import driver

    return Gpu(driver, index)


class Gpu:
    """One GPU, its stream, and all memory taken through it, which `close` gives back.

    stream: a non-default stream's handle; copies and zeroing are only put on it, and done after `synchronize`.
    Everything but `close` is called with the GPU `current`.
    """

    def __init__(self, driver: Any, index: int) -> None:
        self._driver, self.index = driver, index
        self._call("cuInit", 0)
        count = self._call("cuDeviceGetCount")
        if not 0 <= index < count:
            raise EngineError(f"expected one of the {count} GPUs here, numbered from cuda:0, found cuda:{index}")
        device = self._call("cuDeviceGet", index)
        self.name, self.compute_capability = self._describe(device)
        version = self._call("cuDriverGetVersion")
        self.platform = (
            f"{self.name}, compute capability {self.compute_capability}, "
            f"driver for CUDA {version // 1000}.{version % 1000 // 10}"
        )
        self._device, self._owned = device, contextlib.ExitStack()
        self._context = self._call("cuDevicePrimaryCtxRetain", device)
        try:
            with self.current():
                handle = self._call("cuStreamCreate", driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
        except BaseException:
            self._driver.cuDevicePrimaryCtxRelease(device)
            raise
        self._owned.callback(self._driver.cuStreamDestroy, handle)
        self.stream = int(handle)

    @contextlib.contextmanager
    def current(self) -> Iterator[Self]:
        """Make this GPU the one that the calling thread's CUDA calls go to, and put back what was."""
        self._call("cuCtxPushCurrent", self._context)
        try:
            yield self
        finally:
            self._driver.cuCtxPopCurrent()

    def allocate(self, num_bytes: int) -> int:
        """Return the address of new device memory that is set to zero, in stream order."""
        size = max(1, num_bytes)
        pointer = self._call("cuMemAlloc", size, what=f" for {size / 1e6:.1f} MB")
        self._owned.callback(self._driver.cuMemFree, pointer)
        self._call("cuMemsetD8Async", pointer, 0, size, self.stream)
        return int(pointer)

    def allocate_pinned(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return host memory that copies need not stage; it is gone when the GPU is closed."""
        size = max(1, num_bytes)
        address = int(self._call("cuMemHostAlloc", size, 0, what=f" for {size / 1e6:.1f} MB of host memory"))
        self._owned.callback(self._driver.cuMemFreeHost, address)
        return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))

    def upload(self, address: int, source: NDArray[Any]) -> None:
        """Copy a contiguous pinned array to device memory, in stream order."""
        self._call("cuMemcpyHtoDAsync", address, source.ctypes.data, source.nbytes, self.stream)

    def download(self, target: NDArray[Any], address: int) -> None:
        """Copy device memory to a contiguous pinned array, in stream order."""
        self._call("cuMemcpyDtoHAsync", target.ctypes.data, address, target.nbytes, self.stream)

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        """Copy device memory to other device memory, in stream order; the two must not overlap."""
        self._call("cuMemcpyDtoDAsync", target, source, num_bytes, self.stream)

    def synchronize(self) -> None:
        """Wait until all that was put on the stream is done; raises `EngineError` if any of it failed."""
        self._call("cuStreamSynchronize", self.stream)

    def close(self) -> None:
        """Give back memory, stream and context; a device that has failed is left to the end of the process."""
        with contextlib.suppress(EngineError), self.current():
            self._driver.cuStreamSynchronize(self.stream)
            self._owned.close()
        self._driver.cuDevicePrimaryCtxRelease(self._device)

    def _describe(self, device: Any) -> tuple[str, str]:
        kinds = self._driver.CUdevice_attribute
        major = self._call("cuDeviceGetAttribute", kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device)
        minor = self._call("cuDeviceGetAttribute", kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device)
        name = bytes(self._call("cuDeviceGetName", 256, device)).partition(b"\0")[0].decode("utf-8", "replace")
        return name, f"{major}.{minor}"

    def _call(self, function: str, *arguments: Any, what: str = "") -> Any:
        """Call the driver and return its result; raises `EngineError` with the function and the driver's word."""
        code, *results = getattr(self._driver, function)(*arguments)
        if int(code):
            advice = (
                "free memory on it, or export with a smaller --capacity" if int(code) == _OUT_OF_MEMORY else _RELOAD
            )
            raise EngineError(f"cuda:{self.index}: {function}{what} gives {getattr(code, 'name', code)}: {advice}")
        return results[0] if results else None


class PinnedBlock:
    """Small tensors side by side in one block of pinned memory and one of device memory: one copy moves them all.

    tensors: shape and element type by name. arrays: views of the pinned block, addresses: places in the device's.
    """

    def __init__(self, gpu: Gpu, tensors: Mapping[str, tuple[tuple[int, ...], str]]) -> None:
        places = dict(_places(tensors))
        size = max(place.end for place in places.values()) + ALIGNMENT  # what is empty has an address within, too
        self._gpu, self._pinned, self._address = gpu, gpu.allocate_pinned(size), gpu.allocate(size)
        self.arrays = {
            name: self._pinned[place.start : place.end].view(place.dtype).reshape(place.shape)
            for name, place in places.items()
        }
        self.addresses = {name: self._address + place.start for name, place in places.items()}

    def upload(self) -> None:
        """Put a copy of the pinned block to the device on the stream."""
        self._gpu.upload(self._address, self._pinned)

    def download(self) -> None:
        """Put a copy of the device's block to the pinned one on the stream."""
        self._gpu.download(self._pinned, self._address)


@dataclass(frozen=True, slots=True)
class _Place:
    start: int
    end: int
    shape: tuple[int, ...]
    dtype: str


def _places(tensors: Mapping[str, tuple[tuple[int, ...], str]]) -> Iterator[tuple[str, _Place]]:
    """Yield where in a block each tensor lies, aligned as TensorRT wants addresses."""
    end = 0
    for name, (shape, dtype) in tensors.items():
        start = -(-end // ALIGNMENT) * ALIGNMENT
        end = start + math.prod(shape) * ELEMENT_BYTES[dtype]
        yield name, _Place(start, end, shape, dtype)
