"""One small kernel for every name of the device vocabulary, with its inputs and what NumPy says comes out."""

import re
from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np

BLOCK = 128
WARP = 32
SPECIAL = np.array([0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 1e-45, -1e-40, 1.17549435e-38, 3.4028235e38, -3.4028235e38,
                    65519.996, 65520.0, 2.0**-14, 2.0**-24, 2.0**-25, 1.5 * 2.0**-25,
                    1 + 2.0**-11, 1 + 3 * 2.0**-11, 1 + 2.0**-8, 1 + 3 * 2.0**-8], np.float32)


@dataclass(frozen=True)
class Case:
    """A kernel that uses one instruction.

    build(lang, config); instruction: a pattern its PTX holds; inputs(rng) -> arrays; outputs: empty arrays, the kernel's last arguments;
    check(inputs, outputs) compares. One block of 128 threads unless blocks says more. needs: the first architecture that has it; with a
    letter ("sm_90a") the only one.
    """

    name: str
    build: Callable
    instruction: str
    inputs: Callable
    outputs: Callable
    check: Callable
    blocks: tuple = (1, 1)
    shared_bytes: int = 0
    needs: str = "sm_80"

    def exists_on(self, arch):
        (first, letter), (number, _) = (re.fullmatch(r"sm_(\d+)([a-z]?)", name).groups() for name in (self.needs, arch))
        return arch == self.needs if letter else int(number) >= int(first)


def elementwise(name, tags, out_tag):
    """y[i] = lang.name(x[i], ...): one thread an element."""

    def build(lang, config):
        uint32, block = lang.uint32, lang.uint32(BLOCK)
        tid, ctaid, pointer, function = lang.tid_x, lang.ctaid_x, lang.pointer, getattr(lang, name)
        given, made = [getattr(lang, tag) for tag in tags], getattr(lang, out_tag)
        first, second, third = (given * 3)[:3]

        def one(x, y):
            i = uint32(ctaid() * block + tid())
            pointer(y, made)[i] = function(pointer(x, first)[i])

        def two(x, z, y):
            i = uint32(ctaid() * block + tid())
            pointer(y, made)[i] = function(pointer(x, first)[i], pointer(z, second)[i])

        def three(x, z, w, y):
            i = uint32(ctaid() * block + tid())
            pointer(y, made)[i] = function(pointer(x, first)[i], pointer(z, second)[i], pointer(w, third)[i])

        return (one, two, three)[len(tags) - 1]

    return build


