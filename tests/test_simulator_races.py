"""The simulator's race checker with warps of different roles: a ring filled by copies, a hand-over, and what carries knowledge to whom."""

import numpy as np
import pytest
from support.simulated import FIRST, WARP, fails, free, in_every_order, lang, line_of, mbarriers, ready, run, wait

pytestmark = pytest.mark.kernel

SOURCE = np.arange(1, 64 * 4 + 1, dtype=np.float32)


# --- races: the ring --------------------------------------------------------------------------------------------------------

SLOTS, ROUNDS, AT = 2, 5, 64


def ring(mistake=None):
    """Warp 1 fills 2 buffers of 512 bytes in turn, by copies; warp 0 sums what its neighbour lane copied."""

    def kernel(source, out):
        t, lane = lang.tid_x(), lang.tid_x() % WARP
        mbarriers(*[WARP] * SLOTS, *[1] * SLOTS)
        total = 0.0
        for i in range(ROUNDS):
            slot, phase = i % SLOTS, i // SLOTS & 1
            full, empty, buffer = FIRST + 8 * slot, FIRST + 8 * (SLOTS + slot), AT + 512 * slot
            if t >= WARP:
                if mistake == "full where empty is due":
                    wait(full, phase ^ 1)
                elif mistake != "no wait for empty":
                    wait(empty, phase ^ 1)
                lang.cp_async_16(lang.shared_address(buffer + 16 * lane), source + 512 * i + 16 * lane)
                lang.cp_async_mbarrier_arrive_noinc(full)
                continue
            if mistake != "no wait for full":
                wait(full, phase)
            total += lang.ld_shared_v4_f32(lang.shared_address(buffer + 16 * (lane ^ 1)))[0]
            if mistake != "no barrier of the warp":
                lang.bar_warp_sync()
            if lane == 0:
                lang.mbarrier_arrive(empty)
        if t < WARP:
            lang.pointer(out, lang.f32)[t] = total

    return kernel


RING = np.arange(ROUNDS * 128, dtype=np.float32)


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_the_ring_is_clean(seed):
    out = np.zeros(WARP, np.float32)
    run(ring(), shared_bytes=AT + 512 * SLOTS, args=[RING, out], check_races=True, seed=seed)
    np.testing.assert_array_equal(out, RING.reshape(ROUNDS, 32, 4)[:, np.arange(32) ^ 1, 0].sum(0))


@pytest.mark.parametrize("mistake", ["no wait for full", "no wait for empty", "full where empty is due", "no barrier of the warp"])
@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_a_ring_with_a_mistake_races(mistake, seed):
    fails(ring(mistake), "race on bytes", shared_bytes=AT + 512 * SLOTS, args=[RING, np.zeros(WARP, np.float32)], check_races=True, seed=seed)


def test_the_refilled_block_is_named():
    """The producer's warp runs first, so the copies of its second round are under way when the reader comes."""
    fails(ring("full where empty is due"), "asynchronous copy by thread ", ", not landed yet, then read by thread ", shared_bytes=AT + 512 * SLOTS,
          args=[RING, np.zeros(WARP, np.float32)], check_races=True)


# --- races: named barriers --------------------------------------------------------------------------------------------------


def hand_over(reader_waits=True, writer_waits=True):
    """Warp 0 writes P and, when warp 1 has read it, writes P again."""

    def kernel():
        t, cells = lang.tid_x(), lang.shared(0, lang.f32)
        if t < WARP:
            cells[t] = 1.0  # written
            ready.arrive()
            if writer_waits:
                free.sync()
            cells[t] = 2.0  # overwritten
        else:
            (ready.sync if reader_waits else ready.arrive)()
            cells[t ^ 33]  # read
            free.arrive()

    return kernel


def test_a_hand_over_is_clean():
    in_every_order(hand_over())


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_a_reader_that_only_arrives_races(seed):
    kernel = hand_over(reader_waits=False)
    fails(kernel, "race on bytes", line_of(kernel, "written"), line_of(kernel, "read"), check_races=True, seed=seed)


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_p_overwritten_before_it_is_free_races(seed):
    kernel = hand_over(writer_waits=False)
    fails(kernel, "race on bytes", line_of(kernel, "overwritten"), line_of(kernel, "read"), check_races=True, seed=seed)


