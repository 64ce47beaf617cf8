"""The steps of one KV tile, shared by `flash` and `paged`: `head_tile` heads of one draft token meet `kv_tile` keys in shared memory.

    shared memory (float32)      q [HT][D]   kv [TK][D]   scores [HT][TK]   alpha [HT]   total [HT]

    load_keys     all threads    16 B chunks of the tile's KV rows; a row that is hidden or past the end becomes zeros
    scores        warp w         keys w, w+8, ...: every lane sums its dims for all heads, then a transposing butterfly leaves one score a lane
    softmax       warp w         heads w, w+8: online softmax over the tile; m and l stay in the warp's registers
    accumulate    thread t       columns t, t+256 of the output, all heads, in registers

A KV row is fetched once for all heads of the tile: that is the whole point of the tiling. Hidden rows are zero-filled and not merely
weighted with zero, because 0 * NaN would let a NaN in a hidden draft row through.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from .config import TILE_THREADS, WARP, Shape, TileConfig
from .elements import CHUNK_BYTES, elements

#: exp(x) = exp2(x * log2(e)); the maximum is subtracted first, so that scores near 1e5 keep their small differences exact.
LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453


class TileSteps(NamedTuple):
    """Device functions of one (shape, config) in one vocabulary, and factories of their register arrays."""

    new_accumulators: Callable
    new_statistics: Callable
    start: Callable
    load_queries: Callable
    load_keys: Callable
    scores: Callable
    softmax: Callable
    accumulate: Callable
    finish: Callable
    save: Callable
    output: Callable
    columns: int


def warp_reductions(lang: Any) -> tuple[Callable, Callable]:
    """(sum, max) over the 32 lanes of a warp, the same value in every lane. max drops NaN as PTX max.f32 does."""
    shuffle, maximum, uint32 = lang.shfl_sync_bfly_f32, lang.max_f32, lang.uint32

    @lang.device
    def warp_sum(x):
        x = x + shuffle(x, uint32(16))
        x = x + shuffle(x, uint32(8))
        x = x + shuffle(x, uint32(4))
        x = x + shuffle(x, uint32(2))
        return x + shuffle(x, uint32(1))

    @lang.device
    def warp_max(x):
        x = maximum(x, shuffle(x, uint32(16)))
        x = maximum(x, shuffle(x, uint32(8)))
        x = maximum(x, shuffle(x, uint32(4)))
        x = maximum(x, shuffle(x, uint32(2)))
        return maximum(x, shuffle(x, uint32(1)))

    return warp_sum, warp_max


def key_functions(lang: Any, itemsize: int) -> tuple[Callable, Callable]:
    """(visible, byte_offset) of a key, for every kernel that walks a request's keys.

    visible(key, prefix, kv_len, visibility, bits): 1 when the query row whose visibility words start at `bits` sees `key`, else 0.
    byte_offset(slot, token_stride, page_size, page_gap): where pool row `slot` starts; `page_gap` = page_stride - page_size * token_stride
    is zero for all pools but views with gaps between pages, and only then is a division paid.
    """
    uint32, uint64 = lang.uint32, lang.uint64
    item = uint64(itemsize)

    @lang.device
    def visible(key, prefix, kv_len, visibility, bits):
        seen = uint32(0)
        if key < prefix:
            seen = uint32(1)
        elif key < kv_len:
            draft = uint32(key - prefix)
            seen = (visibility[bits + uint64(draft >> uint32(5))] >> (draft & uint32(31))) & uint32(1)
        return seen

    @lang.device
    def byte_offset(slot, token_stride, page_size, page_gap):
        elements_before = uint64(slot) * uint64(token_stride)
        if page_gap != 0:
            # the gap may be negative (overlapping pages of an exotic view); modulo 2**64 the sum is right all the same
            elements_before = uint64(elements_before + uint64(slot // uint32(page_size)) * uint64(page_gap))
        return elements_before * item

    return visible, byte_offset


def score_function(lang: Any) -> Callable:
    """scaled(dot, sm_scale, logit_cap): the score of contract section 1, capped when logit_cap > 0."""
    float32, tanh = lang.float32, lang.tanh_f32

    @lang.device
    def scaled(dot, sm_scale, logit_cap):
        score = dot * sm_scale
        if logit_cap > float32(0):
            score = logit_cap * tanh(score / logit_cap)
        return score

    return scaled


def tile_steps(lang: Any, shape: Shape, config: TileConfig) -> TileSteps:
    """Build the steps. Each binds its constants now, so that the compiler sees every extent."""
    columns = -(-shape.latent_dim // TILE_THREADS)
    layout = _layout(lang, shape, config)
    return TileSteps(
        new_accumulators=lang.local_array(config.head_tile * columns, lang.f32),
        new_statistics=lang.local_array(config.heads_per_warp, lang.f32),
        start=_start(lang, config, columns),
        load_queries=_load_queries(lang, shape, config, layout),
        load_keys=_load_keys(lang, shape, config, layout),
        scores=_scores(lang, shape, config, layout),
        softmax=_softmax(lang, config, layout),
        accumulate=_accumulate(lang, shape, config, columns, layout),
        finish=_finish(lang, config, layout),
        save=_save(lang, config, layout),
        output=_output(lang, config, columns, layout),
        columns=columns,
    )


class _Layout(NamedTuple):
    """Byte offsets in dynamic shared memory."""

    q: Any
    kv: Any
    scores: Any
    alpha: Any
    total: Any


def _layout(lang: Any, shape: Shape, config: TileConfig) -> _Layout:
    kv = 4 * config.head_tile * shape.row_dim
    scores = kv + 4 * config.kv_tile * shape.row_dim
    alpha = scores + 4 * config.head_tile * config.kv_tile
    return _Layout(*(lang.uint32(offset) for offset in (0, kv, scores, alpha, alpha + 4 * config.head_tile)))


def _start(lang: Any, config: TileConfig, columns: int) -> Callable:
    unroll, float32 = lang.unroll, lang.float32
    accumulators, rows = config.head_tile * columns, config.heads_per_warp

    @lang.device
    def start(acc, peak, total):
        """Nothing seen yet: peak -inf, sums 0."""
        for i in range(accumulators):
            unroll()
            acc[i] = float32(0)
        for g in range(rows):
            unroll()
            peak[g] = float32(-float("inf"))
            total[g] = float32(0)

    return start


def _load_queries(lang: Any, shape: Shape, config: TileConfig, layout: _Layout) -> Callable:
    uint32, uint64, shared, load16 = lang.uint32, lang.uint64, lang.shared, lang.ld_global_nc_v4_u32
    u32, f32 = lang.u32, lang.f32
    element = elements(lang, shape.dtype)
    store_chunk = element.store_chunk
    per_chunk, item = uint32(element.per_chunk), uint64(element.itemsize)
    row_chunks, row_dim = shape.row_dim // element.per_chunk, uint32(shape.row_dim)
    chunks, threads, q_offset = config.head_tile * row_chunks, TILE_THREADS, layout.q
    chunk_bytes, row_chunks = uint64(CHUNK_BYTES), uint32(row_chunks)

    @lang.device
    def load_queries(q_address, first, head_stride, heads, t):
        """Queries of `heads` heads from element `first` of q on; rows past `heads` are zeros, their results are never stored."""
        words, floats = shared(q_offset, u32), shared(q_offset, f32)
        for c in range(t, chunks, threads):
            head = uint32(c) // row_chunks
            chunk = uint32(c) - head * row_chunks
            at = head * row_dim + chunk * per_chunk
            if head < heads:
                w = load16(q_address + (first + uint64(head) * head_stride) * item + uint64(chunk) * chunk_bytes)
                store_chunk(words, floats, uint32(at), w[0], w[1], w[2], w[3])
            else:
                store_chunk(words, floats, uint32(at), uint32(0), uint32(0), uint32(0), uint32(0))

    return load_queries


def _load_keys(lang: Any, shape: Shape, config: TileConfig, layout: _Layout) -> Callable:
    uint32, uint64, shared, load16 = lang.uint32, lang.uint64, lang.shared, lang.ld_global_nc_v4_u32
    u32, f32 = lang.u32, lang.f32
    element = elements(lang, shape.dtype)
    store_chunk = element.store_chunk
    visible, byte_offset = key_functions(lang, element.itemsize)
    per_chunk, item = uint32(element.per_chunk), uint64(element.itemsize)
    row_chunks, row_dim = shape.row_dim // element.per_chunk, uint32(shape.row_dim)
    chunks, threads, kv_offset = config.kv_tile * row_chunks, TILE_THREADS, layout.kv
    chunk_bytes, row_chunks = uint64(CHUNK_BYTES), uint32(row_chunks)

    @lang.device
    def load_keys(key0, prefix, kv_len, aside, visibility, bits, kv_address, slots, slot0, token_stride, page_size, page_gap,
                  draft_address, draft0, draft_stride, t):
        """Keys key0, key0 + 1, ... of the request to shared memory as float32; keys from `aside` on come from draft_kv."""
        words, floats = shared(kv_offset, u32), shared(kv_offset, f32)
        for c in range(t, chunks, threads):
            row = uint32(c) // row_chunks
            chunk = uint32(c) - row * row_chunks
            at = row * row_dim + chunk * per_chunk
            key = uint32(key0 + row)
            if visible(key, prefix, kv_len, visibility, bits) != uint32(0):
                if key >= aside:
                    start = draft_address + (draft0 + uint64(key - aside)) * draft_stride * item
                else:
                    start = kv_address + byte_offset(slots[slot0 + uint64(key)], token_stride, page_size, page_gap)
                w = load16(start + uint64(chunk) * chunk_bytes)
                store_chunk(words, floats, uint32(at), w[0], w[1], w[2], w[3])
            else:
                store_chunk(words, floats, uint32(at), uint32(0), uint32(0), uint32(0), uint32(0))

    return load_keys


def _halving_step(lang: Any, half: int, mask: int) -> Callable:
    """Lanes that differ in bit `mask` swap halves of their `2 * half` partial sums: each keeps and completes one half."""
    uint32, unroll, shuffle = lang.uint32, lang.unroll, lang.shfl_sync_bfly_f32
    mask = uint32(mask)

    @lang.device
    def step(partial, lane):
        upper = (lane & mask) != uint32(0)
        for i in range(half):
            unroll()
            low, high = partial[i], partial[i + half]
            keep = high if upper else low
            give = low if upper else high
            partial[i] = keep + shuffle(give, mask)

    return step


def _transposing_sum(lang: Any, count: int) -> tuple[Callable, int]:
    """Sum `count` (16 or 32) values over a warp in 16 + 8 + ... shuffles instead of 5 each; lane // repeat then holds value lane // repeat."""
    shuffle, uint32 = lang.shfl_sync_bfly_f32, lang.uint32
    repeat = WARP // count
    by16, by8 = _halving_step(lang, count // 2, 16), _halving_step(lang, count // 4, 8)
    by4, by2 = _halving_step(lang, count // 8, 4), _halving_step(lang, count // 16, 2)
    by1 = _halving_step(lang, 1, 1)

    @lang.device
    def sum32(partial, lane):
        by16(partial, lane)
        by8(partial, lane)
        by4(partial, lane)
        by2(partial, lane)
        by1(partial, lane)
        return partial[0]

    @lang.device
    def sum16(partial, lane):
        by16(partial, lane)
        by8(partial, lane)
        by4(partial, lane)
        by2(partial, lane)
        return partial[0] + shuffle(partial[0], uint32(1))

    return (sum32 if repeat == 1 else sum16), repeat


def _scores(lang: Any, shape: Shape, config: TileConfig, layout: _Layout) -> Callable:
    uint32, float32, shared, f32, unroll = lang.uint32, lang.float32, lang.shared, lang.f32, lang.unroll
    visible, _ = key_functions(lang, 1)
    scaled = score_function(lang)
    keys, heads, count = config.keys_per_warp, config.head_tile, config.scores_per_lane
    new_partial, new_kv = lang.local_array(count, f32), lang.local_array(keys, f32)
    reduce, repeat = _transposing_sum(lang, count)
    warps, warp, row_dim, steps = TILE_THREADS // WARP, uint32(WARP), shape.row_dim, shape.row_dim // WARP
    repeat, keys_u, kv_tile, minus_infinity = uint32(repeat), uint32(keys), uint32(config.kv_tile), float32(-float("inf"))
    q_offset, kv_offset, s_offset = layout.q, layout.kv, layout.scores

    @lang.device
    def scores(key0, prefix, kv_len, visibility, bits, sm_scale, logit_cap, t):
        """scores[h][key] of the tile: scaled, capped, -inf where hidden or past the end."""
        q, kv, s = shared(q_offset, f32), shared(kv_offset, f32), shared(s_offset, f32)
        w, lane = t // warp, t & uint32(31)
        partial, kv_r = new_partial(), new_kv()
        for i in range(count):
            unroll()
            partial[i] = float32(0)
        kv_at = uint32(w * uint32(row_dim) + lane)
        q_at = lane
        for _ in range(steps):
            for k in range(keys):
                unroll()
                kv_r[k] = kv[kv_at + uint32(k * warps * row_dim)]
            for h in range(heads):
                unroll()
                q_r = q[q_at + uint32(h * row_dim)]
                for k in range(keys):
                    unroll()
                    partial[h * keys + k] = partial[h * keys + k] + q_r * kv_r[k]
            kv_at = uint32(kv_at + warp)
            q_at = uint32(q_at + warp)
        dot = reduce(partial, lane)
        value = lane // repeat
        head, row = value // keys_u, w + uint32(warps) * (value % keys_u)
        score = scaled(dot, sm_scale, logit_cap)
        if visible(uint32(key0 + row), prefix, kv_len, visibility, bits) == uint32(0):
            score = minus_infinity
        if lane % repeat == uint32(0):
            s[head * kv_tile + row] = score

    return scores


def _softmax(lang: Any, config: TileConfig, layout: _Layout) -> Callable:
    uint32, float32, shared, f32, unroll = lang.uint32, lang.float32, lang.shared, lang.f32, lang.unroll
    exp2, maximum = lang.ex2_approx_f32, lang.max_f32
    warp_sum, warp_max = warp_reductions(lang)
    rows, warps, warp, kv_tile = config.heads_per_warp, uint32(TILE_THREADS // WARP), uint32(WARP), uint32(config.kv_tile)
    log2e, minus_infinity = float32(LOG2_E), float32(-float("inf"))
    s_offset, alpha_offset = layout.scores, layout.alpha

    @lang.device
    def softmax(peak, total, t):
        """scores -> weights relative to the running maximum; alpha[h] is what earlier weights have to be scaled by."""
        s, alpha = shared(s_offset, f32), shared(alpha_offset, f32)
        w, lane = t // warp, t & uint32(31)
        for g in range(rows):
            unroll()
            head = w + uint32(g) * warps
            at = uint32(head * kv_tile + lane)
            x = minus_infinity
            if lane < kv_tile:
                x = s[at]
            new_peak = maximum(peak[g], warp_max(x))
            # A row that has seen nothing yet has peak -inf, and -inf - -inf would be NaN: measure from 0 instead.
            base = new_peak if new_peak > minus_infinity else float32(0)
            weight = exp2((x - base) * log2e)
            rescale = exp2((peak[g] - base) * log2e)
            total[g] = total[g] * rescale + warp_sum(weight)
            peak[g] = new_peak
            if lane < kv_tile:
                s[at] = weight
            if lane == uint32(0):
                alpha[head] = rescale

    return softmax


def _accumulate(lang: Any, shape: Shape, config: TileConfig, columns: int, layout: _Layout) -> Callable:
    uint32, float32, shared, f32, unroll = lang.uint32, lang.float32, lang.shared, lang.f32, lang.unroll
    heads, kv_tile, row_dim = config.head_tile, config.kv_tile, uint32(shape.row_dim)
    new_sums, new_values = lang.local_array(heads * columns, f32), lang.local_array(columns, f32)
    latent, threads, count = uint32(shape.latent_dim), TILE_THREADS, heads * columns
    kv_offset, s_offset, alpha_offset = layout.kv, layout.scores, layout.alpha

    @lang.device
    def accumulate(acc, t):
        """acc = acc * alpha + weights @ values. The tile is summed first: two short sums lose less than one of 100,000 terms."""
        kv, s, alpha = shared(kv_offset, f32), shared(s_offset, f32), shared(alpha_offset, f32)
        sums, value = new_sums(), new_values()
        for i in range(count):
            unroll()
            sums[i] = float32(0)
        for key in range(kv_tile):
            row = uint32(key) * row_dim + t
            for c in range(columns):
                unroll()
                value[c] = float32(0)
                if t + uint32(c * threads) < latent:
                    value[c] = kv[row + uint32(c * threads)]
            for h in range(heads):
                unroll()
                weight = s[uint32(h * kv_tile) + uint32(key)]
                for c in range(columns):
                    unroll()
                    sums[h * columns + c] = sums[h * columns + c] + weight * value[c]
        for h in range(heads):
            unroll()
            rescale = alpha[uint32(h)]
            for c in range(columns):
                unroll()
                acc[h * columns + c] = acc[h * columns + c] * rescale + sums[h * columns + c]

    return accumulate


def _finish(lang: Any, config: TileConfig, layout: _Layout) -> Callable:
    uint32, float32, shared, f32, unroll, log2 = lang.uint32, lang.float32, lang.shared, lang.f32, lang.unroll, lang.lg2_approx_f32
    rows, warps, warp, ln2 = config.heads_per_warp, uint32(TILE_THREADS // WARP), uint32(WARP), float32(LN_2)
    total_offset, minus_infinity = layout.total, float32(-float("inf"))

    @lang.device
    def finish(peak, total, heads, lse, lse_at, wants_lse, t):
        """total[h] to shared memory for `output`; lse = peak + ln(total), -inf for a row that saw nothing, to lse[lse_at + head]."""
        totals = shared(total_offset, f32)
        w, lane = t // warp, t & uint32(31)
        for g in range(rows):
            unroll()
            head = w + uint32(g) * warps
            if lane == uint32(0):
                totals[head] = total[g]
                if wants_lse != 0 and head < heads:
                    value = minus_infinity
                    if total[g] != float32(0):
                        value = peak[g] + log2(total[g]) * ln2
                    lse[lse_at + head] = value

    return finish


def _save(lang: Any, config: TileConfig, layout: _Layout) -> Callable:
    uint32, shared, f32, unroll = lang.uint32, lang.shared, lang.f32, lang.unroll
    rows, warps, warp, total_offset = config.heads_per_warp, uint32(TILE_THREADS // WARP), uint32(WARP), layout.total

    @lang.device
    def save(peak, total, heads, statistics, at, t):
        """Of a partial result: total[h] to shared memory for `output`; (peak, total) to statistics[at + 2 head].

        Both, and not their lse: one float32 of 1e5 is coarse by 0.008, and a whole piece would be weighted wrong by as much."""
        totals = shared(total_offset, f32)
        w, lane = t // warp, t & uint32(31)
        for g in range(rows):
            unroll()
            head = w + uint32(g) * warps
            if lane == uint32(0):
                totals[head] = total[g]
                if head < heads:
                    statistics[at + head * uint32(2)] = peak[g]
                    statistics[at + head * uint32(2) + uint32(1)] = total[g]

    return save


def _output(lang: Any, config: TileConfig, columns: int, layout: _Layout) -> Callable:
    uint32, float32, shared, f32 = lang.uint32, lang.float32, lang.shared, lang.f32
    total_offset = layout.total

    @lang.device
    def output(acc, h, c):
        """Finished output value of head `h`, column c: 0 when the row saw nothing; a NaN total stays NaN."""
        total = shared(total_offset, f32)[uint32(h)]
        value = float32(0)
        if total != float32(0):
            value = acc[h * columns + c] / total
        return value

    return output
