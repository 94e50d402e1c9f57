"""The CUDA driver over host memory, as `cuda.bindings.driver` gives it: asynchronous, strict, and hostile to mistakes.

Work put on a stream is done when the stream is synchronized and no sooner, so that what is read too early is old and
what is overwritten too early is lost. New memory holds NaNs. Every call needs a current context in its own thread,
every copy an allocation that holds it and pinned memory on the host. Obeying it proves nothing about real hardware.
"""

import threading
from collections.abc import Callable
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
BFLOAT16 = np.dtype([("bfloat16", "<u2")])  # what stands for a type that NumPy does not have


class Result(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_INVALID_HANDLE = 400
    CUDA_ERROR_ILLEGAL_ADDRESS = 700


class SimulatedDriver:
    """One process's view of the driver. `failing` maps a function to how many of its calls work before one fails."""

    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR=75, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR=76
    )

    def __init__(self, *, num_devices: int = 1, compute_capability: tuple[int, int] = (8, 9)) -> None:
        self.failing: dict[str, int] = {}
        self.device: dict[int, Bytes] = {}
        self.pinned: dict[int, Bytes] = {}
        self.streams: dict[int, list[Callable[[], None]]] = {}
        self.uploads: list[tuple[int, int]] = []  # address ranges since the last call of a graph
        self.copies: list[tuple[str, int]] = []  # direction and bytes of every copy
        self.num_contexts = self._num_streams = 0
        self._num_devices, self._capability = num_devices, compute_capability
        self._threads = threading.local()

    @property
    def num_open(self) -> int:
        """What is still to be given back."""
        return len(self.device) + len(self.pinned) + len(self.streams) + self.num_contexts

    @property
    def is_current(self) -> bool:
        return bool(self._stack)

    @property
    def _stack(self) -> list[int]:
        if not hasattr(self._threads, "stack"):
            self._threads.stack = []
        stack: list[int] = self._threads.stack
        return stack

    def device_bytes(self, address: int, size: int) -> Bytes | None:
        """Return a view of device memory, None if it is not all in one allocation."""
        return _within(self.device, address, size)

    def __getattribute__(self, name: str) -> Any:
        value = object.__getattribute__(self, name)
        return self._guarded(name, value) if name.startswith("cu") else value

    def _guarded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if name in self.failing:
                self.failing[name] -= 1
                if self.failing[name] < 0:
                    del self.failing[name]
                    return (Result.CUDA_ERROR_OUT_OF_MEMORY,)
            if name.startswith(("cuMem", "cuStream")) and not self.is_current:
                return (Result.CUDA_ERROR_INVALID_CONTEXT,)
            return function(*arguments)

        return call

    def cuInit(self, flags: int) -> Any:
        return (Result(flags),)

    def cuDriverGetVersion(self) -> Any:
        return Result.CUDA_SUCCESS, 13020

    def cuDeviceGetCount(self) -> Any:
        return Result.CUDA_SUCCESS, self._num_devices

    def cuDeviceGet(self, ordinal: int) -> Any:
        return Result.CUDA_SUCCESS, ordinal

    def cuDeviceGetName(self, length: int, _: int) -> Any:
        return Result.CUDA_SUCCESS, b"Simulated GPU".ljust(length, b"\0")

    def cuDeviceGetAttribute(self, attribute: int, _: int) -> Any:
        return Result.CUDA_SUCCESS, self._capability[attribute - 75]

    def cuDevicePrimaryCtxRetain(self, device: int) -> Any:
        self.num_contexts += 1
        return Result.CUDA_SUCCESS, 1000 + device

    def cuDevicePrimaryCtxRelease(self, _: int) -> Any:
        self.num_contexts -= 1
        assert self.num_contexts or not self.device, "the context goes before its memory"
        return (Result.CUDA_SUCCESS,)

    def cuCtxPushCurrent(self, context: int) -> Any:
        self._stack.append(context)
        return (Result.CUDA_SUCCESS,)

    def cuCtxPopCurrent(self) -> Any:
        return Result.CUDA_SUCCESS, self._stack.pop()

    def cuStreamCreate(self, flags: int) -> Any:
        assert flags == 1, "a blocking stream waits for the default one"
        self._num_streams += 1
        handle = 0x5000 + self._num_streams
        self.streams[handle] = []
        return Result.CUDA_SUCCESS, handle

    def cuStreamDestroy(self, stream: int) -> Any:
        del self.streams[int(stream)]
        return (Result.CUDA_SUCCESS,)

    def cuStreamSynchronize(self, stream: int) -> Any:
        if int(stream) not in self.streams:
            return (Result.CUDA_ERROR_INVALID_HANDLE,)
        work, self.streams[int(stream)] = self.streams[int(stream)], []
        for action in work:
            action()
        return (Result.CUDA_SUCCESS,)

    def cuMemAlloc(self, size: int) -> Any:
        array = _aligned(size)
        self.device[array.ctypes.data] = array
        return Result.CUDA_SUCCESS, array.ctypes.data

    def cuMemFree(self, address: int) -> Any:
        assert not any(self.streams.values()), "memory goes while work is under way"
        del self.device[int(address)]
        return (Result.CUDA_SUCCESS,)

    def cuMemHostAlloc(self, size: int, _flags: int) -> Any:
        array = _aligned(size)
        self.pinned[array.ctypes.data] = array
        return Result.CUDA_SUCCESS, array.ctypes.data

    def cuMemFreeHost(self, address: int) -> Any:
        del self.pinned[int(address)]
        return (Result.CUDA_SUCCESS,)

    def cuMemsetD8Async(self, address: int, value: int, size: int, stream: int) -> Any:
        target = self.device_bytes(int(address), size)
        if target is None:
            return (Result.CUDA_ERROR_INVALID_VALUE,)
        return self._enqueue(stream, lambda: target.fill(value))

    def cuMemcpyHtoDAsync(self, address: int, source: int, size: int, stream: int) -> Any:
        self.uploads.append((int(address), int(address) + size))
        self.copies.append(("up", size))
        return self._copy(_within(self.pinned, source, size), self.device_bytes(int(address), size), stream)

    def cuMemcpyDtoHAsync(self, target: int, address: int, size: int, stream: int) -> Any:
        self.copies.append(("down", size))
        return self._copy(self.device_bytes(int(address), size), _within(self.pinned, target, size), stream)

    def cuMemcpyDtoDAsync(self, target: int, address: int, size: int, stream: int) -> Any:
        assert abs(int(target) - int(address)) >= size, "copies that overlap are undefined"
        self.copies.append(("across", size))
        return self._copy(self.device_bytes(int(address), size), self.device_bytes(int(target), size), stream)

    def _copy(self, source: Bytes | None, target: Bytes | None, stream: int) -> Any:
        if source is None or target is None:
            return (Result.CUDA_ERROR_INVALID_VALUE,)
        return self._enqueue(stream, lambda: np.copyto(target, source))

    def _enqueue(self, stream: int, action: Callable[[], None]) -> Any:
        if int(stream) not in self.streams:
            return (Result.CUDA_ERROR_INVALID_HANDLE,)
        self.streams[int(stream)].append(action)
        return (Result.CUDA_SUCCESS,)


def _aligned(size: int) -> Bytes:
    whole = np.full(size + 256, 0xFF, np.uint8)
    start = -whole.ctypes.data % 256
    return whole[start : start + size]


def _within(allocations: dict[int, Bytes], address: int, size: int) -> Bytes | None:
    for start, array in allocations.items():
        if start <= address and address + size <= start + len(array):
            return array[address - start : address - start + size]
    return None


def load(view: NDArray[Any]) -> NDArray[Any]:
    """Return a copy of what is in memory; of bfloat16 as float32."""
    if view.dtype != BFLOAT16:
        return view.copy()
    bits: NDArray[Any] = view["bfloat16"].astype(np.uint32) << 16
    return bits.view(np.float32)


def store(view: NDArray[Any], value: NDArray[Any]) -> None:
    """Put values into memory; those for bfloat16 have to be rounded to it."""
    if view.dtype != BFLOAT16:
        view[...] = value
        return
    bits = np.ascontiguousarray(value).view(np.uint32)
    assert not (bits & 0xFFFF).any(), "a value that bfloat16 does not have"
    view["bfloat16"] = bits >> 16
