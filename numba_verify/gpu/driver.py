"""The few CUDA driver calls the package makes itself, each with its status turned into an exception.

cuda.bindings is used directly: its names follow the driver's own, which do not move, and these calls are on the path of every step.
Nothing here is touched at import, so the package imports on a machine with no driver.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, NoReturn

import numpy as np

from ..errors import NoDeviceError


class DriverError(RuntimeError):
    """A CUDA driver call failed; the text holds its name, the error's name and the driver's explanation."""


class DeviceInfo(NamedTuple):
    """What kernels and plans need to know of a GPU. `shared_bytes`: the most a block may ask for (opt-in limit)."""

    ordinal: int
    name: str
    capability: tuple[int, int]
    sm_count: int
    shared_bytes: int
    shared_bytes_per_sm: int
    l2_bytes: int

    @property
    def arch(self) -> str:
        """The compiler's name for it; 9.0 and later get their architecture-specific variant, as numba-cuda does."""
        major, minor = self.capability
        return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


@functools.cache
def _driver():
    from cuda.bindings import driver

    return driver


def call(name: str, *args):
    """Call the driver function `name`; its single result, a tuple of several, or None. DriverError on any status but success."""
    status, *results = getattr(_driver(), name)(*args)
    if status:  # CUDA_SUCCESS is 0
        fail(name, status)
    return results[0] if len(results) == 1 else tuple(results) or None


def fail(name: str, status: Any) -> NoReturn:
    """DriverError for a status of the driver function `name` that is not success."""
    text = _driver().cuGetErrorString(status)[1]
    explanation = text.decode() if isinstance(text, bytes) else text
    raise DriverError(f"{name}: {status.name} ({explanation})")


@functools.cache
def unavailable() -> str:
    """Why no GPU can be used here; the empty string when one can."""
    try:
        call("cuInit", 0)
        count = call("cuDeviceGetCount")
    except ImportError as error:
        return f"cuda.bindings cannot be imported: {error}"
    except (DriverError, RuntimeError, OSError) as error:
        return f"the CUDA driver cannot be used: {error}"
    return "" if count else "the CUDA driver reports no device"


def device_count() -> int:
    """GPUs that can be used; 0 with no driver."""
    return 0 if unavailable() else call("cuDeviceGetCount")


def require_device(what: str) -> None:
    """NoDeviceError unless a GPU can be used."""
    reason = unavailable()
    if reason:
        raise NoDeviceError(f"{what} needs a GPU: {reason}")


