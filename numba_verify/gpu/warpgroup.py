"""The part of the device vocabulary that a warpgroup executes together: four warps whose first is a multiple of four. sm_90a only.

Names of `ptx`, which imports them; "Asynchronous Warpgroup Level Matrix Instructions" if no other section is named. Every
thread of the warpgroup executes the same one, with the same descriptors.

A product starts with `wgmma_ss` or `wgmma_rs` and goes on by itself: nobody may touch its registers, or write what it reads
in shared memory, before a `wgmma_wait` for its group. The order of things:

    fence_proxy_async()       whoever wrote the operands in shared memory, or who waited for them, if it was not TMA
    wgmma_fence()             after the last other access to the accumulators and A registers; not between products
    wgmma_ss(...), ...        products one after the other add up in the same registers
    wgmma_commit()            those since the last commit are a group
    wgmma_wait(...)           now the accumulators are there
"""

from numba.cuda import types

from . import intrinsics, operands
from .intrinsics import expression, in_place, instruction

u32, u64, f32 = types.uint32, types.uint64, types.float32
accumulators = types.CPointer(f32)


# --- order ------------------------------------------------------------------------------------------------------------


@instruction("wgmma.fence.sync.aligned;", memory=True, convergent=True)
def wgmma_fence() -> None:
    """"wgmma.fence": products that follow see what this warp did to registers (and, with the proxy fence, to memory) before."""


@instruction("wgmma.commit_group.sync.aligned;", memory=True, convergent=True)
def wgmma_commit() -> None:
    """"wgmma.commit_group": the products since the last commit become the newest group."""


def wgmma_wait(newest, count):
    """Called in the factory: the instruction that waits for all groups but the `newest` ones (0 to 7).

    "wgmma.wait_group". With a `count` it takes a local array of as many float32, which nothing reads before: give it
    the accumulators of the groups it waits for. With 0 it takes no argument, for a group whose accumulators a later
    wait takes.
    """
    operands.check_wgmma_wait(newest, count)
    text = f"wgmma.wait_group.sync.aligned {newest};"
    if not count:

        @instruction(text, memory=True, convergent=True)
        def wait() -> None:
            """"wgmma.wait_group"."""

        return wait

    @in_place(text, count, memory=True)
    def wait_for(acc: accumulators) -> None:
        """"wgmma.wait_group"."""

    return wait_for


@instruction("fence.proxy.async.shared::cta;", memory=True)
def fence_proxy_async() -> None:
    """"membar / fence", .proxy.async: what this thread wrote to shared memory, or knows of, is there for wgmma to read.

    wgmma reads shared memory through the asynchronous proxy; ordinary stores and cp.async write through the generic one.
    """


# --- operands in shared memory: "Asynchronous Warpgroup Level Matrix Shared Memory Layout" -----------------------------


def wgmma_descriptor(leading, stride, swizzle):
    """Called in the factory: `descriptor(address)`, which says how an operand lies in shared memory from `address` on.

    "Matrix Descriptor Format". leading, stride: distances in bytes, multiples of 16; swizzle: 0, or 128 for rows of
    128 bytes whose 16-byte chunk c of row r lies at place c ^ (r & 7), from a multiple of 1024 bytes on.

        K-major, swizzle 0     8 x 8 matrices of 128 bytes (8 rows of 16); leading: to the next one in K, stride: in M or N
        K-major, swizzle 128   rows of 64 elements of K; stride: to the next 8 rows; a k step of 16 is 32 bytes further
        MN-major, swizzle 128  rows of 64 elements of N; leading: to the next 64 of N, stride: to the next 8 of K

    To move it by n bytes (a multiple of 16) add n >> 4.
    """
    operands.check_descriptor(leading, stride, swizzle)
    constant = intrinsics.I64(operands.descriptor_bits(leading, stride, swizzle))

    def codegen(builder, address):
        field = builder.and_(builder.lshr(address, intrinsics.I32(4)), intrinsics.I32(operands.DESCRIPTOR_FIELD))
        return builder.or_(builder.zext(field, intrinsics.I64), constant)

    @expression(codegen)
    def descriptor(address: u32) -> u64:
        """"Matrix Descriptor Format"."""

    return descriptor


