"""Calls that a plan recognises as like the one before skip the checks that passed: nothing may come of it but time.

A recognised call launches what a fresh plan would launch, and every refusal is the refusal of a fresh plan. Most tests run on a GPU that
only keeps what it was asked to launch.
"""

import gc
import struct
import threading
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
from support import machine
from support.fake_gpu import DEVICE_BYTES, Exported, FakeGpu, Tensor
from support.small import Outputs, good_run, small_for

import cuda_ref.backend
import numba_verify
from numba_verify import DraftTree, arrays, planner
from numba_verify.gpu import driver, launch
from numba_verify.gpu.compile import KernelSource
from numba_verify.gpu.device_array import DeviceArray

HEADS, LATENT, ROPE = 4, 128, 64
DIMS = LATENT + ROPE
ROWS, SLOTS, BATCH, ENTRIES = 8, 100, 2, 40
both_kinds = pytest.mark.parametrize("kind", [Tensor, Exported])


@pytest.fixture
def gpu(monkeypatch):
    return FakeGpu(monkeypatch)


class Step:
    """Arguments of one plan on the fake GPU; a change replaces an array or says how its description differs."""

    def __init__(self, gpu, kind, aside=False, page_size=1):
        self.gpu, self.kind, self.aside, self.page_size = gpu, kind, aside, page_size
        pool = (SLOTS, DIMS) if page_size == 1 else (SLOTS, page_size, DIMS)
        self.run_layouts = {"q": ((ROWS, HEADS, DIMS), "bfloat16"), "kv_cache": (pool, "bfloat16"), "out": ((ROWS, HEADS, LATENT), "bfloat16"),
                            "lse": ((ROWS, HEADS), "float32")} | ({"draft_kv": ((ROWS, DIMS), "bfloat16")} if aside else {})
        self.update_layouts = {"qo_indptr": ((BATCH + 1,), "int32"), "kv_indptr": ((BATCH + 1,), "int32"), "kv_indices": ((ENTRIES,), "int32"),
                               "kv_lens": ((BATCH,), "int32"), "tree": ((ROWS,), "int32")}

    def arguments(self, layouts, changes):
        given = {}
        for name, (shape, dtype) in layouts.items():
            change = changes.pop(name, {})
            given[name] = self.gpu.array(self.kind, **({"shape": shape, "dtype": dtype} | change)) if isinstance(change, dict) else change
        return given | changes

    def plan(self, module=numba_verify, **options):
        return module.plan(**self.arguments(self.update_layouts, {}), num_heads=HEADS, latent_dim=LATENT, rope_dim=ROPE,
                                 draft_in_cache=not self.aside, page_size=self.page_size, **({"kernel": "paged"} | options))

    def run(self, plan, **changes):
        given = self.arguments(self.run_layouts, {"sm_scale": 0.5} | changes)
        return given, plan.run(**given)

    def update(self, plan, **changes):
        plan.update(**self.arguments(self.update_layouts, changes))


def relative(plan, launches):
    """Launches with addresses inside the plan's own memory counted from its beginning, so that two plans can be compared."""
    begin, size = plan._workspace.address, plan._workspace.nbytes
    return [call._replace(arguments=tuple(("own", a - begin) if begin <= a < begin + size else a for a in call.arguments)) for call in launches]


def checks_of(monkeypatch, name):
    """Counts the calls of a check of planner."""
    count, check = [], getattr(planner, name)
    monkeypatch.setattr(planner, name, lambda *given: count.append(1) or check(*given))
    return count


@both_kinds
@pytest.mark.parametrize("kernel", machine.KERNELS)
def test_run_has_no_stale_pointer(gpu, kind, kernel, monkeypatch):
    """Layers A, B, A with arrays of their own: each launch has the addresses of its call, all else is as at first."""
    step = Step(gpu, kind, aside=True)
    plan = step.plan(kernel=kernel)
    gpu.take()
    checked, layers = checks_of(monkeypatch, "check_tensors"), []
    for _ in range(2):
        given, _ = step.run(plan)
        layers.append((given, gpu.take()))
    plan.run(**layers[0][0])
    again = gpu.take()
    assert len(checked) == 1
    assert again == layers[0][1] != layers[1][1]
    for given, launches in layers:
        fresh = step.plan(kernel=kernel)
        gpu.take()
        fresh.run(**given)
        assert relative(plan, launches) == relative(fresh, gpu.take())


