"""What is changed around numba's compiler: it makes the same code with and without, and everything is put back."""

import gc
import re
import resource
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from numba.cuda import compiler, dispatcher, types
from numba.cuda.core import postproc
from numba.cuda.core.errors import NumbaError

from numba_verify.backend import kernel_sources
from numba_verify.gpu import frontend
from numba_verify.gpu.compile import KernelSource, lower
from numba_verify.kernels.config import Shape

ARCH = "sm_90a"
SOURCES = kernel_sources(Shape(512, 64, "bfloat16"), None, 16, True)


def built(build):
    return KernelSource("frontend_test", build, None, ("address",), 64)


@contextmanager
def only_a_device(capability):
    """`prepared` without all that saves time."""
    with frontend._replaced(dispatcher, "get_current_device", lambda ask: lambda: SimpleNamespace(compute_capability=capability[:2])):
        yield


def code_of(source):
    """PTX, without the numbers that numba gives its compilations, and without the one empty word that it declares for each function in any order."""
    lines = lower(source, ARCH, "ptx").splitlines()
    return [re.sub(r"B\d+v\d+B\w+", "", line) for line in lines if not re.match(r"\.common .* _ZN08NumbaEnv", line)]


@pytest.mark.parametrize("name", ["naive", "combine", "schedule"])
def test_the_code_stays_the_same(name, monkeypatch):
    quick = code_of(SOURCES[name])
    monkeypatch.setattr(frontend, "prepared", only_a_device)
    monkeypatch.setattr(frontend, "call_with_room", lambda function, *arguments, **options: function(*arguments, **options))
    assert code_of(SOURCES[name]) == quick


def state():
    return (dispatcher.get_current_device, types.Function.get_call_type, vars(types.Function).get("get_call_type"), compiler.CUDACompiler,
            postproc.PostProcessor.run, gc.isenabled(), gc.get_freeze_count())


def test_everything_is_put_back():
    before = state()
    with frontend.prepared((9, 0, "a")):
        within = state()
    assert all(now is not then for now, then in zip(within[:6], before[:6], strict=True)) and state() == before
    with pytest.raises(KeyError), frontend.prepared((9, 0)):
        raise KeyError("any error")
    assert state() == before


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_stays_as_it_was(enabled):
    try:
        if not enabled:
            gc.disable()
        with frontend.prepared((9, 0)):
            assert not gc.isenabled()
        assert gc.isenabled() == enabled
    finally:
        gc.enable()


def test_what_is_frozen_stays_frozen():
    """A server that forks workers freezes what they share. Their number is no measure of it: frozen objects may die meanwhile."""
    frozen: list = []
    gc.freeze()
    try:
        with frontend.prepared((9, 0)):
            pass
        assert not any(known is frozen for known in gc.get_objects())  # which leaves out what is frozen
    finally:
        gc.unfreeze()
    assert any(known is frozen for known in gc.get_objects())


def test_a_name_that_is_gone_is_left_alone():
    owner = SimpleNamespace(kept=1)
    with frontend._replaced(owner, "kept", lambda was: was + 1), frontend._replaced(owner, "gone", lambda was: pytest.fail("called")):
        assert vars(owner) == {"kept": 2}
    assert vars(owner) == {"kept": 1}


def test_a_signature_is_asked_for_once():
    """Of these types, by this context; refusals and keywords are asked about every time."""
    asked = []

    def ask(self, context, args, kws):
        asked.append((self, context, args, kws))
        if types.float64 in args:
            raise TypeError("refused")
        return len(asked)

    remember = frontend._remember_signatures(ask)
    assert [remember("f", "context", (types.uint32, types.uint32), {}) for _ in range(3)] == [1, 1, 1]
    others = [("g", "context", (types.uint32,), {}), ("f", "other", (types.uint32,), {}), ("f", "context", (types.int32,), {})]
    assert [remember(*other) for other in others] == [2, 3, 4] == [remember(*other) for other in others]
    for _ in range(2):
        with pytest.raises(TypeError, match="refused"):
            remember("f", "context", (types.float64,), {})
    assert [remember("f", "context", (types.uint32,), {"x": types.uint32}) for _ in range(2)] == [7, 8]
    assert [remember("static_getitem", "context", (types.uint32, 0), ()) for _ in range(2)] == [9, 10]


def build_closure(lang, config):
    uint32, pointer, u32, tid = lang.uint32, lang.pointer, lang.u32, lang.tid_x

    def kernel(address):
        def twice(x):
            return uint32(x + x)

        pointer(address, u32)[tid()] = twice(tid())

    return kernel


def build_with(lang, config):
    def kernel(address):
        with config:
            pass

    return kernel


def build_raise(lang, config):
    def kernel(address):
        if address == 0:
            raise ValueError(address)

    return kernel


@pytest.mark.parametrize("build", [build_closure, build_with, build_raise])
def test_what_the_passes_left_out_are_for_is_refused(build):
    """Refused, and not compiled into something else."""
    with pytest.raises((NumbaError, NotImplementedError)):
        lower(built(build), ARCH, "ptx")


def test_all_passes_left_out_exist():
    """Another name in another numba-cuda would cost time unseen."""
    managers = compiler.CUDACompiler(*numba_contexts(), None, (), None, compiler.CUDAFlags(), {}).define_pipelines()
    assert {entry[0].__name__ for manager in managers for entry in manager.passes} >= frontend.NEEDLESS_PASSES


def numba_contexts():
    from numba.cuda.descriptor import cuda_target

    return cuda_target.typing_context, cuda_target.target_context


# --- room for frames --------------------------------------------------------------------------------------------------------


def leaf():
    return None


def faults_at(depth, calls=500):
    """Pages that come into the process while a loop `depth` frames up calls a function."""
    if depth:
        return faults_at(depth - 1, calls)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(calls):
        leaf()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_no_call_maps_memory():
    """At some depth a call would map and unmap a chunk of frames: 500 faults in 500 calls (seen with Python 3.11, 3.12 and 3.13)."""
    assert frontend.call_with_room(lambda: max(faults_at(depth) for depth in range(200))) < 100


def test_arguments_results_and_errors_pass():
    assert frontend.call_with_room(divmod, 7, 2) == (3, 1) and frontend.call_with_room(dict, x=1) == {"x": 1}
    with pytest.raises(ZeroDivisionError):
        frontend.call_with_room(divmod, 1, 0)
