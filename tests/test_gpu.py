"""What only a GPU can show: graph capture and replay, streams, threads, no allocation, 64-bit addresses."""

import threading
import time

import ml_dtypes
import numpy as np
import pytest
from support import batches, machine
from support.batches import Layout, draw
from support.cases import chain, random_tree
from support.graphs import Graph, new_stream

from numba_verify import DraftTree
from numba_verify.backend import HOPPER_CAPABILITY
from numba_verify.gpu import driver
from numba_verify.gpu.compile import KernelSource
from numba_verify.gpu.device_array import empty, tiled, to_device
from numba_verify.gpu.launch import LoadedKernel

pytestmark = [pytest.mark.gpu, pytest.mark.kernel]

HEADS, DIMS, WRITER_THREADS = 16, 576, 128
KERNELS = [(name, kernel) for name in machine.IMPLEMENTATIONS for kernel in machine.KERNELS]
STEPS = [  # trees and prefixes of three steps with the same capacities: shorter, longer, other shapes, an empty request
    [(random_tree(6, 1), 700), (chain(3), 90)],
    [(chain(1), 5), (random_tree(12, 2), 4000)],
    [((), 33), (random_tree(9, 3), 0)],
]
CAPACITY = {"max_batch": 2, "max_total_q": 16, "max_kv_entries": 4100}


def step_requests(step, seed=0):
    return [draw(tree, prefix, HEADS, DIMS, "bfloat16", 10 * seed + i) for i, (tree, prefix) in enumerate(step)]


class Buffers:
    """Device buffers at full capacity, as an engine holds them: each step is written into the same memory."""

    def __init__(self):
        bf16 = np.dtype(ml_dtypes.bfloat16)
        self.arrays = {"q": empty((16, HEADS, DIMS), bf16), "kv_cache": empty((4200, DIMS), bf16), "qo_indptr": empty((3,), np.int32),
                       "kv_indptr": empty((3,), np.int32), "kv_indices": empty((4100,), np.int32), "tree": empty((16,), np.int32)}
        self.out, self.lse = empty((16, HEADS, 512), bf16), empty((16, HEADS), np.float32)

    def write(self, requests):
        """Fill with a step; what lies behind is junk. Outputs are poisoned."""
        host = batches.arguments(requests, Layout(form="parents", padding=0))
        with driver.context(0):
            for name, array in self.arrays.items():
                junk = np.full(array.buffer.nbytes, 0x7F, np.uint8)
                values = host[name].bytes_back()[:int(np.prod(host[name].shape)) * host[name].dtype.itemsize]
                junk[:len(values)] = values
                driver.copy_to_device(array.buffer.address, junk, 0)
            for array in (self.out, self.lse):
                driver.copy_to_device(array.buffer.address, np.full(array.buffer.nbytes, 0xFF, np.uint8), 0)
            driver.synchronize(0)

    def plan(self, name, kernel, **options):
        a = self.arrays
        plan = machine.IMPLEMENTATIONS[name].plan(a["qo_indptr"], a["kv_indptr"], a["kv_indices"], tree=a["tree"], num_heads=HEADS,
                                                  kernel=kernel, **CAPACITY, **options)
        # `plan` worked on the default stream, and the streams of these tests do not wait for that one.
        driver.synchronize(0)
        return plan

    def update(self, plan, stream):
        a = self.arrays
        plan.update(a["qo_indptr"], a["kv_indptr"], a["kv_indices"], tree=a["tree"], stream=stream)

    def run(self, plan, stream):
        plan.run(self.arrays["q"], self.arrays["kv_cache"], sm_scale=DIMS ** -0.5, out=self.out, lse=self.lse, stream=stream)

    def results(self, requests):
        out, lse = self.out.numpy(), self.lse.numpy()
        ends = np.cumsum([len(r.parents) for r in requests])
        assert np.isnan(lse[ends[-1]:]).all(), "rows after the last draft token were written"
        return [(out[e - len(r.parents):e].tobytes(), lse[e - len(r.parents):e].tobytes()) for r, e in zip(requests, ends, strict=True)]


