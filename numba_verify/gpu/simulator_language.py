"""The device vocabulary, simulated: the names of `ptx` in plain Python. See there for what each one does.

Casts take integers (uint32 and the like: a mask) or numbers (float32: a Python float; it is rounded when stored).
"""
import functools
import math
import operator
import struct
import sys

import numpy
from greenlet import getcurrent

from . import operands
from . import simulator_barriers as barriers
from . import simulator_matrix as matrix
from . import simulator_memory as memory
from .simulator import barrier, collective
from .simulator_memory import POISON, SHARED_BASE, MemoryFault, check_access
from .simulator_races import TrackedPointer
from .simulator_warpgroup import (  # noqa: F401 (part of this vocabulary)
    fence_proxy_async,
    set_max_registers,
    wgmma_commit,
    wgmma_descriptor,
    wgmma_fence,
    wgmma_rs,
    wgmma_ss,
    wgmma_wait,
)

_frame = sys._getframe

# --- types ------------------------------------------------------------------------------------------------------------

# `partial` of a C function: half the price of a Python function, and casts are the most frequent call of all.
uint16 = functools.partial(operator.and_, 0xFFFF)
uint32 = functools.partial(operator.and_, 0xFFFFFFFF)
uint64 = functools.partial(operator.and_, 0xFFFFFFFFFFFFFFFF)
float32 = float

u8, u16, u32, i32, u64, i64, f32 = memory.u8, memory.u16, memory.u32, memory.i32, memory.u64, memory.i64, memory.f32


def int32(x):
    return ((x + 0x80000000) & 0xFFFFFFFF) - 0x80000000


def int64(x):
    return ((x + 0x8000000000000000) & 0xFFFFFFFFFFFFFFFF) - 0x8000000000000000


# --- functions, loops, memory -----------------------------------------------------------------------------------------


def device(function):
    return function


def unroll():
    pass


def pointer(address, tag):
    view = memory.global_pointer(address, tag)
    return view if getcurrent().block.races is None else memory.CheckedPointer(view)


def shared(offset, tag):
    me = getcurrent()
    view = me.block.shared.pointer(offset, tag)
    return view if me.block.races is None else TrackedPointer(view, offset, tag.size, me)


def quotient_u32(a, b):
    return a // b


def opaque(x):
    return x


def shared_address(offset):
    return SHARED_BASE + offset


def local_array(length, tag):
    # Every call gives fresh garbage, so that a kernel which relies on old contents is seen.
    garbage = math.nan if tag is f32 else (1 << 8 * tag.size) - 1
    return lambda: [garbage] * length


# --- who am I ---------------------------------------------------------------------------------------------------------


def tid_x():
    return getcurrent().tid


def ctaid_x():
    return getcurrent().block.index[0]


def ctaid_y():
    return getcurrent().block.index[1]


def nctaid_x():
    return getcurrent().block.grid_width


# --- synchronisation --------------------------------------------------------------------------------------------------


def bar_sync():
    barrier(_frame(1))


def _end_interval(values, block):
    if block.races is not None:
        block.races.join_warp(getcurrent())


def bar_warp_sync():
    collective(getcurrent(), _end_interval, None, _frame(1))


def named_barrier(number, threads):
    operands.check_named_barrier(number, threads)

    def named_barrier_sync():
        barriers.arrive_named(number, threads, True, _frame(1))

    def named_barrier_arrive():
        barriers.arrive_named(number, threads, False, _frame(1))

    return operands.NamedBarrier(named_barrier_sync, named_barrier_arrive)


def numbered_barrier(threads):
    operands.check_named_barrier(1, threads)

    def numbered_barrier_sync(number):
        barriers.arrive_named(number, threads, True, _frame(1))

    def numbered_barrier_arrive(number):
        barriers.arrive_named(number, threads, False, _frame(1))

    return operands.NamedBarrier(numbered_barrier_sync, numbered_barrier_arrive)


def _bfly(values, block):
    return values


def _up(values, block):
    return values


def _idx(values, block):
    return values


def shfl_sync_bfly_f32(x, lane_mask):
    me = getcurrent()
    return collective(me, _bfly, x, _frame(1))[(me.lane ^ lane_mask) & 31]


shfl_sync_bfly_u32 = shfl_sync_bfly_f32


def shfl_sync_up_u32(x, delta):
    me = getcurrent()
    source = me.lane - delta
    return collective(me, _up, x, _frame(1))[source if source >= 0 else me.lane]


shfl_sync_up_i64 = shfl_sync_up_u32


def shfl_sync_idx_f32(x, lane):
    return collective(getcurrent(), _idx, x, _frame(1))[lane & 31]


shfl_sync_idx_u32 = shfl_sync_idx_f32


def _any(values, block):
    return 1 if any(values) else 0


def _ballot(values, block):
    return sum(1 << lane for lane, value in enumerate(values) if value)


def vote_sync_any(predicate):
    return collective(getcurrent(), _any, predicate, _frame(1))


