"""The simulator: divergence and races that it reports instead of hanging, what it lets pass, order, and speed."""

import math
import threading
import time

import numpy as np
import pytest
from support.simulated import fails, line_of

from numba_verify.gpu import simulator
from numba_verify.gpu.simulator import launch

lang = simulator.language()
pytestmark = pytest.mark.kernel


# --- divergence -----------------------------------------------------------------------------------------------------------


def test_threads_that_returned_are_named():
    def kernel():
        if lang.tid_x() >= 40:
            return
        lang.bar_sync()  # here

    fails(kernel, "block (0, 0): no thread can go on", f"threads 0-39 in bar_sync at {line_of(kernel, 'here')}", "threads 40-63 returned")


def test_two_different_barriers_are_a_divergence():
    def kernel():
        if lang.tid_x() % 2:
            lang.bar_sync()  # odd
        else:
            lang.bar_sync()  # even

    fails(kernel, "two different bar_sync", f"thread 0 in bar_sync at {line_of(kernel, 'even')}",
          f"thread 1 in bar_sync at {line_of(kernel, 'odd')}")


def test_a_warp_at_a_barrier_and_a_warp_at_a_shuffle():
    def kernel():
        if lang.tid_x() < 40:
            lang.shfl_sync_bfly_f32(1.0, 1)  # shuffle
        lang.bar_sync()  # barrier

    fails(kernel, f"threads 32-39 in shfl_sync_bfly_f32 at {line_of(kernel, 'shuffle')}",
          f"threads 0-31, 40-63 in bar_sync at {line_of(kernel, 'barrier')}")


def test_lanes_at_two_different_instructions():
    def kernel():
        if lang.tid_x() % 32 < 16:
            lang.vote_sync_any(1)  # any
        else:
            lang.vote_sync_ballot(1)  # ballot

    fails(kernel, "lanes of a warp meet at two different instructions", f"threads 0-15 in vote_sync_any at {line_of(kernel, 'any')}",
          f"thread 16 in vote_sync_ballot at {line_of(kernel, 'ballot')}")


def test_lanes_at_the_same_instruction_on_two_lines():
    def kernel():
        if lang.tid_x() % 2:
            lang.bar_warp_sync()
        else:
            lang.bar_warp_sync()

    fails(kernel, "two different instructions")


def test_a_report_shows_who_called_the_helper():
    def helper():
        lang.bar_sync()  # barrier

    def kernel():
        if lang.tid_x() < 32:
            helper()  # call

    fails(kernel, f"threads 0-31 in bar_sync at {line_of(helper, 'barrier')}, called from {line_of(kernel, 'call')}")


def test_whole_blocks_and_warps_may_leave_early():
    out = np.zeros(4, np.uint32)

    def kernel(address):
        if lang.ctaid_x() == 2:
            return
        lang.bar_sync()
        if lang.tid_x() >= 32:
            return
        if lang.vote_sync_any(lang.tid_x() == 31) and lang.tid_x() == 0:
            lang.pointer(address, lang.u32)[lang.ctaid_x()] = 1

    launch(kernel, grid=(4, 1), block=128, args=[out])
    assert out.tolist() == [1, 1, 0, 1]


def test_a_grid_that_overlaps_waits_in_every_thread():
    def kernel(last):
        if lang.tid_x() < last:
            lang.griddepcontrol_wait()

    launch(kernel, grid=(2, 1), block=64, args=[64], overlaps=True)
    launch(kernel, grid=(2, 1), block=64, args=[63])
    fails(kernel, "block (0, 0), thread 63: ends without griddepcontrol_wait", args=[63], overlaps=True)


def test_the_largest_block():
    out = np.zeros(1024, np.uint32)

    def kernel(address):
        t = lang.tid_x()
        cells = lang.shared(0, lang.u32)
        cells[t] = t
        lang.bar_sync()
        lang.pointer(address, lang.u32)[t] = cells[1023 - t]

    launch(kernel, grid=(1, 1), block=1024, shared_bytes=4096, args=[out], check_races=True)
    assert out.tolist() == list(range(1023, -1, -1))


# --- races --------------------------------------------------------------------------------------------------------------------


def exchange(order, distance, tag=lang.f32):
    """Each thread writes its cell, `order` happens, each reads the cell of the thread `distance` further."""

    def kernel():
        t, cells = lang.tid_x(), lang.shared(0, tag)
        cells[t] = 1
        order()
        cells[t ^ distance]

    return kernel


def barrier():
    lang.bar_sync()


def warp_barrier():
    lang.bar_warp_sync()


def shuffle():
    lang.shfl_sync_bfly_f32(1.0, 1)


@pytest.mark.parametrize("order, distance", [(barrier, 1), (barrier, 32), (warp_barrier, 1), (warp_barrier, 31)])
def test_ordered_accesses_are_no_race(order, distance):
    launch(exchange(order, distance), grid=(2, 1), block=64, shared_bytes=256, check_races=True)


@pytest.mark.parametrize("order, distance", [(lambda: None, 1), (shuffle, 1), (warp_barrier, 32), (shuffle, 32)])
def test_unordered_accesses_are_a_race(order, distance):
    fails(exchange(order, distance), "block (0, 0): race on bytes", "of shared memory", check_races=True)
    launch(exchange(order, distance), grid=(1, 1), block=64, shared_bytes=256)