def expected(name, kernel, requests):
    """The same step by a plan of its own capacities-independent bits: deterministic, eager."""
    return [(out.tobytes(), lse.tobytes()) for out, lse in
            batches.call(name, kernel, requests, Layout(form="parents"), deterministic=kernel in machine.SPLITTING)]


@pytest.mark.parametrize("name, kernel", KERNELS)
def test_graph_replay_with_other_lengths_and_trees(name, kernel):
    """update and run captured once, replayed after the buffers changed: bits equal an eager call on the new step."""
    buffers, first = Buffers(), step_requests(STEPS[0])
    buffers.write(first)
    plan = buffers.plan(name, kernel, deterministic=kernel in machine.SPLITTING)
    with new_stream() as stream:
        def record(handle):
            buffers.update(plan, handle)
            buffers.run(plan, handle)

        record(stream)
        graph = Graph(stream, record)
        launches = 2 + (2 if kernel in machine.SPLITTING else 1)
        # Only kernels: no allocation, no copy, nothing that escaped the capture.
        assert graph.kinds == ["CU_GRAPH_NODE_TYPE_KERNEL"] * launches
        for i, step in enumerate([*STEPS, STEPS[0]]):
            requests = step_requests(step, seed=i)
            buffers.write(requests)
            graph.replay()
            assert buffers.results(requests) == expected(name, kernel, requests), f"step {i}"


@pytest.mark.parametrize("name, kernel", KERNELS)
def test_captured_run_follows_updates_outside_the_graph(name, kernel):
    """run alone captured; update called eagerly in between, with arrays of its own and a host DraftTree."""
    buffers = Buffers()
    buffers.write(step_requests(STEPS[0]))
    plan = buffers.plan(name, kernel, deterministic=kernel in machine.SPLITTING)
    with new_stream() as stream:
        buffers.run(plan, stream)
        graph = Graph(stream, lambda handle: buffers.run(plan, handle))
        for i, step in enumerate(STEPS):
            requests = step_requests(step, seed=i)
            buffers.write(requests)
            given = batches.arguments(requests, Layout(form="tree", wide=True))
            plan.update(given["qo_indptr"], given["kv_indptr"], given["kv_indices"], tree=given["tree"], kv_lens=given["kv_lens"], stream=stream)
            driver.synchronize(stream)
            graph.replay()
            assert buffers.results(requests) == expected(name, kernel, requests), f"step {i}"


@pytest.mark.parametrize("name", machine.IMPLEMENTATIONS)
@pytest.mark.parametrize("kernel", machine.SPLITTING)
def test_what_cannot_be_captured_is_refused_and_the_capture_lives_on(name, kernel):
    buffers = Buffers()
    buffers.write(step_requests(STEPS[0]))
    plan, checking = buffers.plan(name, kernel), buffers.plan(name, kernel, validate=True)
    a = buffers.arrays
    tree = DraftTree.from_lists([list(tree) for tree, _ in STEPS[0]])

    def record(stream):
        with pytest.raises(ValueError, match="a host DraftTree cannot be captured"):
            plan.update(a["qo_indptr"], a["kv_indptr"], a["kv_indices"], tree=tree, stream=stream)
        with pytest.raises(ValueError, match="validate=True synchronises and cannot be captured"):
            buffers.update(checking, stream)
        with pytest.raises(ValueError, match="validate=True synchronises and cannot be captured"):
            buffers.run(checking, stream)
        with pytest.raises(ValueError, match="plan: it allocates and cannot be captured"):
            buffers.plan(name, kernel, stream=stream)
        buffers.run(plan, stream)

    with new_stream() as stream:
        buffers.run(plan, stream)
        graph = Graph(stream, record)
        assert graph.kinds == ["CU_GRAPH_NODE_TYPE_KERNEL"] * 2
        graph.replay()


