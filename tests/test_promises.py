"""Promises of the contract that need several calls: determinism, batch invariance, lse merging, verify = decode."""

import functools

import numpy as np
import pytest
from support import machine
from support.batches import Layout, Request, call, draw
from support.cases import chain, random_tree
from support.compare import assert_rows_close

pytestmark = pytest.mark.kernel

LONG, SHORT = (20_000, 700) if machine.HAS_GPU else (1100, 20)
KERNELS = [(name, kernel) for name in machine.IMPLEMENTATIONS for kernel in machine.KERNELS]


def rows_of(kernel):
    """latent_dim, dims, heads: small enough for the simulator, long enough that LONG is cut into pieces (of 1024 keys) and SHORT is not."""
    latent, rope, heads = (512, 64, 20) if machine.HAS_GPU else (128, 64, 3) if kernel in machine.TENSOR else (32, 32, 1)
    return latent, latent + rope, heads


def finest(kernel):
    """The dtype that rounds least."""
    return "float16" if kernel in machine.TENSOR else "float32"


def requests(kernel, dtype="bfloat16"):
    _, dims, heads = rows_of(kernel)
    return [draw(chain(1), LONG, heads, dims, dtype, 1), draw(random_tree(5, 2), SHORT, heads, dims, dtype, 2),
            draw(random_tree(3, 3), 0, heads, dims, dtype, 3)]


def options_of(kernel):
    """deterministic=True where it is another code path: naive and flash keep the promise without being asked."""
    return {"latent_dim": rows_of(kernel)[0], "deterministic": kernel in machine.SPLITTING}


def bits(results):
    return [(out.tobytes(), lse.tobytes()) for out, lse in results]


@functools.cache
def plain(name, kernel):
    """Bits of the requests in their plainest layout."""
    return bits(call(name, kernel, requests(kernel), **options_of(kernel)))


@pytest.mark.parametrize("name, kernel", KERNELS)
def test_same_call_same_bits(name, kernel):
    repeats = 20 if machine.HAS_GPU else 1
    for _ in range(repeats):
        assert bits(call(name, kernel, requests(kernel), **options_of(kernel))) == plain(name, kernel)
    if kernel in machine.SPLITTING:
        options = options_of(kernel) | {"deterministic": False}
        first = bits(call(name, kernel, requests(kernel), **options))
        for _ in range(repeats):
            assert bits(call(name, kernel, requests(kernel), **options)) == first


@pytest.mark.parametrize("name, kernel", KERNELS)
@pytest.mark.parametrize("what, layout", [
    ("padded", Layout(padding=5)), ("other slots", Layout(scatter=9)), ("pages of 16, 64 bit", Layout(page_size=16, wide=True)),
    ("draft rows aside, parents", Layout(aside=True, form="parents")), ("bits", Layout(form="bits")), ("dense mask", Layout(form="dense"))],
    ids=lambda value: value if isinstance(value, str) else "")
def test_layout_changes_no_bits(name, kernel, what, layout):
    assert bits(call(name, kernel, requests(kernel), layout, **options_of(kernel))) == plain(name, kernel), what


@pytest.mark.parametrize("name, kernel", KERNELS)
def test_neighbours_change_no_bits(name, kernel):
    """A request alone, in a batch, and in a permuted batch: the first is long enough to be cut, so the cuts are put to the test."""
    options, batch, together = options_of(kernel), requests(kernel), plain(name, kernel)
    for r, request in enumerate(batch):
        assert bits(call(name, kernel, [request], **options))[0] == together[r], f"request {r} alone"
    permuted = bits(call(name, kernel, [batch[2], batch[0], batch[1]], **options))
    assert [permuted[1], permuted[2], permuted[0]] == together


@pytest.mark.parametrize("name, kernel", KERNELS)
def test_verify_row_equals_decode(name, kernel):
    """Row i of a tree = one-token decode with the ancestors of i as prefix: the same function of the same keys."""
    (latent, dims, heads), dtype = rows_of(kernel), finest(kernel)
    request = draw((-1, 0, 0, 1), SHORT, heads, dims, dtype, 4)
    (out, lse), = call(name, kernel, [request], latent_dim=latent)
    for i, path in enumerate([[0], [0, 1], [0, 2], [0, 1, 3]]):
        keys = np.concatenate([request.keys[:SHORT], request.keys[SHORT:][path]])
        (decoded, decoded_lse), = call(name, kernel, [Request((-1,), request.q[i:i + 1], keys)], latent_dim=latent)
        assert_rows_close(out[i:i + 1], decoded.astype(np.float64), None, dtype, f"row {i}")
        np.testing.assert_allclose(lse[i], decoded_lse[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name, kernel", KERNELS)
def test_lse_merges_two_halves_of_a_prefix(name, kernel):
    """lse is a natural logarithm: halves run apart and merged by it equal one run."""
    (latent, dims, heads), dtype = rows_of(kernel), finest(kernel)
    request = draw(chain(1), SHORT, heads, dims, dtype, 5)
    (whole, whole_lse), = call(name, kernel, [request], latent_dim=latent)
    half = SHORT // 3
    parts = []
    for keys in (request.keys[:half], request.keys[half:]):
        parts.append(call(name, kernel, [Request((-1,), request.q, keys)], latent_dim=latent)[0])
    lses = np.stack([lse for _, lse in parts]).astype(np.float64)
    weights = np.exp(lses - lses.max(axis=0))
    merged = sum(w[..., None] * out for w, (out, _) in zip(weights, parts, strict=True)) / weights.sum(axis=0)[..., None]
    assert_rows_close(whole, merged, None, dtype, "merged")
    np.testing.assert_allclose(whole_lse, lses.max(axis=0) + np.log(weights.sum(axis=0)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name, kernel", KERNELS)
def test_visible_keys_are_counted_exactly(name, kernel):
    """Zero queries and one-hot values: each output column says whether its key was seen, with no tolerance to hide in."""
    parents, prefix = (-1, 0, 0, 1, 2, 2), 9
    (latent, dims, heads), n, dtype = rows_of(kernel), len(parents), finest(kernel)
    keys = np.zeros((prefix + n, dims), dtype)
    keys[np.arange(prefix + n), np.arange(prefix + n)] = 1
    request = Request(parents, np.zeros((n, heads, dims), dtype), keys)
    (out, _), = call(name, kernel, [request], latent_dim=latent)
    ancestors = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4], [0, 2, 5]]
    for i, seen in enumerate(ancestors):
        expected = np.zeros(latent)
        expected[[*range(prefix), *(prefix + d for d in seen)]] = 1 / (prefix + len(seen))
        rounding = {"float32": 3e-7, "float16": 5e-4}[dtype]
        np.testing.assert_allclose(out[i].astype(np.float64), np.broadcast_to(expected, out[i].shape), rtol=rounding, atol=0)
