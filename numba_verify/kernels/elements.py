"""Stored elements (bfloat16, float16, float32) to float32 registers and back: the one place where kernels look at a dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4}
#: Bytes of the widest memory access; rows are whole multiples of it (contract, promise 5).
CHUNK_BYTES = 16


class Elements(NamedTuple):
    """Device functions for one dtype.

    tag: what `lang.pointer` takes to read one element.  load(pointer, i) -> float32.  store(pointer, i, x).
    store_four(address, a, b, c, d): four neighbours, at an address that is a multiple of four elements.
    store_chunk(words, floats, i, w0, w1, w2, w3): 16 bytes of elements, as four uint32, to float32 shared memory from element i on;
    `words` and `floats` are uint32 and float32 pointers to the same place.
    """

    tag: Any
    itemsize: int
    per_chunk: int
    load: Callable
    store: Callable
    store_four: Callable
    store_chunk: Callable


def elements(lang: Any, dtype: str) -> Elements:
    """The functions for `dtype` in the vocabulary `lang` (numba_verify.gpu.ptx or the simulator)."""
    if dtype == "float32":
        return _float32(lang)
    if dtype == "bfloat16":
        return _sixteen_bit(lang, lang.bf16_to_f32, lang.f32_to_bf16, lang.f32_to_bf16x2)
    return _sixteen_bit(lang, lang.f16_to_f32, lang.f32_to_f16, lang.f32_to_f16x2)


def _float32(lang: Any) -> Elements:
    uint32 = lang.uint32

    @lang.device
    def load(pointer, i):
        return pointer[i]

    @lang.device
    def store(pointer, i, x):
        pointer[i] = x

    @lang.device
    def store_chunk(words, floats, i, w0, w1, w2, w3):
        words[i] = w0
        words[i + uint32(1)] = w1
        words[i + uint32(2)] = w2
        words[i + uint32(3)] = w3

    return Elements(lang.f32, 4, 4, load, store, lang.st_global_v4_f32, store_chunk)


def _sixteen_bit(lang: Any, widen: Callable, narrow: Callable, narrow_two: Callable) -> Elements:
    uint32, uint64, pointer, u64 = lang.uint32, lang.uint64, lang.pointer, lang.u64
    low, shift = lang.uint32(0xFFFF), lang.uint32(16)

    @lang.device
    def load(pointer, i):
        return widen(pointer[i])

    @lang.device
    def store(pointer, i, x):
        pointer[i] = narrow(x)

    @lang.device
    def store_four(address, a, b, c, d):
        pointer(address, u64)[0] = uint64(narrow_two(b, a)) | uint64(narrow_two(d, c)) << uint64(32)  # little-endian: a comes first

    @lang.device
    def store_chunk(words, floats, i, w0, w1, w2, w3):
        floats[i] = widen(w0 & low)
        floats[i + uint32(1)] = widen(w0 >> shift)
        floats[i + uint32(2)] = widen(w1 & low)
        floats[i + uint32(3)] = widen(w1 >> shift)
        floats[i + uint32(4)] = widen(w2 & low)
        floats[i + uint32(5)] = widen(w2 >> shift)
        floats[i + uint32(6)] = widen(w3 & low)
        floats[i + uint32(7)] = widen(w3 >> shift)

    return Elements(lang.u16, 2, 8, load, store, store_four, store_chunk)
