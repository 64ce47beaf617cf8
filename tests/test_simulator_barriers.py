"""Named barriers and mbarriers in the simulator: phases, misuse that it reports, copies that arrive at an mbarrier, speed."""

import math
import time

import numpy as np
import pytest
from support.simulated import FIRST, WARP, fails, free, in_every_order, lang, line_of, mbarriers, ready, run, wait

from numba_verify.gpu.simulator import launch

pytestmark = pytest.mark.kernel


# --- named barriers: phases and misuse --------------------------------------------------------------------------------------


def test_sync_waits_for_those_who_arrive():
    order = []

    def kernel():
        if lang.tid_x() < WARP:
            ready.sync()
            order.append("waited")
        else:
            order.append("arrived")
            ready.arrive()

    run(kernel)
    assert order == (["arrived"] * 32 + ["waited"] * 32) * 2


def test_barriers_of_two_numbers_do_not_meet():
    def kernel():
        (ready if lang.tid_x() < WARP else free).sync()  # here

    fails(kernel, "no thread can go on", f"threads 0-31 in named_barrier_sync at {line_of(kernel, 'here')} (named barrier 1: 32 of 64 threads "
          "have come)", "threads 32-63 in named_barrier_sync", "(named barrier 2: 32 of 64 threads have come)")


