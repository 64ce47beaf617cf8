"""Sums over the block of `schedule`, a value a thread.

    shared memory    int64 [ROWS][8 warps]: row 0 block_sum; all four block_scan; row 1 the search of `cuts`

`block_sum` and `block_scan` have one barrier inside, between writing the warps' sums and reading them, and none behind: the caller puts one
between the reads and the next write to the same row. Its loops end with one that stops a hazard in global memory as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .config import WARP

SCHEDULE_THREADS = 256
WARPS = SCHEDULE_THREADS // WARP
ROWS = 4


def shared_bytes() -> int:
    """Of `schedule`."""
    return 8 * ROWS * WARPS


def warp_scan(lang: Any) -> Callable:
    """Device function: the sum of `value` over the lanes of the warp up to this one, its own included."""
    uint32, shuffle = lang.uint32, lang.shfl_sync_up_i64

    @lang.device
    def warp_scan(value, lane):
        inclusive = value
        for step in range(5):
            distance = uint32(1 << step)
            other = shuffle(inclusive, distance)
            if lane >= distance:
                inclusive = inclusive + other
        return inclusive

    return warp_scan


def block_sum(lang: Any) -> Callable:
    """Device function: (sum of `value` over the threads before this one, sum over all threads of the block)."""
    uint32, int64, shared, i64, bar_sync, scan = lang.uint32, lang.int64, lang.shared, lang.i64, lang.bar_sync, warp_scan(lang)
    warps, last = WARPS, uint32(WARP - 1)

    @lang.device
    def block_sum(value, t):
        sums = shared(uint32(0), i64)
        lane, warp = uint32(t & last), uint32(t >> uint32(5))
        inclusive = scan(value, lane)
        if lane == last:
            sums[warp] = inclusive
        # The sums of all warps are written before any thread adds them up.
        bar_sync()
        before, total = int64(0), int64(0)
        for w in range(warps):
            if uint32(w) < warp:
                before = before + sums[uint32(w)]
            total = total + sums[uint32(w)]
        return before + inclusive - value, total

    return block_sum


def block_scan(lang: Any) -> Callable:
    """Device function of (a, b, c, d): the sums of a, b and c over the threads before this one, those over all threads, and the greatest d.
    In one go, since three sums wait no longer than one."""
    uint32, int64, shared, i64, bar_sync, shuffle = lang.uint32, lang.int64, lang.shared, lang.i64, lang.bar_sync, lang.shfl_sync_up_i64
    warps, last = WARPS, uint32(WARP - 1)

    @lang.device
    def block_scan(a, b, c, d, t):
        sums = shared(uint32(0), i64)
        lane, warp = uint32(t & last), uint32(t >> uint32(5))
        sum_a, sum_b, sum_c, most = a, b, c, d
        for step in range(5):
            distance = uint32(1 << step)
            more_a, more_b, more_c, other = shuffle(sum_a, distance), shuffle(sum_b, distance), shuffle(sum_c, distance), shuffle(most, distance)
            if lane >= distance:
                sum_a, sum_b, sum_c = sum_a + more_a, sum_b + more_b, sum_c + more_c
            most = most if most > other else other  # lanes below `distance` have their own value back
        if lane == last:
            sums[warp] = sum_a
            sums[warp + uint32(warps)] = sum_b
            sums[warp + uint32(2 * warps)] = sum_c
            sums[warp + uint32(3 * warps)] = most
        # What all warps have is written before any thread adds it up.
        bar_sync()
        before_a, before_b, before_c = sum_a - a, sum_b - b, sum_c - c
        all_a, all_b, all_c, most = int64(0), int64(0), int64(0), int64(0)
        for w in range(warps):
            here_a, here_b, here_c = sums[uint32(w)], sums[uint32(w + warps)], sums[uint32(w + 2 * warps)]
            if uint32(w) < warp:
                before_a, before_b, before_c = before_a + here_a, before_b + here_b, before_c + here_c
            all_a, all_b, all_c = all_a + here_a, all_b + here_b, all_c + here_c
            other = sums[uint32(w + 3 * warps)]
            most = most if most > other else other
        return before_a, before_b, before_c, all_a, all_b, all_c, most

    return block_scan
