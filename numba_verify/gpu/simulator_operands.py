"""Where the operands of wgmma lie: matrix descriptors, and the elements behind them.

PTX: "Asynchronous Warpgroup Level Matrix Shared Memory Layout", "Strides", "Matrix Descriptor Format". All is counted in chunks of 16
bytes: eight 16-bit elements side by side, of K (K-major) or of M or N (MN-major).
"""
import functools
from typing import NamedTuple

import numpy

from .operands import DESCRIPTOR_FIELD
from .simulator_memory import SHARED_BASE, MemoryFault

CHUNK = 16  # bytes, and elements of K in a product
PATTERN = 1024  # bytes after which the 128-byte swizzle repeats: 8 rows of 128
_FIELDS = (0, 16, 32)  # first bits of start address, leading and stride, in units of 16 bytes
_SWIZZLE = 62
_KNOWN_BITS = sum(DESCRIPTOR_FIELD << bit for bit in _FIELDS) | 3 << _SWIZZLE


class Descriptor(NamedTuple):
    """A matrix descriptor, taken apart; in bytes."""

    start: int
    leading: int
    stride: int
    swizzled: bool


def decode(bits, what):
    if bits & ~_KNOWN_BITS or bits >> _SWIZZLE > 1:
        raise MemoryFault(f"{what}: 0x{bits:x} is no matrix descriptor of wgmma_descriptor, or more was added to it than its address field holds")
    start, leading, stride = ((bits >> bit & DESCRIPTOR_FIELD) << 4 for bit in _FIELDS)
    return Descriptor(start, leading, stride, bool(bits >> _SWIZZLE))


@functools.lru_cache(maxsize=256)
def _offsets(extent, transposed, leading, stride, swizzled):
    """Bytes from the start to every chunk, before the swizzle: [extent, 2] K-major, [16, extent / 8] MN-major (transposed)."""
    outer, inner = numpy.divmod(numpy.arange(CHUNK if transposed else extent)[:, None], 8)
    if transposed:
        blocks = numpy.arange(extent // 8)
        if swizzled:
            return inner * 128 + outer * stride + blocks % 8 * CHUNK + blocks // 8 * leading
        return inner * CHUNK + outer * leading + blocks * stride
    halves = numpy.arange(2)
    if swizzled:
        return inner * 128 + outer * stride + halves * CHUNK
    return inner * CHUNK + outer * stride + halves * leading


def _check_pattern(descriptor, extent, transposed, what):
    """The rules of the 128-byte swizzle, which XORs bits of the address itself: rows are where the pattern has them."""
    start, leading, stride, _ = descriptor
    width = 2 * min(extent, 64) if transposed else 2 * CHUNK
    if start % PATTERN >= 128:
        raise MemoryFault(f"{what}: the operand begins at shared address {start}, in row {start % PATTERN // 128} of the swizzle's pattern of "
                          f"{PATTERN} bytes; it has to begin in row 0")
    if start % 128 + width > 128:
        raise MemoryFault(f"{what}: rows of {width} bytes from byte {start % 128} on do not end within the 128 bytes of the swizzle")
    distances = {"stride": stride if transposed or extent > 8 else 0, "leading": leading if transposed and extent > 64 else 0}
    for name, distance in distances.items():
        if distance % PATTERN:
            raise MemoryFault(f"{what}: {name} is {distance} bytes; with the 128-byte swizzle it is a multiple of {PATTERN}")


def chunks(descriptor, extent, transposed, shared, what):
    """Numbers of the chunks of shared memory that hold an operand: [extent, 2] K-major, [16, extent / 8] MN-major."""
    addresses = descriptor.start + _offsets(extent, transposed, *descriptor[1:])
    if descriptor.swizzled:
        _check_pattern(descriptor, extent, transposed, what)
        addresses ^= addresses >> 3 & 0x70  # bits 4 to 6 by bits 7 to 9
    low, high = int(addresses.min()), int(addresses.max()) + CHUNK
    if low < SHARED_BASE or high > SHARED_BASE + shared.size:
        raise MemoryFault(f"{what}: the operand takes bytes {low - SHARED_BASE} to {high - 1 - SHARED_BASE} (shared addresses {low} to {high - 1}), "
                          f"which are not all within the block's {shared.size} bytes of shared memory")
    return addresses - SHARED_BASE >> 4


def elements(numbers, transposed, shared):
    """The 16-bit patterns in these chunks as a matrix with K along its columns: [extent, 16]."""
    rows = numpy.frombuffer(shared.bytes, numpy.uint16).reshape(-1, 8)[numbers]
    matrix = rows.reshape(len(numbers), -1)
    return matrix.T if transposed else matrix