@functools.cache
def device_info(ordinal: int) -> DeviceInfo:
    """Properties of GPU `ordinal`. NoDeviceError when there is no such GPU."""
    require_device(f"cuda:{ordinal}")
    if not 0 <= ordinal < device_count():
        raise NoDeviceError(f"cuda:{ordinal} does not exist; this machine has {device_count()} GPU(s)")
    device = call("cuDeviceGet", ordinal)
    kinds = _driver().CUdevice_attribute

    def attribute(name: str) -> int:
        return call("cuDeviceGetAttribute", getattr(kinds, f"CU_DEVICE_ATTRIBUTE_{name}"), device)

    name = call("cuDeviceGetName", 128, device).split(b"\0")[0].decode()
    return DeviceInfo(ordinal, name, (attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR")),
                      attribute("MULTIPROCESSOR_COUNT"), attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
                      attribute("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR"), attribute("L2_CACHE_SIZE"))


@functools.cache
def _primary_context(ordinal: int) -> int:
    device_info(ordinal)  # the clear error when there is no such GPU
    # Retained for the life of the process, as torch, CuPy and numba do: they share this context with us.
    return int(call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", ordinal)))


class _Switch:
    """Makes another context current, and puts back what was current before."""

    def __init__(self, wanted: int, before: int):
        self._wanted, self._before = wanted, before

    def __enter__(self) -> None:
        call("cuCtxSetCurrent", self._wanted)

    def __exit__(self, *_: object) -> None:
        # A thread that had no context keeps this one: taking it away again would cost every call the same switch.
        if self._before:
            call("cuCtxSetCurrent", self._before)


_NO_SWITCH = nullcontext()


def context(ordinal: int) -> AbstractContextManager[None]:
    """`with context(ordinal):` the primary context of that GPU is current for this thread, and then what was current before.

    To be entered at once: what is current is asked here, and where it is the right one already, as in most calls, nothing is switched.
    """
    wanted = _primary_context(ordinal)
    status, current = _driver().cuCtxGetCurrent()  # not by `call`, which costs more than the answer, and every step asks
    if status:
        fail("cuCtxGetCurrent", status)
    return _NO_SWITCH if int(current) == wanted else _Switch(wanted, int(current))


def prepare_kernel(kernel: int, nbytes: int) -> Any:
    """The function of `kernel` (a CUkernel) in the current context, ready to be launched with `nbytes` of dynamic shared memory.

    Its code is loaded now: the driver loads lazily, and a first launch under stream capture is no time to allocate. A function belongs to
    one context, so that a launch has nothing to look up.
    """
    function = call("cuKernelGetFunction", kernel)
    if nbytes > 48 * 1024:  # beyond 48 KB a launch fails unless the function has asked for it
        call("cuFuncSetAttribute", function, _driver().CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, nbytes)
    call("cuFuncLoad", function)
    return function


def overlapping_launch(grid: tuple[int, int], threads: int, shared_bytes: int) -> Any:
    """A CUlaunchConfig, its stream still to be set, of a kernel that may start before the one before it in the stream has ended ("programmatic
    dependent launch", CUDA C++ Programming Guide). Under capture it becomes such an edge of the graph."""
    driver = _driver()
    attribute, value, config = driver.CUlaunchAttribute(), driver.CUlaunchAttributeValue(), driver.CUlaunchConfig()
    value.programmaticStreamSerializationAllowed = 1
    attribute.id, attribute.value = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, value
    config.gridDimX, config.gridDimY, config.gridDimZ = *grid, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes, config.attrs, config.numAttrs = shared_bytes, [attribute], 1
    return config


def ordinal_of_pointer(address: int) -> int:
    """Which GPU the memory at `address` belongs to. DriverError when it is no device memory."""
    driver = _driver()
    status, ordinal = driver.cuPointerGetAttribute(driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address)
    if status:  # not by `call`: a step asks this of every array of a library that does not tell its device
        fail("cuPointerGetAttribute", status)
    return int(ordinal)


@contextmanager
def _relaxed_capture() -> Iterator[None]:
    """Allocating and freeing are refused while any stream of the process records a graph in global mode, which is no business of ours:
    another thread may record one, and the garbage collector may free at any time."""
    relaxed = _driver().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    before = call("cuThreadExchangeStreamCaptureMode", relaxed)
    try:
        yield
    finally:
        call("cuThreadExchangeStreamCaptureMode", before)


class DeviceBuffer:
    """Device memory with an owner: freed when the object dies, in a way that may not break somebody's stream capture."""

    def __init__(self, nbytes: int, ordinal: int):
        self.ordinal, self.nbytes = ordinal, nbytes
        with context(ordinal):
            # Never 0 bytes: an address that exists keeps the alignment checks of both implementations free of special cases.
            with _relaxed_capture():
                self.address = int(call("cuMemAlloc", max(nbytes, 256)))

    def __del__(self):
        address = getattr(self, "address", 0)
        if not address:
            return
        try:
            with context(self.ordinal), _relaxed_capture():
                call("cuMemFree", address)
        except (DriverError, TypeError, AttributeError, ImportError):
            pass  # the interpreter or the driver is shutting down and takes the memory with it


class StagedUpload:
    """Host arrays of up to `nbytes` to a device buffer of its own, in stream order and without waiting for the stream.

    The driver may wait for the stream before it copies from ordinary (pageable) memory; from pinned memory it does not. Two pinned halves
    take turns, so the host waits only when it is two whole uploads ahead of the device.
    """

    def __init__(self, nbytes: int, ordinal: int):
        self.ordinal, self._turn, self._pinned = ordinal, 0, 0
        self.buffer = DeviceBuffer(nbytes, ordinal)
        with context(ordinal), _relaxed_capture():
            self._pinned = int(call("cuMemHostAlloc", 2 * max(nbytes, 1), 0))
            self._events = [call("cuEventCreate", _driver().CUevent_flags.CU_EVENT_DISABLE_TIMING) for _ in range(2)]
        self._halves = np.ctypeslib.as_array((ctypes.c_uint8 * (2 * max(nbytes, 1))).from_address(self._pinned)).reshape(2, -1)

    def copy(self, array: np.ndarray, stream: int) -> None:
        """Enqueue the upload of a contiguous array; it may be changed or freed on return. The context has to be current."""
        half, self._turn = self._turn, 1 - self._turn
        call("cuEventSynchronize", self._events[half])
        self._halves[half, :array.nbytes] = array.reshape(-1).view(np.uint8)
        if array.nbytes:
            call("cuMemcpyHtoDAsync", self.buffer.address, self._pinned + half * self._halves.shape[1], array.nbytes, stream)
        call("cuEventRecord", self._events[half], stream)

    def __del__(self):
        if not self._pinned:
            return
        try:
            with context(self.ordinal), _relaxed_capture():
                for event in self._events:
                    call("cuEventSynchronize", event)  # a copy that still reads the pinned memory
                    call("cuEventDestroy", event)
                call("cuMemFreeHost", self._pinned)
        except (DriverError, TypeError, AttributeError, ImportError):
            pass  # the interpreter or the driver is shutting down and takes the memory with it


def is_capturing(stream: int) -> bool:
    """True while `stream` of the current device records a CUDA graph. ValueError for the legacy default stream while another records one."""
    try:
        status = call("cuStreamIsCapturing", stream)
    except DriverError as error:
        if "CAPTURE_IMPLICIT" not in str(error):
            raise
        raise ValueError("stream: the legacy default stream cannot be used while another stream records a CUDA graph; "
                         "pass the recording stream or a stream of your own") from error
    return status != _driver().CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE


def copy_to_device(address: int, array: np.ndarray, stream: int) -> None:
    """Copy a contiguous host array to `address` in stream order; the host array may be reused on return (pageable memory is staged)."""
    if array.nbytes:
        call("cuMemcpyHtoDAsync", address, array.ctypes.data, array.nbytes, stream)


def copy_to_host(array: np.ndarray, address: int, stream: int) -> None:
    """Fill a contiguous host array from `address`, waiting for `stream`."""
    if array.nbytes:
        call("cuMemcpyDtoHAsync", array.ctypes.data, address, array.nbytes, stream)
    call("cuStreamSynchronize", stream)


def synchronize(stream: int) -> None:
    """Wait for all work of `stream`."""
    call("cuStreamSynchronize", stream)
