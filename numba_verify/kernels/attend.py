"""The loop over KV tiles and the writing of a result, shared by `flash` and `paged`: the steps of `tile` with the barriers between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from .config import TILE_THREADS, Shape, TileConfig
from .elements import elements
from .tile import tile_steps


class Attend(NamedTuple):
    """Device functions of one (shape, config), and factories of their register arrays.

    start(acc, peak, total): nothing seen yet.  load_queries(...): see `tile`.
    keys(...): keys of the KV tiles first .. last - 1 go into acc, peak and total.
    write(acc, peak, total, ..., out, lse): a finished row to out and lse.  save(...): an unfinished one to a partial slot.
    """

    new_accumulators: Callable
    new_statistics: Callable
    start: Callable
    load_queries: Callable
    keys: Callable
    write: Callable
    save: Callable


def _put_rows(lang: Any, shape: Shape, config: TileConfig, output: Callable, columns: int, store: Callable) -> Callable:
    """put(acc, heads, pointer, at, head_stride, t): the finished values of the heads that exist, head h from element at + h * head_stride."""
    uint32, uint64, unroll = lang.uint32, lang.uint64, lang.unroll
    head_tile, latent, threads = config.head_tile, shape.latent_dim, TILE_THREADS

    @lang.device
    def put(acc, heads, pointer, at, head_stride, t):
        for h in range(head_tile):
            unroll()
            for c in range(columns):
                unroll()
                column = t + uint32(c * threads)
                if uint32(h) < heads and column < uint32(latent):
                    store(pointer, at + uint64(h) * head_stride + uint64(column), output(acc, h, c))

    return put


def attend(lang: Any, shape: Shape, config: TileConfig) -> Attend:
    """Build the functions in the vocabulary `lang`."""
    steps = tile_steps(lang, shape, config)
    uint32, uint64, bar_sync = lang.uint32, lang.uint64, lang.bar_sync
    load_keys, scores, softmax, accumulate = steps.load_keys, steps.scores, steps.softmax, steps.accumulate
    finish, save_statistics, kv_tile, latent = steps.finish, steps.save, config.kv_tile, shape.latent_dim

    @lang.device
    def keys(acc, peak, total, first, last, prefix, kv_len, aside, visibility, bits, kv_address, slots, slot0, token_stride, page_size,
             page_gap, draft_address, draft0, draft_stride, sm_scale, logit_cap, t):
        for block in range(first, last):
            key0 = uint32(block * kv_tile)
            load_keys(key0, prefix, kv_len, aside, visibility, bits, kv_address, slots, slot0, token_stride, page_size, page_gap,
                      draft_address, draft0, draft_stride, t)
            # Queries and keys, stored by all threads, are complete before any warp reads them.
            bar_sync()
            scores(key0, prefix, kv_len, visibility, bits, sm_scale, logit_cap, t)
            # A softmax row is written by all warps (each has its own keys) and read by one.
            bar_sync()
            softmax(peak, total, t)
            # Weights and rescale factors, each written by one warp, are read by every thread.
            bar_sync()
            accumulate(acc, t)
            # All threads have read the KV tile and the weights before the next tile overwrites them.
            bar_sync()

    put_elements, put_floats = (_put_rows(lang, shape, config, steps.output, steps.columns, elements(lang, dtype).store)
                                for dtype in (shape.dtype, "float32"))

    @lang.device
    def write(acc, peak, total, heads, out, out_at, out_head, lse, lse_at, wants_lse, t):
        finish(peak, total, heads, lse, lse_at, wants_lse, t)
        # The sums, each written by its warp, are read by every thread.
        bar_sync()
        put_elements(acc, heads, out, out_at, out_head, t)

    @lang.device
    def save(acc, peak, total, heads, partial, partial_at, statistics, statistics_at, t):
        save_statistics(peak, total, heads, statistics, statistics_at, t)
        # The sums, each written by its warp, are read by every thread.
        bar_sync()
        put_floats(acc, heads, partial, partial_at, uint64(latent), t)

    return Attend(steps.new_accumulators, steps.new_statistics, steps.start, steps.load_queries, keys, write, save)
