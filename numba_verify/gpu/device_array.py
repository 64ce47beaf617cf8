"""A minimal device array: memory, shape and strides, with `__cuda_array_interface__`.

For the commands, benchmarks and tests of this package, which must run on a GPU machine with no array library. Users bring their own.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from . import driver

# bfloat16 has no type string of its own in the array interface; two void bytes is what torch exports.
_TYPESTR = {"bfloat16": "<V2", "bool": "|b1", "uint8": "|u1"}


class Device(NamedTuple):
    """Which GPU, in the words of CuPy's arrays. The array interface does not say it, and asking the driver costs a call an array."""

    id: int


class DeviceArray:
    """`shape` elements of `dtype` at byte `offset` of `buffer`, `strides` in bytes."""

    def __init__(self, buffer: driver.DeviceBuffer, shape: tuple[int, ...], dtype: np.dtype, strides: tuple[int, ...] | None = None,
                 offset: int = 0):
        self.buffer, self.shape, self.dtype, self.device = buffer, tuple(shape), np.dtype(dtype), Device(buffer.ordinal)
        self.__cuda_array_interface__ = {
            "version": 3, "shape": self.shape, "typestr": _TYPESTR.get(self.dtype.name, self.dtype.str), "strides": strides,
            "data": (buffer.address + offset, False)}

    def bytes_back(self) -> np.ndarray:
        """The whole buffer as uint8, after all work of the legacy default stream."""
        raw = np.empty(self.buffer.nbytes, np.uint8)
        with driver.context(self.buffer.ordinal):
            driver.copy_to_host(raw, self.buffer.address, 0)
        return raw

    def numpy(self) -> np.ndarray:
        """The contents of an array that fills its buffer without gaps."""
        size = int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize
        return self.bytes_back()[:size].view(self.dtype).reshape(self.shape)


def to_device(array: np.ndarray, ordinal: int = 0) -> DeviceArray:
    """A contiguous copy of `array` on GPU `ordinal`."""
    dense = np.ascontiguousarray(array)
    return DeviceArray(upload(dense.reshape(-1).view(np.uint8), ordinal), dense.shape, dense.dtype)


def upload(raw: np.ndarray, ordinal: int = 0) -> driver.DeviceBuffer:
    """The bytes of `raw` in device memory."""
    buffer = driver.DeviceBuffer(raw.nbytes, ordinal)
    with driver.context(ordinal):
        driver.copy_to_device(buffer.address, raw, 0)
        driver.synchronize(0)
    return buffer


def empty(shape: tuple[int, ...], dtype: np.dtype, ordinal: int = 0) -> DeviceArray:
    """Uninitialised memory for `shape` elements."""
    dtype = np.dtype(dtype)
    return DeviceArray(driver.DeviceBuffer(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize, ordinal), shape, dtype)


def tiled(block: np.ndarray, rows: int, ordinal: int = 0) -> DeviceArray:
    """`rows` rows made of copies of `block` ([n, ...] rows): random data by the gigabyte without drawing it all on the host."""
    block = np.ascontiguousarray(block)
    row_bytes = block.nbytes // len(block)
    result = empty((rows, *block.shape[1:]), block.dtype, ordinal)
    with driver.context(ordinal):
        driver.copy_to_device(result.buffer.address, block[:rows].reshape(-1).view(np.uint8), 0)
        filled = min(len(block), rows)
        while filled < rows:
            count = min(filled, rows - filled)
            driver.call("cuMemcpyDtoDAsync", result.buffer.address + filled * row_bytes, result.buffer.address, count * row_bytes, 0)
            filled += count
        driver.synchronize(0)
    return result
