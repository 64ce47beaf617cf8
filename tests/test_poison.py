"""The guards must go off: corruption of every kind is injected and has to be found and named."""

import ml_dtypes
import numpy as np
import pytest
from support.poison import ALIGNMENT, RED_ZONE_BYTES, Guarded, GuardedArrays, poison_bytes

ROWS = np.arange(1, 13, dtype=np.float32).reshape(3, 4)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_poison_reads_as_nan(dtype):
    assert np.isnan(poison_bytes(4096).view(dtype).astype(np.float32)).all()


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_poison_is_no_index(dtype):
    assert (poison_bytes(4096).view(dtype) < -65_000).all()


@pytest.mark.parametrize("written", [0x7FFF, 0xFFFF, 0x7FC0, 0x7E00, 0])
def test_poison_differs_from_what_kernels_write(written):
    assert (poison_bytes(4096).view(np.uint16) != written).all()


@pytest.fixture
def guarded():
    with GuardedArrays() as arrays:
        arrays.input("q", ROWS, row_gap=8)
        arrays.output("out", (4, 3), np.float32, written=2, row_gap=4)
        arrays.pool("kv", (4, 2, 4), ROWS, [5, 0, 3])
        arrays.check_guards()
        yield arrays
        for guard in arrays.guards.values():
            guard.arm()  # the injected corruption was looked at; what remains would be reported twice


def test_contents_and_alignment(guarded):
    q, out, kv = (guarded.guards[name].array for name in ("q", "out", "kv"))
    assert np.array_equal(q, ROWS)
    assert q.strides == (24, 4)
    assert np.isnan(out).all()
    assert np.array_equal(kv.reshape(-1, 4)[[5, 0, 3]], ROWS)
    assert np.isnan(kv.reshape(-1, 4)[[1, 2, 4, 6, 7]]).all()
    assert all(array.ctypes.data % ALIGNMENT == 0 for array in (q, out, kv))


def test_writes_where_they_are_allowed_pass(guarded):
    guarded.guards["out"].array[:2] = 7
    guarded.check_guards()


def corrupt(guard, byte):
    guard.backing[byte] ^= 1


@pytest.mark.parametrize(
    ("name", "inject", "text"),
    [
        ("q", lambda g: corrupt(g, g.offset - 1), "q: 1 bytes changed .* first 1 B before the array"),
        ("q", lambda g: corrupt(g, 0), f"first {RED_ZONE_BYTES} B before the array"),
        ("q", lambda g: corrupt(g, g.offset + g.span), "first 0 B behind the array"),
        ("q", lambda g: corrupt(g, -1), "behind the array: .. became .."),
        ("q", lambda g: corrupt(g, g.offset + 16), r"first in the gap behind the row at \(0, 3\)"),
        ("q", lambda g: g.array.__setitem__((2, 1), 0.0), r"first at \(2, 1\)"),
        ("out", lambda g: g.array.__setitem__((2, 0), 0.0), r"out: 4 bytes changed .* first at \(2, 0\)"),
        ("out", lambda g: g.array.__setitem__((3, 2), np.nan), r"first at \(3, 2\)"),
        ("out", lambda g: corrupt(g, g.offset + 12), r"first in the gap behind the row at \(0, 2\)"),
        ("kv", lambda g: g.array.__setitem__((3, 1), np.nan), r"kv: .* first at \(3, 1, 0\)"),
        ("kv", lambda g: g.array.__setitem__((0, 0, 3), 0.0), r"first at \(0, 0, 3\)"),
    ],
)
def test_injected_corruption_is_found_and_named(guarded, name, inject, text):
    inject(guarded.guards[name])
    with pytest.raises(AssertionError, match=text):
        guarded.check_guards()


def test_the_with_block_checks_on_the_way_out():
    with pytest.raises(AssertionError, match="q: 1 bytes changed"), GuardedArrays() as arrays:
        arrays.input("q", ROWS)[0, 0] = -1
    # An error of the test itself is not replaced by what the guards say.
    with pytest.raises(KeyError), GuardedArrays() as arrays:
        arrays.input("q", ROWS)[0, 0] = -1
        raise KeyError


def test_bytes_from_a_device_are_checked_the_same_way():
    guard = Guarded("out", (2, 2), np.float16)
    with pytest.raises(RuntimeError, match="out: the guard was never armed"):
        guard.check()
    guard.allow_writes(None)
    guard.arm()
    fetched = guard.backing.copy()
    fetched[guard.offset] ^= 1
    guard.check(fetched)
    fetched[guard.offset + guard.span + 3] ^= 1
    with pytest.raises(AssertionError, match="first 3 B behind the array"):
        guard.check(fetched)
    guard.check()
    with pytest.raises(ValueError, match="out: expected the .* bytes of backing, got uint8"):
        guard.check(fetched[1:])


def test_pools_of_every_layout():
    for shape in ((8, 4), (8, 1, 4), (4, 2, 4), (4, 2, 1, 4)):
        with GuardedArrays() as arrays:
            kv = arrays.pool("kv", shape, ROWS.astype(ml_dtypes.bfloat16), [6, 1, 2], row_gap=16)
            tokens = np.asarray(kv).reshape(8, 4).astype(np.float32)
            assert np.array_equal(tokens[[6, 1, 2]], ROWS)
            assert np.isnan(tokens[[0, 3, 4, 5, 7]]).all()


def test_empty_arrays_and_misaligned_starts():
    with GuardedArrays() as arrays:
        assert arrays.input("none", np.empty((0, 4), np.float16)).shape == (0, 4)
        assert arrays.input("moved", ROWS, misalign=4).ctypes.data % ALIGNMENT == 4
        with pytest.raises(ValueError, match="expected a new name, got 'moved' twice"):
            arrays.input("moved", ROWS)
        with pytest.raises(ValueError, match="expected row_gap and misalign in multiples of 2 B"):
            arrays.input("odd", ROWS, row_gap=3)