# --- products: "Multiply-and-Accumulate Instruction: wgmma.mma_async" ---------------------------------------------------


def _product(n, dtype, transpose_b, registers, first=0):
    """The text of a product. Operands: n / 2 accumulators, A (a descriptor or four registers), B, whether to accumulate."""
    operands.check_wgmma(n, dtype, transpose_b, first)
    element, count = operands.WGMMA_TYPES[dtype], n // 2
    acc, a = (", ".join(f"${i}" for i in range(begin, end)) for begin, end in ((0, count), (count, count + registers)))
    a, transposes = (f"{{{a}}}", f"{int(transpose_b)}") if registers > 1 else (a, f"0, {int(transpose_b)}")
    b = count + registers
    return (f"{{ .reg .pred add; setp.ne.b32 add, ${b + 1}, 0; wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{element}.{element} "
            f"{{{acc}}}, {a}, ${b}, add, 1, 1, {transposes}; }}")


def wgmma_ss(n, dtype, transpose_b, first=0):
    """Called in the factory: `product(acc, a, b, accumulate)`, D (64 x n) = A (64 x 16) B (16 x n), plus D if accumulate is not 0.

    A and B are descriptors; A is K-major, B too unless transpose_b makes it MN-major. dtype: "bfloat16" or "float16";
    n: a multiple of 8 up to 256. acc is a local array of which n / 2 float32 from `first` on are D ("Register Fragments",
    wgmma D): warp w of the group holds rows 16 w to 16 w + 15, and with g = lane // 4, t = lane % 4, for every j below n / 8:

        acc[4 j], acc[4 j + 1]      D[16 w + g, 8 j + 2 t], D[16 w + g, 8 j + 2 t + 1]
        acc[4 j + 2], acc[4 j + 3]  D[16 w + g + 8, 8 j + 2 t], D[16 w + g + 8, 8 j + 2 t + 1]
    """

    @in_place(_product(n, dtype, transpose_b, 1, first), n // 2, first=first)
    def product(acc: accumulators, a_descriptor: u64, b_descriptor: u64, accumulate: u32) -> None:
        """"wgmma.mma_async"."""

    return product


def wgmma_rs(n, dtype, transpose_b):
    """Called in the factory: `product(acc, a0, a1, a2, a3, b, accumulate)`, as `wgmma_ss` with A in registers.

    ("Register Fragments", wgmma A), low half first, w, g and t as for D:

        a0  A[16 w + g, 2 t], A[16 w + g, 2 t + 1]              a1  A[16 w + g + 8, 2 t], A[16 w + g + 8, 2 t + 1]
        a2  A[16 w + g, 2 t + 8], A[16 w + g, 2 t + 9]          a3  A[16 w + g + 8, 2 t + 8], A[16 w + g + 8, 2 t + 9]
    """

    @in_place(_product(n, dtype, transpose_b, 4), n // 2)
    def product(acc: accumulators, a0: u32, a1: u32, a2: u32, a3: u32, b_descriptor: u64, accumulate: u32) -> None:
        """"wgmma.mma_async"."""

    return product


# --- registers: "Miscellaneous Instructions" --------------------------------------------------------------------------


def set_max_registers(count, increase):
    """Called in the factory: the instruction that lets every thread of its warpgroup own `count` registers from here on.

    "setmaxnreg": a multiple of 8 from 24 to 256. With `increase` it waits until others have given enough back.
    """
    operands.check_register_count(count)
    direction = "inc" if increase else "dec"

    @instruction(f"setmaxnreg.{direction}.sync.aligned.u32 {count};", volatile=True, convergent=True)
    def set_registers() -> None:
        """"setmaxnreg"."""

    return set_registers
