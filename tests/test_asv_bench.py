"""The benchmarks themselves: names that history hangs on, skips with no GPU, no time for a wrong result, one process and asv alike."""

import importlib.util
import json
import math
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from asv_bench import measure, sweep
from asv_bench.benchmarks import common, compile_time, device, host, offline, peers, resources
from numba_verify import shapes, timing
from numba_verify.gpu import driver

ROOT = Path(__file__).resolve().parents[1]

# A renamed benchmark or parameter begins a new, empty graph: change these on purpose only.
NAMES = {
    device.Device: (["track_device_us"], ["impl", "kernel", "shape", "l2"]),
    device.Accuracy: (["track_max_relative_error"], ["impl", "kernel", "shape"]),
    device.Workspace: (["track_workspace_bytes"], ["impl", "kernel", "shape"]),
    peers.Peers: (["track_device_us"], ["impl", "shape"]),
    host.Host: (["track_host_us"], ["impl", "kernel", "call"]),
    offline.Offline: (["track_registers", "track_shared_bytes", "track_spill_bytes", "track_stack_bytes"], ["impl", "kernel", "arch"]),
    offline.Instructions: (["track_sass_instructions"], ["impl", "kernel", "arch"]),
    compile_time.Compile: (["track_cold_s", "track_warm_ms"], ["kernel"]),
    compile_time.Import: (["track_import_ms"], ["impl"]),
}
SHAPE = common.SHAPES[0]
no_gpu = pytest.mark.skipif(not common.gpu_reason(), reason="a GPU is here, so device benchmarks do not skip")


@pytest.mark.parametrize("family", NAMES, ids=lambda family: family.__name__)
def test_names_units_and_versions_are_stable(family):
    tracks, parameters = NAMES[family]
    assert [name for name in vars(family) if name.startswith(("track_", "time_", "peakmem_"))] == tracks
    assert family.param_names == parameters and len(family.params) == len(parameters)
    assert all(isinstance(value, str) for values in family.params for value in values), "parameters are the axes of graphs"
    for name in tracks:
        function = getattr(family, name)
        # Without a version of its own asv takes a hash of the source, and an edited comment would end the history.
        assert function.unit and function.version == "1"
        assert "flop" not in function.unit.lower(), "asv takes lower for better"


def test_every_family_is_found_and_nothing_else():
    assert set(measure.families(measure.files()).values()) == set(NAMES)
    # asv takes any function or class of a benchmark file for a benchmark when its name, or a method's, begins so.
    for path in map(Path, {sys.modules[family.__module__].__file__ for family in NAMES}):
        assert not [line for line in path.read_text().splitlines() if line.lstrip().startswith(("def time", "def mem_", "def peakmem_"))], path


def test_parameters():
    assert common.IMPLEMENTATIONS == ("numba_verify", "cuda_ref")
    assert [shape.name for shape in shapes.SHAPES[:9]] == list(common.SHAPES)
    assert all(common.shape_of(name).name == name for name in common.SHAPES)
    assert set(resources._TWIN_NAMES) == set(resources.COMPILED)


