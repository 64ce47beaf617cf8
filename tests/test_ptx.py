"""Every name of the device vocabulary alone: what PTX it becomes, and what it does, on every backend, against NumPy."""

import re
import subprocess
import sys

import numpy as np
import pytest
from support import instructions
from support.device import backends
from support.instructions import BLOCK, MEMORY, SYNCHRONISATION, TENSOR
from support.signals import SIGNALS, SUSPENDED
from support.warpgroup import PRODUCT_CASES, WARPGROUP

from numba_verify.gpu import driver, sass, simulator
from numba_verify.gpu.compile import KernelSource, compile_kernel, lower

ARCHITECTURES = ("sm_80", "sm_90a", "sm_120")
CASES = instructions.CASES + SIGNALS + WARPGROUP


def by_name(cases):
    return pytest.mark.parametrize("case", cases, ids=[case.name for case in cases])


def source(build, arguments, name="test", shared_bytes=0):
    """`name` tells apart what `compile_kernel` keeps; `lower` keeps nothing."""
    return KernelSource(name, build, None, ("address",) * arguments, BLOCK, shared_bytes=shared_bytes)


def of_case(case):
    return source(case.build, len(case.inputs(np.random.default_rng(0))) + len(case.outputs()), case.name, shared_bytes=case.shared_bytes)


@pytest.fixture(scope="module")
def ptx():
    from numba_verify.gpu import ptx

    return ptx


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_VERIFY_CACHE_DIR", str(tmp_path))


# --- the vocabulary -------------------------------------------------------------------------------------------------------


TYPES = {"uint32", "int32", "uint64", "int64", "float32", "u8", "u16", "u32", "i32", "u64", "i64", "f32"}
INSTRUCTIONS = {case.name for case in CASES} - {"special_registers", SUSPENDED.name} | {"tid_x", "ctaid_x", "ctaid_y", "nctaid_x"}
REST = {"device", "unroll", "pointer", "shared", "shared_address", "local_array", "cp_async_commit", "cp_async_wait_group"}


def test_both_languages_have_every_name(ptx):
    for language in (ptx, simulator.language()):
        missing = [name for name in TYPES | INSTRUCTIONS | REST if not hasattr(language, name)]
        assert not missing, language


def test_every_instruction_has_a_case(ptx):
    from numba.cuda.extending import _Intrinsic

    instructions = {name for name, value in vars(ptx).items() if isinstance(value, _Intrinsic) and not name.startswith("_")}
    assert instructions <= INSTRUCTIONS | REST


def test_every_instruction_names_its_manual_section(ptx):
    for name in INSTRUCTIONS - {"tanh_f32"}:
        assert getattr(ptx, name).__doc__, name


# --- one by one -----------------------------------------------------------------------------------------------------------


@pytest.mark.kernel
@pytest.mark.parametrize("backend", backends(), ids=lambda backend: backend.name)
@by_name(CASES + PRODUCT_CASES)
def test_effect(case, backend):
    if backend.name == "gpu" and not case.exists_on(driver.device_info(0).arch):
        pytest.skip(f"{case.name} needs {case.needs}")
    given, made = case.inputs(np.random.default_rng(7)), case.outputs()
    before = [array.tobytes() for array in given]
    backend.run_kernel(case.build, case.blocks, BLOCK, case.shared_bytes, [*given, *made])
    assert [array.tobytes() for array in given] == before
    case.check(given, made)


@by_name([case for case in CASES if case.exists_on("sm_80")])
def test_becomes_its_instruction(case):
    assert re.search(case.instruction, lower(of_case(case), "sm_80", "ptx"))