def test_a_race_names_both_threads_and_lines():
    def kernel():
        cells = lang.shared(64, lang.f32)
        if lang.tid_x() == 3:
            cells[2] = 1.0  # first
        if lang.tid_x() == 40:
            cells[2] = 2.0  # second

    fails(kernel, f"race on bytes 72 to 75 of shared memory: write by thread 3 at {line_of(kernel, 'first')}, then write by thread 40 at "
          f"{line_of(kernel, 'second')}, with no bar_sync", check_races=True)


def test_a_write_after_others_have_read_is_a_race():
    def kernel():
        cells = lang.shared(0, lang.f32)
        if lang.tid_x() < 63:
            cells[0]
        else:
            cells[0] = 1.0

    fails(kernel, "read by thread 0", "then write by thread 63", check_races=True)


@pytest.mark.parametrize("tag", [lang.u8, lang.u16], ids=lambda tag: tag.name)
def test_neighbours_within_a_word_are_no_race(tag):
    def kernel():
        lang.shared(0, tag)[lang.tid_x()] = 1

    launch(kernel, grid=(1, 1), block=64, shared_bytes=256, check_races=True)


def test_a_write_to_a_neighbour_does_not_hide_a_race():
    def kernel():
        t, cells = lang.tid_x(), lang.shared(0, lang.u8)
        if t < 2:
            cells[t] = 1
        if t == 40:
            cells[0]

    fails(kernel, "write by thread 0", "then read by thread 40", check_races=True)


def test_vector_and_matrix_accesses_count():
    def store():
        lang.st_shared_v4_f32(lang.shared_address((lang.tid_x() >> 1) * 16), 1.0, 1.0, 1.0, 1.0)

    def matrix():
        t, cells = lang.tid_x(), lang.shared(0, lang.f32)
        cells[t * 4 + 1] = 1.0
        lang.ldmatrix_x4(lang.shared_address((t ^ 1) * 16))

    fails(store, "write by thread 0", "write by thread 1", check_races=True)
    fails(matrix, "read by thread", check_races=True)


# --- numbers ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["uint32", "int32", "uint64", "int64"])
def test_casts_wrap_as_numpy_does(name):
    for number in (0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 1 << 63, (1 << 64) - 1, 1 << 64, -1, -0x80000001, True):
        assert getattr(lang, name)(number) == int(np.array(number % (1 << 64), np.uint64).astype(name))


def test_casts_to_integers_take_no_floats():
    with pytest.raises(TypeError):
        lang.uint32(1.5)


# --- order, threads, speed ------------------------------------------------------------------------------------------------------


def visited(seed):
    order = []

    def kernel():
        if lang.tid_x() == 0:
            order.append((lang.ctaid_x(), lang.ctaid_y(), lang.nctaid_x()))

    launch(kernel, grid=(5, 3), block=32, seed=seed)
    return order


def test_blocks_run_in_order_or_shuffled_by_a_seed():
    rows = [(x, y, 5) for y in range(3) for x in range(5)]
    assert visited(None) == rows
    assert visited(1) == visited(1) != visited(2)
    assert sorted(visited(1)) == sorted(rows)


def test_threads_are_shuffled_too():
    order = []
    launch(lambda: order.append(lang.tid_x()), grid=(1, 1), block=64, seed=3)
    assert order != list(range(64)) and sorted(order) == list(range(64))


@pytest.mark.parametrize("options, text", [
    ({"grid": (1,), "block": 32}, "grid: expected two integers"),
    ({"grid": (1, -1), "block": 32}, "grid: expected two integers"),
    ({"grid": (1, 1), "block": 33}, "block: expected a multiple of 32 up to 1024"),
    ({"grid": (1, 1), "block": 2048}, "block: expected a multiple of 32 up to 1024"),
    ({"grid": (1, 1), "block": 32, "shared_bytes": -1}, "shared_bytes: expected"),
])
def test_a_geometry_that_no_gpu_takes(options, text):
    with pytest.raises(ValueError, match=text):
        launch(lambda: None, **options)


def test_an_empty_grid_runs_nothing():
    launch(lambda: 1 / 0, grid=(0, 7), block=32)


def test_launches_in_two_os_threads_do_not_meet():
    results = np.zeros((2, 128), np.float32)

    def kernel(address, start):
        x = start + float(lang.tid_x())
        for _ in range(300):
            x = lang.shfl_sync_bfly_f32(x, 1)
            lang.bar_sync()
        lang.pointer(address, lang.f32)[lang.tid_x()] = x

    workers = [threading.Thread(target=launch, args=(kernel, (1, 1), 128), kwargs={"args": [results[i], 1000.0 * i]}) for i in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    np.testing.assert_array_equal(results, np.arange(128) + np.array([[0], [1000]]))


def rate(kernel, count):
    """Calls a second of this process's own time, the best of five: the machine may be busy."""
    best = math.inf
    for _ in range(5):
        begin = time.process_time()
        launch(kernel, grid=(1, 1), block=128, shared_bytes=2048, args=[count])
        best = min(best, time.process_time() - begin)
    return count / best


def test_speed():
    """A third or less of what two cores of 2026 reach: 11,000 barriers, 9,000 shuffles and 4,800 mma of each of 4 warps a second."""

    def barriers(count):
        for _ in range(count):
            lang.bar_sync()

    def shuffles(count):
        for _ in range(count):
            lang.shfl_sync_bfly_f32(1.0, 1)

    def products(count):
        for _ in range(count):
            lang.mma_m16n8k16_bf16(1, 2, 3, 4, 5, 6, 1.0, 2.0, 3.0, 4.0)

    assert rate(barriers, 200) > 3000
    assert rate(shuffles, 200) > 2500
    assert rate(products, 100) > 1300
