"""Constants that instructions are made with, checked once for both vocabularies. No numba here: the simulator imports it."""

from typing import Any, NamedTuple


class NamedBarrier(NamedTuple):
    """The two device functions of a named barrier. A kernel binds them to names of its factory first."""

    sync: Any
    arrive: Any


def check_group_count(newest):
    if not isinstance(newest, int) or not 0 <= newest <= 7:
        raise ValueError(f"cp_async_wait_group: expected the number of groups that may stay in flight (an int from 0 "
                         f"to 7), got {newest!r}; call it in the kernel factory, the instruction takes a constant only")


def check_named_barrier(number, threads):
    if not isinstance(number, int) or not 1 <= number <= 15:
        raise ValueError(f"named_barrier: expected a number from 1 to 15 (0 is bar_sync's), got {number!r}")
    if not isinstance(threads, int) or threads % 32 or not 0 < threads <= 1024:
        raise ValueError(f"named_barrier: expected a multiple of 32 threads up to 1024, got {threads!r}")


def check_register_count(count):
    if not isinstance(count, int) or count % 8 or not 24 <= count <= 256:
        raise ValueError(f"set_max_registers: expected a multiple of 8 from 24 to 256, got {count!r}")


#: dtype -> what wgmma calls it.
WGMMA_TYPES = {"bfloat16": "bf16", "float16": "f16"}
#: Widest of the 14-bit fields of a matrix descriptor, which count in units of 16 bytes.
DESCRIPTOR_FIELD = (1 << 14) - 1
_SWIZZLE_MODES = {0: 0, 128: 1}


def check_wgmma(n, dtype, transpose_b, first=0):
    if not isinstance(n, int) or n % 8 or not 8 <= n <= 256:
        raise ValueError(f"wgmma: expected a multiple of 8 columns from 8 to 256, got {n!r}")
    if dtype not in WGMMA_TYPES:
        raise ValueError(f"wgmma: expected dtype 'bfloat16' or 'float16', got {dtype!r}")
    if not isinstance(transpose_b, bool):
        raise ValueError(f"wgmma: expected True (B is MN-major) or False (K-major) for transpose_b, got {transpose_b!r}")
    if not isinstance(first, int) or first < 0:
        raise ValueError(f"wgmma: expected the number of the first accumulator (an int from 0 on), got {first!r}")


def check_wgmma_wait(newest, count):
    if not isinstance(newest, int) or not 0 <= newest <= 7:
        raise ValueError(f"wgmma_wait: expected the number of groups that may stay in flight (an int from 0 to 7), got {newest!r}")
    if not isinstance(count, int) or not 0 <= count <= 256:
        raise ValueError(f"wgmma_wait: expected the length of the accumulators (an int from 0 to 256), got {count!r}")


def check_descriptor(leading, stride, swizzle):
    for name, distance in (("leading", leading), ("stride", stride)):
        if not isinstance(distance, int) or distance % 16 or not 0 <= distance >> 4 <= DESCRIPTOR_FIELD:
            raise ValueError(f"wgmma_descriptor: expected a multiple of 16 bytes below {DESCRIPTOR_FIELD + 1 << 4} for {name}, got {distance!r}")
    if swizzle not in _SWIZZLE_MODES:
        raise ValueError(f"wgmma_descriptor: expected swizzle 0 or 128, got {swizzle!r}")


def descriptor_bits(leading, stride, swizzle):
    """A matrix descriptor without its address (PTX: "Matrix Descriptor Format")."""
    return leading >> 4 << 16 | stride >> 4 << 32 | _SWIZZLE_MODES[swizzle] << 62
