"""The device vocabulary, compiled: one name per PTX instruction (or per thing a kernel cannot say in plain numba).

Kernels are factories, `def build(lang, config): ...`, and `lang` is this module or its twin `simulator.language()`, which has the same names in
plain Python. Titles in quotation marks are those of the PTX ISA manual. Kernel arguments are 64-bit addresses and scalars, several results a tuple.

Register classes: u16 "h", u32 / i32 "r", u64 / i64 "l", f32 "f". A float64 where an f32 is due is a typing error: a bare literal such as `1.0`
makes float64 of an expression; write `float32(1.0)`. Integers convert in silence, but unsigned 32-bit arithmetic widens to 64: wrap it in `uint32`.

Warp-wide instructions (shfl, vote, ldmatrix, mma, bar.warp.sync) want all 32 lanes: the member mask is always full.
What a warpgroup executes together (wgmma, setmaxnreg) comes from `warpgroup.py`, the order of grids from `grids.py`.
"""

import numpy
from numba import cuda
from numba.cuda import libdevice, types
from numba.cuda.extending import intrinsic

from . import intrinsics, operands
from .grids import griddepcontrol_launch_dependents, griddepcontrol_wait  # noqa: F401 (part of this vocabulary)
from .intrinsics import GLOBAL_SPACE, SHARED_SPACE, expression, instruction, llvm_intrinsic, vector_load, vector_store
from .warpgroup import (  # noqa: F401 (part of this vocabulary)
    fence_proxy_async,
    set_max_registers,
    wgmma_commit,
    wgmma_descriptor,
    wgmma_fence,
    wgmma_rs,
    wgmma_ss,
    wgmma_wait,
)

# --- types ------------------------------------------------------------------------------------------------------------

uint16 = numpy.uint16
uint32 = numpy.uint32
int32 = numpy.int32
uint64 = numpy.uint64
int64 = numpy.int64
float32 = numpy.float32

u8 = types.uint8
u16 = types.uint16
u32 = types.uint32
i32 = types.int32
u64 = types.uint64
i64 = types.int64
f32 = types.float32

# --- functions, loops, memory -----------------------------------------------------------------------------------------


def device(function):
    """Decorator of device helper functions. Compiling one asks numba for the current GPU; `compile.lower` answers in its place."""
    return cuda.jit(device=True)(function)


@intrinsic
def unroll(typingctx):
    """`unroll()` as the first statement of a `for` body: unroll that loop fully. Its trip count must be constant.

    A local array whose index depends on a loop that is not unrolled lives in memory, not in registers, and NVVM gives
    up on large nests by itself.
    """

    def lower(context, builder, signature, arguments):
        intrinsics.mark_loop_for_full_unroll(builder)
        return context.get_dummy_value()

    return types.void(), lower


@intrinsic
def pointer(typingctx, address, tag):
    """`pointer(address, tag)`: global memory at `address` (uint64) as elements of `tag`; `p[i]` loads and stores."""

    def lower(context, builder, signature, arguments):
        return intrinsics.generic_pointer(context, builder, arguments[0], GLOBAL_SPACE, signature.return_type)

    return types.CPointer(tag.dtype)(types.uint64, tag), lower


@intrinsic
def shared(typingctx, offset, tag):
    """`shared(offset, tag)`: dynamic shared memory from byte `offset` on as elements of `tag`; `p[i]` loads and stores."""

    def lower(context, builder, signature, arguments):
        offset = builder.zext(arguments[0], intrinsics.I64)
        start = builder.gep(intrinsics.shared_base(builder), [offset])
        return intrinsics.generic_pointer(context, builder, start, SHARED_SPACE, signature.return_type)

    return types.CPointer(tag.dtype)(types.uint32, tag), lower


@expression(lambda builder, a, b: builder.udiv(a, b))
def quotient_u32(a: u32, b: u32) -> u32:
    """"div": a // b for a divisor that is not 0. numba's own asks, and goes around the division: on the way ptxas may keep what is not there."""


@instruction("mov.u32 $0, $1;", volatile=True)
def opaque(x: u32) -> u32:
    """A copy whose origin the compiler cannot see: what is computed from it is computed here, and not kept from before."""


@intrinsic
def _shared_symbol_address(typingctx):
    """The 32-bit address where dynamic shared memory begins."""

    def lower(context, builder, signature, arguments):
        return builder.ptrtoint(intrinsics.shared_base(builder), intrinsics.I32)

    return types.uint32(), lower


