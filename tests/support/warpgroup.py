"""Cases of instructions.py for what a warpgroup does together (sm_90a): products of operands that lie in shared memory in every known way.

The block is one warpgroup. An operand is laid out here in NumPy, element by element as the manual says, and the kernel copies that image.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np

from .instructions import BLOCK, Case

ROWS = 64
#: Where B begins in shared memory; A begins at 0.
B_AT = 16384
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
NEEDS = "sm_90a"


@dataclass(frozen=True)
class Layout:
    """An operand of `extent` rows (M or N) in shared memory. leading, stride: as in the descriptor; step: bytes from one 16 of K to the next."""

    extent: int
    depth: int
    transposed: bool
    swizzle: int
    leading: int
    stride: int
    step: int

    def place(self, row, k):
        """Byte of element (row, k), from the manual's canonical layouts."""
        if self.transposed:
            if self.swizzle:
                byte = row // 64 * self.leading + k // 8 * self.stride + k % 8 * 128 + row % 64 * 2
            else:
                byte = row // 8 * self.stride + k // 8 * self.leading + k % 8 * 16 + row % 8 * 2
        elif self.swizzle:
            byte = row // 8 * self.stride + row % 8 * 128 + k * 2
        else:
            byte = row // 8 * self.stride + k // 8 * self.leading + row % 8 * 16 + k % 8 * 2
        return byte ^ (byte >> 7 & 7) << 4 if self.swizzle else byte

    def image(self, operand):
        """The bytes in shared memory of `operand` [extent, depth]; what lies between is NaN."""
        row, k = np.indices((self.extent, self.depth))
        places = self.place(row, k)
        image = np.full(places.max() // 2 + 1, 0x7FFF, np.uint16)
        image[places // 2] = operand.view(np.uint16)
        return image


def layout(extent, transposed, swizzle):
    """Distances that differ from each other wherever the hardware allows it: one taken for another is seen."""
    if transposed and swizzle:
        return Layout(extent, 64, True, 128, leading=8192 + 1024, stride=1024, step=2048)
    if transposed:
        return Layout(extent, 32, True, 0, leading=extent // 8 * 144, stride=144, step=2 * (extent // 8 * 144))
    if swizzle:
        return Layout(extent, 64, False, 128, leading=16, stride=1024 if extent > 128 else 2048, step=32)
    return Layout(extent, 32, False, 0, leading=extent // 8 * 128 + 16, stride=128, step=2 * (extent // 8 * 128 + 16))


@dataclass(frozen=True)
class Product:
    """D = A B^T (+ C) with all of K, 16 at a time. accumulate: does C count; it and `at_run_time` (the kernel reads it) are for the first step."""

    n: int
    dtype: str
    transposed: bool
    swizzle: int
    source: str
    accumulate: bool
    at_run_time: bool = False

    def __str__(self):
        major, mode = "mn" if self.transposed else "k", "add" if self.accumulate else "new"
        return f"wgmma_{self.source}-n{self.n}-{self.dtype}-{major}{self.swizzle}-{mode}"

    @property
    def a(self):
        return layout(ROWS, False, self.swizzle)

    @property
    def b(self):
        return layout(self.n, self.transposed, self.swizzle)

    @property
    def depth(self):
        return self.b.depth

    @property
    def instruction(self):
        """The PTX: registers of the accumulators, A (a descriptor or four registers), B, the predicate, signs, and what is transposed."""
        element = {"bfloat16": "bf16", "float16": "f16"}[self.dtype]
        a, flags = (r"%rd\d+", f"0, {int(self.transposed)}") if self.source == "ss" else (r"\{(%r\d+, ){3}%r\d+\}", str(int(self.transposed)))
        return (rf"wgmma\.mma_async\.sync\.aligned\.m64n{self.n}k16\.f32\.{element}\.{element} \{{(%\w+, ){{{self.n // 2 - 1}}}%\w+\}}, {a}, "
                rf"%rd\d+, add, 1, 1, {flags};")

    def inputs(self, rng):
        dtype = DTYPES[self.dtype]
        a, b = rng.standard_normal((ROWS, self.depth)).astype(dtype), rng.standard_normal((self.n, self.depth)).astype(dtype)
        image = np.concatenate([self.a.image(a), np.zeros(B_AT // 2, np.uint16)])[:B_AT // 2]
        image = np.concatenate([image, self.b.image(b), np.zeros(8, np.uint16)])
        return [image[:image.size // 8 * 8], a, b, rng.standard_normal((ROWS, self.n)).astype(np.float32), np.array([self.accumulate], np.uint32)]

    def check(self, given, made):
        _, a, b, c, _ = given
        a, b, c = a.astype(np.float64), b.astype(np.float64), c * self.accumulate
        # The hardware keeps some bits less than float32 of the largest addend, in each of the steps.
        bound = 2.0**-20 * (np.abs(a) @ np.abs(b).T + np.abs(c))
        assert (np.abs(made[0] - (a @ b.T + c)) <= bound).all()

    def case(self, name, instruction, build=None):
        shared = 2 * (self.inputs(np.random.default_rng(0))[0].size)
        return Case(name, build or build_product(self), instruction, self.inputs, lambda: [np.zeros((ROWS, self.n), np.float32)], self.check,
                    shared_bytes=shared, needs=NEEDS)


def fragments(lang, product):
    """Device functions of the registers' layout: fetch(acc, c) and store(acc, y) of a matrix [64, n]; fetch_a(words, a) of A [64, depth]."""
    uint32, u32, f32, pointer, unroll, tid = lang.uint32, lang.u32, lang.f32, lang.pointer, lang.unroll, lang.tid_x
    n, depth, steps = product.n, product.depth, product.depth // 16

    @lang.device
    def first_row():
        t = tid()
        return uint32((t >> uint32(5)) * uint32(16) + ((t & uint32(31)) >> uint32(2)))

    @lang.device
    def fetch(acc, c):
        values, row, pair = pointer(c, f32), first_row(), uint32((tid() & uint32(3)) * uint32(2))
        for j in range(n // 8):
            unroll()
            for h in range(2):
                unroll()
                at = uint32((row + uint32(8 * h)) * uint32(n) + uint32(8 * j) + pair)
                acc[4 * j + 2 * h] = values[at]
                acc[4 * j + 2 * h + 1] = values[at + uint32(1)]

    @lang.device
    def store(acc, y):
        values, row, pair = pointer(y, f32), first_row(), uint32((tid() & uint32(3)) * uint32(2))
        for j in range(n // 8):
            unroll()
            for h in range(2):
                unroll()
                at = uint32((row + uint32(8 * h)) * uint32(n) + uint32(8 * j) + pair)
                values[at] = acc[4 * j + 2 * h]
                values[at + uint32(1)] = acc[4 * j + 2 * h + 1]

    @lang.device
    def fetch_a(words, a):
        values, row, pair = pointer(a, u32), first_row(), uint32(tid() & uint32(3))
        for s in range(steps):
            unroll()
            for i in range(4):
                unroll()
                words[4 * s + i] = values[uint32((row + uint32(i % 2 * 8)) * uint32(depth // 2) + uint32(8 * s + i // 2 * 4) + pair)]

    return fetch, store, fetch_a


def fill_shared(lang, words):
    """Device function: the first `words` words of shared memory come from an image in global memory, and are there for wgmma."""
    uint32, u32, pointer, shared, tid = lang.uint32, lang.u32, lang.pointer, lang.shared, lang.tid_x
    proxy_fence, bar = lang.fence_proxy_async, lang.bar_sync

    @lang.device
    def fill(image):
        given, cells, i = pointer(image, u32), shared(uint32(0), u32), tid()
        while i < uint32(words):
            cells[i] = given[i]
            i = uint32(i + uint32(BLOCK))
        proxy_fence()
        bar()

    return fill


def words_of(product):
    return product.inputs(np.random.default_rng(0))[0].size // 2


def build_product(product):
    """All of K in one group."""

    def build(lang, config):
        uint32, uint64, f32, u32, pointer, unroll, at = lang.uint32, lang.uint64, lang.f32, lang.u32, lang.pointer, lang.unroll, lang.shared_address
        n, steps, registers = product.n, product.depth // 16, product.source == "rs"
        multiply = (lang.wgmma_rs if registers else lang.wgmma_ss)(n, product.dtype, product.transposed)
        new, new_words = lang.local_array(n // 2, f32), lang.local_array(4 * steps, u32)
        fetch, store, fetch_a = fragments(lang, product)
        fill, fence, commit, wait = fill_shared(lang, words_of(product)), lang.wgmma_fence, lang.wgmma_commit, lang.wgmma_wait(0, n // 2)
        of_a, of_b = (lang.wgmma_descriptor(x.leading, x.stride, x.swizzle) for x in (product.a, product.b))
        a_step, b_step, first, at_run_time = product.a.step >> 4, product.b.step >> 4, int(product.accumulate), product.at_run_time

        def kernel(image, a, b, c, flag, y):
            fill(image)
            acc, words, base = new(), new_words(), at(uint32(0))
            a_descriptor, b_descriptor = of_a(base), of_b(uint32(base + uint32(B_AT)))
            add = pointer(flag, u32)[0] if at_run_time else uint32(first)
            fetch(acc, c)
            fetch_a(words, a)
            fence()
            for s in range(steps):
                unroll()
                here, mode = uint64(b_descriptor + uint64(s * b_step)), add if s == 0 else uint32(1)
                if registers:
                    multiply(acc, words[4 * s], words[4 * s + 1], words[4 * s + 2], words[4 * s + 3], here, mode)
                else:
                    multiply(acc, uint64(a_descriptor + uint64(s * a_step)), here, mode)
            commit()
            wait(acc)
            store(acc, y)

        return kernel

    return build


def build_groups(product):
    """A group for each 16 of K, two accumulators in turn; D is their sum. The older one is read while the newer is on its way."""

    def build(lang, config):
        uint32, uint64, f32, unroll, at = lang.uint32, lang.uint64, lang.f32, lang.unroll, lang.shared_address
        n, steps = product.n, product.depth // 16
        multiply, new = lang.wgmma_ss(n, product.dtype, product.transposed), lang.local_array(n // 2, f32)
        fetch, store, _ = fragments(lang, product)
        fill, fence, commit, newer_on_its_way, all_done = (fill_shared(lang, words_of(product)), lang.wgmma_fence, lang.wgmma_commit,
                                                           lang.wgmma_wait(1, n // 2), lang.wgmma_wait(0, n // 2))
        nobody = lang.wgmma_wait(0, 0)
        of_a, of_b = (lang.wgmma_descriptor(x.leading, x.stride, x.swizzle) for x in (product.a, product.b))
        a_step, b_step = product.a.step >> 4, product.b.step >> 4

        def kernel(image, a, b, c, flag, y):
            fill(image)
            one, two, base = new(), new(), at(uint32(0))
            a_descriptor, b_descriptor = of_a(base), of_b(uint32(base + uint32(B_AT)))
            fetch(one, c)
            fence()
            for s in range(steps):
                unroll()
                here = uint64(b_descriptor + uint64(s * b_step))
                if s == steps - 1:
                    multiply(two, uint64(a_descriptor + uint64(s * a_step)), here, uint32(0))
                else:
                    multiply(one, uint64(a_descriptor + uint64(s * a_step)), here, uint32(1))
                commit()
            newer_on_its_way(one)
            nobody()
            all_done(two)
            for i in range(n // 2):
                unroll()
                one[i] = one[i] + two[i]
            store(one, y)

        return kernel

    return build


def build_parts(product):
    """The columns in two halves, each a product of its own into its part of one array."""

    def build(lang, config):
        uint32, uint64, f32, unroll, at = lang.uint32, lang.uint64, lang.f32, lang.unroll, lang.shared_address
        n, steps, half = product.n, product.depth // 16, product.n // 2
        left, right = lang.wgmma_ss(half, product.dtype, product.transposed), lang.wgmma_ss(half, product.dtype, product.transposed, half // 2)
        new, (fetch, store, _) = lang.local_array(n // 2, f32), fragments(lang, product)
        fill, fence, commit, wait = fill_shared(lang, words_of(product)), lang.wgmma_fence, lang.wgmma_commit, lang.wgmma_wait(0, n // 2)
        of_a, of_b = (lang.wgmma_descriptor(x.leading, x.stride, x.swizzle) for x in (product.a, product.b))
        a_step, b_step, b_half = product.a.step >> 4, product.b.step >> 4, int(product.b.place(half, 0)) >> 4

        def kernel(image, a, b, c, flag, y):
            fill(image)
            acc, base = new(), at(uint32(0))
            a_descriptor, b_descriptor = of_a(base), of_b(uint32(base + uint32(B_AT)))
            fetch(acc, c)
            fence()
            for s in range(steps):
                unroll()
                left(acc, uint64(a_descriptor + uint64(s * a_step)), uint64(b_descriptor + uint64(s * b_step)), uint32(1))
                right(acc, uint64(a_descriptor + uint64(s * a_step)), uint64(b_descriptor + uint64(s * b_step + b_half)), uint32(1))
            commit()
            wait(acc)
            store(acc, y)

        return kernel

    return build


def build_descriptors(lang, config):
    u32, u64, uint32, pointer, tid, descriptor = lang.u32, lang.u64, lang.uint32, lang.pointer, lang.tid_x, lang.wgmma_descriptor(8192, 1024, 128)
    plain = lang.wgmma_descriptor(128, 256, 0)

    def kernel(x, y):
        given, made, t = pointer(x, u32), pointer(y, u64), tid()
        made[t] = descriptor(given[t])
        made[t + uint32(BLOCK)] = plain(given[t])

    return kernel


#: The parts of these two that do not depend on the address.
SWIZZLED, PLAIN = 512 << 16 | 64 << 32 | 1 << 62, 8 << 16 | 16 << 32


def check_descriptors(given, made):
    start = given[0].astype(np.uint64) // np.uint64(16)
    np.testing.assert_array_equal(made[0], np.concatenate([start | np.uint64(SWIZZLED), start | np.uint64(PLAIN)]))


BASE = Product(64, "bfloat16", False, 128, "ss", True)
IN_GROUPS = BASE.case("wgmma_wait", r"(?s)wgmma\.wait_group\.sync\.aligned 1;.*wgmma\.wait_group\.sync\.aligned 0;", build_groups(BASE))
AT_RUN_TIME = replace(BASE, at_run_time=True)
#: By the names of the vocabulary.
WARPGROUP = [
    BASE.case("wgmma_fence", r"wgmma\.fence\.sync\.aligned;"),
    BASE.case("wgmma_commit", r"wgmma\.commit_group\.sync\.aligned;"),
    BASE.case("fence_proxy_async", r"fence\.proxy\.async\.shared::cta;"),
    IN_GROUPS,
    AT_RUN_TIME.case("wgmma_ss", AT_RUN_TIME.instruction),
    replace(AT_RUN_TIME, source="rs", accumulate=False).case("wgmma_rs", replace(AT_RUN_TIME, source="rs").instruction),
    Case("wgmma_descriptor", build_descriptors, rf"(?s)or\.b64\s+%rd\d+, %rd\d+, {SWIZZLED};.*or\.b64\s+%rd\d+, %rd\d+, {PLAIN};",
         lambda rng: [16 * rng.permutation(1 << 14)[:BLOCK].astype(np.uint32)], lambda: [np.zeros(2 * BLOCK, np.uint64)], check_descriptors),
]
#: Every layout, source and width; types and modes in turn.
PRODUCTS = [
    Product(n, ("bfloat16", "float16")[(i + j) % 2], transposed, swizzle, source, bool((i + j // 2) % 2))
    for i, n in enumerate((8, 64, 256))
    for j, (transposed, swizzle, source) in enumerate((t, s, x) for t in (False, True) for s in (0, 128) for x in ("ss", "rs"))
]
_WIDE = Product(256, "bfloat16", True, 128, "ss", True)
PRODUCT_CASES = [product.case(str(product), product.instruction) for product in PRODUCTS] + [
    _WIDE.case("wgmma_ss-in-parts", replace(_WIDE, n=128).instruction, build_parts(_WIDE))]
