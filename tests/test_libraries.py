"""Arrays of torch, CuPy, numba and JAX on the GPU: taken as they are, and new outputs of the same kind. Runs where a library is installed."""

import ml_dtypes
import numpy as np
import pytest
from support import batches, machine
from support.batches import Layout, draw
from support.cases import chain, random_tree

pytestmark = [pytest.mark.gpu, pytest.mark.kernel]

REQUESTS = [draw(random_tree(5, 1), 40, 16, 576, "float16", 1), draw(chain(2), 300, 16, 576, "float16", 2)]
NAMES = ("q", "kv_cache", "qo_indptr", "kv_indptr", "kv_indices", "tree")


def host_arguments(dtype):
    given = batches.arguments(REQUESTS, Layout(form="parents"))
    host = {name: given[name].numpy() for name in NAMES}
    return {name: a.astype(dtype) if a.dtype == np.float16 else a for name, a in host.items()}


def verify(name, arrays, **options):
    positional = [arrays[key] for key in NAMES[:5]]
    return machine.IMPLEMENTATIONS[name].verify_mla(*positional, tree=arrays["tree"], sm_scale=1 / 24, return_lse=True, **options)


def check(out, lse):
    expected = batches.call("numba_verify", "naive", REQUESTS, Layout(form="parents"), sm_scale=1 / 24)
    got, wanted = np.asarray(out).astype(np.float64), np.concatenate([o for o, _ in expected]).astype(np.float64)
    # bfloat16 callers get float16's numbers rounded on the way in: 2^-9 a value, and once more on the way out
    assert np.linalg.norm(got - wanted) < 1e-2 * np.linalg.norm(wanted)
    np.testing.assert_allclose(np.asarray(lse), np.concatenate([lse for _, lse in expected]), rtol=2e-2)


@pytest.mark.parametrize("name", machine.IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_torch(name, dtype):
    torch = pytest.importorskip("torch")
    host = host_arguments(np.float16)
    arrays = {key: torch.from_numpy(a).cuda() for key, a in host.items()}
    arrays = {key: a.to(getattr(torch, dtype)) if a.dtype == torch.float16 else a for key, a in arrays.items()}
    arrays["q"].requires_grad_(True)
    out, lse = verify(name, arrays)
    assert isinstance(out, torch.Tensor) and out.dtype == getattr(torch, dtype) and out.is_cuda and lse.dtype == torch.float32
    check(out.float().cpu().numpy(), lse.cpu().numpy())


@pytest.mark.parametrize("name", machine.IMPLEMENTATIONS)
def test_torch_current_stream_is_asked_at_every_call(name):
    """q is filled late on a side stream; a call that ran anywhere else would read what was there before."""
    torch = pytest.importorskip("torch")
    arrays = {key: torch.from_numpy(a).cuda() for key, a in host_arguments(np.float16).items()}
    right = arrays["q"].clone()
    verify(name, arrays)  # the plan of the default stream exists, and is not to be taken below
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    for stream in (side, torch.cuda.current_stream()):
        arrays["q"].zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            arrays["q"].copy_(right)
            out, lse = verify(name, arrays)
        stream.synchronize()
        check(out.float().cpu().numpy(), lse.cpu().numpy())


@pytest.mark.parametrize("name", machine.IMPLEMENTATIONS)
def test_torch_cuda_graph(name):
    """verify_mla itself under torch.cuda.graph, once it has been called with this shape."""
    torch = pytest.importorskip("torch")
    arrays = {key: torch.from_numpy(a).cuda() for key, a in host_arguments(np.float16).items()}
    side = torch.cuda.Stream()
    torch.cuda.synchronize()  # the arrays were filled on the default stream, which this one does not wait for
    with torch.cuda.stream(side):
        verify(name, arrays)
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            out, lse = verify(name, arrays)
        out.fill_(float("nan"))
        graph.replay()
    side.synchronize()
    check(out.float().cpu().numpy(), lse.cpu().numpy())


@pytest.mark.parametrize("name", machine.IMPLEMENTATIONS)
def test_cupy(name):
    cupy = pytest.importorskip("cupy")
    arrays = {key: cupy.asarray(a) for key, a in host_arguments(np.float16).items()}
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()  # the arrays were filled on the default stream, which this one does not wait for
    with stream:
        out, lse = verify(name, arrays)
    stream.synchronize()
    assert isinstance(out, cupy.ndarray) and out.dtype == np.float16
    check(out.get(), lse.get())


@pytest.mark.parametrize("name", machine.IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_jax(name, dtype):
    jax = pytest.importorskip("jax")
    host = host_arguments(np.dtype(getattr(ml_dtypes, dtype, np.float16)) if dtype == "bfloat16" else np.float16)
    arrays = {key: jax.block_until_ready(jax.device_put(a)) for key, a in host.items()}
    out, lse = verify(name, arrays)
    machine.driver.synchronize(0)
    assert isinstance(out, jax.Array) and out.dtype == arrays["q"].dtype
    check(np.asarray(out).astype(np.float32), np.asarray(lse))


@pytest.mark.parametrize("name", machine.IMPLEMENTATIONS)
def test_numba(name):
    from numba import cuda

    arrays = {key: cuda.to_device(a) for key, a in host_arguments(np.float16).items()}
    out, lse = verify(name, arrays)
    assert isinstance(out, type(arrays["q"])) and out.dtype == np.float16
    check(out.copy_to_host(), lse.copy_to_host())


@pytest.mark.parametrize("name", machine.IMPLEMENTATIONS)
def test_host_and_device_arrays_do_not_mix(name):
    arrays = {key: machine.put(a) for key, a in host_arguments(np.float16).items()}
    arrays["kv_indices"] = host_arguments(np.float16)["kv_indices"]
    with pytest.raises(ValueError, match="kv_indices: expected on cuda:0 like the index arrays of the plan, got the host"):
        verify(name, arrays)
