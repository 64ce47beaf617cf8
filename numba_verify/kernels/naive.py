"""naive: the oracle on the GPU. One warp an output row (draft token, head); nothing is shared, so every row fetches the whole prefix.

    grid (rows, ceil(H / 4)), 128 threads = 4 warps = 4 heads of one draft token
    lane l of the warp      dims l, l + 32, ... of q and of each KV row; the same columns of the output, in registers

Online softmax, one key at a time, no shared memory and no barrier: little can be wrong here that is not plain to see. Every 32 keys the
running sums join the total: two short sums lose less in float32 than one of 100,000 terms. Its global KV
traffic, rows * H * (L + n) * D elements, is what the head tile of `flash` divides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .config import WARP, Shape
from .elements import elements
from .tile import LN_2, LOG2_E, key_functions, score_function, warp_reductions
from .work import FLAG_DRAFT_ASIDE, FLAG_LSE, KV_LEN, PREFIX, Q_BEGIN, REQUEST_FIELDS, SLOT_BEGIN

THREADS = 128
#: Keys of one short sum, about the square root of the thousands of keys at which one long sum would show.
GROUP_KEYS = 32

#: Arguments of `naive` and `flash`, in order. Addresses, then strides in elements, then counts and flags, then scalars.
SIGNATURE = ("address",) * 9 + ("i64",) * 11 + ("f32",) * 2


@dataclass(frozen=True)
class NaiveConfig:
    """The row layout is all there is to configure."""

    shape: Shape

    def __str__(self) -> str:
        return f"{self.shape.latent_dim}_{self.shape.rope_dim}_{self.shape.dtype}"


def grid(config: NaiveConfig, rows: int, num_heads: int) -> tuple[int, int]:
    return rows, -(-num_heads // (THREADS // WARP))


def build(lang: Any, config: NaiveConfig) -> Callable:
    """The kernel for `config` in the vocabulary `lang`."""
    uint32, uint64, float32, unroll = lang.uint32, lang.uint64, lang.float32, lang.unroll
    pointer, u32, i32, i64, f32 = lang.pointer, lang.u32, lang.i32, lang.i64, lang.f32
    tid, block_x, block_y = lang.tid_x, lang.ctaid_x, lang.ctaid_y
    exp2, log2 = lang.ex2_approx_f32, lang.lg2_approx_f32
    shape = config.shape
    element = elements(lang, shape.dtype)
    tag, load, store, item = element.tag, element.load, element.store, uint64(element.itemsize)
    visible, byte_offset = key_functions(lang, element.itemsize)
    scaled, (warp_sum, _) = score_function(lang), warp_reductions(lang)
    dims, columns = shape.row_dim // WARP, shape.latent_dim // WARP
    new_query, new_kv, new_acc = lang.local_array(dims, f32), lang.local_array(dims, f32), lang.local_array(columns, f32)
    new_group, group_keys = lang.local_array(columns, f32), GROUP_KEYS
    warp, minus_infinity, log2e, ln2 = uint32(WARP), float32(-float("inf")), float32(LOG2_E), float32(LN_2)
    heads_per_block, fields = uint32(THREADS // WARP), uint64(REQUEST_FIELDS)
    q_begin_at, prefix_at, kv_len_at, slots_at = uint64(Q_BEGIN), uint64(PREFIX), uint64(KV_LEN), uint64(SLOT_BEGIN)
    draft_flag, lse_flag = FLAG_DRAFT_ASIDE, FLAG_LSE

    def naive(q_address, kv_address, draft_address, out_address, lse_address,
              requests_address, rows_address, slots_address, visibility_address,
              q_row, q_head, token_stride, page_size, page_gap, draft_stride, out_row, out_head, num_heads, words, flags,
              sm_scale, logit_cap):
        row, t = uint64(block_x()), tid()
        lane = t & uint32(31)
        head = uint64(block_y() * heads_per_block + t // warp)
        request = pointer(rows_address, i32)[row]
        if request < 0 or head >= uint64(num_heads):
            return
        requests, slots, visibility = pointer(requests_address, i64), pointer(slots_address, u32), pointer(visibility_address, u32)
        table = uint64(request) * fields
        prefix, kv_len = uint32(requests[table + prefix_at]), uint32(requests[table + kv_len_at])
        draft0, slot0 = uint64(requests[table + q_begin_at]), uint64(requests[table + slots_at])
        aside = prefix if (flags & draft_flag) != 0 else kv_len
        bits = row * uint64(words)
        q, out = pointer(q_address, tag), pointer(out_address, tag)

        query, kv_r, acc, group = new_query(), new_kv(), new_acc(), new_group()
        q_at = row * uint64(q_row) + head * uint64(q_head) + uint64(lane)
        for i in range(dims):
            unroll()
            query[i] = load(q, q_at + uint64(i * 32))
        for i in range(columns):
            unroll()
            acc[i] = float32(0)
            group[i] = float32(0)
        peak, total, group_total = minus_infinity, float32(0), float32(0)

        for key in range(kv_len):
            key = uint32(key)
            if key % uint32(group_keys) == uint32(0):
                total, group_total = total + group_total, float32(0)
                for i in range(columns):
                    unroll()
                    acc[i] = acc[i] + group[i]
                    group[i] = float32(0)
            if visible(key, prefix, kv_len, visibility, bits) != uint32(0):
                if key >= aside:
                    start = draft_address + (draft0 + uint64(key - aside)) * uint64(draft_stride) * item
                else:
                    start = kv_address + byte_offset(slots[slot0 + uint64(key)], token_stride, page_size, page_gap)
                kv = pointer(start, tag)
                dot = float32(0)
                for i in range(dims):
                    unroll()
                    kv_r[i] = load(kv, uint64(lane) + uint64(i * 32))
                    dot = dot + query[i] * kv_r[i]
                score = scaled(warp_sum(dot), sm_scale, logit_cap)
                if score > peak:  # the same in every lane
                    rescale = exp2((peak - score) * log2e)
                    peak = score
                    total, group_total = total * rescale, group_total * rescale
                    for i in range(columns):
                        unroll()
                        acc[i] = acc[i] * rescale
                        group[i] = group[i] * rescale
                # -inf - -inf would be NaN while the row has seen nothing finite: measure from 0 instead
                base = peak if peak > minus_infinity else float32(0)
                weight = exp2((score - base) * log2e)
                group_total = group_total + weight
                for i in range(columns):
                    unroll()
                    group[i] = group[i] + weight * kv_r[i]

        total = total + group_total
        out_at = row * uint64(out_row) + head * uint64(out_head) + uint64(lane)
        for i in range(columns):
            unroll()
            value = float32(0)
            if total != float32(0):
                value = (acc[i] + group[i]) / total
            store(out, out_at + uint64(i * 32), value)
        if (flags & lse_flag) != 0 and lane == uint32(0):
            value = minus_infinity
            if total != float32(0):
                value = peak + log2(total) * ln2
            pointer(lse_address, f32)[row * uint64(num_heads) + head] = value

    return naive
