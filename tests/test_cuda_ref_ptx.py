"""ptx.cuh: what each instruction does, on the CPU and on the GPU, against NumPy; what the fiber layer reports; that the assembly assembles."""

import os
import re
import subprocess
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from support.instructions import SPECIAL
from support.units import PLACES, SOURCES, Programs, compile_host, needs_nvcc
from support.warpgroup import BASE, Product

from cuda_ref import binding, build, toolchain
from numba_verify.gpu import driver

UNIT = Path(__file__).parent / "support" / "ptx_unit.cu"
FLOAT16 = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}
# Another order of the threads each: a kernel that is right is right under all of them.
SEEDS = ("0", "1", "2", "3")


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    return Programs(UNIT, tmp_path_factory.mktemp("ptx"))


@pytest.fixture(params=PLACES)
def unit(request, programs):
    """unit(kernel, input, shape, dtype, seed): what the kernel made of the input."""
    program = programs(request.param)

    def run(kernel, given, shape, dtype, seed="0"):
        given = np.ascontiguousarray(given)
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        done = subprocess.run([program, kernel, str(given.nbytes), str(size)], input=given.tobytes(), capture_output=True, timeout=60,
                              env={**os.environ, "CUDA_REF_HOST_SEED": seed})  # fmt: skip
        assert done.returncode == 0, done.stderr.decode()
        return np.frombuffer(done.stdout, dtype).reshape(shape)

    run.place = request.param
    return run


# --- the instructions -----------------------------------------------------------------------------------------------------

pytestmark = pytest.mark.kernel


def test_ldmatrix(unit):
    """Two warps, rows anywhere: each result against the definition."""
    rng = np.random.default_rng(0)
    image = rng.integers(0, 1 << 16, 2048, np.uint16)
    rows = rng.permutation(256)[:64].astype(np.uint32)  # 16-byte rows of the image
    got = unit("ldmatrix", np.concatenate([image.view(np.uint32), 16 * rows]), (2, 32, 2, 4), np.uint32).view(np.uint16)
    got = got.reshape(2, 32, 2, 4, 2)
    matrices = image.reshape(256, 8)[rows].reshape(2, 4, 8, 8)
    for lane in range(32):
        outer, inner = lane // 4, 2 * (lane % 4)
        np.testing.assert_array_equal(got[:, lane, 0], matrices[:, :, outer, inner : inner + 2])
        np.testing.assert_array_equal(got[:, lane, 1], matrices[:, :, inner : inner + 2, outer])


def fragments(a, b, c):
    """The registers of 32 lanes, by the table of the PTX manual: [32, 10] words."""
    lanes = []
    for lane in range(32):
        g, t = lane // 4, lane % 4
        words = [a[g, 2 * t :], a[g + 8, 2 * t :], a[g, 2 * t + 8 :], a[g + 8, 2 * t + 8 :], b[2 * t :, g], b[2 * t + 8 :, g]]
        sums = [c[g, 2 * t], c[g, 2 * t + 1], c[g + 8, 2 * t], c[g + 8, 2 * t + 1]]
        halves = np.concatenate([word[:2] for word in words]).view(np.uint16)
        lanes.append(np.concatenate([halves.view(np.uint32), np.array(sums, np.float32).view(np.uint32)]))
    return np.array(lanes)


@pytest.mark.parametrize("dtype", FLOAT16)
def test_mma(unit, dtype):
    rng = np.random.default_rng(1)
    a = rng.standard_normal((2, 16, 16)).astype(FLOAT16[dtype])
    b = rng.standard_normal((2, 16, 8)).astype(FLOAT16[dtype])
    c = rng.standard_normal((2, 16, 8)).astype(np.float32)
    a[1, 3, 5], a[1, 9, 2], b[1, 2, 7] = np.inf, np.nan, 0
    given = np.concatenate([fragments(*matrices) for matrices in zip(a, b, c, strict=True)])
    got = unit(f"mma_{dtype}", given, (2, 8, 4, 2, 2), np.float32)  # [warp, g, t, row half, column]
    got = got.transpose(0, 3, 1, 2, 4).reshape(2, 16, 8)
    with np.errstate(invalid="ignore"):
        want = a.astype(np.float64) @ b.astype(np.float64) + c
    # A tensor core keeps a few bits less than float32 of the largest addend.
    np.testing.assert_allclose(got, want, rtol=0, atol=4e-6)
    assert np.isnan(got[1, 9]).all() and np.isinf(got[1, 3]).any()