# --- races: what carries knowledge ------------------------------------------------------------------------------------------


def test_knowledge_is_passed_on():
    """Thread 0 writes, tells warp 1 by an mbarrier, warp 1 tells warp 2 by a named barrier, warp 2 reads."""
    onward = lang.named_barrier(3, 64)

    def chain(complete):
        def kernel():
            t, cells = lang.tid_x(), lang.shared(8, lang.u32)
            mbarriers(1)
            if t == 0:
                cells[0] = 1
                lang.mbarrier_arrive(FIRST)
            elif WARP <= t < 2 * WARP:
                if complete or t % 2:
                    wait(FIRST, 0)
                onward.arrive()
            elif t >= 2 * WARP:
                onward.sync()
                cells[0]

        return kernel

    in_every_order(chain(True), block=96)
    in_every_order(chain(False), block=96)  # one that knows is enough


def test_a_store_after_the_arrival_is_not_passed_on():
    def kernel():
        t, cells = lang.tid_x(), lang.shared(8, lang.u32)
        mbarriers(1)
        if t == 0:
            lang.mbarrier_arrive(FIRST)
            cells[0] = 1  # late
        if t == 32:
            wait(FIRST, 0)
            cells[0]

    fails(kernel, "write by thread 0", line_of(kernel, "late"), "then read by thread 32", check_races=True)


def test_a_wait_learns_of_its_phase_and_not_of_the_next():
    def kernel():
        t, cells = lang.tid_x(), lang.shared(8, lang.u32)
        mbarriers(2)
        if t < 2:
            lang.mbarrier_arrive(FIRST)
        if t == 1:
            cells[0] = 1  # late
            lang.mbarrier_arrive(FIRST)  # one of two for the second phase
        if t == 32:
            wait(FIRST, 0)
            cells[0]

    fails(kernel, "write by thread 1", line_of(kernel, "late"), "then read by thread 32", check_races=True)


def test_a_phase_of_a_named_barrier_forgets_the_one_before():
    """Warps 0 and 1 complete a phase in which nobody waits; warps 2 and 3 meet in the next."""

    def kernel():
        t, cells = lang.tid_x(), lang.shared(0, lang.u32)
        if t < 64:
            cells[t] = 1
            ready.arrive()
        else:
            ready.sync()
            cells[t - 64]

    fails(kernel, "write by thread ", "then read by thread ", block=128, check_races=True)


def test_after_a_barrier_of_the_warp_accesses_race_again():
    def kernel():
        lang.bar_warp_sync()
        lang.shared(0, lang.u32)[0] = 1

    fails(kernel, "write by thread 31", "then write by thread 0", block=32, check_races=True)


def test_copies_that_have_landed_are_told_on():
    """Landed by the first arrival, which nobody waits for; the second arrival stands for all copies so far."""

    def kernel(source):
        mbarriers(1, 1)
        if lang.tid_x() == 0:
            lang.cp_async_16(FIRST + 16, source)
            lang.cp_async_mbarrier_arrive_noinc(FIRST)
            lang.cp_async_mbarrier_arrive_noinc(FIRST + 8)
        if lang.tid_x() == 32:
            wait(FIRST + 8, 0)
            lang.ld_shared_v4_f32(FIRST + 16)

    in_every_order(kernel, args=[SOURCE])


def test_an_asynchronous_arrival_publishes_copies_and_no_stores():
    def kernel(source):
        t, cells = lang.tid_x(), lang.shared(64, lang.u32)
        mbarriers(1)
        if t == 0:
            cells[0] = 1  # stored
            lang.cp_async_16(FIRST + 16, source)
            lang.cp_async_mbarrier_arrive_noinc(FIRST)
        if t == 32:
            wait(FIRST, 0)
            lang.ld_shared_v4_f32(FIRST + 16)
            cells[0]  # read

    fails(kernel, "write by thread 0", line_of(kernel, "stored"), "then read by thread 32", line_of(kernel, "read"), args=[SOURCE],
          check_races=True)


