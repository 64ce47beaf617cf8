"""Promises of the contract that need several calls: determinism, batch invariance, lse merging, verify = decode."""

import numpy as np
import pytest
from support import machine
from support.batches import Layout, Request, call, draw
from support.cases import chain, random_tree
from support.compare import assert_rows_close

pytestmark = pytest.mark.kernel

# Small enough for the simulator, long enough that the first is cut into pieces (more than 1024 keys) and its neighbour is not.
LATENT, ROPE, HEADS = (512, 64, 20) if machine.HAS_GPU else (32, 32, 1)
LONG, SHORT = (20_000, 700) if machine.HAS_GPU else (1100, 20)
KERNELS = [(name, kernel) for name in machine.IMPLEMENTATIONS for kernel in machine.KERNELS]


def requests(dtype="bfloat16"):
    dims = LATENT + ROPE
    return [draw(chain(1), LONG, HEADS, dims, dtype, 1), draw(random_tree(5, 2), SHORT, HEADS, dims, dtype, 2),
            draw(random_tree(3, 3), 0, HEADS, dims, dtype, 3)]


def bits(results):
    return [(out.tobytes(), lse.tobytes()) for out, lse in results]


@pytest.mark.parametrize("name, kernel", KERNELS)
def test_same_call_same_bits(name, kernel):
    first = bits(call(name, kernel, requests(), latent_dim=LATENT))
    for _ in range(20 if machine.HAS_GPU else 1):
        assert bits(call(name, kernel, requests(), latent_dim=LATENT)) == first


@pytest.mark.parametrize("name, kernel", KERNELS)
@pytest.mark.parametrize("what, layout", [
    ("padded", Layout(padding=5)), ("other slots", Layout(scatter=9)), ("pages of 16, 64 bit", Layout(page_size=16, wide=True)),
    ("draft rows aside, parents", Layout(aside=True, form="parents")), ("bits", Layout(form="bits")), ("dense mask", Layout(form="dense"))],
    ids=lambda value: value if isinstance(value, str) else "")
def test_layout_changes_no_bits(name, kernel, what, layout):
    """deterministic=True; naive and flash keep the promise without being asked."""
    options = {"latent_dim": LATENT, "deterministic": kernel == "paged"}
    assert bits(call(name, kernel, requests(), layout, **options)) == bits(call(name, kernel, requests(), **options)), what


@pytest.mark.parametrize("name, kernel", KERNELS)
def test_neighbours_change_no_bits(name, kernel):
    """A request alone, in a batch, and in a permuted batch: the first is long enough to be cut, so the cuts are put to the test."""
    options, batch = {"latent_dim": LATENT, "deterministic": kernel == "paged"}, requests()
    together = bits(call(name, kernel, batch, **options))
    for r, request in enumerate(batch):
        assert bits(call(name, kernel, [request], **options))[0] == together[r], f"request {r} alone"
    permuted = bits(call(name, kernel, [batch[2], batch[0], batch[1]], **options))
    assert [permuted[1], permuted[2], permuted[0]] == together


@pytest.mark.parametrize("name, kernel", KERNELS)
def test_verify_row_equals_decode(name, kernel):
    """Row i of a tree = one-token decode with the ancestors of i as prefix: the same function of the same keys."""
    request = draw((-1, 0, 0, 1), SHORT, HEADS, LATENT + ROPE, "float32", 4)
    (out, lse), = call(name, kernel, [request], latent_dim=LATENT)
    for i, path in enumerate([[0], [0, 1], [0, 2], [0, 1, 3]]):
        keys = np.concatenate([request.keys[:SHORT], request.keys[SHORT:][path]])
        (decoded, decoded_lse), = call(name, kernel, [Request((-1,), request.q[i:i + 1], keys)], latent_dim=LATENT)
        assert_rows_close(out[i:i + 1], decoded.astype(np.float64), None, "float32", f"row {i}")
        np.testing.assert_allclose(lse[i], decoded_lse[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name, kernel", KERNELS)
def test_lse_merges_two_halves_of_a_prefix(name, kernel):
    """lse is a natural logarithm: halves run apart and merged by it equal one run."""
    request = draw(chain(1), SHORT, HEADS, LATENT + ROPE, "float32", 5)
    (whole, whole_lse), = call(name, kernel, [request], latent_dim=LATENT)
    half = SHORT // 3
    parts = []
    for keys in (request.keys[:half], request.keys[half:]):
        parts.append(call(name, kernel, [Request((-1,), request.q, keys)], latent_dim=LATENT)[0])
    lses = np.stack([lse for _, lse in parts]).astype(np.float64)
    weights = np.exp(lses - lses.max(axis=0))
    merged = sum(w[..., None] * out for w, (out, _) in zip(weights, parts, strict=True)) / weights.sum(axis=0)[..., None]
    assert_rows_close(whole, merged, None, "float32", "merged")
    np.testing.assert_allclose(whole_lse, lses.max(axis=0) + np.log(weights.sum(axis=0)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name, kernel", KERNELS)
def test_visible_keys_are_counted_exactly(name, kernel):
    """Zero queries and one-hot values: each output column says whether its key was seen, with no tolerance to hide in."""
    parents, prefix = (-1, 0, 0, 1, 2, 2), 9
    dims, n = LATENT + ROPE, len(parents)
    keys = np.zeros((prefix + n, dims), np.float32)
    keys[np.arange(prefix + n), np.arange(prefix + n)] = 1
    request = Request(parents, np.zeros((n, HEADS, dims), np.float32), keys)
    (out, _), = call(name, kernel, [request], latent_dim=LATENT)
    ancestors = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4], [0, 2, 5]]
    for i, seen in enumerate(ancestors):
        expected = np.zeros(LATENT)
        expected[[*range(prefix), *(prefix + d for d in seen)]] = 1 / (prefix + len(seen))
        np.testing.assert_allclose(out[i], np.broadcast_to(expected, out[i].shape), rtol=3e-7, atol=0)