@device
def shared_address(offset):
    """The 32-bit shared address of byte `offset` of dynamic shared memory, for ldmatrix, cp.async and the v4 accesses.

    It passes through a volatile mov. Otherwise LLVM folds the symbol into every constant offset and ptxas keeps one
    address register per access (168 registers instead of 124 in one kernel on sm_90a). Call it once, then add.
    """
    return uint32(opaque(_shared_symbol_address()) + offset)


def local_array(length, tag):
    """Called in the factory: a function that, in the kernel, gives `length` elements of `tag` of the thread's own.

    Uninitialised. They live in registers as long as every index is a constant after unrolling, else in local memory.
    """
    return intrinsics.make_local_array(length, tag)


# --- who am I: "Special Registers" ------------------------------------------------------------------------------------


@llvm_intrinsic("llvm.nvvm.read.ptx.sreg.tid.x")
def tid_x() -> u32:
    """%tid.x, the thread's number in its block."""


@llvm_intrinsic("llvm.nvvm.read.ptx.sreg.ctaid.x")
def ctaid_x() -> u32:
    """%ctaid.x, the block's column in the grid."""


@llvm_intrinsic("llvm.nvvm.read.ptx.sreg.ctaid.y")
def ctaid_y() -> u32:
    """%ctaid.y, the block's row in the grid."""


@llvm_intrinsic("llvm.nvvm.read.ptx.sreg.nctaid.x")
def nctaid_x() -> u32:
    """%nctaid.x, the number of blocks in a grid row."""


# --- synchronisation: "Parallel Synchronization and Communication Instructions" -----------------------------------------


@instruction("bar.sync 0;", memory=True, convergent=True)
def bar_sync() -> None:
    """"bar, barrier": all threads of the block arrive, and see what the others wrote before."""


@instruction("bar.warp.sync 0xffffffff;", memory=True, convergent=True)
def bar_warp_sync() -> None:
    """"bar.warp.sync": all lanes of the warp arrive, and see what the others wrote before."""


def named_barrier(number, threads):
    """Called in the factory: a NamedBarrier, whose `sync` and `arrive` are the instructions for barrier `number` (1 to 15).

    "bar, barrier": each phase ends when `threads` threads (whole warps) have come by either. `sync` waits for that and
    then sees what the others wrote before they came; `arrive` does not wait.
    """
    operands.check_named_barrier(number, threads)

    @instruction(f"bar.sync {number}, {threads};", memory=True, convergent=True)
    def sync() -> None:
        """"bar.sync"."""

    @instruction(f"bar.arrive {number}, {threads};", memory=True, convergent=True)
    def arrive() -> None:
        """"bar.arrive"."""

    return operands.NamedBarrier(sync, arrive)


def numbered_barrier(threads):
    """Called in the factory: a NamedBarrier whose `sync(number)` and `arrive(number)` take the barrier's number (1 to 15) at run time."""
    operands.check_named_barrier(1, threads)

    @instruction(f"bar.sync $0, {threads};", memory=True, convergent=True)
    def sync(number: u32) -> None:
        """"bar.sync"."""

    @instruction(f"bar.arrive $0, {threads};", memory=True, convergent=True)
    def arrive(number: u32) -> None:
        """"bar.arrive"."""

    return operands.NamedBarrier(sync, arrive)


@instruction("shfl.sync.bfly.b32 $0, $1, $2, 31, -1;", volatile=True, convergent=True)
def shfl_sync_bfly_f32(x: f32, lane_mask: u32) -> f32:
    """"shfl.sync": `x` of lane `lane ^ lane_mask`. Orders no memory."""


@instruction("shfl.sync.bfly.b32 $0, $1, $2, 31, -1;", volatile=True, convergent=True)
def shfl_sync_bfly_u32(x: u32, lane_mask: u32) -> u32:
    """"shfl.sync": `x` of lane `lane ^ lane_mask`. Orders no memory."""


@instruction("shfl.sync.up.b32 $0, $1, $2, 0, -1;", volatile=True, convergent=True)
def shfl_sync_up_u32(x: u32, delta: u32) -> u32:
    """"shfl.sync": `x` of lane `lane - delta`; the lane's own where there is no such lane. Orders no memory."""


@instruction("{ .reg .b32 lo, hi; mov.b64 {lo, hi}, $1; shfl.sync.up.b32 lo, lo, $2, 0, -1; "
             "shfl.sync.up.b32 hi, hi, $2, 0, -1; mov.b64 $0, {lo, hi}; }", volatile=True, convergent=True)
def shfl_sync_up_i64(x: i64, delta: u32) -> i64:
    """"shfl.sync", twice: a 64-bit `x` of lane `lane - delta`; the lane's own where there is no such lane."""


