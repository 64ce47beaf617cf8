"""wgmma in the simulator: when products happen, and what is reported of those who take part. That they are right: test_ptx.py."""

import math

import pytest
from support.products import B_AT, GROUP, SHARED, A, B, array, breaks, done, is_clean, issue, multiply, prepare, start, take, take_older, write
from support.simulated import FIRST, lang, line_of

from numba_verify.gpu.simulator import launch

pytestmark = pytest.mark.kernel


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
