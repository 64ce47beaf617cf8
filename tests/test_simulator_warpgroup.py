"""wgmma in the simulator: when products happen, what the other proxy sees, and what is reported. That they are right: test_ptx.py."""

import math

import numpy as np
import pytest
from support.simulated import FIRST, fails, lang, line_of, mbarriers, run, wait

from numba_verify.gpu.simulator import launch

pytestmark = pytest.mark.kernel

GROUP = 128
# A (64 x 16) in matrices of 8 x 8 at byte 0, B (8 x 16) behind it; mbarriers and others from REST on.
B_AT, REST, SHARED = 2048, 2304, 4096
A = lang.wgmma_descriptor(1024, 128, 0)(FIRST)
B = lang.wgmma_descriptor(128, 0, 0)(FIRST + B_AT)
multiply, take, done = lang.wgmma_ss(8, "float16", False), lang.wgmma_wait(0, 4), lang.wgmma_wait(0, 0)
take_older = lang.wgmma_wait(1, 4)
array = lang.local_array(4, lang.f32)
ONE = 0x3C00  # 1.0 in float16
SOURCE = np.full(8 * GROUP, ONE, np.uint16)


def write(first=0, last=REST, value=ONE):
    """In a kernel: a warpgroup writes the elements in these bytes."""
    cells = lang.shared(0, lang.u16)
    for i in range(first // 2 + lang.tid_x() % GROUP, last // 2, GROUP):
        cells[i] = value  # written


def prepare():
    """In a kernel: A and B are all ones, as every thread and the other proxy know."""
    if lang.tid_x() < GROUP:
        write()
    lang.fence_proxy_async()
    lang.bar_sync()


def issue(acc, a=A, b=B, accumulate=0):
    multiply(acc, a, b, accumulate)  # issued
    lang.wgmma_commit()


def start(accumulate=0):
    """In a kernel: a group on its way. Every element of the product is 16."""
    prepare()
    acc = array()
    lang.wgmma_fence()
    issue(acc, accumulate=accumulate)
    return acc


def is_clean(kernel, block=GROUP, **options):
    for seed in (None, 1, 2):
        run(kernel, block=block, shared_bytes=SHARED, check_races=True, seed=seed, **options)


def breaks(kernel, *texts, block=GROUP, **options):
    return fails(kernel, *texts, block=block, **{"shared_bytes": SHARED, "check_races": True, **options})


# --- when a product happens -------------------------------------------------------------------------------------------------


def test_accumulators_are_nan_until_a_wait_takes_them():
    def kernel():
        acc = start()
        assert all(map(math.isnan, acc))
        done()
        assert all(map(math.isnan, acc))
        take(acc)
        assert acc == [16.0] * 4

    is_clean(kernel)


def test_a_product_happens_at_the_wait_that_ends_it():
    """With what is in shared memory then: the race that it is has no order by luck."""

    def kernel():
        acc = start()
        lang.bar_sync()
        write(value=0)
        lang.bar_sync()
        take(acc)
        assert acc == [0.0] * 4

    launch(kernel, (1, 1), GROUP, SHARED)


def test_older_groups_end_first():
    def kernel():
        one = start()
        two = array()
        multiply(two, A, B, 0)
        multiply(two, A, B, 1)
        lang.wgmma_commit()
        take_older(one)
        assert one == [16.0] * 4 and all(map(math.isnan, two))
        take(two)
        assert two == [32.0] * 4

    is_clean(kernel)


def test_groups_add_up_whether_or_not_a_wait_lies_between_them():
    def kernel():
        acc = start()
        issue(acc, accumulate=1)
        done()
        issue(acc, accumulate=1)
        take(acc)
        assert acc == [48.0] * 4
        acc[1] = 1.0
        lang.wgmma_fence()
        issue(acc, accumulate=1)
        take(acc)
        assert acc == [64.0, 17.0, 64.0, 64.0]
        lang.wgmma_fence()
        issue(acc)
        take(acc)
        assert acc == [16.0] * 4

    is_clean(kernel)


def test_warpgroups_multiply_each_for_itself():
    bar = lang.numbered_barrier(GROUP)

    def kernel():
        second = lang.tid_x() // GROUP
        prepare()
        acc = array()
        for _ in range(3 + second):
            lang.wgmma_fence()
            issue(acc)
            take(acc)
            bar.sync(1 + second)
        assert acc == [16.0] * 4

    is_clean(kernel, block=2 * GROUP)


# --- who takes part ---------------------------------------------------------------------------------------------------------


def test_a_warp_that_does_not_come():
    def kernel():
        if lang.tid_x() < 96:
            lang.wgmma_fence()
            multiply(array(), A, B, 0)

    breaks(kernel, "no thread can go on", "threads 0-95 in wgmma_fence", "threads 96-127 returned")

    def product():
        lang.wgmma_fence()
        if lang.tid_x() < 96:
            multiply(array(), A, B, 0)  # here

    breaks(product, "no thread can go on", f"threads 0-95 in wgmma_ss at {line_of(product, 'here')}", "threads 96-127 returned")


def test_fewer_threads_than_a_warpgroup():
    breaks(lambda: lang.wgmma_fence(), "threads 0 and up of the block are fewer than the 128 of a warpgroup", block=96)
    breaks(lambda: lang.wgmma_fence() if lang.tid_x() > 127 else None, "threads 128 and up of the block are fewer", block=192)


def test_two_products_at_once():
    other = lang.wgmma_ss(8, "bfloat16", False)

    def kernel():
        acc = array()
        lang.wgmma_fence()
        (multiply if lang.tid_x() < 64 else other)(acc, A, B, 0)

    breaks(kernel, "threads of a warpgroup meet at two different instructions")


@pytest.mark.parametrize("operands, name", [((A + 1, B, 0), "descriptor of A"), ((A, B + 1, 0), "descriptor of B"), ((A, B, 1), "accumulate")])
def test_threads_that_disagree(operands, name):
    def kernel():
        lang.wgmma_fence()
        multiply(array(), *(operands if lang.tid_x() == 70 else (A, B, 0)))

    breaks(kernel, f"wgmma: {name} differs between threads 0 and 70 of the warpgroup")


def test_threads_that_bring_different_arrays():
    def kernel():
        one, two = start(), array()
        issue(two)
        issue(two if lang.tid_x() == 5 else one)

    breaks(kernel, "wgmma: its accumulators, 0 to 3 of their arrays, belong in part to the wgmma at")


def test_parts_of_an_array():
    """Two products side by side in one array, which one wait takes; a third that lies across them."""
    whole, half, new = lang.wgmma_wait(0, 8), lang.wgmma_ss(8, "float16", False, 4), lang.local_array(8, lang.f32)
    across = lang.wgmma_ss(8, "float16", False, 2)

    def kernel(third):
        prepare()
        acc = new()
        lang.wgmma_fence()
        issue(acc)
        half(acc, A, B, 0)
        half(acc, A, B, 1)
        if third:
            across(acc, A, B, 0)
        lang.wgmma_commit()
        whole(acc)
        assert acc == [16.0] * 4 + [32.0] * 4

    is_clean(kernel, args=[False])
    breaks(kernel, "wgmma: its accumulators, 2 to 5 of their arrays, belong in part to the wgmma at", "with 0 to 3", args=[True])


def test_arrays_of_another_length():
    product = lang.wgmma_ss(16, "float16", False)

    def short():
        lang.wgmma_fence()
        product(array(), A, lang.wgmma_descriptor(128, 128, 0)(FIRST), 0)

    breaks(short, "wgmma: 16 columns are 8 accumulators a thread, from 0 on, and the array has 4")
    breaks(lambda: take([0.0] * 8), "wgmma_wait: expected an array of 4, got one of 8")


# --- registers --------------------------------------------------------------------------------------------------------------


def test_no_fence_at_all():
    def kernel():
        multiply(array(), A, B, 0)  # here

    breaks(kernel, f"at {line_of(kernel, 'here')}: wgmma: no wgmma_fence before the first one")


def test_no_fence_since_the_wait():
    def kernel():
        acc = start()
        take(acc)
        issue(acc, accumulate=1)

    breaks(kernel, "wgmma: no wgmma_fence since the wait that took its accumulators")


def test_a_fence_too_early():
    def kernel():
        acc = start()
        take(acc)
        lang.wgmma_fence()
        if lang.tid_x() == 77:
            acc[2] = 0.0
        issue(acc, accumulate=1)

    breaks(kernel, "wgmma: its accumulators were written after the last wgmma_fence")


@pytest.mark.parametrize("then", ["wait", "product"])
def test_accumulators_written_on_their_way(then):
    def kernel():
        acc = start()
        if lang.tid_x() == 9:
            acc[3] = 1.0
        if then == "wait":
            take(acc)
        else:
            issue(acc, accumulate=1)

    breaks(kernel, f"the accumulators of the wgmma at {line_of(issue, 'issued')} were written in thread 9 of the warpgroup before a wgmma_wait")


def test_a_wait_that_takes_what_it_does_not_wait_for():
    def newest():
        take_older(start())

    breaks(newest, f"wgmma_wait: it takes the accumulators of the wgmma at {line_of(issue, 'issued')}, whose group it does not wait for")

    def without_commit():
        prepare()
        acc = array()
        lang.wgmma_fence()
        multiply(acc, A, B, 0)
        take(acc)

    breaks(without_commit, "whose group it does not wait for")


# --- operands ---------------------------------------------------------------------------------------------------------------


def descriptor(offset, leading=1024, stride=128, swizzle=0):
    return lang.wgmma_descriptor(leading, stride, swizzle)(FIRST + offset)


@pytest.mark.parametrize("make, transposed, text", [
    (lambda: descriptor(B_AT + 8), False, "wgmma_descriptor: shared address 3080 is no multiple of 16 bytes"),
    (lambda: descriptor(1 << 18), False, "does not fit 18 bits"),
    (lambda: descriptor(SHARED), False, "wgmma, B: the operand takes bytes 4096 to 5247"),
    (lambda: descriptor(SHARED - 256, leading=256), False, "wgmma, B: the operand takes bytes 3840 to 4223 (shared addresses 4864 to 5247)"),
    (lambda: descriptor(0) - (FIRST >> 4), False, "wgmma, B: the operand takes bytes -1024 to 127"),
    (lambda: descriptor(0, stride=2048, swizzle=128) + (3 * 128 >> 4), False, "begins at shared address 1408, in row 3 of the swizzle's pattern"),
    (lambda: descriptor(0, swizzle=128) + (112 >> 4), False, "rows of 32 bytes from byte 112 on do not end within the 128 bytes"),
    (lambda: descriptor(0, stride=1024, swizzle=128) + (96 >> 4), False, None),
    (lambda: descriptor(0, stride=1040, swizzle=128), True, "stride is 1040 bytes; with the 128-byte swizzle it is a multiple of 1024"),
    (lambda: descriptor(0) + (1 << 14), False, "is no matrix descriptor of wgmma_descriptor"),
    (lambda: descriptor(0) | 2 << 62, False, "is no matrix descriptor of wgmma_descriptor"),
])
def test_operands_that_lie_elsewhere(make, transposed, text):
    product = lang.wgmma_ss(8, "float16", transposed)

    def kernel():
        prepare()
        lang.wgmma_fence()
        product(array(), A, make(), 0)

    if text is None:
        is_clean(kernel)
    else:
        breaks(kernel, "block (0, 0), thread ", text)


@pytest.mark.parametrize("n, transposed, leading, stride, text", [
    (16, False, 16, 512, "stride is 512 bytes"), (64, True, 512, 1024, None), (72, True, 512, 1024, "leading is 512 bytes"),
    (72, True, 2048, 1024, None), (16, False, 512, 1024, None),
])
def test_distances_that_the_swizzle_allows(n, transposed, leading, stride, text):
    """Only those that the operand uses."""
    product, new, at = lang.wgmma_ss(n, "float16", transposed), lang.local_array(n // 2, lang.f32), lang.wgmma_descriptor(leading, stride, 128)

    def kernel():
        lang.wgmma_fence()
        product(new(), A, at(FIRST), 0)

    if text is None:
        launch(kernel, (1, 1), GROUP, 8192)
    else:
        breaks(kernel, text, shared_bytes=8192)


# --- races: what a product reads --------------------------------------------------------------------------------------------


def test_a_write_that_nothing_orders_before_the_product():
    def kernel(synced):
        t = lang.tid_x()
        prepare()
        if t == 40:
            lang.shared(0, lang.u16)[3] = ONE  # here
            lang.fence_proxy_async()
        if synced:
            lang.bar_sync()
        lang.wgmma_fence()
        issue(array())

    breaks(kernel, f"race on bytes 6 to 7 of shared memory: write by thread 40 at {line_of(kernel, 'here')}, then read by the wgmma of threads "
           f"0-127 at {line_of(issue, 'issued')}, with no bar_sync", "between them that thread 0 knows of", args=[False])
    is_clean(kernel, args=[True])


def test_a_write_that_one_warp_does_not_know_of():
    """Warp 0 writes and arrives; warps 1 and 2 wait, warp 3 does not."""

    def kernel():
        t = lang.tid_x()
        mbarriers(32)
        if t < 32:
            lang.shared(512, lang.u32)[t] = 0
            lang.fence_proxy_async()
            lang.mbarrier_arrive(FIRST)
        if t < 96:
            wait(FIRST, 0)
        lang.wgmma_fence()
        multiply(array(), lang.wgmma_descriptor(1024, 128, 0)(FIRST + 512), B, 0)

    breaks(kernel, "race on bytes 512 to 513", "write by thread 0 ", "that thread 96 knows of")


def test_a_write_between_issue_and_wait():
    def kernel():
        acc = start()
        lang.bar_sync()
        if lang.tid_x() == 3:
            lang.shared(B_AT, lang.u32)[2] = 0  # here
        take(acc)

    breaks(kernel, f"race on bytes 2048 to 2051 of shared memory: read by the wgmma of threads 0-127 at {line_of(issue, 'issued')}, then write by "
           f"thread 3 at {line_of(kernel, 'here')}, with no wgmma_wait and barrier between them")


@pytest.mark.parametrize("tell", ["nobody", "lane of each warp", "all"])
def test_the_next_writer_knows_that_all_warps_have_waited(tell):
    """One lane of a warp may speak for it."""

    def kernel():
        t = lang.tid_x()
        if t == 0:
            lang.mbarrier_init(FIRST + REST, GROUP if tell == "all" else 4)
        acc = start()
        take(acc)
        if tell == "all" or tell == "lane of each warp" and t % 32 == 0:
            lang.mbarrier_arrive(FIRST + REST)
        if t == 3:
            if tell != "nobody":
                wait(FIRST + REST, 0)
            lang.shared(B_AT, lang.u32)[2] = 0

    if tell == "nobody":
        breaks(kernel, "read by the wgmma of threads 0-127", "then write by thread 3", "no wgmma_wait and barrier")
    else:
        is_clean(kernel)


def test_a_wait_for_older_groups_keeps_what_the_newest_reads():
    def kernel(byte):
        one = start()
        issue(array(), a=lang.wgmma_descriptor(0, 0, 0)(FIRST))
        take_older(one)
        lang.bar_sync()
        if lang.tid_x() == 3:
            lang.shared(byte, lang.u32)[0] = 0

    is_clean(kernel, args=[1024])
    breaks(kernel, "then write by thread 3", args=[0])


def test_a_copy_to_what_a_product_reads():
    def kernel(source):
        acc = start()
        if lang.tid_x() == 6:
            lang.cp_async_16(FIRST + B_AT, source)
        take(acc)

    breaks(kernel, "race on bytes 2048 to 2051", "read by the wgmma of threads 0-127", "then write by thread 6", args=[SOURCE])


# --- races: the proxies -----------------------------------------------------------------------------------------------------

FENCES = {"writers, before the barrier": True, "readers, after it": True, "nobody": False, "writers, too early": False, "one reader": False}


@pytest.mark.parametrize("who", FENCES)
def test_stores_need_a_proxy_fence(who):
    def kernel():
        if who == "writers, too early":
            lang.fence_proxy_async()
        write()
        if who == "writers, before the barrier":
            lang.fence_proxy_async()
        lang.bar_sync()
        if who == "readers, after it" or who == "one reader" and lang.tid_x() == 0:
            lang.fence_proxy_async()
        lang.wgmma_fence()
        issue(array())

    if FENCES[who]:
        is_clean(kernel)
    else:
        thread = 1 if who == "one reader" else 0
        breaks(kernel, f"race on bytes 0 to 1 of shared memory: write by thread 0 at {line_of(write, 'written')}, then read by the wgmma of threads",
               f"with no fence_proxy_async between them that thread {thread} knows of")


def test_one_reader_may_fence_for_all_if_a_barrier_follows():
    def kernel():
        write()
        lang.bar_sync()
        if lang.tid_x() == 17:
            lang.fence_proxy_async()
        lang.bar_sync()
        lang.wgmma_fence()
        issue(array())

    is_clean(kernel)


@pytest.mark.parametrize("size, index", [(2, 21), (4, 10), (8, 5)])
def test_every_written_element_counts(size, index):
    """One of them, written after the fence: a store of any size is found."""
    tag = {2: lang.u16, 4: lang.u32, 8: lang.u64}[size]

    def kernel():
        prepare()
        if lang.tid_x() == 1:
            lang.shared(0, tag)[index] = 0
        lang.bar_sync()
        lang.wgmma_fence()
        issue(array())

    breaks(kernel, f"race on bytes {size * index} to {size * index + 1}", "write by thread 1", "no fence_proxy_async")


def test_stores_beside_the_operands_need_none():
    def kernel():
        prepare()
        lang.shared(REST, lang.u32)[lang.tid_x()] = 0
        lang.bar_sync()
        lang.wgmma_fence()
        issue(array())

    is_clean(kernel)


def test_a_write_after_the_wait_needs_none():
    """The end of a product is a proxy fence; only the next product needs another."""

    def kernel(again):
        for i in range(2):
            if i == 0 or again:
                prepare()
            else:
                write()
                lang.bar_sync()
            acc = array()
            lang.wgmma_fence()
            issue(acc)
            take(acc)
            lang.bar_sync()

    is_clean(kernel, args=[True])
    breaks(kernel, "no fence_proxy_async", args=[False])


COPIES = {"after the copies have landed": True, "nobody": False, "before they landed": False}


@pytest.mark.parametrize("when", COPIES)
@pytest.mark.parametrize("by", ["group", "mbarrier"])
def test_copies_need_a_proxy_fence(when, by):
    everything = lang.cp_async_wait_group(0)

    def kernel(source):
        t = lang.tid_x()
        if t == 0:
            lang.mbarrier_init(FIRST + REST, GROUP)
        prepare()
        lang.cp_async_16(FIRST + 16 * t, source + 16 * t)  # copied
        if when == "before they landed":
            lang.fence_proxy_async()
        if by == "group":
            lang.cp_async_commit()
            everything()
            lang.bar_sync()
        else:
            lang.cp_async_mbarrier_arrive_noinc(FIRST + REST)
            wait(FIRST + REST, 0)
        if when == "after the copies have landed":
            lang.fence_proxy_async()
        acc = array()
        lang.wgmma_fence()
        issue(acc)
        take(acc)
        assert acc == [16.0] * 4

    if COPIES[when]:
        is_clean(kernel, args=[SOURCE])
    else:
        breaks(kernel, "race on bytes 0 to 1 of shared memory: asynchronous copy by thread 0", line_of(kernel, "copied"), "no fence_proxy_async",
               args=[SOURCE])


def test_copies_nobody_waited_for():
    def kernel(source):
        prepare()
        if lang.tid_x() == 127:
            lang.cp_async_16(FIRST + 32, source)
        lang.bar_sync()
        lang.fence_proxy_async()
        lang.wgmma_fence()
        issue(array())

    breaks(kernel, "race on bytes 32 to 35", "asynchronous copy by thread 127 begun at ", "not landed yet, then read by the wgmma", args=[SOURCE])


def test_fences_reach_other_warpgroups_by_mbarriers():
    """Warpgroup 1 writes and fences, warpgroup 0 multiplies."""

    def kernel(fenced):
        t = lang.tid_x()
        if t == 0:
            lang.mbarrier_init(FIRST + REST, GROUP)
        lang.bar_sync()
        if t >= GROUP:
            write()
            if fenced:
                lang.fence_proxy_async()
            lang.mbarrier_arrive(FIRST + REST)
            return
        wait(FIRST + REST, 0)
        lang.wgmma_fence()
        acc = array()
        issue(acc)
        take(acc)
        assert acc == [16.0] * 4

    is_clean(kernel, block=2 * GROUP, args=[True])
    breaks(kernel, "write by thread 128 ", "no fence_proxy_async between them that thread 0 knows of", block=2 * GROUP, args=[False])