@instruction("shfl.sync.idx.b32 $0, $1, $2, 31, -1;", volatile=True, convergent=True)
def shfl_sync_idx_f32(x: f32, lane: u32) -> f32:
    """"shfl.sync": `x` of lane `lane` (modulo 32). Orders no memory."""


@instruction("shfl.sync.idx.b32 $0, $1, $2, 31, -1;", volatile=True, convergent=True)
def shfl_sync_idx_u32(x: u32, lane: u32) -> u32:
    """"shfl.sync": `x` of lane `lane` (modulo 32). Orders no memory. With a constant lane ptxas knows that all lanes get the same."""


@instruction("{ .reg .pred p, q; setp.ne.u32 p, $1, 0; vote.sync.any.pred q, p, -1; selp.u32 $0, 1, 0, q; }",
             volatile=True, convergent=True)
def vote_sync_any(predicate: u32) -> u32:
    """"vote.sync": 1 if `predicate` is nonzero in some lane of the warp, else 0. Orders no memory."""


@instruction("{ .reg .pred p; setp.ne.u32 p, $1, 0; vote.sync.ballot.b32 $0, p, -1; }", volatile=True, convergent=True)
def vote_sync_ballot(predicate: u32) -> u32:
    """"vote.sync": bit l is set if `predicate` is nonzero in lane l. Orders no memory."""


# --- arithmetic: "Floating Point Instructions" --------------------------------------------------------------------------


@instruction("ex2.approx.ftz.f32 $0, $1;")
def ex2_approx_f32(x: f32) -> f32:
    """"ex2": 2 ** x within 2 ulp; ex2(-inf) = 0; subnormal arguments and results count as 0."""


@instruction("lg2.approx.f32 $0, $1;")
def lg2_approx_f32(x: f32) -> f32:
    """"lg2": log2 x; lg2(0) = -inf."""


@instruction("max.f32 $0, $1, $2;")
def max_f32(a: f32, b: f32) -> f32:
    """"max": the larger; a NaN gives way to the other operand."""


@instruction("fma.rn.f32 $0, $1, $2, $3;")
def fma_f32(a: f32, b: f32, c: f32) -> f32:
    """"fma": a * b + c, rounded once."""


#: tanh within 2 ulp (libdevice), not the tanh.approx instruction, whose error of 5e-4 would show in the scores.
tanh_f32 = libdevice.tanhf


# --- conversion: "Data Movement and Conversion Instructions: cvt" -----------------------------------------------------


@expression(lambda builder, bits: builder.bitcast(bits, intrinsics.REGISTERS[f32][0]))
def b32_to_f32(bits: u32) -> f32:
    """"mov": the same 32 bits, read as a float32."""


@expression(lambda builder, x: builder.bitcast(x, intrinsics.I32))
def f32_to_b32(x: f32) -> u32:
    """"mov": the same 32 bits, read as an integer."""


def _widen_bf16(builder, bits):
    word = builder.shl(builder.zext(bits, intrinsics.I32), intrinsics.I32(16))
    return builder.bitcast(word, intrinsics.REGISTERS[f32][0])


@expression(_widen_bf16)
def bf16_to_f32(bits: u16) -> f32:
    """bfloat16 bits to float32, exact: they are the upper half of one (a shift, no cvt needed)."""


@instruction("cvt.f32.f16 $0, $1;")
def f16_to_f32(bits: u16) -> f32:
    """"cvt": float16 bits to float32, exact."""


@instruction("cvt.rn.bf16.f32 $0, $1;")
def f32_to_bf16(x: f32) -> u16:
    """"cvt": to bfloat16 bits, nearest even; NaN becomes 0x7fff."""


@instruction("cvt.rn.f16.f32 $0, $1;")
def f32_to_f16(x: f32) -> u16:
    """"cvt": to float16 bits, nearest even, infinity from 65520 on; NaN becomes 0x7fff."""


@instruction("cvt.rn.bf16x2.f32 $0, $1, $2;")
def f32_to_bf16x2(high: f32, low: f32) -> u32:
    """"cvt": two bfloat16 in one word, nearest even. PTX order: the upper half comes first."""


@instruction("cvt.rn.f16x2.f32 $0, $1, $2;")
def f32_to_f16x2(high: f32, low: f32) -> u32:
    """"cvt": two float16 in one word, nearest even. PTX order: the upper half comes first."""


# --- wide accesses: "Data Movement and Conversion Instructions: ld, ld.global.nc, st" ----------------------------------