@pytest.mark.parametrize("case, arch", [
    pytest.param(case, arch, id=f"{case.name}-{arch}")
    for case in SYNCHRONISATION + MEMORY + TENSOR + SIGNALS + WARPGROUP + PRODUCT_CASES for arch in ARCHITECTURES[1:] if case.exists_on(arch)
])
def test_becomes_its_instruction_on_later_architectures(case, arch):
    assert re.search(case.instruction, lower(of_case(case), arch, "ptx"))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_tanh_is_the_accurate_one_and_links_offline(arch, empty_cache):
    case = next(case for case in CASES if case.name == "tanh_f32")
    assert "tanh.approx" not in lower(of_case(case), arch, "ptx")
    assert compile_kernel(of_case(case), arch).resources.stack_bytes == 0


# --- waits ----------------------------------------------------------------------------------------------------------------


def build_waits(suspend):
    """Seven waits: three in a row, four in an unrolled loop; shared memory is read before, between and after them."""

    def build(lang, config):
        uint32, u32, tid, pointer, shared, unroll = lang.uint32, lang.u32, lang.tid_x, lang.pointer, lang.shared, lang.unroll
        at, wait = lang.shared_address, lang.mbarrier_wait(suspend)

        def kernel(y):
            barrier, cell = at(uint32(0)), shared(uint32(64), u32)
            total = cell[0]
            wait(barrier, uint32(0))
            wait(barrier, uint32(1))
            wait(barrier, uint32(0))
            total += cell[0]
            for i in range(4):
                unroll()
                wait(uint32(barrier + uint32(8 * i)), uint32(i & 1))
                total += cell[0]
            pointer(y, u32)[tid()] = uint32(total)

        return kernel

    return build


@pytest.mark.parametrize("suspend, arch", [(False, "sm_80"), (False, "sm_90a"), (False, "sm_120"), (True, "sm_90a"), (True, "sm_120")])
def test_a_wait_may_stand_many_times(suspend, arch, empty_cache):
    kernel = source(build_waits(suspend), 1, f"waits {suspend}", shared_bytes=256)
    text = lower(kernel, arch, "ptx")
    looks = re.findall(r"mbarrier\.(\w+)\.parity\.|(ld\.shared)\.[bu]32", text)
    wait, read = ("try_wait" if suspend else "test_wait", ""), ("", "ld.shared")
    # Each wait at its place, and no read of shared memory moved over it or taken for the same as another.
    assert looks == [read, wait, wait, wait, read, *[wait, read] * 4]
    cubin = compile_kernel(kernel, arch)
    assert (cubin.resources.stack_bytes, cubin.resources.spill_store_bytes) == (0, 0)
    if arch == "sm_80" or sass.find_nvdisasm() is None:
        return  # sm_80 has no instruction of its own for it: it reads the mbarrier's word
    asked = [name for name in sass.opcodes(cubin.code)[cubin.symbol] if name.startswith("SYNCS.PHASECHK")]
    assert len(asked) >= 7 and all(name.endswith("TRYWAIT") is suspend for name in asked)


@pytest.mark.parametrize("case, arch", [pytest.param(case, arch, id=f"{case.name}-{arch}") for case in SIGNALS + WARPGROUP
                                        for arch in ARCHITECTURES if case.exists_on(arch)])
def test_signals_link_offline(case, arch, empty_cache):
    assert compile_kernel(of_case(case), arch).resources.stack_bytes == 0


# --- products of a warpgroup ----------------------------------------------------------------------------------------------