def test_the_issuing_thread_has_to_wait_too():
    def kernel(source):
        mbarriers(64)
        at = FIRST + 16 + 16 * lang.tid_x()
        lang.cp_async_16(at, source)
        lang.cp_async_mbarrier_arrive_noinc(FIRST)
        if lang.tid_x() == 62:  # its arrival is the last: all copies have landed, and it does not know
            lang.ld_shared_v4_f32(at)

    fails(kernel, "asynchronous copy by thread 62", "landed at", "then read by thread 62", args=[SOURCE], shared_bytes=2048, check_races=True)


def test_a_block_barrier_does_not_wait_for_copies():
    def kernel(source, everybody):
        t = lang.tid_x()
        mbarriers(64)
        lang.shared(16, lang.u32)[t] = 1
        lang.bar_sync()
        lang.cp_async_16(FIRST + 1024 + 16 * t, source)
        lang.cp_async_mbarrier_arrive_noinc(FIRST)
        if everybody or t == 1:
            wait(FIRST, 0)
        lang.bar_sync()
        lang.shared(16, lang.u32)[t ^ 1] = 1
        lang.ld_shared_v4_f32(FIRST + 1024 + 16 * (t ^ 32))

    run(kernel, args=[SOURCE, True], shared_bytes=2048, check_races=True)
    run(kernel, args=[SOURCE, False], shared_bytes=2048, check_races=True)  # thread 1 waited, and the barrier passes it on

    def nobody(source):
        lang.tid_x()
        mbarriers(64)
        lang.cp_async_16(FIRST + 16 + 16 * lang.tid_x(), source)
        lang.cp_async_mbarrier_arrive_noinc(FIRST)
        lang.bar_sync()
        lang.ld_shared_v4_f32(FIRST + 16)

    fails(nobody, "asynchronous copy by thread 0", "landed at", "no bar_sync", args=[SOURCE], shared_bytes=2048, check_races=True)


def test_a_group_waited_for_may_be_told_on():
    """Copies announced to an mbarrier and waited for as a group: whoever learns it either way may read."""
    everything = lang.cp_async_wait_group(0)

    def kernel(source):
        t = lang.tid_x()
        mbarriers(32)
        if t < WARP:
            lang.cp_async_16(FIRST + 16 + 16 * t, source)
            lang.cp_async_commit()
            if t % 2:
                lang.cp_async_mbarrier_arrive_noinc(FIRST)
                everything()
            else:
                everything()
                lang.cp_async_mbarrier_arrive_noinc(FIRST)
            lang.ld_shared_v4_f32(FIRST + 16 + 16 * t)
        else:
            wait(FIRST, 0)
            lang.ld_shared_v4_f32(FIRST + 16 + 16 * (t ^ 33))

    in_every_order(kernel, args=[SOURCE], shared_bytes=2048)


@pytest.mark.parametrize("use", [lang.mbarrier_arrive, lang.cp_async_mbarrier_arrive_noinc, lambda address: wait(address, 1)])
def test_an_mbarrier_nobody_was_told_of_is_a_race(use):
    def kernel():
        if lang.tid_x() == 0:
            lang.mbarrier_init(FIRST, 64)  # made
        use(FIRST)

    fails(kernel, "race on the mbarrier at byte 0: mbarrier_init by thread 0 at " + line_of(kernel, "made"), "by thread 1 at", check_races=True)


def test_the_bytes_of_an_mbarrier_are_written_by_its_init():
    def kernel():
        if lang.tid_x() == 0:
            lang.mbarrier_init(FIRST, 1)
        if lang.tid_x() == 32:
            lang.shared(0, lang.u32)[1]

    fails(kernel, "race on bytes 4 to 7 of shared memory: write by thread 0", "then read by thread 32", check_races=True)
