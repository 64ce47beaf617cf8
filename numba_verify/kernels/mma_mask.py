"""The mask of `mma`: which scores of a step are hidden, and what is done about NaN in draft rows that only some rows see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from .config import WARP
from .mma_config import MmaConfig
from .mma_work import Ring, Swizzle, block_bytes

#: Visibility bits of a word.
WORD_KEYS = 32


def seen_words(config: MmaConfig) -> int:
    """Words that the visibility bits of one row take for the keys of a step."""
    return -(-config.tile.keys // WORD_KEYS)


def _row_bits(lang: Any, keys: int) -> Callable:
    """row_bits(...): bit i set = the row whose visibility words start at `bits` sees key `key` + i, for `keys` keys, at most 32."""
    uint32, uint64 = lang.uint32, lang.uint64
    ones, width = uint32(0xFFFFFFFF), uint32(keys)

    @lang.device
    def word_at(visibility, bits, index, words):
        return visibility[bits + uint64(index)] if index < words else uint32(0)

    @lang.device
    def row_bits(visibility, bits, words, key, prefix, kv_len):
        seen = uint32(0)
        if uint32(key + width) <= prefix:
            seen = ones
        elif key < kv_len:
            if key < prefix:
                count = uint32(prefix - key)  # of the prefix, below 32: the rest follows from draft token 0 on
                seen = uint32(uint32((uint32(1) << count) - uint32(1)) | uint32(word_at(visibility, bits, uint32(0), words) << count))
            else:
                draft = uint32(key - prefix)
                index, turn = draft >> uint32(5), draft & uint32(31)
                seen = word_at(visibility, bits, index, words) >> turn
                if turn != uint32(0):
                    seen = uint32(seen | uint32(word_at(visibility, bits, uint32(index + uint32(1)), words) << uint32(uint32(32) - turn)))
            left = uint32(kv_len - key)
            if left < uint32(32):
                seen = uint32(seen & uint32((uint32(1) << left) - uint32(1)))
        return seen

    return row_bits


def poison_remover(lang: Any, config: MmaConfig, swizzle: Swizzle, ring: Ring) -> Callable:
    """zero(...): values of the step's draft keys that hold a NaN or an infinity become zeros. Rare, so it takes its time."""
    uint32, shared, u32, shuffle = lang.uint32, lang.shared, lang.u32, lang.shfl_sync_bfly_u32
    row_offset, place = swizzle.row, ring.place
    # A power of two of threads a key, so that they can agree by shuffles; with 48 keys a quarter of the group has nothing to do.
    halvings = (WARP * config.tile.row_warps // config.tile.keys).bit_length() - 1
    threads, keys, block_keys = uint32(1 << halvings), uint32(config.tile.keys), uint32(config.tile.block_keys)
    chunks, latent_chunks, step = config.shape.row_dim // 8, config.shape.latent_dim // 8, 1 << halvings
    exponent = 0x7F80 if config.shape.dtype == "bfloat16" else 0x7C00
    low, high, size, ring_at = uint32(exponent), uint32(exponent << 16), uint32(block_bytes(config)), uint32(config.layout.ring)

    @lang.device
    def zero(member, number, key0, prefix):
        """member: thread of the group; number: running number of the step's first block."""
        key, part = member // threads, member % threads
        row, start = key % block_keys, uint32(ring_at + place(uint32(number + key // block_keys)) * size)
        words, bad = shared(uint32(0), u32), uint32(0)
        if key < keys:
            for c in range(part, chunks, step):
                at = uint32(start + row_offset(row, uint32(c))) >> uint32(2)
                for i in range(4):
                    x = words[at + uint32(i)]
                    if (x & low) == low or (x & high) == high:
                        bad = uint32(1)
        for i in range(halvings):
            bad = uint32(bad | shuffle(bad, uint32(1) << uint32(i)))
        if bad != uint32(0) and uint32(key0 + key) >= prefix:
            for c in range(part, latent_chunks, step):
                at = uint32(start + row_offset(row, uint32(c))) >> uint32(2)
                for i in range(4):
                    words[at + uint32(i)] = uint32(0)

    return zero


class Mask(NamedTuple):
    """Device functions for a step that holds draft tokens or the end of the list; `seen` has the visibility bits of the lane's rows, 32 keys a word.

    look(seen, ...) fills it.  poisoned(scores, seen) -> 1 if a hidden score is not finite.
    hide(scores, seen, factor) -> factor: hidden scores are -inf once they are multiplied by it.
    """

    look: Callable
    poisoned: Callable
    hide: Callable


def mask_of(lang: Any, config: MmaConfig) -> Mask:
    """Build the functions in the vocabulary `lang`."""
    uint32, uint64, float32, unroll = lang.uint32, lang.uint64, lang.float32, lang.unroll
    row_tiles, key_tiles = config.tile.warp_rows // 16, config.tile.keys // 8
    row_bits, minus_infinity = _row_bits(lang, min(config.tile.keys, WORD_KEYS)), float32(-float("inf"))
    spans, quotient = seen_words(config), lang.quotient_u32

    @lang.device
    def look(seen, key, flat, last, row_heads, q_begin, visibility, words, prefix, kv_len, lane):
        """key: first of the step; flat: the lane's first row in the request; last: the request's last draft token."""
        for i in range(2 * row_tiles):
            unroll()
            token = quotient(uint32(flat + uint32(8 * i)), row_heads)
            token = token if token < last else last
            where = (q_begin + uint64(token)) * uint64(words)
            for s in range(spans):
                unroll()
                bits = row_bits(visibility, where, uint32(words), uint32(key + uint32(s * WORD_KEYS)), prefix, kv_len)
                seen[i * spans + s] = uint32(bits >> uint32(uint32(2) * (lane & uint32(3))))

    @lang.device
    def poisoned(scores, seen):
        found = uint32(0)
        for i in range(2 * row_tiles):
            unroll()
            for n in range(key_tiles):
                unroll()
                for e in range(2):
                    unroll()
                    x = scores[(i // 2 * key_tiles + n) * 4 + 2 * (i % 2) + e]
                    if (seen[i * spans + n // 4] & uint32(1 << (8 * (n % 4) + e))) == uint32(0) and x - x != float32(0):
                        found = uint32(1)
        return found

    @lang.device
    def hide(scores, seen, factor):
        """Hidden scores become what `factor` will make -inf of; returns the factor. Not -inf times a factor done here: float32 numbers of 1e5 are
        0.008 apart, and the later fma rounds once. A factor of 0 is done here: 0 times infinity is NaN."""
        hidden, done = minus_infinity, factor == float32(0)
        if factor < float32(0):
            hidden = -minus_infinity
        for i in range(2 * row_tiles):
            unroll()
            for n in range(key_tiles):
                unroll()
                for e in range(2):
                    unroll()
                    j = (i // 2 * key_tiles + n) * 4 + 2 * (i % 2) + e
                    x = scores[j] * factor if done else scores[j]
                    scores[j] = x if (seen[i * spans + n // 4] & uint32(1 << (8 * (n % 4) + e))) != uint32(0) else hidden
        return float32(1) if done else factor

    return Mask(look, poisoned, hide)
