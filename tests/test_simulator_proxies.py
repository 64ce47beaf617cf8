"""wgmma in the simulator: who may write what a product reads, and which fence the other proxy needs."""

import pytest
from support.products import B_AT, GROUP, ONE, REST, SOURCE, B, array, breaks, is_clean, issue, multiply, prepare, start, take, take_older, write
from support.simulated import FIRST, lang, line_of, mbarriers, wait

pytestmark = pytest.mark.kernel


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
