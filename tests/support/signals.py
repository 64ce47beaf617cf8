"""Cases of instructions.py for what warps of different roles use: named barriers, mbarriers, register counts, and the accesses beside them.

Threads 0 to 63 of the block produce, 64 to 127 consume, through shared memory of one or two buffers.
"""

import numpy as np

from .instructions import BLOCK, Case

HALF = BLOCK // 2
ROUNDS = 5


def build_named(lang, config):
    """One buffer: `ready` when it is filled, `free` when it is read."""
    uint32, float32, f32, tid, half = lang.uint32, lang.float32, lang.f32, lang.tid_x, lang.uint32(HALF)
    shared, pointer, ready, free = lang.shared, lang.pointer, lang.named_barrier(1, BLOCK), lang.named_barrier(15, BLOCK)
    ready_sync, ready_arrive, free_sync, free_arrive = ready.sync, ready.arrive, free.sync, free.arrive

    def kernel(x, y):
        cells, given, t, total = shared(uint32(0), f32), pointer(x, f32), tid(), float32(0)
        for j in range(ROUNDS):
            if t < half:
                cells[t] = given[uint32(j) * half + t]
                ready_arrive()
                free_sync()
            else:
                ready_sync()
                total += cells[uint32(BLOCK - 1) - t]
                free_arrive()
        pointer(y, f32)[t] = total

    return kernel


def build_numbered(lang, config):
    """Two buffers in turn, each with a `ready` barrier of its own: 2 and 3; the `free` barriers are 4 and 5."""
    uint32, float32, f32, tid, half = lang.uint32, lang.float32, lang.f32, lang.tid_x, lang.uint32(HALF)
    shared, pointer, barrier = lang.shared, lang.pointer, lang.numbered_barrier(BLOCK)
    sync, arrive = barrier.sync, barrier.arrive

    def kernel(x, y):
        cells, given, t, total = shared(uint32(0), f32), pointer(x, f32), tid(), float32(0)
        for j in range(ROUNDS):
            slot = uint32(j) & uint32(1)
            if t < half:
                if j > 1:
                    sync(uint32(slot + uint32(4)))  # the buffer is free
                cells[slot * half + t] = given[uint32(j) * half + t]
                arrive(uint32(slot + uint32(2)))
            else:
                sync(uint32(slot + uint32(2)))  # the buffer is filled
                total += cells[slot * half + uint32(BLOCK - 1) - t]
                arrive(uint32(slot + uint32(4)))
        pointer(y, f32)[t] = total

    return kernel


def build_mbarriers(suspend, counted=False):
    """One buffer: mbarrier `full` counts its 64 writers, `empty` one lane of each of its two readers' warps.

    counted: one lane of each warp arrives for the writers of its warp.
    """

    def build(lang, config):
        uint32, float32, f32, tid, half = lang.uint32, lang.float32, lang.f32, lang.tid_x, lang.uint32(HALF)
        shared, pointer, at, bar, warp = lang.shared, lang.pointer, lang.shared_address, lang.bar_sync, lang.bar_warp_sync
        init, arrive, wait = lang.mbarrier_init, lang.mbarrier_arrive, lang.mbarrier_wait(suspend)
        arrive_for, lanes = lang.mbarrier_arrive_count, lang.uint32(32)

        def kernel(x, y):
            full, empty, cells = at(uint32(4 * HALF)), at(uint32(4 * HALF + 8)), shared(uint32(0), f32)
            given, t, total = pointer(x, f32), tid(), float32(0)
            if t == uint32(0):
                init(full, half)
                init(empty, uint32(2))
            bar()  # the barriers are there
            for j in range(ROUNDS):
                if t < half:
                    wait(empty, uint32(uint32(j) & uint32(1)) ^ uint32(1))
                    cells[t] = given[uint32(j) * half + t]
                    if counted:
                        warp()  # all lanes have written
                        if t & uint32(31) == uint32(0):
                            arrive_for(full, lanes)
                    else:
                        arrive(full)
                else:
                    wait(full, uint32(uint32(j) & uint32(1)))
                    total += cells[uint32(BLOCK - 1) - t]
                    warp()  # all lanes have read
                    if t & uint32(31) == uint32(0):
                        arrive(empty)
            pointer(y, f32)[t] = total

        return kernel

    return build