def build_late_writer(lang, config):
    """Copies `count` float32, in one block, long after it has let the next grid start."""
    int64, pointer, f32, tid, go_on = lang.int64, lang.pointer, lang.f32, lang.tid_x, lang.griddepcontrol_launch_dependents

    def late_writer(source, target, count):
        go_on()
        for i in range(int64(tid()), count, int64(WRITER_THREADS)):
            pointer(target, f32)[i] = pointer(source, f32)[i]

    return late_writer


class Writer:
    """Enqueues a copy of a device array: by the driver, or by a kernel that lets the next one start before it has begun."""

    def __init__(self, by_kernel):
        self._kernel = None
        if by_kernel:
            if driver.device_info(0).capability < HOPPER_CAPABILITY:
                pytest.skip("grids do not overlap before sm_90")
            source = KernelSource("late_writer", build_late_writer, None, ("address", "address", "i64"), WRITER_THREADS)
            self._kernel = LoadedKernel(source, 0)

    def __call__(self, target, source, stream):
        to, of, nbytes = target.buffer.address, source.buffer.address, source.buffer.nbytes
        if self._kernel is None:
            driver.call("cuMemcpyDtoDAsync", to, of, nbytes, stream)
        else:
            self._kernel.launch(stream, (1, 1), (of, to, nbytes // 4))


@pytest.mark.parametrize("by_kernel", [False, True], ids=["behind_a_copy", "behind_an_early_kernel"])
@pytest.mark.parametrize("step", [STEPS[1], [(chain(3), 5), (chain(2), 9)]], ids=["pieces", "whole_tiles"])
@pytest.mark.parametrize("name, kernel", KERNELS)
def test_nothing_overtakes_in_a_graph(name, kernel, step, by_kernel):
    """`combine` may start before the partials are written, and must not end before `out` is. Two results in turn, so that what is left from the run
    before is wrong. The kernel does not start before its queries are written, also if whoever writes them allows it."""
    requests, buffers = step_requests(step), Buffers()
    buffers.write(requests)
    plan, q, out, write = buffers.plan(name, kernel), buffers.arrays["q"], buffers.out, Writer(by_kernel)
    queries = [to_device(q.numpy()), to_device(-q.numpy())]
    copies = [empty(out.shape, out.dtype) for _ in range(12)]
    with new_stream() as stream:
        expected = []
        for one in queries:
            driver.call("cuMemcpyDtoDAsync", q.buffer.address, one.buffer.address, one.buffer.nbytes, stream)
            buffers.run(plan, stream)
            driver.synchronize(stream)
            expected.append(out.numpy().tobytes())
        assert expected[0] != expected[1]

        def record(stream):
            for i, copy in enumerate(copies):
                write(q, queries[i % 2], stream)
                buffers.run(plan, stream)
                driver.call("cuMemcpyDtoDAsync", copy.buffer.address, out.buffer.address, out.buffer.nbytes, stream)

        graph = Graph(stream, record)
        for _ in range(3):
            graph.replay()
            assert [copy.numpy().tobytes() == expected[i % 2] for i, copy in enumerate(copies)] == [True] * len(copies)


@pytest.mark.parametrize("name, kernel", KERNELS)
def test_run_and_update_allocate_nothing(name, kernel):
    buffers = Buffers()
    buffers.write(step_requests(STEPS[0]))
    plan = buffers.plan(name, kernel)
    with new_stream() as stream:
        buffers.update(plan, stream)
        buffers.run(plan, stream)
        driver.synchronize(stream)
        deadline, kept = time.monotonic() + 60, False
        while not kept and time.monotonic() < deadline:  # tests that run beside this one allocate too: one quiet round is enough, a leak leaves none
            free = driver.call("cuMemGetInfo")[0]
            for _ in range(50):
                buffers.update(plan, stream)
                buffers.run(plan, stream)
            driver.synchronize(stream)
            kept = driver.call("cuMemGetInfo")[0] == free
        assert kept


@pytest.mark.parametrize("name, kernel", KERNELS)
def test_two_plans_on_two_streams_from_two_threads(name, kernel):
    """Each thread has its own plan and stream; 50 rounds, every result bit-equal to what it was alone."""
    failures = []

    def work(step, seed):
        try:
            requests, buffers = step_requests(step, seed), Buffers()
            buffers.write(requests)
            plan = buffers.plan(name, kernel)
            with new_stream() as stream:
                buffers.run(plan, stream)
                driver.synchronize(stream)
                alone = buffers.results(requests)
                start.wait()
                for _ in range(50):
                    buffers.update(plan, stream)
                    buffers.run(plan, stream)
                    driver.synchronize(stream)
                    if buffers.results(requests) != alone:
                        failures.append(seed)
        except BaseException as error:  # a thread's exception would be lost, and with it the test
            failures.append(error)
            start.abort()

    start = threading.Barrier(2)
    threads = [threading.Thread(target=work, args=(step, seed)) for seed, step in enumerate(STEPS[:2])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize("name, kernel", KERNELS)
def test_pool_beyond_2_31_elements(name, kernel):
    """4.2 million slots of 576: rows listed at the far end lie beyond 2^31 elements (from slot 3,728,271 on) and beyond 4 GB."""
    slots, request = 4_200_000, draw(random_tree(4, 1), 60, HEADS, DIMS, "bfloat16", 1)
    pool = tiled(np.random.default_rng(0).standard_normal((4096, DIMS)).astype(ml_dtypes.bfloat16), slots)
    far = slots - 1 - 7 * np.arange(64)
    row_bytes = DIMS * 2
    with driver.context(0):
        for slot, row in zip(far, request.keys, strict=True):
            driver.copy_to_device(pool.buffer.address + int(slot) * row_bytes, np.ascontiguousarray(row).view(np.uint8), 0)
    module = machine.IMPLEMENTATIONS[name]
    tree = DraftTree.from_lists([list(request.parents)])
    got = module.verify_mla(to_device(request.q), pool, to_device(np.array([0, 4])), to_device(np.array([0, 64])), to_device(far), tree=tree,
                            sm_scale=DIMS ** -0.5, kernel=kernel, return_lse=True, deterministic=kernel in machine.SPLITTING)
    (out, lse), = batches.call(name, kernel, [request], deterministic=kernel in machine.SPLITTING)
    assert machine.fetch(got[0]).tobytes() == out.tobytes() and machine.fetch(got[1]).tobytes() == lse.tobytes()


@pytest.mark.parametrize("name, kernel", KERNELS)
def test_queries_and_output_beyond_2_31_elements(name, kernel):
    """33,000 one-token requests with 128 heads: q passes 2^31 elements at row 29,127, out at row 32,768."""
    count, heads, drawn = 33_000, 128, 1024
    rng = np.random.default_rng(2)
    block = rng.standard_normal((drawn, heads, DIMS)).astype(ml_dtypes.bfloat16)
    keys = rng.standard_normal((drawn, DIMS)).astype(ml_dtypes.bfloat16)
    q, out = tiled(block, count), empty((count, heads, 512), block.dtype)
    indptr = to_device(np.arange(count + 1, dtype=np.int32))
    slots = to_device((np.arange(count) % drawn).astype(np.int32))
    machine.IMPLEMENTATIONS[name].verify_mla(q, to_device(keys), indptr, indptr, slots, sm_scale=0.05, kernel=kernel, out=out)
    # One visible key: the output is that key's latent part, whatever the query.
    got = out.numpy()
    for row in (0, 29_126, 29_127, 29_128, 32_767, 32_768, count - 1):
        np.testing.assert_array_equal(got[row], np.broadcast_to(keys[row % drawn, :512], (heads, 512)))
