"""The simulator's memory: bad accesses that it reports, arguments, poison, rounding, asynchronous copies."""

import gc
import math
import weakref

import ml_dtypes
import numpy as np
import pytest
from support.simulated import fails, line_of

from numba_verify.gpu import simulator
from numba_verify.gpu.simulator import SimulatorError, launch

lang = simulator.language()
pytestmark = pytest.mark.kernel


# --- exceptions and bad accesses --------------------------------------------------------------------------------------------


def test_an_exception_names_block_thread_and_line():
    def kernel(n):
        if lang.ctaid_x() == 1 and lang.ctaid_y() == 2 and lang.tid_x() == 5:
            n // (n - n)  # quotient

    error = fails(kernel, f"block (1, 2), thread 5, at {line_of(kernel, 'quotient')}: ZeroDivisionError", grid=(2, 3), args=[3])
    assert isinstance(error.__cause__, ZeroDivisionError)


def test_reads_and_writes_out_of_bounds():
    def read(address, n):
        values = lang.pointer(address, lang.f32)
        values[n + lang.tid_x()]  # access

    def write(address, n):
        values = lang.pointer(address, lang.f32)
        values[n + lang.tid_x()] = 1.0  # access

    for kernel in (read, write):
        for races in (False, True):
            fails(kernel, f"thread 4, at {line_of(kernel, 'access')}: values[n + lang.tid_x()] out of bounds: index 10, but values has 10",
                  args=[np.zeros(10, np.float32), 6], check_races=races)


def test_negative_indices_are_refused_by_the_checked_pointers():
    def outside(address):
        values = lang.pointer(address, lang.f32)
        values[lang.int32(lang.tid_x()) - 1]

    def inside():
        values = lang.shared(16, lang.f32)
        values[lang.int32(lang.tid_x()) - 1]

    fails(outside, "thread 0", "index -1, but values has 64", args=[np.zeros(64, np.float32)], check_races=True)
    fails(inside, "thread 0", "index -1, but values has 252", check_races=True)


def test_values_that_do_not_fit():
    def kernel(address):
        out = lang.pointer(address, lang.u16)
        out[lang.tid_x()] = 65530 + lang.tid_x()

    fails(kernel, "thread 6", "the value does not fit the element type", args=[np.zeros(64, np.uint16)])


@pytest.mark.parametrize("kernel, text", [
    (lambda x: lang.pointer(0, lang.f32)[0], "index 0, but lang.pointer(0, lang.f32) has 0 elements"),
    (lambda x: lang.pointer(12345, lang.f32), "expected an address from the kernel's arguments, got 12345"),
    (lambda x: lang.pointer(x + 2, lang.f32), "byte 2 of argument 0 (256 bytes, array of float32 [64]) is not aligned for f32"),
    (lambda x: lang.pointer(x + 260, lang.f32), "byte 260 is outside argument 0"),
    (lambda x: lang.pointer(x - 4, lang.f32), "byte -4 is outside argument 0"),
    (lambda x: lang.uint32(x), "an address is cut to 32 bits"),
    (lambda x: lang.ld_global_nc_v4_u32(x + 244), "bytes 244 to 259 are outside argument 0"),
    (lambda x: lang.ld_global_nc_v4_f32(x + 8), "not aligned to 16 bytes"),
    (lambda x: lang.ld_global_nc_v4_f32(0), "null or invalid address 0"),
    (lambda x: lang.st_global_v4_u32(x + 256, 1, 2, 3, 4), "outside argument 0"),
    (lambda x: lang.shared(1028, lang.f32), "lies outside the block's 1024 bytes"),
    (lambda x: lang.shared(2, lang.f32), "byte 2 is not aligned for f32"),
    (lambda x: lang.shared(0, lang.f32)[256], "index 256, but lang.shared(0, lang.f32) has 256 elements"),
    (lambda x: lang.ld_shared_v4_f32(0), "addresses come from shared_address()"),
    (lambda x: lang.ld_shared_v4_f32(lang.shared_address(1012)), "outside the block's 1024 bytes"),
    (lambda x: lang.ldmatrix_x4(lang.shared_address(8)), "is not aligned to 16 bytes"),
    (lambda x: lang.cp_async_16(lang.shared_address(0), x + 248), "cp_async_16: bytes 248 to 263 are outside argument 0"),
    (lambda x: lang.cp_async_16_zfill(lang.shared_address(0), x, 17), "expected 0 to 16 source bytes, got 17"),
])
def test_bad_accesses(kernel, text):
    error = fails(kernel, text, args=[np.zeros(64, np.float32)])
    assert "block (0, 0), thread 0, at " in str(error)