def build_copies(lang, config):
    """Two buffers of 64 x 16 bytes, filled by copies that announce themselves; the rounds are unrolled."""
    uint32, uint64, float32, f32, tid, half = lang.uint32, lang.uint64, lang.float32, lang.f32, lang.tid_x, lang.uint32(HALF)
    shared, pointer, at, bar, unroll = lang.shared, lang.pointer, lang.shared_address, lang.bar_sync, lang.unroll
    init, arrive, wait, copy, landed = (lang.mbarrier_init, lang.mbarrier_arrive, lang.mbarrier_wait(False), lang.cp_async_16,
                                        lang.cp_async_mbarrier_arrive_noinc)
    bytes_of = 16 * HALF

    def kernel(x, y):
        base, cells, t, total = at(uint32(0)), shared(uint32(0), f32), tid(), float32(0)
        full, empty = uint32(base + uint32(2 * bytes_of)), uint32(base + uint32(2 * bytes_of + 16))
        if t < uint32(2):
            init(uint32(full + t * uint32(8)), half)
            init(uint32(empty + t * uint32(8)), half)
        bar()  # the barriers are there
        for j in range(ROUNDS):
            unroll()
            slot, phase = j & 1, (j >> 1) & 1
            if t < half:
                wait(uint32(empty + uint32(slot * 8)), uint32(phase ^ 1))
                copy(uint32(base + uint32(slot * bytes_of) + t * uint32(16)), x + uint64(uint32(j * bytes_of) + t * uint32(16)))
                landed(uint32(full + uint32(slot * 8)))
            else:
                wait(uint32(full + uint32(slot * 8)), uint32(phase))
                total += cells[uint32(slot * bytes_of // 4) + (uint32(BLOCK - 1) - t) * uint32(4)]
                arrive(uint32(empty + uint32(slot * 8)))
        pointer(y, f32)[t] = total

    return kernel


def sums_case(name, build, instruction, width=1, needs="sm_80"):
    """`width` floats a thread and round, of which the first counts."""

    def check(given, made):
        np.testing.assert_array_equal(made[0][:HALF], 0)
        wanted = given[0].reshape(ROUNDS, HALF, width)[:, ::-1, 0].astype(np.float64).sum(0)
        np.testing.assert_allclose(made[0][HALF:], wanted, rtol=1e-5, atol=1e-5)

    return Case(name, build, instruction, lambda rng: [rng.standard_normal(ROUNDS * HALF * width).astype(np.float32)],
                lambda: [np.zeros(BLOCK, np.float32)], check, shared_bytes=2 * 16 * HALF + 32, needs=needs)


def build_registers(lang, config):
    pointer, f32, tid, fewer = lang.pointer, lang.f32, lang.tid_x, lang.set_max_registers(40, False)

    def kernel(x, y):
        fewer()
        pointer(y, f32)[tid()] = pointer(x, f32)[tid()]

    return kernel


def build_volatile(lang, config):
    uint64, u64, pointer, tid, load, prefetch = lang.uint64, lang.u64, lang.pointer, lang.tid_x, lang.ld_volatile_u64, lang.prefetch_global_l1

    def kernel(x, y):
        t = uint64(tid())
        prefetch(x + t * uint64(8))
        pointer(y, u64)[t] = load(x + t * uint64(8))

    return kernel


def volatile_case(name, instruction):
    """8 bytes of every thread come out as they went in."""

    def check(given, made):
        np.testing.assert_array_equal(made[0], given[0])

    return Case(name, build_volatile, instruction, lambda rng: [rng.integers(0, 1 << 64, BLOCK, np.uint64)], lambda: [np.zeros(BLOCK, np.uint64)],
                check)


def build_grids(lang, config):
    """As after a launch that does not overlap: nothing is waited for."""
    pointer, f32, tid, go_on, wait = lang.pointer, lang.f32, lang.tid_x, lang.griddepcontrol_launch_dependents, lang.griddepcontrol_wait

    def kernel(x, y):
        go_on()
        wait()
        pointer(y, f32)[tid()] = pointer(x, f32)[tid()]

    return kernel


def build_tests(lang, config):
    """Every thread looks at both phases of an mbarrier that is fresh, and again when all have arrived."""
    uint32, u32, tid, pointer, shared_address = lang.uint32, lang.u32, lang.tid_x, lang.pointer, lang.shared_address
    init, arrive, test, bar, block = lang.mbarrier_init, lang.mbarrier_arrive, lang.mbarrier_test, lang.bar_sync, lang.uint32(BLOCK)

    def kernel(y):
        at = shared_address(uint32(0))
        if tid() == uint32(0):
            init(at, block)
        bar()  # the barrier is there
        seen = uint32(test(at, uint32(0)) | test(at, uint32(1)) << uint32(1))
        bar()  # all have looked
        arrive(at)
        bar()  # all have arrived
        pointer(y, u32)[tid()] = uint32(seen | test(at, uint32(0)) << uint32(2) | test(at, uint32(1)) << uint32(3))

    return kernel


def tests_case():
    """A fresh barrier counts as one after a phase of parity 1; then phase 0 is complete."""

    def check(given, made):
        np.testing.assert_array_equal(made[0], np.full(BLOCK, 0b0110, np.uint32))

    return Case("mbarrier_test", build_tests, r"mbarrier\.test_wait\.parity\.shared\.b64 done, \[%r\d+\], %r\d+; selp", lambda rng: [],
                lambda: [np.zeros(BLOCK, np.uint32)], check, shared_bytes=8)


def build_pairs(lang, config):
    uint32, uint64, pointer, f32, tid, put = lang.uint32, lang.uint64, lang.pointer, lang.f32, lang.tid_x, lang.st_global_v2_f32

    def kernel(x, y):
        given, t = pointer(x, f32), tid()
        put(y + uint64(t) * uint64(8), given[uint32(2) * t + uint32(1)], given[uint32(2) * t])

    return kernel


def copied_case(name, build, instruction, floats=1, needs="sm_80"):
    """The thread's floats come out in reverse order."""

    def check(given, made):
        np.testing.assert_array_equal(made[0].reshape(BLOCK, floats), given[0].reshape(BLOCK, floats)[:, ::-1])

    return Case(name, build, instruction, lambda rng: [rng.standard_normal(BLOCK * floats).astype(np.float32)],
                lambda: [np.zeros(BLOCK * floats, np.float32)], check, needs=needs)


TEST_WAIT, TRY_WAIT = (rf"mbarrier\.{name}\.parity\.shared\.b64 done, \[%r\d+\], %r\d+; @!done bra again;" for name in ("test_wait", "try_wait"))
#: A case whose name is no name of the vocabulary: a second form of mbarrier_wait.
SUSPENDED = sums_case("mbarrier_wait_suspended", build_mbarriers(True), TRY_WAIT, needs="sm_90")
SIGNALS = [
    sums_case("named_barrier", build_named, r"(?s)bar\.(arrive 1|sync 15), 128;.*bar\.(sync 15|arrive 1), 128;"),
    sums_case("numbered_barrier", build_numbered, r"bar\.(arrive|sync) (%r\d+|[2-5]), 128;"),
    sums_case("mbarrier_init", build_mbarriers(False), r"mbarrier\.init\.shared\.b64 \[%r\d+\], %r\d+;"),
    sums_case("mbarrier_arrive", build_mbarriers(False), r"mbarrier\.arrive\.shared\.b64 state, \[%r\d+\];"),
    sums_case("mbarrier_arrive_count", build_mbarriers(True, counted=True), r"mbarrier\.arrive\.shared\.b64 state, \[%r\d+\], %r\d+;",
              needs="sm_90"),
    sums_case("mbarrier_wait", build_mbarriers(False), TEST_WAIT),
    SUSPENDED,
    tests_case(),
    volatile_case("ld_volatile_u64", r"ld\.volatile\.global\.u64 %rd\d+, \[%rd\d+\];"),
    volatile_case("prefetch_global_l1", r"prefetch\.global\.L1 \[%rd\d+\];"),
    sums_case("cp_async_mbarrier_arrive_noinc", build_copies, r"cp\.async\.mbarrier\.arrive\.noinc\.shared\.b64 \[%r\d+\];", width=4),
    copied_case("set_max_registers", build_registers, r"setmaxnreg\.dec\.sync\.aligned\.u32 40;", needs="sm_90a"),
    copied_case("griddepcontrol_launch_dependents", build_grids, r"griddepcontrol\.launch_dependents;", needs="sm_90"),
    copied_case("griddepcontrol_wait", build_grids, r"griddepcontrol\.wait;", needs="sm_90"),
    copied_case("st_global_v2_f32", build_pairs, r"st\.global\.v2\.[bf]32", floats=2),
]