def build_products(mistake=None, accumulate=1):
    """A loop of the shape of attention: S = Q K^T, then O = O * s + S V, with the accumulators passed through device functions."""

    def build(lang, config):
        u32, f32, uint32, uint64, float32 = lang.u32, lang.f32, lang.uint32, lang.uint64, lang.float32
        unroll, pointer, tid, at = lang.unroll, lang.pointer, lang.tid_x, lang.shared_address
        new_o, new_s, new_p, pack = lang.local_array(128, f32), lang.local_array(32, f32), lang.local_array(16, u32), lang.f32_to_bf16x2
        scores, values = lang.wgmma_ss(64, "bfloat16", False), lang.wgmma_rs(256, "bfloat16", True)
        fence, commit, take_s, take_o = lang.wgmma_fence, lang.wgmma_commit, lang.wgmma_wait(0, 32), lang.wgmma_wait(0, 128)
        of_k, of_v = lang.wgmma_descriptor(16, 1024, 128), lang.wgmma_descriptor(8192, 1024, 128)

        @lang.device
        def score(s, q, k):
            fence()
            for i in range(4):
                unroll()
                scores(s, uint64(q + uint64(2 * i)), uint64(k + uint64(2 * i)), uint32(0) if i == 0 else uint32(1))
            commit()
            take_s(s)

        @lang.device
        def scale(o, factor):
            for i in range(128):
                unroll()
                o[i] = o[i] * factor

        @lang.device
        def add(o, s, p, v, mode):
            for i in range(16):
                unroll()
                p[i] = pack(s[2 * i + 1], s[2 * i])
            fence()
            for i in range(4):
                unroll()
                values(o, p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3], uint64(v + uint64(128 * i)), mode)
                if mistake == "between":
                    o[i] = o[i] + float32(1)
            commit()
            if mistake == "before":
                scale(o, s[1])
            take_o(o)

        def kernel(n, y):
            o, s, p, t, base = new_o(), new_s(), new_p(), tid(), at(uint32(0))
            q, k, v = of_k(base), of_k(uint32(base + uint32(16384))), of_v(uint32(base + uint32(16384)))
            count = pointer(n, u32)[0]
            mode = pointer(n, u32)[1] if accumulate is None else uint32(accumulate)
            for i in range(128):
                unroll()
                o[i] = float32(0)
            for _ in range(count):
                score(s, q, k)
                scale(o, s[0])
                add(o, s, p, v, mode)
            for i in range(128):
                unroll()
                pointer(y, f32)[uint32(i * BLOCK) + t] = o[i]

        return kernel

    return build


def test_accumulators_stay_in_registers(empty_cache):
    cubin = compile_kernel(source(build_products(), 2, "products", shared_bytes=65536), "sm_90a")
    assert (cubin.resources.stack_bytes, cubin.resources.spill_store_bytes) == (0, 0)
    if sass.find_nvdisasm() is None:
        return
    code = [name for name in sass.opcodes(cubin.code)[cubin.symbol] if "GMMA" in name or name.startswith("WARPGROUP")]
    # Nothing waits but the two waits of the kernel.
    assert code == ["WARPGROUP.ARRIVE", *["HGMMA.64x64x16.F32.BF16"] * 4, "WARPGROUP.DEPBAR.LE",
                    "WARPGROUP.ARRIVE", *["HGMMA.64x256x16.F32.BF16"] * 4, "WARPGROUP.DEPBAR.LE"]


@pytest.mark.parametrize("mistake", ["before", "between"])
def test_accumulators_touched_before_the_wait_are_refused(mistake, empty_cache):
    with pytest.raises(RuntimeError, match=rf"{mistake}_None: the compiler put waits between its wgmma: .*C751\d"):
        compile_kernel(source(build_products(mistake), 2, mistake, shared_bytes=65536), "sm_90a")


@pytest.mark.skipif(sass.find_nvdisasm() is None, reason="needs nvdisasm")
def test_a_constant_accumulate_is_no_predicate_to_compute(empty_cache):
    def comparisons(mode):
        cubin = compile_kernel(source(build_products(accumulate=mode), 2, f"accumulate {mode}", shared_bytes=65536), "sm_90a")
        return sum("SETP" in name for name in sass.opcodes(cubin.code)[cubin.symbol])

    assert comparisons(0) == comparisons(1) < comparisons(None)


# --- what the compiler does around them -----------------------------------------------------------------------------------


def build_contraction(lang, config):
    f32, pointer, tid = lang.f32, lang.pointer, lang.tid_x

    def kernel(x, y):
        p, q, t = pointer(x, f32), pointer(y, f32), tid()
        q[t] = p[t] * q[t] + p[0]

    return kernel