def test_conversions(unit):
    rng = np.random.default_rng(2)
    pairs = (rng.standard_normal((64, 2)) * 2.0 ** rng.integers(-30, 17, (64, 2))).astype(np.float32)
    pairs.reshape(-1)[: len(SPECIAL)] = SPECIAL
    pairs[40:48, 0] = [-149, -126.5, -126, -1.5, 0.3, 127.5, 128, 200]
    got = unit("convert", pairs, (64, 4), np.uint32)
    with np.errstate(all="ignore"):
        for column, dtype in enumerate(FLOAT16.values()):
            halves = got[:, column].copy().view(dtype).reshape(64, 2).astype(np.float32)
            np.testing.assert_array_equal(halves, pairs[:, ::-1].astype(dtype).astype(np.float32))
        x = pairs[:, 0].astype(np.float64)
        power, logarithm = got[:, 2].view(np.float32), got[:, 3].view(np.float32)
        want = np.exp2(x)
        want[want < 2.0**-126] = 0  # flushed
        want[want >= 2.0**128] = np.inf
        np.testing.assert_allclose(power, want, rtol=3e-7)
        np.testing.assert_allclose(logarithm, np.log2(x), rtol=3e-7, atol=3e-7)


def test_copies_by_groups(unit):
    rng = np.random.default_rng(3)
    chunks = rng.integers(0, 256, (3, 32, 16), np.uint8)
    got = unit("groups", chunks, chunks.shape, np.uint8)
    want = chunks.copy()
    for t in range(32):
        want[2, t, t % 17 :] = 0
    np.testing.assert_array_equal(got, want)


def test_a_copy_lands_at_the_wait_and_is_nan_before(unit, programs):
    given = np.arange(128, dtype=np.float32)
    if unit.place == "gpu":
        return  # whatever the GPU shows before the wait is right
    if unit.place == "sanitized":
        done = subprocess.run([programs("sanitized"), "peek", "512", "384"], input=given.tobytes(), capture_output=True)
        assert b"use-after-poison" in done.stderr and b"peek_kernel" in done.stderr
        return
    before, on_its_way, after = unit("peek", given, (32, 3), np.float32).T
    np.testing.assert_array_equal(before, 0)
    assert np.isnan(on_its_way).all()
    np.testing.assert_array_equal(after, given[::4])


def test_mbarrier_parity(unit):
    np.testing.assert_array_equal(unit("parity", np.zeros(4, np.int32), 5, np.int32), 1)


@pytest.mark.parametrize("seed", SEEDS)
def test_mbarrier_looked_at(unit, seed):
    """A fresh barrier counts as one after a phase of parity 1; then phase 0 is complete. What was found landed is there."""
    given = np.arange(1, 5, dtype=np.int32)
    np.testing.assert_array_equal(unit("look", given, 68, np.int32, seed), [*(0b0110,) * 64, *given])


@pytest.mark.parametrize("seed", SEEDS)
def test_ring_of_copies(unit, seed):
    """Producers and consumers seven times around a ring of three blocks."""
    blocks = np.random.default_rng(4).integers(0, 256, (22, 2048), np.uint8)
    np.testing.assert_array_equal(unit("ring", blocks, blocks.shape, np.uint8, seed), blocks)


@pytest.mark.parametrize("seed", SEEDS)
def test_named_barriers(unit, seed):
    steps = np.random.default_rng(5).integers(-100, 100, (9, 128)).astype(np.float32)
    want = np.tile((steps**2).sum(0), 2)
    np.testing.assert_array_equal(unit("named", steps, 256, np.float32, seed), want)


def test_barriers_numbered_at_run_time(unit):
    given = np.arange(128, dtype=np.float32)
    np.testing.assert_array_equal(unit("numbered", given, 128, np.float32), given.reshape(2, 2, 32)[:, ::-1].reshape(128))


@pytest.mark.parametrize("dtype", FLOAT16)
def test_attention_shaped_product(unit, dtype):
    """cp.async into swizzled rows, ldmatrix plain and transposed, mma: q kv^T, then that times kv."""
    rng = np.random.default_rng(6)
    rows = rng.standard_normal((48, 64)).astype(FLOAT16[dtype])
    got = unit(f"product_{dtype}", rows.view(np.uint16), 16 * 96, np.float32)
    scores, out = got[: 16 * 32].reshape(16, 32), got[16 * 32 :].reshape(16, 64)
    q, kv = rows[:16].astype(np.float64), rows[16:].astype(np.float64)
    np.testing.assert_allclose(scores, q @ kv.T, rtol=0, atol=3e-5)
    np.testing.assert_allclose(out, scores.astype(FLOAT16[dtype]).astype(np.float64) @ kv, rtol=0, atol=3e-4)