@both_kinds
def test_update_has_no_stale_pointer(gpu, kind, monkeypatch):
    step = Step(gpu, kind)
    plan = step.plan()
    gpu.take()
    checked, steps = checks_of(monkeypatch, "check_batch"), []
    for _ in range(2):
        given = step.arguments(step.update_layouts, {})
        plan.update(**given)
        steps.append((given, gpu.take()))
    plan.update(**steps[0][0])
    assert gpu.take() == steps[0][1] != steps[1][1]
    assert not checked, "`plan` itself has laid out such a step"
    for given, launches in steps:
        fresh = step.plan()
        gpu.take()
        fresh.update(**{**given, "kv_lens": None})  # another layout, so that the next is no repetition
        gpu.take()
        fresh.update(**given)
        assert relative(plan, launches) == relative(fresh, gpu.take())


@both_kinds
@pytest.mark.parametrize("page_size", [1, 4])
def test_other_layouts_are_followed(gpu, kind, page_size):
    """Every legal change of layout, between two calls of the usual one."""
    step = Step(gpu, kind, page_size=page_size)
    plan = step.plan()
    row = HEADS * DIMS
    pool = {"shape": (SLOTS // 2, *step.run_layouts["kv_cache"][0][1:])}
    for change in ({"q": {"strides": (row + 8, DIMS, 1)}}, {"q": {"shape": (ROWS + 1, HEADS, DIMS)}}, {"lse": None}, {"sm_scale": 0.25},
                   {"out": {"strides": (2 * HEADS * LATENT, LATENT, 1)}}, {"kv_cache": pool}, {"logit_cap": 30.0}, {"sm_scale": 1},
                   {"sm_scale": np.float32(0.75)}, {"lse": {"address": gpu.place(512) + 4}}):
        step.run(plan)
        gpu.take()
        given, result = step.run(plan, **dict(change))
        launches, fresh = gpu.take(), step.plan()
        gpu.take()
        fresh.run(**given)
        assert relative(plan, launches) == relative(fresh, gpu.take()), change
        assert result is given["out"] if given["lse"] is None else result == (given["out"], given["lse"])


def test_a_scale_that_changes_in_place_is_read_anew(gpu):
    """An array of rank 0 is a number too, and equal to itself whatever it holds."""
    step, scale = Step(gpu, Tensor), np.array(0.5)
    plan = step.plan()
    for value in (0.5, 0.25):
        scale[...] = value
        gpu.take()
        step.run(plan, sm_scale=scale)
        assert gpu.take()[0].arguments[-2] == value


def shapes(*wrong):
    return [{"shape": shape} for shape in wrong]


RUN_REFUSALS = [(name, change) for name, changes in {
    "q": [*shapes((ROWS, HEADS + 1, DIMS), (ROWS, DIMS), (ROWS, HEADS, DIMS - 1)), {"dtype": "float16"}, {"strides": (HEADS * DIMS + 4, DIMS, 1)},
          {"strides": (HEADS * DIMS, DIMS, 2)}, {"strides": (-HEADS * DIMS, DIMS, 1)}],
    "kv_cache": [*shapes((SLOTS, DIMS + 1), (SLOTS, 2, DIMS), (SLOTS * DIMS,)), {"dtype": "float32"}, {"strides": (DIMS + 1, 1)},
                 {"strides": (DIMS, 2)}],
    "out": [*shapes((ROWS, HEADS, DIMS), (ROWS, LATENT)), {"dtype": "float32"}, {"strides": (0, LATENT, 1)}, {"strides": (HEADS * LATENT, 0, 1)}],
    "lse": [*shapes((ROWS,), (ROWS, HEADS + 1)), {"dtype": "bfloat16"}, {"strides": (2 * HEADS, 1)}, {"strides": (0, 1)}],
}.items() for change in [*changes, {"address": DEVICE_BYTES + 256}, {"address": DEVICE_BYTES // 2 + 2}, np.zeros(4, np.float32), [0.0], "q"]]
RUN_REFUSALS += [("out", {"read_only": True}), ("lse", {"read_only": True}), ("q", {"mask": "mask"}),
                 ("draft_kv", {"shape": (ROWS, DIMS), "dtype": "bfloat16"})]
RUN_REFUSALS += [("sm_scale", value) for value in (True, np.True_, "0.5", None, float("nan"), float("inf"), 1e39, 1j)]
RUN_REFUSALS += [("logit_cap", value) for value in (-1.0, False, float("nan"))] + [("stream", value) for value in ("0", 1.5, True)]


def refusal(call):
    with pytest.raises((TypeError, ValueError)) as caught:
        call()
    return type(caught.value), str(caught.value)


@both_kinds
@pytest.mark.parametrize("name, change", RUN_REFUSALS, ids=str)
def test_run_refuses_what_a_fresh_plan_refuses(gpu, kind, name, change):
    if kind is Tensor and isinstance(change, dict) and change.keys() & {"read_only", "mask"}:
        pytest.skip("torch tensors are neither read-only nor masked")
    step = Step(gpu, kind)
    used, fresh = step.plan(), step.plan()
    step.run(used)
    gpu.take()
    wrong = step.arguments(step.run_layouts, {"sm_scale": 0.5} | ({name: gpu.array(kind, **change)} if name == "draft_kv" else {name: change}))
    for _ in range(2):  # a refused call is not remembered
        assert refusal(lambda: used.run(**wrong)) == refusal(lambda: fresh.run(**wrong))
    assert not gpu.take()
    step.run(used)
    assert len(gpu.take()) == 2


@both_kinds
def test_run_refuses_a_missing_draft_kv(gpu, kind):
    step = Step(gpu, kind, aside=True)
    used = step.plan()
    given, _ = step.run(used)
    gpu.take()
    assert refusal(lambda: used.run(**{**given, "draft_kv": None}))[1].startswith("draft_kv: the plan was made with draft_in_cache=False")
    assert not gpu.take()


UPDATE_REFUSALS = [(name, change) for name, changes in {
    "qo_indptr": shapes((BATCH + 2,), (BATCH + 1, 1), (0,)), "kv_indptr": shapes((BATCH,), (1, BATCH + 1)),
    "kv_indices": shapes((ENTRIES + 1,), (ENTRIES, 1)), "kv_lens": shapes((BATCH + 1,), ()),
    "tree": [*shapes((ROWS + 1,), (ROWS, 1, 1, 1)), {"dtype": "int64"}]}.items()
    for change in [*changes, {"dtype": "float32"}, {"address": DEVICE_BYTES + 256}, {"address": DEVICE_BYTES // 2 + 2}, np.zeros(3, np.int64), [0]]]
UPDATE_REFUSALS += [("kv_indices", {"strides": (2,)}), ("tree", {"strides": (2,)}), ("stream", 1.5)]


@both_kinds
@pytest.mark.parametrize("name, change", UPDATE_REFUSALS, ids=str)
def test_update_refuses_what_a_fresh_plan_refuses(gpu, kind, name, change):
    step = Step(gpu, kind)
    used, fresh = step.plan(), step.plan()
    # of the fresh plan nothing is to be recognised: its last step had another layout
    step.update(fresh, kv_lens=None, tree=None)
    gpu.take()
    wrong = step.arguments(step.update_layouts, {name: change})
    for _ in range(2):
        assert refusal(lambda: used.update(**wrong)) == refusal(lambda: fresh.update(**wrong))
    assert not gpu.take()
    step.update(used)
    assert len(gpu.take()) == 2


@both_kinds
def test_rows_of_a_host_tree_are_asked_at_every_run(gpu, kind):
    """The arrays have not changed, the planned tree has: now they have too few rows, and then again enough."""
    step = Step(gpu, kind)
    plan = step.plan()
    for name in ("q", "out", "lse"):
        shape, _ = step.run_layouts[name]
        short = step.arguments(step.run_layouts, {"sm_scale": 0.5, name: {"shape": (5, *shape[1:])}})
        plan.run(**short)
        step.update(plan, tree=DraftTree.chain([3, 3]))
        gpu.take()
        assert refusal(lambda: plan.run(**short))[1].startswith(f"{name}: expected at least 6 rows")  # noqa: B023
        assert not gpu.take()
        step.update(plan)
        plan.run(**short)


def test_the_current_stream_is_asked_at_every_call(gpu):
    """torch's, as recognised calls ask it too; a build without the short way is asked the long way."""
    step = Step(gpu, Tensor)
    plan = step.plan()
    for stream in (0, 7, 9):
        gpu.torch.stream = stream
        gpu.take()
        step.update(plan)
        step.run(plan)
        assert [call.stream for call in gpu.take()] == [stream] * 4
        step.run(plan, stream=5)
        assert [call.stream for call in gpu.take()] == [5] * 2
    del gpu.torch._C._cuda_getCurrentRawStream
    gpu.torch.cuda = type("cuda", (), {"current_stream": staticmethod(lambda ordinal: type("Stream", (), {"cuda_stream": 11}))})
    step.run(plan)
    assert [call.stream for call in gpu.take()] == [11] * 2


def test_own_arrays_say_where_they_are(gpu, monkeypatch):
    """The driver is asked about none of them, in checked calls and recognised ones; on another GPU than the plan they are refused."""
    asked, ordinal = [], 0

    def own(address, shape, dtype):
        return DeviceArray(SimpleNamespace(address=address, ordinal=ordinal), shape, arrays.NUMPY_DTYPE[dtype])

    monkeypatch.setattr(driver, "ordinal_of_pointer", lambda address: asked.append(address) or 0)
    step = Step(gpu, own)
    plan = step.plan()
    for _ in range(2):
        step.update(plan)
        step.run(plan)
    ordinal = 1
    assert "expected on cuda:0 like the index arrays of the plan, got cuda:1" in refusal(lambda: step.run(plan))[1]
    assert not asked


@both_kinds
def test_no_array_is_kept(gpu, kind):
    step = Step(gpu, kind)
    plan = step.plan()
    given, indices = step.arguments(step.run_layouts, {}), step.arguments(step.update_layouts, {})
    for _ in range(2):
        plan.update(**indices)
        plan.run(**given, sm_scale=0.5)
    alive = [weakref.ref(array) for array in (*given.values(), *indices.values())]
    del given, indices
    gc.collect()
    assert not any(ref() for ref in alive)


@both_kinds
def test_validate_is_asked_at_every_call(gpu, kind, monkeypatch):
    monkeypatch.setattr(planner.validation, "check_indices", lambda *given: looked.append("update"))
    monkeypatch.setattr(planner.validation, "check_run", lambda *given: looked.append("run"))
    looked, step = [], Step(gpu, kind)
    plan = step.plan(validate=True)
    for _ in range(2):
        step.update(plan)
        step.run(plan)
    assert looked == ["update"] + ["update", "run"] * 2


@both_kinds
def test_the_c_library_gets_no_stale_pointer(gpu, kind, monkeypatch):
    """cuda_ref keeps the record that it passes to the library: each call has the addresses of its arrays, all else is as at first."""
    seen = []

    def record(config, given, *rest):
        seen.append([bytes(given), *rest])
        return 0

    def workspace_bytes(config, size):
        size.value = 4096
        return 0

    library = SimpleNamespace(nvr_can_run=lambda config, kernel: 0, nvr_workspace_bytes=workspace_bytes, nvr_plan_update=record,
                              nvr_verify_paged=record)
    monkeypatch.setattr(cuda_ref.backend, "library_of", lambda device: library)
    step = Step(gpu, kind, aside=True)
    used, fresh = (step.plan(module=cuda_ref) for _ in range(2))
    layers = [(step.arguments(step.update_layouts, {}), step.arguments(step.run_layouts, {"lse": lse, "sm_scale": 0.5})) for lse in ({}, {}, None)]
    for indices, given in [*layers[:2], layers[0], layers[2]]:
        got = []
        for plan in (used, fresh):
            if plan is fresh:  # of which nothing is to be recognised
                step.update(fresh, tree=None)
                step.run(fresh, lse=None if given["lse"] else {})
            seen.clear()
            plan.update(**indices)
            plan.run(**given)
            got.append([(passed, *rest[1:]) for passed, *rest in seen])
        assert len(got[0]) == 2 and got[0] == got[1]


@pytest.mark.parametrize("plans", [1, 2])
def test_two_threads(gpu, plans):
    """Each launch has the arguments of one call, and with one plan the two launches of a call follow each other."""
    step, rounds = Step(gpu, Tensor), 20
    made = [step.plan() for _ in range(plans)]
    calls = [[step.arguments(step.run_layouts, {}) for _ in range(rounds)] for _ in range(2)]
    for plan in made:
        plan.run(**calls[0][0], sm_scale=0.5)
    gpu.take()
    gpu.launch_seconds = 2e-4
    failures = []

    def work(thread):
        try:
            for given in calls[thread]:
                step.update(made[thread % plans])
                made[thread % plans].run(**given, sm_scale=0.5, stream=thread)
        except BaseException as error:  # a thread's exception would be lost, and with it the test
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    launches = gpu.take()
    assert len(launches) == 8 * rounds
    for stream, own in enumerate(calls):
        attended = [call for call in launches if call.kernel == "paged" and call.stream == stream]
        merged = [call for call in launches if call.kernel == "combine" and call.stream == stream]
        names = ("q", "kv_cache", "out", "lse")
        wanted = [tuple(given[name].data_ptr() for name in names) for given in own]
        assert [(*call.arguments[:2], *call.arguments[3:5]) for call in attended] == wanted
        assert [call.arguments[:2] for call in merged] == [pointers[2:] for pointers in wanted]
    if plans == 1:
        order = [call.kernel for call in launches]
        assert all(pair in (["schedule", "expand"], ["paged", "combine"]) for pair in (order[i:i + 2] for i in range(0, len(order), 2)))


def test_launcher(gpu):
    """Arguments of each type arrive; one that is refused spoils no later launch; an empty grid launches nothing; a status is an error."""
    source = KernelSource("mixed", None, None, ("address", "i64", "f32", "address"), 32)
    gpu._sources["mixed"] = source
    launcher = launch.Launcher(launch.load(source, 0))
    grid, fixed = (3, 2), (-5, np.float32(0.1), 1 << 50)
    launcher(1, grid, (1 << 63,), fixed)
    launcher(2, grid, (8,), fixed)
    launcher(3, (0, 2), (8,), fixed)
    launcher(4, (1, 1), (8,), fixed)
    launcher(5, grid, (16,), fixed)
    with pytest.raises(struct.error):
        launcher(6, grid, (8,), (7, "half", 16))
    launcher(7, grid, (24,), fixed)
    tail = (-5, float(np.float32(0.1)), 1 << 50)
    assert gpu.take() == [("mixed", (3, 2), 1, (1 << 63, *tail)), ("mixed", (3, 2), 2, (8, *tail)), ("mixed", (1, 1), 4, (8, *tail)),
                          ("mixed", (3, 2), 5, (16, *tail)), ("mixed", (3, 2), 7, (24, *tail))]
    api = driver._driver()
    api.cuLaunchKernel = lambda *given: (type("Status", (), {"name": "CUDA_ERROR_LAUNCH", "__bool__": lambda self: True})(),)
    api.cuGetErrorString = lambda status: (0, b"it failed")
    with pytest.raises(driver.DriverError, match=r"cuLaunchKernel: CUDA_ERROR_LAUNCH \(it failed\)"):
        launch.Launcher(launch.load(source, 0))(0, grid, (8,), fixed)


@pytest.mark.parametrize("current, switches", [(5, []), (7, [5, 7]), (0, [5])])
def test_context_is_switched_where_another_is_current(monkeypatch, current, switches):
    """And put back, unless there was none."""
    history = [current]
    monkeypatch.setattr(driver, "_driver", lambda: SimpleNamespace(cuCtxGetCurrent=lambda: (0, history[-1]),
                                                                   cuCtxSetCurrent=lambda context: (history.append(context) or 0,)))
    monkeypatch.setattr(driver, "_primary_context", lambda ordinal: 5)
    with pytest.raises(KeyError), driver.context(0):
        assert history[-1] == 5
        raise KeyError
    assert history[1:] == switches


@pytest.mark.gpu
@pytest.mark.kernel
@pytest.mark.parametrize("name", list(machine.IMPLEMENTATIONS))
@pytest.mark.parametrize("kernel", machine.KERNELS)
def test_results_of_repeated_calls(name, kernel):
    """Step 0, step 1 and step 0 again in new arrays each time: right rows and no others, from the second call on without checks."""
    module, steps = machine.IMPLEMENTATIONS[name], [small_for(kernel, step=0), small_for(kernel, step=1)]
    plan = module.plan(**steps[0].plan_arguments())
    for small in (steps[0], steps[0], steps[1], steps[0]):
        plan.update(**small.update_arguments(tree=small.parents))
        for _ in range(2):
            good_run(plan, small)


@pytest.mark.gpu
@pytest.mark.kernel
@pytest.mark.parametrize("name", list(machine.IMPLEMENTATIONS))
@pytest.mark.parametrize("kernel", machine.SPLITTING)
def test_one_plan_on_one_stream_from_two_threads(name, kernel):
    """Each thread has outputs of its own; the partial results of the plan are never those of the other call."""
    small = small_for(kernel)
    plan = machine.IMPLEMENTATIONS[name].plan(**small.plan_arguments())
    outputs, failures = [Outputs(small, small.total_q) for _ in range(2)], []

    def work(own):
        try:
            given = small.run_arguments(out=own.out, lse=own.lse, stream=0)
            for _ in range(200):
                plan.run(**given)
        except BaseException as error:  # a thread's exception would be lost, and with it the test
            failures.append(error)

    threads = [threading.Thread(target=work, args=(own,)) for own in outputs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    for own in outputs:
        small.check(*(array[:small.total_q] for array in own.check()))