def vote_sync_ballot(predicate):
    return collective(getcurrent(), _ballot, predicate, _frame(1))


# --- arithmetic -------------------------------------------------------------------------------------------------------


def ex2_approx_f32(x):
    if x < -126.0:
        return 0.0  # .ftz: a subnormal result is flushed
    if x >= 128.0:
        return math.inf
    return 2.0**x


def lg2_approx_f32(x):
    if x > 0.0:
        return math.log2(x)
    return -math.inf if x == 0.0 else math.nan


def max_f32(a, b):
    return a if a >= b or b != b else b


def fma_f32(a, b, c):
    return a * b + c


tanh_f32 = math.tanh

# --- conversion -------------------------------------------------------------------------------------------------------

_FLOAT, _WORD = struct.Struct("<f"), struct.Struct("<I")


def b32_to_f32(bits):
    return _FLOAT.unpack(_WORD.pack(bits))[0]


def f32_to_b32(x):
    try:
        return _WORD.unpack(_FLOAT.pack(x))[0]
    except OverflowError:
        return 0x7F800000 if x > 0 else 0xFF800000


# All 65536 values of a 16-bit float: a list lookup is the cheapest conversion, and kernels convert every KV element.
_BITS16 = numpy.arange(1 << 16, dtype=numpy.uint32)
bf16_to_f32 = (_BITS16 << 16).view(numpy.float32).tolist().__getitem__
f16_to_f32 = _BITS16.astype(numpy.uint16).view(numpy.float16).astype(numpy.float32).tolist().__getitem__


def f32_to_bf16(x):
    if x != x:
        return 0x7FFF
    bits = f32_to_b32(x)
    # Round to nearest even: add half a unit, less one if the kept part is even.
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


_HALF = struct.Struct("<e")
_BITS = struct.Struct("<H")


def f32_to_f16(x):
    if x != x:
        return 0x7FFF
    try:
        # Through float32 first, as the operand of the instruction is one.
        return _BITS.unpack(_HALF.pack(b32_to_f32(f32_to_b32(x))))[0]
    except OverflowError:
        return 0x7C00 if x > 0 else 0xFC00


def f32_to_bf16x2(high, low):
    return f32_to_bf16(high) << 16 | f32_to_bf16(low)


def f32_to_f16x2(high, low):
    return f32_to_f16(high) << 16 | f32_to_f16(low)


# --- wide accesses ----------------------------------------------------------------------------------------------------

_WORDS4, _FLOATS4 = struct.Struct("<4I"), struct.Struct("<4f")


def ld_global_nc_v4_u32(address):
    span, offset = check_access(address, 16, 16, "ld_global_nc_v4_u32")
    return _WORDS4.unpack_from(span.bytes, offset)


def ld_global_nc_v4_f32(address):
    span, offset = check_access(address, 16, 16, "ld_global_nc_v4_f32")
    return _FLOATS4.unpack_from(span.bytes, offset)


def ld_volatile_u64(address):
    span, offset = check_access(address, 8, 8, "ld_volatile_u64")
    return int.from_bytes(span.bytes[offset:offset + 8], "little")


def prefetch_global_l1(address):
    check_access(address, 1, 1, "prefetch_global_l1")


def st_global_v4_u32(address, a, b, c, d):
    span, offset = check_access(address, 16, 16, "st_global_v4_u32")
    _WORDS4.pack_into(span.bytes, offset, a, b, c, d)


def st_global_v4_f32(address, a, b, c, d):
    span, offset = check_access(address, 16, 16, "st_global_v4_f32")
    floats = span.bytes[offset:offset + 16].cast("f")
    # Element by element: unlike struct, a memoryview rounds what is too large for float32 to infinity, as the GPU does.
    floats[0], floats[1], floats[2], floats[3] = a, b, c, d


def st_global_v2_f32(address, a, b):
    span, offset = check_access(address, 8, 8, "st_global_v2_f32")
    floats = span.bytes[offset:offset + 8].cast("f")
    floats[0], floats[1] = a, b


def _shared_access(address, size, write, what):
    """The block's shared memory and the offset of a checked access; told to the race tracker if there is one."""
    me = getcurrent()
    block = me.block
    offset = block.shared.check(address, size, what)
    if block.races is not None:
        block.races.record(me, offset, size, write, _frame(2))
    return block.shared, offset


def ld_shared_v4_f32(address):
    block_memory, offset = _shared_access(address, 16, False, "ld_shared_v4_f32")
    return _FLOATS4.unpack_from(block_memory.bytes, offset)


def st_shared_v4_f32(address, a, b, c, d):
    block_memory, offset = _shared_access(address, 16, True, "st_shared_v4_f32")
    floats, i = block_memory.views[f32], offset >> 2
    floats[i], floats[i + 1], floats[i + 2], floats[i + 3] = a, b, c, d