@instruction("ld.global.nc.v4.u32 {$0, $1, $2, $3}, [$4];")
def ld_global_nc_v4_u32(address: u64) -> (u32, u32, u32, u32):
    """"ld.global.nc": 16 aligned bytes of global memory that nobody writes while the kernel runs."""


@instruction("ld.global.nc.v4.f32 {$0, $1, $2, $3}, [$4];")
def ld_global_nc_v4_f32(address: u64) -> (f32, f32, f32, f32):
    """"ld.global.nc": 16 aligned bytes of global memory that nobody writes while the kernel runs."""


@instruction("ld.volatile.global.u64 $0, [$1];", volatile=True)
def ld_volatile_u64(address: u64) -> u64:
    """"ld.volatile": 8 aligned bytes of global memory, fetched where it stands: ptxas moves it past no branch, and drops it never."""


@instruction("prefetch.global.L1 [$0];", volatile=True)
def prefetch_global_l1(address: u64) -> None:
    """"prefetch, prefetchu": the cache line of global memory that holds `address` begins to move to L1."""


@vector_store(GLOBAL_SPACE)
def st_global_v4_u32(address: u64, a: u32, b: u32, c: u32, d: u32) -> None:
    """"st": 16 aligned bytes to global memory."""


@vector_store(GLOBAL_SPACE)
def st_global_v4_f32(address: u64, a: f32, b: f32, c: f32, d: f32) -> None:
    """"st": 16 aligned bytes to global memory."""


@vector_store(GLOBAL_SPACE)
def st_global_v2_f32(address: u64, a: f32, b: f32) -> None:
    """"st": 8 aligned bytes to global memory."""


@vector_load(SHARED_SPACE)
def ld_shared_v4_f32(address: u32) -> (f32, f32, f32, f32):
    """"ld": 16 aligned bytes from a `shared_address`."""


@vector_store(SHARED_SPACE)
def st_shared_v4_f32(address: u32, a: f32, b: f32, c: f32, d: f32) -> None:
    """"st": 16 aligned bytes to a `shared_address`."""


@vector_store(SHARED_SPACE)
def st_shared_v4_u32(address: u32, a: u32, b: u32, c: u32, d: u32) -> None:
    """"st": 16 aligned bytes to a `shared_address`."""


# --- asynchronous copies: "Data Movement and Conversion Instructions: Asynchronous copy" --------------------------------


@instruction("cp.async.cg.shared.global.L2::128B [$0], [$1], 16;", memory=True)
def cp_async_16(shared_address: u32, global_address: u64) -> None:
    """"cp.async": start to copy 16 aligned bytes; they may be read only after commit and wait (and a barrier)."""


@instruction("cp.async.cg.shared.global.L2::128B [$0], [$1], 16, $2;", memory=True)
def cp_async_16_zfill(shared_address: u32, global_address: u64, source_bytes: u32) -> None:
    """"cp.async": the same, but only the first `source_bytes` (0 to 16) are read, the rest of the 16 is zero.

    With 0 nothing is read at all: the way to predicate a copy without a branch.
    """


@instruction("cp.async.commit_group;", memory=True)
def cp_async_commit() -> None:
    """"cp.async.commit_group": the copies this thread has started since the last commit become its newest group."""


def cp_async_wait_group(newest):
    """Called in the factory: the instruction that waits for all of this thread's groups but the `newest` ones.

    "cp.async.wait_group". The data are then visible to this thread; a barrier makes them visible to the others.
    """
    operands.check_group_count(newest)

    @instruction(f"cp.async.wait_group {newest};", memory=True)
    def cp_async_wait() -> None:
        """"cp.async.wait_group"."""

    return cp_async_wait


# --- mbarriers: "Parallel Synchronization and Communication Instructions: mbarrier" -----------------------------------------


@instruction("mbarrier.init.shared.b64 [$0], $1;", memory=True)
def mbarrier_init(address: u32, count: u32) -> None:
    """"mbarrier.init": the 8 aligned bytes at a `shared_address` become a barrier whose phases end with `count` arrivals.

    The first phase has parity 0. A bar_sync makes the barrier known to the other threads.
    """


@instruction("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [$0]; }", memory=True, convergent=True)
def mbarrier_arrive(address: u32) -> None:
    """"mbarrier.arrive": one arrival, after all this thread did before; does not wait."""


@instruction("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [$0], $1; }", memory=True, convergent=True)
def mbarrier_arrive_count(address: u32, count: u32) -> None:
    """"mbarrier.arrive", with a count: as many arrivals at once."""