def test_a_number_may_be_chosen_by_the_kernel():
    pair = lang.numbered_barrier(32)

    def kernel(first):
        pair.sync(first + lang.tid_x() // WARP)
        pair.arrive(first + lang.tid_x() // WARP)

    run(kernel, args=[14])
    fails(kernel, "block (0, 0), thread 0", "expected the number of a named barrier from 1 to 15, got 0", args=[0])
    fails(kernel, "thread 32", "expected the number of a named barrier from 1 to 15, got 16", args=[15])


def test_an_arrival_may_be_left_over():
    def kernel():
        if lang.tid_x() < WARP:
            ready.arrive()

    run(kernel)


def test_participants_must_agree_on_their_number():
    short = lang.named_barrier(1, 32)

    def kernel():
        if lang.tid_x() < WARP:
            ready.sync()  # long
        else:
            short.sync()  # short

    fails(kernel, "named barrier 1: 32 of 64 threads have come, and thread 32 says 32", f"threads 0-31 in named_barrier_sync at "
          f"{line_of(kernel, 'long')}", f"thread 32 in named_barrier_sync at {line_of(kernel, 'short')}")

    def one_after_the_other():
        if lang.tid_x() < WARP:
            short.sync()
        lang.bar_sync()
        ready.sync()

    run(one_after_the_other)


def test_a_thread_may_not_come_twice_in_one_phase():
    def kernel():
        if lang.tid_x() < WARP:
            ready.arrive()
            ready.arrive()  # again

    fails(kernel, "named barrier 1: 1 of 64 threads have come, and thread 0 comes twice in one phase",
          f"thread 0 in named_barrier_arrive at {line_of(kernel, 'again')}")


def test_lanes_of_a_warp_come_to_one_place():
    def kernel():
        if lang.tid_x() % 2:
            ready.sync()
        else:
            ready.sync()

    fails(kernel, "lanes of a warp come at two different places")


# --- mbarriers: phases and misuse -------------------------------------------------------------------------------------------


def test_a_fresh_mbarrier_lets_pass_who_waits_for_the_phase_before():
    order = []

    def kernel():
        mbarriers(1)
        if lang.tid_x() == 0:
            wait(FIRST, 1)
            wait(FIRST, 0)
            order.append("complete")
            wait(FIRST, 0)
        if lang.tid_x() == 1:
            order.append("arrives")
            lang.mbarrier_arrive(FIRST)

    run(kernel)
    assert order == ["arrives", "complete"] * 2


def test_a_phase_takes_as_many_arrivals_as_the_count():
    def kernel():
        mbarriers(64)
        if lang.tid_x() > 0:
            lang.mbarrier_arrive(FIRST)
        wait(FIRST, 0)  # here

    fails(kernel, "no thread can go on",
          f"threads 0-63 in mbarrier_wait at {line_of(kernel, 'here')} (mbarrier at byte 0: phase 0 has 63 of 64 arrivals)")


def test_a_thread_may_arrive_for_others():
    def kernel():
        t = lang.tid_x()
        mbarriers(64)
        for i in range(5):
            lang.shared(512, lang.u32)[t] = i
            lang.bar_warp_sync()
            if t == 3:
                lang.mbarrier_arrive_count(FIRST, 31)
            if t == 5:
                lang.mbarrier_arrive(FIRST)
            if t == 40:
                lang.mbarrier_arrive_count(FIRST, 32)
            wait(FIRST, i & 1)
            assert lang.shared(512, lang.u32)[t ^ 63] == i
            lang.bar_sync()

    in_every_order(kernel)


def test_phases_follow_one_another():
    def kernel():
        mbarriers(64)
        for i in range(5):
            lang.mbarrier_arrive(FIRST)
            wait(FIRST, i & 1)

    in_every_order(kernel)


def test_who_sleeps_through_a_phase_is_reported():
    def kernel():
        mbarriers(1)
        if lang.tid_x() == 0:
            wait(FIRST, 0)
        if lang.tid_x() == 1:
            lang.mbarrier_arrive(FIRST)
            lang.mbarrier_arrive(FIRST)

    fails(kernel, "mbarrier at byte 0: phase 2 has 0 of 1 arrivals, but thread 0 still waits for phase 0")


def overwritten():
    mbarriers(64)
    lang.shared(0, lang.u32)[1] = 0
    lang.mbarrier_arrive(FIRST)


def made_twice():
    mbarriers(1)
    mbarriers(1)


@pytest.mark.parametrize("kernel, text", [
    (lambda: lang.mbarrier_arrive(FIRST), "mbarrier_arrive: there is no mbarrier at shared address 1024 (byte 0); mbarrier_init comes first"),
    (lambda: wait(FIRST, 0), "mbarrier_wait: there is no mbarrier"),
    (lambda: lang.cp_async_mbarrier_arrive_noinc(FIRST), "cp_async_mbarrier_arrive_noinc: there is no mbarrier"),
    (lambda: lang.mbarrier_init(FIRST + 4, 1), "is not aligned to 8 bytes"),
    (lambda: lang.mbarrier_init(FIRST + 1024, 1), "outside the block's 1024 bytes"),
    (lambda: lang.mbarrier_init(FIRST, 0), "expected a count from 1 to 1048575, got 0"),
    (lambda: lang.mbarrier_init(FIRST, 1 << 20), "expected a count from 1 to 1048575"),
    (made_twice, "mbarrier_init: mbarrier at byte 0: phase 0 has 0 of 1 arrivals, and is made a second time"),
    (lambda: (mbarriers(1), wait(FIRST, 2)), "expected a parity of 0 or 1, got 2"),
    (lambda: (mbarriers(8), lang.mbarrier_arrive_count(FIRST, 5)), "mbarrier at byte 0: phase 0 has 5 of 8 arrivals, and 5 more come at once"),
    (lambda: (mbarriers(8), lang.mbarrier_arrive_count(FIRST, 0)), "and 0 more come at once"),
    (lambda: lang.mbarrier_arrive_count(FIRST, 1), "mbarrier_arrive_count: there is no mbarrier"),
    (overwritten, "mbarrier_arrive: the mbarrier at byte 0 was overwritten"),
])
def test_misuse_of_mbarriers(kernel, text):
    fails(kernel, text, "block (0, 0), thread ")


def test_mbarriers_are_gone_in_the_next_block():
    def kernel():
        if lang.ctaid_x() == 0:
            mbarriers(1)
        wait(FIRST, 1)

    fails(kernel, "block (1, 0), thread 0", "there is no mbarrier", grid=(2, 1))


# --- copies that arrive at an mbarrier --------------------------------------------------------------------------------------

SOURCE = np.arange(1, 64 * 4 + 1, dtype=np.float32)


def landed(offset):
    """Has the copy of SOURCE's first 16 bytes to this place landed?"""
    return lang.shared(offset, lang.f32)[0] == 1.0


def test_copies_land_when_the_last_has_arrived():
    seen = []

    def kernel(source):
        t = lang.tid_x()
        mbarriers(64)
        lang.cp_async_16(FIRST + 16 + 16 * t, source)
        lang.cp_async_mbarrier_arrive_noinc(FIRST)
        seen.append(landed(16))
        wait(FIRST, 0)
        assert landed(16 + 16 * t)

    launch(kernel, grid=(1, 1), block=64, shared_bytes=2048, args=[SOURCE])
    assert seen == [False] * 63 + [True]


def test_an_arrival_takes_the_copies_begun_before_it_only():
    def kernel(source):
        mbarriers(32, 32)
        if lang.tid_x() >= WARP:
            return
        at = 16 + 64 * lang.tid_x()
        for i in range(4):
            lang.cp_async_16(FIRST + at + 16 * i, source)
            if i == 0:
                lang.cp_async_commit()  # a group; two open ones follow
            if i == 2:
                lang.cp_async_mbarrier_arrive_noinc(FIRST)
        wait(FIRST, 0)
        assert [landed(at + 16 * i) for i in range(4)] == [True, True, True, False]
        lang.cp_async_mbarrier_arrive_noinc(FIRST + 8)
        wait(FIRST + 8, 0)
        assert landed(at + 48)

    run(kernel, shared_bytes=4096, args=[SOURCE])


def test_groups_can_still_be_waited_for():
    all_but_one, everything = lang.cp_async_wait_group(1), lang.cp_async_wait_group(0)

    def kernel(source):
        mbarriers(128)
        at = 16 + 48 * lang.tid_x()
        for i in range(3):
            lang.cp_async_16(FIRST + at + 16 * i, source)
            if i == 1:
                lang.cp_async_mbarrier_arrive_noinc(FIRST)
            lang.cp_async_commit()
        all_but_one()  # two of three groups, the mbarrier's phase not being complete
        assert [landed(at + i) for i in (0, 16)] == [True, True]
        lang.shared(at, lang.f32)[0] = 7.0
        lang.mbarrier_arrive(FIRST)
        wait(FIRST, 0)
        everything()
        assert landed(at + 32)
        assert lang.shared(at, lang.f32)[0] == 7.0  # no copy landed a second time

    in_every_order(kernel, shared_bytes=4096, args=[SOURCE])


def test_a_group_may_have_landed_before_it_is_waited_for():
    everything = lang.cp_async_wait_group(0)

    def kernel(source):
        mbarriers(64)
        at = 16 + 16 * lang.tid_x()
        lang.cp_async_16(FIRST + at, source)
        lang.cp_async_mbarrier_arrive_noinc(FIRST)
        lang.bar_sync()
        lang.cp_async_mbarrier_arrive_noinc(FIRST)  # nothing new
        lang.cp_async_commit()
        everything()
        assert landed(at)

    in_every_order(kernel, shared_bytes=2048, args=[SOURCE])


def test_an_arrival_without_copies_counts():
    def kernel():
        mbarriers(64)
        lang.cp_async_mbarrier_arrive_noinc(FIRST)
        wait(FIRST, 0)

    in_every_order(kernel)


# --- speed ------------------------------------------------------------------------------------------------------------------


def cost(kernel, count, block):
    """Seconds of this process's own time for one of `count` steps, the best of five: the machine may be busy."""
    best = math.inf
    for _ in range(5):
        begin = time.process_time()
        launch(kernel, grid=(1, 1), block=block, shared_bytes=64, args=[count])
        best = min(best, time.process_time() - begin)
    return best / count


def test_speed():
    """Three times what a core of 2026 takes, and more: 0.6 ms a named barrier of 512 threads, 0.3 us a wait that need not wait."""
    whole = lang.named_barrier(1, 512)

    def barriers(count):
        for _ in range(count):
            whole.sync()

    def waits(count):
        mbarriers(1)
        for _ in range(count):
            wait(FIRST, 1)

    assert cost(barriers, 50, 512) < 2e-3
    assert cost(waits, 2000, 32) / 32 < 1.5e-6