def st_shared_v4_u32(address, a, b, c, d):
    block_memory, offset = _shared_access(address, 16, True, "st_shared_v4_u32")
    _WORDS4.pack_into(block_memory.bytes, offset, a, b, c, d)


# --- asynchronous copies ----------------------------------------------------------------------------------------------

_POISON16 = bytes([POISON]) * 16


def _begin_copy(shared_address, data, what):
    me = getcurrent()
    block = me.block
    target = block.shared.check(shared_address, 16, what)
    if block.races is not None:
        block.races.begin_copy(me, target, _frame(2))
    # Nobody may look at the target before the copy has landed: until then it holds poison.
    block.shared.bytes[target:target + 16] = _POISON16
    me.copies.open.append((target, data))


def cp_async_16(shared_address, global_address):
    span, offset = check_access(global_address, 16, 16, "cp_async_16")
    _begin_copy(shared_address, bytes(span.bytes[offset:offset + 16]), "cp_async_16")


def cp_async_16_zfill(shared_address, global_address, source_bytes):
    if not 0 <= source_bytes <= 16:
        raise MemoryFault(f"cp_async_16_zfill: expected 0 to 16 source bytes, got {source_bytes}")
    data = b""
    if source_bytes:
        span, offset = check_access(global_address, source_bytes, 16, "cp_async_16_zfill")
        data = bytes(span.bytes[offset:offset + source_bytes])
    _begin_copy(shared_address, data.ljust(16, b"\0"), "cp_async_16_zfill")


def cp_async_commit():
    getcurrent().copies.commit()


def cp_async_wait_group(newest):
    operands.check_group_count(newest)

    def cp_async_wait():
        me = getcurrent()
        block = me.block
        batches = me.copies.wait(newest, block, _frame(1))
        if block.races is not None:
            block.races.acquire_copies(me, batches)

    return cp_async_wait


# --- mbarriers --------------------------------------------------------------------------------------------------------


def mbarrier_init(address, count):
    me = getcurrent()
    made = barriers.init_mbarrier(me, address, count)
    if me.block.races is not None:
        me.block.races.init_mbarrier(me, made, _frame(1))


def mbarrier_arrive(address):
    _arrive(address, 1, "mbarrier_arrive", _frame(1))


def mbarrier_arrive_count(address, count):
    _arrive(address, count, "mbarrier_arrive_count", _frame(1))


def _arrive(address, count, what, frame):
    me = getcurrent()
    block = me.block
    found = barriers.find_mbarrier(block, address, what)
    if block.races is not None:
        block.races.release_mbarrier(me, found, frame)
    found.arrive(block, frame, count)


def cp_async_mbarrier_arrive_noinc(address):
    me = getcurrent()
    block = me.block
    found = barriers.find_mbarrier(block, address, "cp_async_mbarrier_arrive_noinc")
    found.copies += me.copies.announce()
    if block.races is not None:
        block.races.release_copies(me, found, _frame(1))
    found.arrive(block, _frame(1))


def mbarrier_test(address, parity):
    me = getcurrent()
    block = me.block
    found = barriers.find_mbarrier(block, address, "mbarrier_test")
    if found.phase & 1 == parity:
        return 0
    if block.races is not None:
        block.races.acquire_mbarrier(me, found, _frame(1))
    return 1


def mbarrier_wait(suspend):
    def mbarrier_wait(address, parity):
        me = getcurrent()
        block = me.block
        found = barriers.find_mbarrier(block, address, "mbarrier_wait")
        if found.phase & 1 == parity:
            found.wait(me)
        elif parity != 0 and parity != 1:
            raise MemoryFault(f"mbarrier_wait: expected a parity of 0 or 1, got {parity}")
        if block.races is not None:
            block.races.acquire_mbarrier(me, found, _frame(1))

    return mbarrier_wait


# --- grids ------------------------------------------------------------------------------------------------------------

# Grids run one after another here. What is checked is that every thread of one that may overlap waits (see `simulator.launch`).


def griddepcontrol_launch_dependents():
    return None


def griddepcontrol_wait():
    getcurrent().has_waited = True


# --- tensor cores -----------------------------------------------------------------------------------------------------


def ldmatrix_x4(shared_address):
    _shared_access(shared_address, 16, False, "ldmatrix_x4")
    me = getcurrent()
    return collective(me, matrix.ldmatrix, shared_address, _frame(1))[me.lane]


def ldmatrix_x4_trans(shared_address):
    _shared_access(shared_address, 16, False, "ldmatrix_x4_trans")
    me = getcurrent()
    return collective(me, matrix.ldmatrix_trans, shared_address, _frame(1))[me.lane]


def mma_m16n8k16_bf16(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3):
    me = getcurrent()
    operands = matrix.OPERANDS.pack(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3)
    return collective(me, matrix.mma_bf16, operands, _frame(1))[me.lane]


def mma_m16n8k16_f16(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3):
    me = getcurrent()
    operands = matrix.OPERANDS.pack(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3)
    return collective(me, matrix.mma_f16, operands, _frame(1))[me.lane]