@instruction("cp.async.mbarrier.arrive.noinc.shared.b64 [$0];", memory=True, convergent=True)
def cp_async_mbarrier_arrive_noinc(address: u32) -> None:
    """"cp.async.mbarrier.arrive", .noinc: one arrival, when all copies that this thread has started so far are complete.

    It happens by itself and does not wait. The manual does not promise that it comes after the thread's other stores.
    """


@instruction("{ .reg .pred done; mbarrier.test_wait.parity.shared.b64 done, [$1], $2; selp.u32 $0, 1, 0, done; }", memory=True, convergent=True)
def mbarrier_test(address: u32, parity: u32) -> u32:
    """"mbarrier.test_wait", .parity: 1 if the phase of that parity is complete (see `mbarrier_wait`), 0 if not. Does not wait."""


def mbarrier_wait(suspend):
    """Called in the factory: `wait(address, parity)`, which returns when the phase of that parity is complete.

    "mbarrier.test_wait, mbarrier.try_wait", .parity: the phase in progress or the one before it; a fresh barrier counts
    as one after a phase of parity 1. What the arriving threads did before, and copies that arrived, is then visible.
    suspend: try_wait, which lets the warp sleep between two looks (sm_90 and up), else test_wait (sm_80 and up).
    """
    test = "try_wait" if suspend else "test_wait"

    # The braces keep the label local: the text may stand in a kernel many times.
    @instruction(f"{{ .reg .pred done; again: mbarrier.{test}.parity.shared.b64 done, [$0], $1; @!done bra again; }}",
                 memory=True, convergent=True)
    def wait(address: u32, parity: u32) -> None:
        """"mbarrier.test_wait, mbarrier.try_wait"."""

    return wait


# --- tensor cores: "Warp Level Matrix Instructions" ---------------------------------------------------------------------


@instruction("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];", memory=True, convergent=True)
def ldmatrix_x4(shared_address: u32) -> (u32, u32, u32, u32):
    """"Warp-level matrix load instruction: ldmatrix": four 8 x 8 matrices of 16-bit elements.

    Lane l gives the address of row l % 8 (16 aligned bytes) of matrix l // 8. Result m of lane l holds row l // 4,
    columns 2 (l % 4) (low half) and 2 (l % 4) + 1 (high half) of matrix m.
    """


@instruction("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0, $1, $2, $3}, [$4];", memory=True, convergent=True)
def ldmatrix_x4_trans(shared_address: u32) -> (u32, u32, u32, u32):
    """"Warp-level matrix load instruction: ldmatrix", .trans: the same matrices transposed.

    Result m of lane l holds rows 2 (l % 4) (low half) and 2 (l % 4) + 1 (high half) of column l // 4 of matrix m.
    """


_MMA = ("mma.sync.aligned.m16n8k16.row.col.f32.{0}.{0}.f32 "
        "{{$0, $1, $2, $3}}, {{$4, $5, $6, $7}}, {{$8, $9}}, {{$10, $11, $12, $13}};")
_ACCUMULATORS = ("c0", "c1", "c2", "c3")


@instruction(_MMA.format("bf16"), convergent=True, tied=_ACCUMULATORS)
def mma_m16n8k16_bf16(a0: u32, a1: u32, a2: u32, a3: u32, b0: u32, b1: u32,
                      c0: f32, c1: f32, c2: f32, c3: f32) -> (f32, f32, f32, f32):
    """"Multiply-and-Accumulate Instruction: mma", m16n8k16: D = A (16 x 16 bf16) B (16 x 8 bf16) + C (16 x 8 float32).

    Fragments ("Matrix Fragments for mma.m16n8k16 with floating point type"), g = lane // 4, t = lane % 4, low half first:
        a0  A[g, 2t], A[g, 2t + 1]              a1  A[g + 8, 2t], A[g + 8, 2t + 1]
        a2  A[g, 2t + 8], A[g, 2t + 9]          a3  A[g + 8, 2t + 8], A[g + 8, 2t + 9]
        b0  B[2t, g], B[2t + 1, g]              b1  B[2t + 8, g], B[2t + 9, g]
        c0, c1  C[g, 2t], C[g, 2t + 1]          c2, c3  C[g + 8, 2t], C[g + 8, 2t + 1]        results as c
    """


@instruction(_MMA.format("f16"), convergent=True, tied=_ACCUMULATORS)
def mma_m16n8k16_f16(a0: u32, a1: u32, a2: u32, a3: u32, b0: u32, b1: u32,
                     c0: f32, c1: f32, c2: f32, c3: f32) -> (f32, f32, f32, f32):
    """The same with float16 A and B; fragments as in `mma_m16n8k16_bf16`."""