def elementwise_case(name, tags, out_tag, instruction, inputs, expected, rtol=0.0, atol=0.0):
    size = len(inputs(np.random.default_rng(0))[0])
    dtype = {"f32": np.float32, "u16": np.uint16, "u32": np.uint32, "i64": np.int64, "u64": np.uint64}[out_tag]

    def check(given, made):
        with np.errstate(all="ignore"):
            wanted = expected(*given)
        if rtol or atol:
            np.testing.assert_allclose(made[0], wanted, rtol=rtol, atol=atol)
        else:
            np.testing.assert_array_equal(made[0], wanted)

    build = elementwise(name, tags, out_tag)
    return Case(name, build, instruction, inputs, lambda: [np.zeros(size, dtype)], check, blocks=(size // BLOCK, 1))


def floats(count, scale):
    """`count` * 128 floats: the special ones, then random ones."""

    def make(rng):
        values = np.concatenate([SPECIAL, scale * rng.standard_normal(BLOCK * 4 - SPECIAL.size).astype(np.float32)])
        return [rng.permutation(values) for _ in range(count)]

    return make


def float_patterns(rng):
    """Float32 of every exponent, ties and NaN payloads among them."""
    patterns = rng.integers(0, 1 << 32, 1 << 13, dtype=np.uint64).astype(np.uint32)
    patterns[::4] &= 0xFFFF8000  # ties of bfloat16
    patterns[1::4] = np.linspace(-2.0**-13, 2.0**-13, patterns[1::4].size, dtype=np.float32).view(np.uint32)  # float16 subnormals
    patterns[2::4] = (np.float32(1) + np.arange(patterns[2::4].size, dtype=np.float32) * 2.0**-12).view(np.uint32)  # ties of float16
    patterns[3::4][:SPECIAL.size] = SPECIAL.view(np.uint32)
    return [patterns.view(np.float32)]


def all_bits16(rng):
    return [np.arange(1 << 16, dtype=np.uint16)]


def narrowed(dtype):
    def expected(x):
        return np.where(np.isnan(x), np.uint16(0x7FFF), x.astype(dtype).view(np.uint16))

    return expected


def flushed_exp2(x):
    y = np.exp2(np.where(np.abs(x) < 1.17549435e-38, 0, x).astype(np.float64))
    return np.where(y < 1.17549435e-38, 0, y).astype(np.float32)


def packed(dtype):
    one = narrowed(dtype)
    return lambda high, low: one(high).astype(np.uint32) << 16 | one(low)


# The simulator rounds a * b + c twice (double, then float32), the GPU once: one unit in the last place.
ULP = 2.0**-23
ARITHMETIC = [
    elementwise_case("ex2_approx_f32", ["f32"], "f32", r"ex2\.approx\.ftz\.f32", floats(1, 60.0), flushed_exp2, rtol=2 * ULP),
    elementwise_case("lg2_approx_f32", ["f32"], "f32", r"lg2\.approx\.f32", floats(1, 1e3),
                     lambda x: np.log2(x.astype(np.float64)), rtol=2 * ULP, atol=2.0**-22),
    elementwise_case("max_f32", ["f32", "f32"], "f32", r"max\.f32", floats(2, 1.0), np.fmax),
    elementwise_case("fma_f32", ["f32"] * 3, "f32", r"fma\.rn\.f32", floats(3, 1.0),
                     lambda a, b, c: (a.astype(np.float64) * b + c).astype(np.float32), rtol=ULP, atol=1e-45),
    elementwise_case("tanh_f32", ["f32"], "f32", r"ex2\.approx", floats(1, 2.0),
                     lambda x: np.tanh(x.astype(np.float64)), rtol=3 * ULP, atol=1e-45),
    elementwise_case("opaque", ["u32"], "u32", r"inline asm\s+mov\.u32 %r\d+, %r\d+;", lambda rng: [float_patterns(rng)[0].view(np.uint32)],
                     lambda x: x),
    elementwise_case("quotient_u32", ["u32", "u32"], "u32", r"div\.u32", lambda rng: [rng.integers(0, 1 << 32, 4 * BLOCK, np.uint32),
                     rng.integers(1, 1 << 16, 4 * BLOCK, np.uint32)], lambda a, b: a // b),
    elementwise_case("b32_to_f32", ["u32"], "f32", r"ld\.global", lambda rng: [float_patterns(rng)[0].view(np.uint32)],
                     lambda x: x.view(np.float32)),
    elementwise_case("f32_to_b32", ["f32"], "u32", r"ld\.global", floats(1, 1.0), lambda x: x.view(np.uint32)),
    elementwise_case("bf16_to_f32", ["u16"], "f32", r"shl\.b32", all_bits16, lambda x: x.view(ml_dtypes.bfloat16).astype(np.float32)),
    elementwise_case("f16_to_f32", ["u16"], "f32", r"cvt\.f32\.f16", all_bits16, lambda x: x.view(np.float16).astype(np.float32)),
    elementwise_case("f32_to_bf16", ["f32"], "u16", r"cvt\.rn\.bf16\.f32", float_patterns, narrowed(ml_dtypes.bfloat16)),
    elementwise_case("f32_to_f16", ["f32"], "u16", r"cvt\.rn\.f16\.f32", float_patterns, narrowed(np.float16)),
    elementwise_case("f32_to_bf16x2", ["f32", "f32"], "u32", r"cvt\.rn\.bf16x2\.f32", floats(2, 1.0), packed(ml_dtypes.bfloat16)),
    elementwise_case("f32_to_f16x2", ["f32", "f32"], "u32", r"cvt\.rn\.f16x2\.f32", floats(2, 1e4), packed(np.float16)),
]

# --- warp-wide instructions: the second operand differs from lane to lane -------------------------------------------------


def lanes(x):
    return x.reshape(-1, WARP)


def from_lane(choose):
    def expected(x, operand):
        lane = np.broadcast_to(np.arange(WARP), lanes(x).shape)
        return np.take_along_axis(lanes(x), choose(lane, lanes(operand).astype(np.int64)), axis=1).ravel()

    return expected


def shuffled(dtype):
    def make(rng):
        values = rng.integers(0, 1 << 62, BLOCK * 2).astype(dtype)
        return [values, rng.integers(0, WARP, BLOCK * 2).astype(np.uint32)]

    return make


def predicates(rng):
    """Four warps: nobody, one lane, some, all; nonzero in any bit counts."""
    chance = np.array([0.0, 0.0, 0.5, 1.1])[:, None]
    flags = (rng.random((4, WARP)) < chance).astype(np.uint32) * rng.integers(1, 1 << 32, (4, WARP), dtype=np.uint64).astype(np.uint32)
    flags[1, 31] = 1 << 31
    return [flags.ravel()]


def bfly(lane, mask):
    return lane ^ mask


def up(lane, delta):
    return np.where(lane >= delta, lane - delta, lane)


def idx(lane, source):
    return source


WARP_WIDE = [
    elementwise_case(f"shfl_sync_{mode.__name__}_{tag}", [tag, "u32"], tag, rf"shfl\.sync\.{mode.__name__}\.b32", shuffled(dtype),
                     from_lane(mode))
    for mode, tag, dtype in ((bfly, "f32", np.float32), (bfly, "u32", np.uint32), (up, "u32", np.uint32), (up, "i64", np.int64),
                             (idx, "f32", np.float32), (idx, "u32", np.uint32))
] + [
    elementwise_case("vote_sync_any", ["u32"], "u32", r"vote\.sync\.any\.pred", predicates,
                     lambda p: lanes(p).any(1).repeat(WARP).astype(np.uint32)),
    elementwise_case("vote_sync_ballot", ["u32"], "u32", r"vote\.sync\.ballot\.b32", predicates,
                     lambda p: ((lanes(p) != 0) << np.arange(WARP)).sum(1).repeat(WARP).astype(np.uint32)),
]

# --- who am I, barriers -------------------------------------------------------------------------------------------------


def build_indices(lang, config):
    uint32, uint64, pointer, u32 = lang.uint32, lang.uint64, lang.pointer, lang.u32
    tid, x, y, width = lang.tid_x, lang.ctaid_x, lang.ctaid_y, lang.nctaid_x
    block, hundred, million = lang.uint32(BLOCK), lang.uint32(1000), lang.uint32(1000000)

    def kernel(out):
        i = (y() * width() + x()) * block + tid()
        pointer(out, u32)[uint64(i)] = uint32(tid() + x() * hundred + y() * million)

    return kernel


def check_indices(given, made):
    y, x, t = np.meshgrid(range(2), range(3), range(BLOCK), indexing="ij")
    np.testing.assert_array_equal(made[0], (t + x * 1000 + y * 1000000).ravel())


def build_exchange(barrier, partner):
    """Through shared memory to the thread whose number differs in the bits of `partner`."""

    def build(lang, config):
        uint32, pointer, f32, tid, mask = lang.uint32, lang.pointer, lang.f32, lang.tid_x, lang.uint32(partner)
        meet, cells = getattr(lang, barrier), lang.shared

        def kernel(x, y):
            cell, t = cells(uint32(16), f32), tid()
            cell[t] = pointer(x, f32)[t]
            meet()
            pointer(y, f32)[t] = cell[t ^ mask]

        return kernel

    def check(given, made):
        np.testing.assert_array_equal(made[0], given[0][np.arange(BLOCK) ^ partner])

    return build, check


def exchange_case(name, instruction, partner):
    build, check = build_exchange(name, partner)
    return Case(name, build, instruction, lambda rng: [rng.standard_normal(BLOCK).astype(np.float32)],
                lambda: [np.zeros(BLOCK, np.float32)], check, shared_bytes=4 * BLOCK + 16)


SYNCHRONISATION = [
    Case("special_registers", build_indices, r"%nctaid\.x", lambda rng: [], lambda: [np.zeros(6 * BLOCK, np.uint32)], check_indices,
         blocks=(3, 2)),
    exchange_case("bar_sync", r"bar\.sync|barrier\.sync", 0x7F),
    exchange_case("bar_warp_sync", r"bar\.warp\.sync", 0x15),
]

# --- 16-byte accesses and asynchronous copies -----------------------------------------------------------------------------


def build_vectors(load, store, through_shared):
    """16 bytes a thread: global -> (shared, the neighbour's) -> global."""

    def build(lang, config):
        uint32, uint64, tid, bar, at = lang.uint32, lang.uint64, lang.tid_x, lang.bar_sync, lang.shared_address
        fetch, put = getattr(lang, load), getattr(lang, store)
        park = getattr(lang, through_shared) if through_shared else None
        take, item, one = lang.ld_shared_v4_f32, lang.uint32(16), lang.uint32(1)

        def direct(x, y):
            offset = uint64(tid()) * uint64(item)
            a, b, c, d = fetch(x + offset)
            put(y + offset, d, c, b, a)

        def parked(x, y):
            base, t = at(uint32(0)), tid()
            a, b, c, d = fetch(x + uint64(t) * uint64(item))
            park(uint32(base + t * item), d, c, b, a)
            bar()
            e, f, g, h = take(uint32(base + (t ^ one) * item))
            put(y + uint64(t) * uint64(item), e, f, g, h)

        return parked if through_shared else direct

    return build


def vector_case(name, load, store, through_shared, instruction):
    def check(given, made):
        order = np.arange(BLOCK) ^ (1 if through_shared else 0)
        np.testing.assert_array_equal(made[0].view(np.uint32), given[0].view(np.uint32).reshape(BLOCK, 4)[order, ::-1].ravel())

    return Case(name, build_vectors(load, store, through_shared), instruction,
                lambda rng: [rng.standard_normal(4 * BLOCK).astype(np.float32)],
                lambda: [np.zeros(4 * BLOCK, np.float32)], check, shared_bytes=16 * BLOCK)


def build_ring(lang, config):
    """Three tiles through two buffers, one copy in flight while the tile before it is summed."""
    uint32, uint64, float32, f32 = lang.uint32, lang.uint64, lang.float32, lang.f32
    tid, bar, at, cells, pointer = lang.tid_x, lang.bar_sync, lang.shared_address, lang.shared, lang.pointer
    copy, commit, wait_one, wait_all = lang.cp_async_16, lang.cp_async_commit, lang.cp_async_wait_group(1), lang.cp_async_wait_group(0)
    tile, item, mask = lang.uint32(16 * BLOCK), lang.uint32(16), lang.uint32(BLOCK - 1)

    def kernel(x, y):
        base, buffers, t = at(uint32(0)), cells(uint32(0), f32), tid()
        source = x + uint64(t) * uint64(item)
        copy(uint32(base + t * item), source)
        commit()
        total = float32(0)
        for j in range(3):
            if j < 2:
                copy(uint32(base + uint32((j + 1) & 1) * tile + t * item), source + uint64(j + 1) * uint64(tile))
                commit()
                wait_one()
            else:
                wait_all()
            bar()  # the others' copies have landed too
            total += buffers[uint32(uint32(j & 1) * (tile >> uint32(2)) + ((t + uint32(j)) & mask) * uint32(4))]
            bar()  # all have read before the buffer is filled again
        pointer(y, f32)[t] = total

    return kernel


def check_ring(given, made):
    tiles = given[0].reshape(3, BLOCK, 4)[:, :, 0].astype(np.float64)
    np.testing.assert_allclose(made[0], sum(np.roll(tiles[j], -j) for j in range(3)), rtol=1e-5, atol=1e-5)


def build_zfill(lang, config):
    uint32, uint64, u32, tid, bar, at = lang.uint32, lang.uint64, lang.u32, lang.tid_x, lang.bar_sync, lang.shared_address
    copy, commit, wait = lang.cp_async_16_zfill, lang.cp_async_commit, lang.cp_async_wait_group(0)
    cells, pointer = lang.shared, lang.pointer

    def kernel(x, sizes, y):
        t = tid()
        copy(uint32(at(uint32(0)) + t * uint32(16)), x + uint64(t) * uint64(16), pointer(sizes, u32)[t])
        commit()
        wait()
        bar()
        words = cells(uint32(0), u32)
        for i in range(4):
            pointer(y, u32)[t * uint32(4) + uint32(i)] = words[t * uint32(4) + uint32(i)]

    return kernel


def check_zfill(given, made):
    source = given[0].view(np.uint8).reshape(BLOCK, 16)
    kept = np.where(np.arange(16) < given[1][:, None], source, 0).astype(np.uint8)
    np.testing.assert_array_equal(made[0].view(np.uint8).reshape(BLOCK, 16), kept)


MEMORY = [
    vector_case("ld_global_nc_v4_u32", "ld_global_nc_v4_u32", "st_global_v4_u32", None, r"ld\.global\.nc\.v4\.u32"),
    vector_case("st_global_v4_u32", "ld_global_nc_v4_u32", "st_global_v4_u32", None, r"st\.global\.v4\.[bu]32"),
    vector_case("ld_global_nc_v4_f32", "ld_global_nc_v4_f32", "st_global_v4_f32", None, r"ld\.global\.nc\.v4\.f32"),
    vector_case("st_global_v4_f32", "ld_global_nc_v4_f32", "st_global_v4_f32", None, r"st\.global\.v4\.[bf]32"),
    vector_case("st_shared_v4_u32", "ld_global_nc_v4_u32", "st_global_v4_f32", "st_shared_v4_u32", r"st\.shared\.v4\.[bu]32"),
    vector_case("st_shared_v4_f32", "ld_global_nc_v4_f32", "st_global_v4_f32", "st_shared_v4_f32", r"st\.shared\.v4\.[bf]32"),
    vector_case("ld_shared_v4_f32", "ld_global_nc_v4_f32", "st_global_v4_f32", "st_shared_v4_f32", r"ld\.shared\.v(4\.[bf]32|2\.b64)"),
    Case("cp_async_16", build_ring, r"cp\.async\.cg\.shared\.global\.L2::128B \[%r\d+\], \[%rd\d+\], 16;[\s\S]*cp\.async\.wait_group 1;",
         lambda rng: [rng.standard_normal(3 * 4 * BLOCK).astype(np.float32)], lambda: [np.zeros(BLOCK, np.float32)], check_ring,
         shared_bytes=2 * 16 * BLOCK),
    Case("cp_async_16_zfill", build_zfill, r"cp\.async\.cg\.shared\.global\.L2::128B \[%r\d+\], \[%rd\d+\], 16, %r\d+;",
         lambda rng: [rng.integers(0, 256, 16 * BLOCK).astype(np.uint8), rng.integers(0, 17, BLOCK).astype(np.uint32)],
         lambda: [np.full(4 * BLOCK, 7, np.uint32)], check_zfill, shared_bytes=16 * BLOCK),
]

# --- tensor cores ---------------------------------------------------------------------------------------------------------


def build_ldmatrix(name):
    """One warp's worth of matrices a warp; lane l names row `rows[l]` of the warp's own 32."""

    def build(lang, config):
        uint32, u32, tid, bar, at = lang.uint32, lang.u32, lang.tid_x, lang.bar_sync, lang.shared_address
        load, cells, pointer, item, warp = getattr(lang, name), lang.shared, lang.pointer, lang.uint32(4), lang.uint32(0x60)

        def kernel(x, rows, y):
            t = tid()
            words = cells(uint32(0), u32)
            for i in range(4):
                words[t * item + uint32(i)] = pointer(x, u32)[t * item + uint32(i)]
            bar()
            a, b, c, d = load(uint32(at(uint32(0)) + ((t & warp) + pointer(rows, u32)[t]) * uint32(16)))
            out = pointer(y, u32)
            out[t * item] = a
            out[t * item + uint32(1)] = b
            out[t * item + uint32(2)] = c
            out[t * item + uint32(3)] = d

        return kernel

    return build


def ldmatrix_case(name, instruction, transposed):
    def inputs(rng):
        rows = np.concatenate([rng.permutation(WARP) for _ in range(4)])
        return [rng.integers(0, 1 << 16, BLOCK * 8).astype(np.uint16), rows.astype(np.uint32)]

    def check(given, made):
        rows = given[0].reshape(4, WARP, 8)
        named = np.take_along_axis(rows, given[1].reshape(4, WARP, 1).astype(np.int64), axis=1)
        matrices = named.reshape(4, 4, 8, 8)  # warp, matrix, row, column
        if transposed:
            matrices = matrices.transpose(0, 1, 3, 2)
        fragments = matrices.reshape(4, 4, 8, 4, 2).transpose(0, 2, 3, 1, 4)  # warp, lane // 4, lane % 4, matrix, half
        np.testing.assert_array_equal(made[0].view(np.uint16), fragments.ravel())

    return Case(name, build_ldmatrix(name), instruction, inputs, lambda: [np.zeros(BLOCK * 4, np.uint32)], check, shared_bytes=16 * BLOCK)


def build_mma(name):
    """Operands from memory by the fragment layout of the docstring: A [4][16][16], B transposed [4][8][16], C and D [4][16][8]."""

    def build(lang, config):
        uint32, u32, f32, tid, pointer, mma = lang.uint32, lang.u32, lang.f32, lang.tid_x, lang.pointer, getattr(lang, name)

        def kernel(a_address, b_address, c_address, d_address):
            t = tid()
            warp, g, q = t >> uint32(5), (t >> uint32(2)) & uint32(7), t & uint32(3)
            a, b, c, d = pointer(a_address, u32), pointer(b_address, u32), pointer(c_address, f32), pointer(d_address, f32)
            i = warp * uint32(128) + g * uint32(8) + q
            j = warp * uint32(64) + g * uint32(8) + q
            k = warp * uint32(128) + g * uint32(8) + q * uint32(2)
            x = mma(a[i], a[i + uint32(64)], a[i + uint32(4)], a[i + uint32(68)], b[j], b[j + uint32(4)],
                    c[k], c[k + uint32(1)], c[k + uint32(64)], c[k + uint32(65)])
            d[k] = x[0]
            d[k + uint32(1)] = x[1]
            d[k + uint32(64)] = x[2]
            d[k + uint32(65)] = x[3]

        return kernel

    return build


def mma_case(name, instruction, dtype):
    def inputs(rng):
        a, b = rng.standard_normal((4, 16, 16)).astype(dtype), rng.standard_normal((4, 8, 16)).astype(dtype)
        c = rng.standard_normal((4, 16, 8)).astype(np.float32)
        a[1, 3, 5], a[2, 9, 0], c[3, 1, 2] = np.inf, np.nan, -np.inf
        return [a, b, c]

    def check(given, made):
        a, b, c = (x.astype(np.float64) for x in given)
        exact = a @ b.transpose(0, 2, 1) + c
        size = np.abs(a) @ np.abs(b).transpose(0, 2, 1) + np.abs(c)
        finite = np.isfinite(exact)
        np.testing.assert_array_equal(made[0][~finite], exact[~finite].astype(np.float32))
        # The hardware aligns the products to the largest and cuts off what is below: some units in the last place of the sum of sizes.
        assert (np.abs(made[0][finite] - exact[finite]) <= 2.0**-21 * size[finite]).all()

    return Case(name, build_mma(name), instruction, inputs, lambda: [np.zeros((4, 16, 8), np.float32)], check)


TENSOR = [
    ldmatrix_case("ldmatrix_x4", r"ldmatrix\.sync\.aligned\.m8n8\.x4\.shared\.b16", False),
    ldmatrix_case("ldmatrix_x4_trans", r"ldmatrix\.sync\.aligned\.m8n8\.x4\.trans\.shared\.b16", True),
    mma_case("mma_m16n8k16_bf16", r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.bf16\.bf16\.f32", ml_dtypes.bfloat16),
    mma_case("mma_m16n8k16_f16", r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.f16\.f16\.f32", np.float16),
]

CASES = ARITHMETIC + WARP_WIDE + SYNCHRONISATION + MEMORY + TENSOR
