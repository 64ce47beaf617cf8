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