# --- products of a warpgroup ----------------------------------------------------------------------------------------------


def needs_hopper(unit):
    if unit.place == "gpu" and driver.device_info(0).arch != "sm_90a":
        pytest.skip("wgmma needs sm_90a")


@pytest.mark.parametrize("product", [
    Product(64, "bfloat16", False, 128, "ss", True), Product(256, "float16", True, 128, "rs", False),
    Product(8, "float16", False, 0, "ss", False), Product(96, "bfloat16", True, 0, "rs", True),
], ids=str)  # fmt: skip
def test_wgmma(unit, product):
    """Operands in shared memory in every way that is known; what lies between them is NaN."""
    needs_hopper(unit)
    given = product.inputs(np.random.default_rng(7))
    image, a, _, c, _ = given
    got = unit(str(product), np.concatenate([x.view(np.uint16).ravel() for x in (image, a, c)]), (64, product.n), np.float32)
    product.check(given, [got])


@pytest.mark.parametrize("seed", SEEDS)
def test_wgmma_in_groups(unit, seed):
    needs_hopper(unit)
    image, a, b, c, _ = BASE.inputs(np.random.default_rng(8))
    got = unit("wgmma_groups", np.concatenate([x.view(np.uint16).ravel() for x in (image, a, c)]), (2, 64, 64), np.float32, seed)
    for made, k in zip(got, (slice(0, 16), slice(16, 64)), strict=True):
        np.testing.assert_allclose(made, a[:, k].astype(np.float64) @ b[:, k].T.astype(np.float64), rtol=0, atol=3e-5)


def test_a_product_happens_at_the_wait_that_ends_it(unit):
    if unit.place == "gpu":
        return  # whatever the GPU shows before the wait is right
    right_away, ended, taken = unit("wgmma_late", np.zeros(1, np.float32), (128, 3), np.float32).T
    assert np.isnan(right_away).all() and np.isnan(ended).all()
    np.testing.assert_array_equal(taken, 0)


# --- what the fiber layer reports -----------------------------------------------------------------------------------------