def test_read_only_arrays_stay_so():
    array = np.zeros(64, np.float32)
    array.flags.writeable = False

    def kernel(address):
        lang.pointer(address, lang.f32)[0] = 1.0

    fails(kernel, "cannot modify read-only memory", args=[array])


def test_nothing_is_kept_after_an_error():
    array = np.zeros(64, np.float32)
    gone = weakref.ref(array)

    def kernel(address):
        if lang.tid_x():
            lang.bar_sync()
        lang.pointer(address, lang.f32)[100]

    with pytest.raises(SimulatorError):
        launch(kernel, grid=(1, 1), block=64, args=[array])
    del array
    gc.collect()
    assert gone() is None


# --- memory -----------------------------------------------------------------------------------------------------------------


def test_strided_views_and_offsets_reach_the_array_itself():
    base = np.zeros((6, 8, 4), np.float32)
    view = base[1:5, ::2]  # 4 x 4 rows of 4, strides 32 and 8 elements

    def kernel(address, row_stride, column_stride):
        t = lang.tid_x()
        if t < 16:
            lang.pointer(address + (t // 4) * row_stride * 4, lang.f32)[(t % 4) * column_stride + 1] = float(t)

    launch(kernel, grid=(1, 1), block=32, args=[view, 32, 8])
    np.testing.assert_array_equal(view[:, :, 1].ravel(), np.arange(16))
    assert np.count_nonzero(base) == 15

    def beyond(address):
        lang.pointer(address, lang.f32)[32 * 3 + 8 * 3 + 4]

    fails(beyond, "index 124", args=[view])


def test_a_reversed_view_starts_at_its_first_element():
    array = np.arange(64, dtype=np.float32)

    def kernel(address, out):
        lang.pointer(out, lang.f32)[lang.tid_x()] = lang.pointer(address - 4 * lang.tid_x(), lang.f32)[0]

    out = np.zeros(64, np.float32)
    launch(kernel, grid=(1, 1), block=64, args=[array[::-1], out])
    np.testing.assert_array_equal(out, array[::-1])


def test_arguments_of_every_kind():
    seen = []

    def kernel(*arguments):
        if lang.tid_x() == 0:
            seen.extend(arguments)

    array = np.zeros(4, ml_dtypes.bfloat16)
    launch(kernel, grid=(1, 1), block=32, args=[simulator.address_of(array) + 2, 0, np.int64(7), np.float32(0.1), True, array, np.zeros(0)])
    address, null, integer, number, flag, whole, _ = seen
    assert (address.offset, whole.offset, null, flag) == (2, 0, 0, True)
    assert (integer, type(integer), number, type(number)) == (7, int, float(np.float32(0.1)), float)
    assert address + 4 == 4 + address and lang.uint64(address) is address and address != 0


@pytest.mark.parametrize("argument", [None, "x", [1, 2], object()])
def test_arguments_of_other_kinds_are_refused(argument):
    with pytest.raises(TypeError, match="argument 1: expected a NumPy array, an Address or a number, got"):
        launch(lambda a, b: None, grid=(1, 1), block=32, args=[1, argument])


def test_memory_starts_as_poison_in_every_block():
    out = np.zeros((3, 64), np.float32)

    def kernel(address):
        t, cells = lang.tid_x(), lang.shared(0, lang.f32)
        mine, words = lang.local_array(2, lang.f32)(), lang.local_array(1, lang.u16)()
        garbage = math.isnan(cells[t]) and math.isnan(mine[1]) and words[0] == 0xFFFF
        cells[t] = 1.0
        lang.pointer(address, lang.f32)[lang.ctaid_x() * 64 + t] = 1.0 if garbage else 0.0

    launch(kernel, grid=(3, 1), block=64, shared_bytes=256, args=[out])
    assert out.all()


def test_stores_round_to_float32_and_overflow_to_infinity():
    out = np.zeros(8, np.float32)

    def kernel(address):
        if lang.tid_x() == 0:
            values, cells = lang.pointer(address, lang.f32), lang.shared(0, lang.f32)
            values[0], values[1] = 0.1, 1e39
            lang.st_global_v4_f32(address + 16, 0.1, -1e39, math.nan, 1e-50)
            lang.st_shared_v4_f32(lang.shared_address(0), 1e39, 0.0, 0.0, 0.0)
            values[2] = cells[0]

    launch(kernel, grid=(1, 1), block=32, shared_bytes=16, args=[out])
    np.testing.assert_array_equal(out, np.array([0.1, np.inf, np.inf, 0, 0.1, -np.inf, np.nan, 0], np.float32))


# --- asynchronous copies ------------------------------------------------------------------------------------------------------


def copies(wait):
    """Two committed copies and one open one; then `wait`; then what the thread sees of each."""

    def kernel(source, out):
        t, cells = lang.tid_x(), lang.shared(0, lang.f32)
        for i in range(3):
            lang.cp_async_16(lang.shared_address(i * 512 + t * 16), source + i * 512 + t * 16)
            if i < 2:
                lang.cp_async_commit()
        wait()
        for i in range(3):
            lang.pointer(out, lang.f32)[i * 32 + t] = cells[i * 128 + t * 4]

    source, out = np.arange(3 * 128, dtype=np.float32), np.zeros((3, 32), np.float32)
    launch(kernel, grid=(1, 1), block=32, shared_bytes=3 * 512, args=[source, out])
    expected = source.reshape(3, 32, 4)[:, :, 0]
    return [bool((row == wanted).all()) if not np.isnan(row).all() else None for row, wanted in zip(out, expected, strict=True)]


def test_copies_land_at_the_wait_and_not_before():
    assert copies(lambda: None) == [None, None, None]
    assert copies(lang.cp_async_wait_group(1)) == [True, None, None]
    assert copies(lang.cp_async_wait_group(0)) == [True, True, None]


def test_a_copy_without_a_barrier_is_a_race():
    """The last thread at the barrier is the first to go on, so its copy has landed when thread 0 reads it."""
    wait = lang.cp_async_wait_group(0)

    def kernel(source):
        t = lang.tid_x()
        lang.cp_async_16(lang.shared_address(t * 16), source + t * 16)  # begun
        lang.cp_async_commit()
        lang.bar_sync()
        wait()  # landed
        if t == 0:
            lang.ld_shared_v4_f32(lang.shared_address(63 * 16))  # read

    fails(kernel, "race on bytes 1008 to 1011 of shared memory: asynchronous copy by thread 63", "then read by thread 0", line_of(kernel, "begun"),
          line_of(kernel, "landed"), line_of(kernel, "read"), args=[np.zeros(256, np.float32)], check_races=True)


def test_a_copy_under_way_may_not_be_touched():
    def reads(source):
        lang.cp_async_16(lang.shared_address(lang.tid_x() * 16), source)  # begun
        lang.cp_async_commit()
        lang.bar_sync()
        lang.shared(0, lang.f32)[4 * lang.tid_x() + 3]  # touched

    def writes(source):
        lang.cp_async_16(lang.shared_address(lang.tid_x() * 16), source)  # begun
        lang.shared(0, lang.f32)[4 * lang.tid_x()] = 0.0  # touched

    for kernel, access, thread in ((reads, "read", 63), (writes, "write", 0)):
        text = f"asynchronous copy by thread {thread} begun at {line_of(kernel, 'begun')}, not landed yet, then {access} by thread {thread}"
        fails(kernel, text, line_of(kernel, "touched"), args=[np.zeros(4, np.float32)], check_races=True)