def test_a_product_and_a_sum_become_one_fma():
    assert "fma.rn.f32" in lower(source(build_contraction, 2), "sm_80", "ptx")


def build_opaque_copies(lang, config):
    u32, uint32, pointer, tid, opaque = lang.u32, lang.uint32, lang.pointer, lang.tid_x, lang.opaque

    def kernel(x, y):
        p, q, t = pointer(x, u32), pointer(y, u32), tid()
        q[t] = uint32(opaque(t) * p[0] - opaque(t) * p[0])

    return kernel


def test_two_opaque_copies_are_never_taken_for_the_same():
    code = lower(source(build_opaque_copies, 2), "sm_80", "ptx")
    assert len(re.findall(r"inline asm\s+mov\.u32", code)) == 2
    assert len(re.findall(r"mul\.lo\.s32", code)) == 2


def build_quotient(lang, config):
    u32, uint32, pointer, tid = lang.u32, lang.uint32, lang.pointer, lang.tid_x

    def kernel(x):
        p, t = pointer(x, u32), tid()
        p[t] = uint32(p[t] // p[0])

    return kernel


def test_an_unsigned_quotient_raises_no_device_exception():
    code = lower(source(build_quotient, 1), "sm_80", "ptx")
    assert "trap" not in code
    assert code.count("st.global") == 1


def build_nest(trips, request):
    """A dynamic loop around constant ones whose indices choose the element of a local array."""

    def build(lang, config):
        uint32, float32, f32, tid, pointer, shared = lang.uint32, lang.float32, lang.f32, lang.tid_x, lang.pointer, lang.shared
        unroll = lang.unroll if request else lang.device(lambda: None)
        rows, keys, columns = trips
        new, elements, bar = lang.local_array(rows * columns, f32), rows * columns, lang.bar_sync

        def kernel(count, y):
            values, acc, t = shared(uint32(0), f32), new(), tid()
            for i in range(elements):
                unroll()
                acc[i] = float32(0)
            for _ in range(count):
                bar()  # else the loads move out of the loop, all of them, and spill
                for i in range(rows):
                    unroll()
                    for k in range(keys):
                        unroll()
                        x = values[t + uint32(k * 64)]
                        for j in range(columns):
                            unroll()
                            acc[i * columns + j] = acc[i * columns + j] * x + values[uint32(i * 8 + k)]
            for i in range(elements):
                unroll()
                pointer(y, f32)[t + uint32(i * 128)] = acc[i]

        return kernel

    return build


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("trips", [(64, 8, 1), (8, 8, 8), (8, 4, 8)], ids=str)
def test_unrolled_nests_keep_local_arrays_in_registers(trips, arch, empty_cache):
    resources = compile_kernel(source(build_nest(trips, True), 2, f"nest {trips}"), arch).resources
    assert (resources.stack_bytes, resources.spill_store_bytes) == (0, 0)


def test_without_unroll_the_nest_would_live_in_memory(empty_cache):
    assert compile_kernel(source(build_nest((64, 8, 1), False), 2, "rolled nest"), "sm_80").resources.stack_bytes > 0


# --- refusals -------------------------------------------------------------------------------------------------------------


def refused(build, arguments, text):
    from numba.core.errors import TypingError

    with pytest.raises(TypingError, match=text):
        lower(source(build, arguments), "sm_80", "ptx")


def test_a_double_is_refused():
    def build(lang, config):
        f32, pointer, maximum = lang.f32, lang.pointer, lang.max_f32

        def kernel(x):
            pointer(x, f32)[0] = maximum(pointer(x, f32)[0], 0.5)

        return kernel

    refused(build, 1, r"max_f32: b must be float32, got float64; wrap .* in float32")


def test_a_wrong_number_of_operands_is_refused():
    def build(lang, config):
        f32, pointer, maximum = lang.f32, lang.pointer, lang.max_f32

        def kernel(x):
            pointer(x, f32)[0] = maximum(pointer(x, f32)[0])

        return kernel

    refused(build, 1, r"max_f32 takes 2 arguments \(a, b\), got 1")


def test_unroll_outside_a_loop_is_refused():
    def build(lang, config):
        unroll = lang.unroll

        def kernel(x):
            unroll()

        return kernel

    from numba.cuda.core.errors import NumbaError

    with pytest.raises(NumbaError, match="first statement of the body of a for loop"):
        lower(source(build, 1), "sm_80", "ptx")


@pytest.mark.parametrize("newest", [-1, 8, 1.0, "0"])
@pytest.mark.parametrize("language", ["ptx", "simulator"])
def test_the_number_of_groups_in_flight_is_checked(newest, language, ptx):
    with pytest.raises(ValueError, match="from 0 to 7"):
        (ptx if language == "ptx" else simulator.language()).cp_async_wait_group(newest)


@pytest.mark.parametrize("name, arguments, text", [
    ("named_barrier", (0, 64), "a number from 1 to 15"), ("named_barrier", (16, 64), "a number from 1 to 15"),
    ("named_barrier", (1, 48), "a multiple of 32 threads"), ("named_barrier", (1, 0), "a multiple of 32 threads"),
    ("named_barrier", (1, 2048), "a multiple of 32 threads"), ("named_barrier", ("1", 64), "a number from 1 to 15"),
    ("numbered_barrier", (48,), "a multiple of 32 threads"),
    ("set_max_registers", (20, False), "a multiple of 8 from 24 to 256"), ("set_max_registers", (264, True), "a multiple of 8 from 24 to 256"),
    ("set_max_registers", (42, True), "a multiple of 8 from 24 to 256"),
    ("wgmma_ss", (12, "bfloat16", False), "a multiple of 8 columns from 8 to 256"), ("wgmma_rs", (264, "bfloat16", False), "from 8 to 256"),
    ("wgmma_ss", (0, "bfloat16", False), "from 8 to 256"), ("wgmma_rs", (64, "float32", False), "dtype 'bfloat16' or 'float16'"),
    ("wgmma_ss", (64, "float16", 1), "for transpose_b, got 1"), ("wgmma_ss", (64, "float16", True, -4), "the number of the first accumulator"),
    ("wgmma_wait", (8, 32), "an int from 0 to 7"), ("wgmma_wait", (-1, 0), "an int from 0 to 7"), ("wgmma_wait", (0, 257), "an int from 0 to 256"),
    ("wgmma_descriptor", (8, 1024, 0), "a multiple of 16 bytes below 262144 for leading, got 8"),
    ("wgmma_descriptor", (16, 1 << 18, 128), "for stride, got 262144"), ("wgmma_descriptor", (16, 1024, 64), "swizzle 0 or 128"),
])
@pytest.mark.parametrize("language", ["ptx", "simulator"])
def test_constants_are_checked(language, name, arguments, text, ptx):
    with pytest.raises(ValueError, match=text):
        getattr(ptx if language == "ptx" else simulator.language(), name)(*arguments)


# --- imports --------------------------------------------------------------------------------------------------------------


def run_python(code):
    return subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)


def test_numba_cuda_imports_where_numpy_has_no_row_stack():
    done = run_python("import numpy; vars(numpy).pop('row_stack', None); from numba_verify.gpu import ptx; "
                      "print(numpy.row_stack is numpy.vstack)")
    assert done.stdout.split() == ["True"], done.stderr


def test_the_simulator_needs_no_numba():
    done = run_python("import sys; sys.modules['numba'] = None; from numba_verify.gpu import simulator; simulator.language(); "
                      "print('numba.cuda' in sys.modules)")
    assert done.stdout.split() == ["False"], done.stderr
