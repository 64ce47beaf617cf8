"""A small product of one warpgroup, for the tests of wgmma in the simulator."""

import numpy as np

from .simulated import FIRST, fails, lang, run

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