# Kernels that must fail in a block of 96 threads with 1024 bytes of shared memory (128 and 4096 if they multiply by warpgroup), each with what
# the report says. `base`: the shared address where it begins; `t`: the thread; r: uint32_t[4]; acc: float[4]; a, b: descriptors of operands
# for 8 columns.
BAD_KERNELS = {
    "named barrier that too few come to": (
        "if (t < 64) ptx::named_barrier<2, 96>::sync();",
        "0 for the rest of their warp, 32 have ended; 64 wait at named barrier 2, where 64 of 96 have arrived"),
    "two named barriers that wait for each other": (
        "if (t < 32) ptx::named_barrier<1, 64>::sync(); else if (t < 64) ptx::named_barrier<2, 64>::sync();",
        "32 wait at named barrier 1, where 32 of 64 have arrived; 32 wait at named barrier 2, where 32 of 64 have arrived"),
    "half a warp at a named barrier": ("if (t % 32 < 16) ptx::named_barrier<1, 96>::sync();", "48 for the rest of their warp"),
    "a warp at two named barriers": (
        "if (t % 2) ptx::named_barrier<1, 96>::sync(); else ptx::named_barrier<4, 96>::sync();",
        "lanes of a warp arrive at named barriers"),
    "a named barrier of two sizes": (
        "if (t < 32) ptx::named_barrier<1, 96>::sync(); else ptx::named_barrier<1, 64>::sync();",
        "named barrier 1 is for 64 threads here and for 96 elsewhere"),
    "a named barrier that does not exist": (
        "ptx::numbered_barrier<96>::sync(16);", "named barrier 16: the numbers are 1 to 15, 0 is __syncthreads"),
    "mbarrier phase that does not end": (
        "if (t == 0) ptx::mbarrier_init(base + 16, 2); __syncthreads(); if (t == 0) ptx::mbarrier_arrive(base + 16); "
        "ptx::mbarrier_wait(base + 16, 0);",
        "96 wait for phase 0 of the mbarrier at byte 16, which misses 1 of 2 arrivals"),
    "mbarrier phase of the wrong parity": (
        "if (t == 0) { ptx::mbarrier_init(base, 1); ptx::mbarrier_arrive(base); ptx::mbarrier_wait(base, 1); }",
        "1 wait for phase 1 of the mbarrier at byte 0"),
    "mbarrier of nobody": ("ptx::mbarrier_arrive(base + 64);", "thread 0: mbarrier_arrive: no mbarrier at byte 64 of shared memory"),
    "mbarrier written over": (
        "if (t == 0) { ptx::mbarrier_init(base, 1); shared_memory()[1] = 7; ptx::mbarrier_arrive(base); }",
        "mbarrier_arrive: no mbarrier at byte 0 of shared memory: not initialised, or written over"),
    "mbarrier made twice": ("ptx::mbarrier_init(base, 1);", "thread 1: mbarrier_init: the mbarrier at byte 0 exists already"),
    "mbarrier for nobody": ("ptx::mbarrier_init(base, 0);", "expected 1 to 1048575 arrivals, got 0"),
    "mbarrier misaligned": ("ptx::mbarrier_init(base + 4, 1);", "mbarrier_init: shared address 1028 is no multiple of 8"),
    "parity that counts on": (
        "if (t == 0) { ptx::mbarrier_init(base, 1); ptx::mbarrier_wait(base, 2); }", "expected parity 0 or 1, got 2"),
    "look at a parity that counts on": (
        "if (t == 0) { ptx::mbarrier_init(base, 1); ptx::mbarrier_test(base, 2); }", "mbarrier_test: expected parity 0 or 1, got 2"),
    "look at an mbarrier of nobody": ("ptx::mbarrier_test(base + 64, 0);", "mbarrier_test: no mbarrier at byte 64 of shared memory"),
    "half a warp at ldmatrix": ("if (t < 16) ptx::ldmatrix_x4(r, base);", "16 for the rest of their warp"),
    "two instructions in a warp": (
        "if (t % 2) ptx::ldmatrix_x4(r, base); else ptx::ldmatrix_x4_trans(r, base);",
        "lanes of a warp meet at two different instructions, ldmatrix_x4_trans and ldmatrix_x4"),
    "ldmatrix beside a shuffle": (
        "if (t % 2) ptx::ldmatrix_x4(r, base); else __syncwarp();",
        "lanes of a warp meet at two different instructions, a shuffle, a vote or __syncwarp and ldmatrix_x4"),
    "offset for an address": (
        "ptx::ldmatrix_x4(r, 16);", "ldmatrix_x4: shared address 16 is out of bounds: shared memory has the addresses 1024 to 2048"),
    "row that begins inside and ends outside": ("ptx::ldmatrix_x4(r, base + 1016);", "ldmatrix_x4: shared address 2040 is out of bounds"),
    "row misaligned": ("ptx::ldmatrix_x4_trans(r, base + 8);", "ldmatrix_x4_trans: shared address 1032 is no multiple of 16"),
    "pointer to elsewhere": ("r[0] = ptx::shared_address(r);", "shared_address: the pointer does not lie in the block's shared memory"),
    "copy from a misaligned address": ("ptx::cp_async_16(base, p.data + 1);", "is no multiple of 16"),
    "copy of more than 16 bytes": ("ptx::cp_async_16_zfill(base, p.data, 17);", "expected 0 to 16 source bytes, got 17"),
    "copy from beyond the array": ("ptx::cp_async_16(base + 16 * (t % 64), p.data + 4);", "heap-buffer-overflow"),
    "copy read by ldmatrix on its way": (
        "if (t < 32) { ptx::cp_async_16(base + 16 * t, p.data); ptx::ldmatrix_x4(r, base + 16 * t); }", "use-after-poison"),
    "copy read before the mbarrier phase": (
        "if (t == 0) { ptx::mbarrier_init(base, 1); ptx::cp_async_16(base + 16, p.data); ptx::cp_async_mbarrier_arrive_noinc(base); "
        "p.data[0] = static_cast<uint32_t>(shared_memory()[4]); }",
        "use-after-poison"),
    "too many arrivals at once": (
        "if (t == 0) { ptx::mbarrier_init(base, 8); ptx::mbarrier_arrive_count(base, 5); ptx::mbarrier_arrive_count(base, 5); }",
        "mbarrier_arrive: 5 arrivals at once, and the phase misses 3"),
    "no warpgroup": ("host::wgmma_fence();", "wgmma_fence: the block's last warps are no warpgroup"),
    "a warp without the others of its group": (
        "ptx::wgmma_fence(); if (t < 96) ptx::wgmma_ss<false, Fp16>(acc, a, b, false);",
        "32 have ended; 96 wait for the rest of their warpgroup"),
    "warps of a group at two instructions": (
        "if (t < 64) ptx::wgmma_fence(); else ptx::wgmma_commit();",
        "warps of a warpgroup meet at two different instructions, wgmma_fence and wgmma_commit"),
    "threads of a group that disagree": (
        "ptx::wgmma_fence(); ptx::wgmma_ss<false, Fp16>(acc, a, b + (t == 70), false);",
        "wgmma: thread 70 of the warpgroup brings other descriptors, or another product, than this one"),
    "no wgmma_fence": (
        "ptx::wgmma_ss<false, Fp16>(acc, a, b, false);", "wgmma: no wgmma_fence since the last wgmma_wait that took accumulators, or none"),
    "no wgmma_fence since the wait": (
        "ptx::wgmma_fence(); ptx::wgmma_ss<false, Fp16>(acc, a, b, false); ptx::wgmma_commit(); ptx::wgmma_wait<0>(acc); "
        "ptx::wgmma_ss<false, Fp16>(acc, a, b, true);",
        "wgmma: no wgmma_fence since the last wgmma_wait that took accumulators, or none"),
    "accumulators written on their way": (
        "ptx::wgmma_fence(); ptx::wgmma_ss<false, Fp16>(acc, a, b, false); ptx::wgmma_commit(); if (t == 9) acc[2] = 1.0f; ptx::wgmma_wait<0>(acc);",
        "wgmma: thread 9 of the warpgroup wrote accumulators of a product on its way, before a wgmma_wait took them"),
    "accumulators taken too early": (
        "ptx::wgmma_fence(); ptx::wgmma_ss<false, Fp16>(acc, a, b, false); ptx::wgmma_commit(); ptx::wgmma_wait<1>(acc);",
        "wgmma_wait: it takes the accumulators of a product whose group it does not wait for"),
    "wgmma beyond shared memory": (
        "ptx::wgmma_fence(); ptx::wgmma_ss<false, Fp16>(acc, a, b + 128, false);", "wgmma: shared address 5120 is out of bounds"),
    "wgmma off the swizzle's pattern": (
        "ptx::wgmma_fence(); ptx::wgmma_ss<false, Fp16>(acc, a, ptx::wgmma_descriptor<16, 1024, 128>(base + 384), false);",
        "wgmma, B: it begins in row 3 of the swizzle's pattern, not in row 0"),
    "wgmma across the swizzle's rows": (
        "ptx::wgmma_fence(); ptx::wgmma_ss<false, Fp16>(acc, a, ptx::wgmma_descriptor<16, 1024, 128>(base) + 7, false);",
        "wgmma, B: rows of 32 bytes from byte 112 on leave the 128 bytes of the swizzle"),
    "wgmma of a broken descriptor": (
        "ptx::wgmma_fence(); ptx::wgmma_ss<false, Fp16>(acc, a + (1 << 14), b, false);", "wgmma, A: 0x800404040 is no descriptor"),
    "copy read by wgmma on its way": (
        "ptx::cp_async_16(base + 16 * t, p.data); ptx::wgmma_fence(); ptx::wgmma_ss<false, Fp16>(acc, a, b, false);", "use-after-poison"),
    "copy on the heels of another": ("if (t == 0) { ptx::cp_async_16(base, p.data); ptx::cp_async_16(base, p.data); }", "use-after-poison"),
}  # fmt: skip


