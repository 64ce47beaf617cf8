"""Q to shared memory and S = Q K^T, for the score warps of `mma`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .mma_config import ITEMSIZE, SCORE_THREADS, SEGMENT_BYTES, THREADS_PER_ROW, MmaConfig, layout
from .mma_work import Swizzle

#: Steps of 16 dims that fragments are fetched ahead: an ldmatrix waits its turn among those of twelve warps, longer than one step lasts.
AHEAD = 2


def queries(lang: Any, config: MmaConfig, place: Swizzle) -> Callable:
    """load(...): the rows of a tile to shared memory, landed for this thread on return. Rows past the request's last become zeros."""
    uint32, uint64, unroll = lang.uint32, lang.uint64, lang.unroll
    copy, commit, wait = lang.cp_async_16_zfill, lang.cp_async_commit, lang.cp_async_wait_group(0)
    row_offset, rows_a_pass = place.row, SCORE_THREADS // THREADS_PER_ROW
    passes, segments = config.tile.rows // rows_a_pass, config.shape.row_dim * ITEMSIZE // (16 * THREADS_PER_ROW)
    offset, item, quotient = uint32(layout(config.shape, config.tile).q), uint64(ITEMSIZE), lang.quotient_u32

    @lang.device
    def load(base, t, first, row_heads, rows, q_address, q_begin, q_row, q_head):
        """first: flat row (draft token x head) of the tile's first; rows: flat rows of the request that may be read."""
        sub = t & uint32(7)
        for i in range(passes):
            unroll()
            row = uint32((t >> uint32(3)) + uint32(i * rows_a_pass))
            flat = uint32(first + row)
            token = quotient(flat, row_heads)
            head = uint32(flat - token * row_heads)
            valid = flat < rows
            source = q_address
            if valid:
                source = q_address + ((q_begin + uint64(token)) * q_row + uint64(head) * q_head) * item + uint64(sub) * uint64(16)
            target = uint32(base + offset + row_offset(row, sub))
            for s in range(segments):
                unroll()
                copy(uint32(target + uint32(s * 128)), source + uint64(s * 128) if valid else source, uint32(16) if valid else uint32(0))
        commit()
        wait()

    return load


def products_of(lang: Any, config: MmaConfig) -> tuple[Callable, Callable]:
    """(new_scores, products): products(scores, ...) = this warp's rows times this warp's keys, over all of row_dim."""
    uint32, unroll, u32, f32, float32 = lang.uint32, lang.unroll, lang.u32, lang.f32, lang.float32
    tile, ldmatrix = config.tile, lang.ldmatrix_x4
    mma = lang.mma_m16n8k16_bf16 if config.shape.dtype == "bfloat16" else lang.mma_m16n8k16_f16
    row_tiles, key_tiles, segments = tile.warp_rows // 16, tile.keys // 8, config.shape.row_dim * ITEMSIZE // SEGMENT_BYTES
    pairs = key_tiles // 2
    # Few accumulators would wait for each other (an mma takes about 33 clocks): then several share a result.
    chains = max(1, 8 // (row_tiles * key_tiles))
    count, row_bytes, segment, ahead = row_tiles * key_tiles * 4, config.shape.row_dim * ITEMSIZE, SEGMENT_BYTES, AHEAD
    new_scores, new_a, new_b = lang.local_array(count * chains, f32), lang.local_array(4 * 4 * row_tiles, u32), lang.local_array(4 * 4 * pairs, u32)

    @lang.device
    def load_a(a, k, at):
        for m in range(row_tiles):
            unroll()
            x = ldmatrix(uint32(at + uint32(m * 16 * row_bytes)))
            for i in range(4):
                unroll()
                a[(k * row_tiles + m) * 4 + i] = x[i]

    @lang.device
    def load_b(b, k, k_at, offset):
        for n in range(pairs):
            unroll()
            x = ldmatrix(uint32((k_at[n] ^ uint32(k << 5)) + offset))
            for i in range(4):
                unroll()
                b[(k * pairs + n) * 4 + i] = x[i]

    @lang.device
    def load(a, b, k, q_at, k_at, offset):
        """The fragments of k step `k` (0 .. 3) of the segment at byte `offset` of a row."""
        load_a(a, k, uint32((q_at ^ uint32(k << 5)) + offset))
        load_b(b, k, k_at, offset)

    @lang.device
    def multiply(scores, a, b, k):
        for m in range(row_tiles):
            unroll()
            for n in range(key_tiles):
                unroll()
                i = ((k % chains * row_tiles + m) * key_tiles + n) * 4
                j = (k * row_tiles + m) * 4
                h = (k * pairs + n // 2) * 4 + 2 * (n % 2)
                x = mma(a[j], a[j + 1], a[j + 2], a[j + 3], b[h], b[h + 1], scores[i], scores[i + 1], scores[i + 2], scores[i + 3])
                scores[i], scores[i + 1], scores[i + 2], scores[i + 3] = x[0], x[1], x[2], x[3]

    @lang.device
    def products(scores, q_at, k_at):
        """q_at, k_at[block]: the lane's ldmatrix rows of k step 0; the swizzle makes step k of a segment the same address with bits 5 and 6 XOR k."""
        a, b = new_a(), new_b()
        for i in range(count * chains):
            unroll()
            scores[i] = float32(0)
        for k in range(ahead):
            unroll()
            load(a, b, k, q_at, k_at, uint32(0))
        for s in range(segments - 1):
            unroll()
            offset = uint32(s * segment)
            for k in range(4):
                unroll()
                load(a, b, (k + ahead) % 4, q_at, k_at, uint32(offset + uint32((k + ahead) // 4 * segment)))
                multiply(scores, a, b, k)
        for k in range(4):
            unroll()
            if k + ahead < 4:
                load(a, b, k + ahead, q_at, k_at, uint32((segments - 1) * segment))
            multiply(scores, a, b, k)
        for c in range(1, chains):
            unroll()
            for i in range(count):
                unroll()
                scores[i] = scores[i] + scores[c * count + i]

    return new_scores, products