def test_discovery_imports_nothing_heavy():
    """asv imports every file in a process of its own for each parameter, on machines with no GPU too."""
    code = (
        f"import sys, importlib\nfor name in {measure.files()!r}: importlib.import_module('asv_bench.benchmarks.' + name)\n"
        "heavy = {'numba', 'numpy', 'cuda', 'torch', 'numba_verify'} & set(sys.modules)\nassert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@no_gpu
@pytest.mark.parametrize("family", [device.Device, device.Accuracy, device.Workspace, peers.Peers, host.Host], ids=lambda family: family.__name__)
def test_no_gpu_is_a_skip_and_not_a_failure(family):
    assert family().setup_cache() == {}
    with pytest.raises(NotImplementedError, match="needs a GPU: "):
        family().setup({}, *common.all_keys(family)[0])


# --- device times, with a GPU that is not there -----------------------------------------------------------------------------------


class FakeWork:
    """A workload whose result is off by `error`, with a KV pool of `nbytes`."""

    ordinal = 0
    out = lse = SimpleNamespace(buffer=SimpleNamespace(address=0, nbytes=64))

    def __init__(self, error=0.001, nbytes=1000, refused=()):
        self.error, self.refused, self.pools = error, refused, [SimpleNamespace(buffer=SimpleNamespace(nbytes=nbytes))]

    def plan(self, module, kernel):
        if module in self.refused:
            raise ValueError("kernel='mma' is not part of this version")
        return SimpleNamespace(workspace_bytes=4096, module=module)

    def run(self, plan):
        pass

    def calls(self, plan, warm=False):
        return [plan.module] * 8

    def check(self):
        return self.error


@pytest.fixture
def fake_gpu(monkeypatch):
    """A driver that does nothing, an L2 cache of 1 MB, and graphs that take 100 us of cuda_ref and 110 of numba_verify. Returns the order of
    the replays."""
    replayed = []

    class FakeReplay:
        def __init__(self, ordinal, calls):
            self.calls, self.name = len(calls), calls[0]

        def replay_us(self):
            replayed.append(self.name)
            return 110.0 if self.name == "numba_verify" else 100.0

        def close(self):
            replayed.append("closed")

    for name, value in {"context": lambda ordinal: nullcontext(), "call": lambda *arguments: None, "synchronize": lambda stream: None,
                        "device_info": lambda ordinal: SimpleNamespace(l2_bytes=1 << 20)}.items():
        monkeypatch.setattr(driver, name, value)
    monkeypatch.setattr(timing, "Replay", FakeReplay)
    monkeypatch.setattr(common, "implementation", lambda name: name)
    monkeypatch.setattr(common, "gpu_reason", lambda: "")
    return replayed


def read(family, track, entries, *key):
    instance = family()
    instance.setup(entries, *key)
    return getattr(instance, track)(entries, *key)


def test_implementations_are_replayed_in_turn(fake_gpu):
    entries = device.measure(FakeWork(), "mma", list(common.IMPLEMENTATIONS))
    assert entries["numba_verify"] == device.Entry(110.0, 110.0, 0.001, 4096) and entries["cuda_ref"].cold_us == 100.0
    cold = fake_gpu[:fake_gpu.index("closed")]
    assert len(cold) > 2 * device.LEAST_REPLAYS and cold == list(common.IMPLEMENTATIONS) * (len(cold) // 2)
    assert fake_gpu.count("closed") == 4, "two graphs, cold and warm"


@pytest.mark.parametrize("error", [0.01, float("inf"), float("nan")])
def test_a_wrong_result_gives_no_time(error, fake_gpu, monkeypatch):
    key = ("numba_verify", "paged", SHAPE)
    monkeypatch.setattr(common, "workload", lambda shape: FakeWork(error))
    entries = device.collect([key])
    assert not fake_gpu, "a wrong kernel was timed"
    for family, track, rest in ((device.Device, "track_device_us", ("cold",)), (device.Accuracy, "track_max_relative_error", ())):
        with pytest.raises(RuntimeError, match="wrong result: error .* of a row's norm, allowed 0.0046"):
            read(family, track, entries, *key, *rest)


def test_warm_times_only_where_the_pool_fits(fake_gpu):
    entries = {("cuda_ref", "mma", SHAPE): device.measure(FakeWork(nbytes=2 << 20), "mma", ["cuda_ref"])["cuda_ref"]}
    assert read(device.Device, "track_device_us", entries, "cuda_ref", "mma", SHAPE, "cold") == 100.0
    with pytest.raises(NotImplementedError, match="2 MB of KV do not fit in an L2 cache of 1 MB"):
        read(device.Device, "track_device_us", entries, "cuda_ref", "mma", SHAPE, "warm")


def test_a_slow_kernel_is_skipped_with_the_time(fake_gpu, monkeypatch):
    monkeypatch.setattr(device, "SLOWEST_MS", -1.0)
    entries = {("cuda_ref", "naive", SHAPE): device.measure(FakeWork(), "naive", ["cuda_ref"])["cuda_ref"]}
    with pytest.raises(NotImplementedError, match="takes 0 ms a call; measured up to -1"):
        read(device.Device, "track_device_us", entries, "cuda_ref", "naive", SHAPE, "cold")
    assert read(device.Accuracy, "track_max_relative_error", entries, "cuda_ref", "naive", SHAPE) == 0.001
    assert not fake_gpu


def test_a_refused_kernel_does_not_stop_its_twin(fake_gpu):
    entries = device.measure(FakeWork(refused=["numba_verify"]), "mma", list(common.IMPLEMENTATIONS))
    assert entries["cuda_ref"].cold_us == 100.0
    assert entries["numba_verify"].cold_us == "failed: ValueError: kernel='mma' is not part of this version"


def test_nothing_new_begins_when_time_is_over(fake_gpu, monkeypatch):
    monkeypatch.setattr(common, "deadline", -math.inf)
    key = ("cuda_ref", "mma", SHAPE)
    with pytest.raises(NotImplementedError, match="out of time"):
        read(device.Device, "track_device_us", device.collect([key]), *key, "cold")
    with pytest.raises(NotImplementedError, match="out of time"):
        read(peers.Peers, "track_device_us", peers.collect([("unfused", SHAPE)]), "unfused", SHAPE)


def test_replays_are_bounded_by_time_and_number():
    assert [device.replays(8, ms) for ms in (0.02, 5.0, 20.0)] == [device.MOST_REPLAYS, 10, device.LEAST_REPLAYS]


def test_host_times_are_medians_of_rounds_in_turn(fake_gpu, monkeypatch):
    order = []
    monkeypatch.setattr(common, "workload", lambda shape: FakeWork())
    monkeypatch.setattr(host, "_time", lambda work, plan, call: order.append(plan.module) or float(len(order)))
    figures = host.collect([(name, "mma", "run") for name in common.IMPLEMENTATIONS])
    assert sorted(order[:2]) == sorted(common.IMPLEMENTATIONS) and len(order) == 2 * host.ROUNDS
    assert sorted(figures.values()) == [3.0, 4.0]


def test_peers_that_are_not_installed_are_skipped(fake_gpu, monkeypatch):
    monkeypatch.setattr(common, "workload", lambda shape: FakeWork())
    monkeypatch.setattr(peers.Unfused, "module", "no_such_library")
    entries = peers.collect([(name, SHAPE) for name in (*common.IMPLEMENTATIONS, "unfused")])
    assert read(peers.Peers, "track_device_us", entries, "cuda_ref", SHAPE) == 100.0
    with pytest.raises(NotImplementedError, match="no_such_library is not installed"):
        read(peers.Peers, "track_device_us", entries, "unfused", SHAPE)


def test_unfused_computes_tree_attention(monkeypatch):
    pytest.importorskip("torch", reason="torch is not installed")
    import ml_dtypes
    import numpy as np

    from numba_verify import bench

    shape, rng = shapes.Shape(2, 40, 6, 4), np.random.default_rng(1)
    work = bench.Workload.__new__(bench.Workload)  # its arrays without the GPU that it puts them on
    work.block, work.queries = (rng.standard_normal((bench.DRAWN_ROWS, 576), np.float32).astype(ml_dtypes.bfloat16) for _ in range(2))
    work.shape, work.sm_scale, work.total_q, work.parents, work._known = shape, 576 ** -0.5, 12, shapes.draft_tree(shape), {}
    indices = rng.permutation(2 * 46).astype(np.int32)
    work.kv_indices, work.pools = SimpleNamespace(numpy=lambda: indices), [None]
    out = peers.Unfused(work, "cpu").out()
    assert out.shape == (12, 4, 512) and work.check(out, rows=12) <= peers.PEER_ERROR_BOUND
    out[3] = out[4]
    assert work.check(out, rows=12) > peers.PEER_ERROR_BOUND


def test_an_implementation_comes_from_the_commit_that_is_measured(monkeypatch, tmp_path):
    """One of another checkout may be importable as well."""
    monkeypatch.setattr(common, "ROOT", tmp_path)
    assert common.attempt(lambda: common.implementation("cuda_ref")) == "this commit has no cuda_ref"
    assert resources.collect([("cuda_ref", "expand", "sm_80")]) == {("cuda_ref", "expand", "sm_80"): "this commit has no cuda_ref"}
    with pytest.raises(NotImplementedError, match="this commit has no cuda_ref"):
        compile_time.Import().setup("cuda_ref")


def test_a_library_that_does_not_build_is_compiled_once(monkeypatch):
    tries = []

    def build(*arguments):
        tries.append(arguments)
        raise RuntimeError("nvcc says no")

    monkeypatch.setattr(common, "find_nvcc", lambda: "/nvcc")
    monkeypatch.setitem(sys.modules, "cuda_ref.build", SimpleNamespace(build=build))
    common._why_not_built.cache_clear()
    try:
        for _ in range(3):
            assert common.attempt(lambda: common.implementation("cuda_ref")) == "failed: RuntimeError: cuda_ref does not build: nvcc says no"
    finally:
        common._why_not_built.cache_clear()
    assert len(tries) == 1


@no_gpu
def test_a_sweep_needs_a_gpu(capsys, tmp_path):
    assert sweep.main(["--out", str(tmp_path / "sweep.json")]) == 2
    assert capsys.readouterr().err.startswith("sweep: needs a GPU: ") and not any(tmp_path.iterdir())


# --- what the compilers made ------------------------------------------------------------------------------------------------------


def test_offline_figures():
    rows = resources.numba_resources(["sm_90a"], ["expand"])
    assert len(rows) == 1 and rows[0].registers > 0 and rows[0].spill_bytes == rows[0].stack_bytes == 0
    assert rows[0].sass is None or rows[0].sass > 100
    figures = {("numba_verify", "expand", "sm_90a"): rows[0]._asdict()}
    key = ("numba_verify", "expand", "sm_90a")
    offline.Offline().setup(figures, *key)
    assert offline.Offline().track_registers(figures, *key) == rows[0].registers
    with pytest.raises(NotImplementedError, match="cuda_ref was not compiled here"):
        offline.Offline().setup(figures, "cuda_ref", *key[1:])
    twin = rows[0]._replace(impl="cuda_ref", registers=77, sass=None)
    lines = resources.format_resources([*rows, twin]).splitlines()
    assert len(lines) == 2 and f" {rows[0].registers} " in lines[1] and " 77 " in lines[1] and lines[1].endswith("-")


@pytest.mark.parametrize(
    "demangled, name",
    [
        ("void nvr::paged_kernel<nvr::Bf16, nvr::Tile<16, 16>, nvr::Dims<512, 64> >(nvr::VerifyParams)", "paged_h16k16"),
        ("void nvr::naive_kernel<nvr::Bf16, nvr::Dims<512, 64> >(nvr::VerifyParams)", "naive"),
        ("nvr::schedule_kernel(nvr::ScheduleParams)", "schedule"),
    ],
)
def test_names_of_the_twin(demangled, name):
    assert resources._twin_name(demangled) == resources._TWIN_NAMES[name]


# --- one process, and asv ---------------------------------------------------------------------------------------------------------


def test_one_process_gives_what_asv_would(tmp_path, capsys):
    out = tmp_path / "figures.json"
    chosen = r"track_(registers|spill_bytes)\('numba_verify', 'expand', 'sm_90a'\)"
    assert measure.main(["--file", "offline", "--bench", chosen, "--out", str(out)]) == 0
    written = json.loads(out.read_text())
    assert list(written["results"]) == ["offline.Offline.track_registers", "offline.Offline.track_spill_bytes"]
    values, params, version, *_ = written["results"]["offline.Offline.track_registers"]
    at = common.all_keys(offline.Offline).index(("numba_verify", "expand", "sm_90a"))
    # What was not asked for reads n/a. A null would say that it failed, and bench-check would call it a regression.
    assert values[at] > 0 and all(math.isnan(value) for i, value in enumerate(values) if i != at)
    assert params[1] == [repr(name) for name in resources.COMPILED] and version == "1"
    assert written["measured"]["offline.Offline.track_registers"] == [at]
    assert written["versions"]["numba-cuda"] and not written["failures"]
    assert "offline.Offline.track_registers(numba_verify, expand, sm_90a)" in capsys.readouterr().out


def test_a_failure_takes_no_other_figure_with_it(tmp_path, monkeypatch, capsys):
    def collect(keys):
        return {key: "failed: RuntimeError: it broke" if key[0] == "cuda_ref" else {"sass": 7, "registers": 8} for key in keys}

    for family in (offline.Offline, offline.Instructions):
        monkeypatch.setattr(family, "collect", staticmethod(collect))
    out = tmp_path / "figures.json"
    assert measure.main(["--bench", r"(registers|sass)\w*\(.*'expand', 'sm_80'", "--out", str(out)]) == 1
    written = json.loads(out.read_text())
    assert written["failures"] == {f"{name}(cuda_ref, expand, sm_80)": "RuntimeError: it broke"
                                   for name in ("offline.Offline.track_registers", "offline.Instructions.track_sass_instructions")}
    assert {row[0][common.all_keys(offline.Offline).index(("numba_verify", "expand", "sm_80"))] for row in written["results"].values()} == {7, 8}
    assert "failed: RuntimeError" in capsys.readouterr().out


def test_prepare_says_why_there_is_nothing_to_do(capsys):
    if common.gpu_reason():
        assert measure.main(["--prepare"]) == 0
        assert capsys.readouterr().out.startswith("nothing to prepare: needs a GPU: ")


@pytest.mark.slow
def test_asv_runs_an_offline_benchmark(tmp_path):
    if importlib.util.find_spec("asv") is None:
        benchmark = compile_time.Compile()
        benchmark.setup("expand")
        assert 0 < benchmark.track_warm_ms("expand") < 1000
        return  # without asv (extra `bench`) at least the benchmark itself runs
    # A copy may have a .git without all objects.
    if subprocess.run(["git", "rev-list", "--objects", "--quiet", "HEAD"], cwd=ROOT, capture_output=True).returncode:
        pytest.skip("asv reads the git history, and this tree has none")
    # asv keeps the machine's name in HOME; git's settings (a tree of another owner wants `safe.directory`) stay those of the user.
    environment = {"GIT_CONFIG_GLOBAL": str(Path.home() / ".gitconfig"), **os.environ, "HOME": str(tmp_path), "ASV_PYTHONPATH": str(ROOT)}
    config = (ROOT / "asv_bench" / "asv.conf.json").read_text()
    places = {
        '"repo": ".."': ROOT,
        '"benchmark_dir": "benchmarks"': ROOT / "asv_bench" / "benchmarks",
        '"results_dir": "results"': tmp_path,
    }
    for text, place in places.items():  # asv writes into its results folder even when it keeps nothing
        assert config.count(text) == 1
        config = config.replace(text, f"{text.split(':')[0]}: {json.dumps(str(place))}")
    (tmp_path / "asv.conf.json").write_text(config)
    common_arguments = ["--config", str(tmp_path / "asv.conf.json")]
    named = subprocess.run([sys.executable, "-m", "asv", "machine", "--yes", *common_arguments], env=environment, capture_output=True, text=True)
    assert named.returncode == 0, named.stdout + named.stderr
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "asv",
            "run",
            *common_arguments,
            "--quick",
            "--dry-run",
            "--show-stderr",
            "--launch-method",
            "spawn",
            "--environment",
            f"existing:{sys.executable}",
            "--bench",
            r"track_warm_ms\('expand'\)",
            "--bench",
            r"track_host_us\('cuda_ref', 'naive'",
            "--bench",
            r"track_device_us\('cuda_ref', 'mma', 'b1_kv4096_t16_h64'",
        ],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "compile_time.Compile.track_warm_ms" in done.stdout and "failed" not in done.stdout, done.stdout + done.stderr
    if common.gpu_reason():
        assert "n/a" in done.stdout, done.stdout