@pytest.fixture(scope="module")
def bad_kernels(tmp_path_factory):
    """One sanitized program that runs the bad kernel of the given number."""
    folder = tmp_path_factory.mktemp("bad")
    kernels = "".join(
        f"void bad{i}(P p) {{\n"
        "    const int t = static_cast<int>(threadIdx.x);\n"
        "    const uint32_t base = ptx::shared_address(shared_memory());\n"
        "    uint32_t r[4] = {};\n    float acc[4] = {};\n"
        "    const uint64_t a = ptx::wgmma_descriptor<1024, 128, 0>(base), b = ptx::wgmma_descriptor<128, 0, 0>(base + 2048);\n"
        f"    (void)t, (void)base, (void)r, (void)acc, (void)a, (void)b, (void)p;\n    {body}\n}}\n"
        for i, (body, _) in enumerate(BAD_KERNELS.values())
    )
    calls = "".join(f"    if (number == {i}) status = launch<bad{i}>({{}}, \"bad\", dim3(2), {'128, 4096' if 'ptx::wgmma_' in body else '96, 1024'}, "
                    "nullptr, p);\n" for i, (body, _) in enumerate(BAD_KERNELS.values()))  # fmt: skip
    (folder / "bad.cpp").write_text(
        '#include <stdio.h>\n#include <stdlib.h>\n#include "device.cuh"\n#include "wgmma_ptx.cuh"\nusing namespace nvr;\n'
        f"struct P {{ uint32_t* data; }};\n{kernels}"
        "int main(int, char** argv) {\n"
        "    P p = {static_cast<uint32_t*>(aligned_alloc(16, 16))};\n"
        f"    int status = 0, number = atoi(argv[1]);\n{calls}"
        '    puts(status ? last_error_text() : "nothing");\n'
        "    free(p.data);\n"
        "    return status;\n}\n"
    )
    return compile_host([folder / "bad.cpp"], folder / "bad", sanitize=True)


@pytest.mark.parametrize("name", BAD_KERNELS)
def test_bad_kernel_is_reported_and_does_not_hang(bad_kernels, name):
    done = subprocess.run([bad_kernels, str(list(BAD_KERNELS).index(name))], capture_output=True, text=True, timeout=60)
    text = BAD_KERNELS[name][1]
    assert text in done.stdout + done.stderr
    if "poison" not in text and "overflow" not in text:
        assert done.returncode == binding.Status.BARRIER and done.stderr == ""


# --- the assembly ---------------------------------------------------------------------------------------------------------


@needs_nvcc
@pytest.mark.parametrize("arch", build.DEFAULT_ARCHITECTURES)
def test_assembles(tmp_path, arch):
    """ptxas takes every instruction; what an architecture lacks is replaced or left out."""
    nvcc = toolchain.find_nvcc()
    log = toolchain.run([str(nvcc.path), *build.NVCC_FLAGS, *nvcc.flags, f"-I{SOURCES}", "-cubin", f"-arch=sm_{arch}", "--keep", "--keep-dir",
                   str(tmp_path), "-o", str(tmp_path / "unit.cubin"), str(UNIT)], "compiling failed")  # fmt: skip
    text = "".join(path.read_text() for path in tmp_path.glob("*.ptx"))
    always = ("ldmatrix.sync.aligned.m8n8.x4.shared.b16", "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16", "f32.bf16.bf16.f32", "f32.f16.f16.f32",
              "cp.async.cg.shared.global.L2::128B", "cp.async.commit_group", "cp.async.wait_group 2",
              "cp.async.mbarrier.arrive.noinc.shared.b64", "mbarrier.init.shared.b64", "mbarrier.arrive.shared.b64",
              "mbarrier.test_wait.parity.shared.b64", "bar.sync 2, 384", "bar.arrive 3, 384", "cvt.rn.bf16x2.f32", "cvt.rn.f16x2.f32",
              "ex2.approx.ftz.f32", "lg2.approx.f32")  # fmt: skip
    assert [name for name in always if name not in text] == []
    suspends = arch != "80"
    waits = re.findall(r"mbarrier\.(\w+)\.parity[^;]*;\s*@!completed bra again", text)
    assert set(waits) == {"try_wait" if suspends else "test_wait"}
    assert ("mbarrier.arrive.shared.b64 state, [%r1], %r2" in re.sub(r"%r\d+\], %r\d+", "%r1], %r2", text)) == suspends
    assert ("fence.proxy.async.shared::cta" in text) == suspends
    assert all((f"griddepcontrol.{name};" in text) == suspends for name in ("wait", "launch_dependents"))
    hopper = ("setmaxnreg.dec.sync.aligned.u32 40", "wgmma.fence.sync.aligned", "wgmma.commit_group.sync.aligned", "wgmma.wait_group.sync.aligned 1",
              "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16", "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16",
              "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16", "wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16")  # fmt: skip
    assert [name for name in hopper if (name in text) != (arch == "90a")] == []
    # No product waits for another, as it would if ptxas saw its registers touched on their way.
    assert not re.search(r"\(C75\d\d\)", log)
