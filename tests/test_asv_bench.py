"""The benchmark suite itself: names that history hangs on, skips with no GPU, no time for a wrong result, and one run of asv."""

import importlib.util
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from asv_bench.benchmarks import common, compile_time, device, host, offline
from numba_verify import shapes

ROOT = Path(__file__).resolve().parents[1]

# A renamed benchmark or parameter begins a new, empty graph: change these on purpose only.
NAMES = {
    device.Device: (["track_device_us"], ["impl", "kernel", "shape"]),
    host.Host: (["track_host_us"], ["impl", "kernel", "call"]),
    offline.Offline: (["track_registers", "track_shared_bytes", "track_spill_bytes", "track_stack_bytes"], ["impl", "kernel", "arch"]),
    offline.Instructions: (["track_sass_instructions"], ["impl", "kernel", "arch"]),
    compile_time.Compile: (["track_cold_s", "track_warm_ms"], ["kernel"]),
}
FILES = sorted(path.stem for path in Path(common.__file__).parent.glob("[a-z]*.py"))


def bench_tool():
    spec = importlib.util.spec_from_file_location("tools_bench", ROOT / "tools" / "bench.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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


def test_parameters():
    assert common.IMPLEMENTATIONS == ("numba_verify", "cuda_ref")
    assert [shape.name for shape in shapes.SHAPES[:9]] == list(common.SHAPES)
    assert all(common.shape_of(name).name == name for name in common.SHAPES)
    assert set(common._TWIN_NAMES) == set(common.COMPILED)


def test_discovery_imports_nothing_heavy():
    """asv imports every file in a process of its own for each parameter, on machines with no GPU too."""
    code = (
        f"import sys, importlib\nfor name in {FILES!r}: importlib.import_module('asv_bench.benchmarks.' + name)\n"
        "heavy = {'numba', 'numpy', 'cuda', 'torch', 'numba_verify'} & set(sys.modules)\nassert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.skipif(not common.gpu_reason(), reason="a GPU is here, so device benchmarks do not skip")
def test_no_gpu_is_a_skip_and_not_a_failure():
    assert device.Device().setup_cache() == {}
    with pytest.raises(NotImplementedError, match="needs a GPU: "):
        device.Device().setup({}, "numba_verify", "paged", common.SHAPES[0])
    with pytest.raises(NotImplementedError, match="needs a GPU: "):
        host.Host().setup("numba_verify", "paged", "run")


class FakeWork:
    """A workload whose result is off by `error`."""

    ordinal = 0

    def __init__(self, error):
        self.error = error

    def plan(self, module, kernel):
        return None

    def run(self, plan):
        pass

    def time(self, plan, replays):
        raise AssertionError("a wrong kernel was timed")

    def check(self):
        return self.error


@pytest.mark.parametrize("error", [0.01, float("inf"), float("nan")])
def test_a_wrong_result_gives_no_time(error, monkeypatch):
    def check_only(work, plan):
        if not work.check() <= common.ERROR_BOUND:
            raise RuntimeError(f"wrong result: error {work.check():.3g}")

    monkeypatch.setattr(common, "run_checked", check_only)
    figure = device.measure("numba_verify", "paged", FakeWork(error))
    assert figure.startswith("failed: wrong result")
    key = ("numba_verify", "paged", common.SHAPES[0])
    monkeypatch.setattr(common, "require_gpu", lambda: None)
    device.Device().setup({key: figure}, *key)
    with pytest.raises(RuntimeError, match="wrong result"):
        device.Device().track_device_us({key: figure}, *key)


def test_a_slow_kernel_is_skipped_with_the_time(monkeypatch):
    key = ("numba_verify", "naive", common.SHAPES[0])
    monkeypatch.setattr(common, "require_gpu", lambda: None)
    with pytest.raises(NotImplementedError, match="takes 900 ms a call"):
        device.Device().setup({key: "takes 900 ms a call; measured up to 60"}, *key)
    device.Device().setup({key: 12.5}, *key)
    assert device.Device().track_device_us({key: 12.5}, *key) == 12.5


def test_offline_figures():
    rows = common.numba_resources(["sm_90a"], ["expand"])
    assert len(rows) == 1 and rows[0].registers > 0 and rows[0].spill_bytes == rows[0].stack_bytes == 0
    assert rows[0].sass is None or rows[0].sass > 100
    figures = {("numba_verify", "expand", "sm_90a"): rows[0]._asdict()}
    key = ("numba_verify", "expand", "sm_90a")
    offline.Offline().setup(figures, *key)
    assert offline.Offline().track_registers(figures, *key) == rows[0].registers
    with pytest.raises(NotImplementedError, match="cuda_ref was not compiled here"):
        offline.Offline().setup(figures, "cuda_ref", *key[1:])
    twin = rows[0]._replace(impl="cuda_ref", registers=77, sass=None)
    lines = common.format_resources([*rows, twin]).splitlines()
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
    assert common._twin_name(demangled) == common._TWIN_NAMES[name]


# --- make bench -----------------------------------------------------------------------------------------------------------------


def test_results_are_filed_by_machine_and_merged(tmp_path, monkeypatch):
    tool = bench_tool()
    monkeypatch.setattr(tool, "RESULTS", tmp_path)
    folder, commit = tmp_path / "no-gpu", "0123456789abcdef"
    folder.mkdir()

    def asv_writes(results):
        text = json.dumps({"env_name": "existing-py_somewhere_bin_python", "result_columns": ["result"], "results": results})
        (folder / "01234567-existing-py_somewhere_bin_python.json").write_text(text)
        return tool.file_by_machine("no-gpu", commit)

    target = asv_writes({"a": [1], "b": [2]})
    assert target == folder / "01234567-no-gpu.json" and asv_writes({"b": [3]}) == target
    assert [path.name for path in folder.iterdir()] == ["01234567-no-gpu.json"]
    kept = json.loads(target.read_text())
    assert kept["python"] == kept["params"]["python"] == platform.python_version(), "no path of this machine in a kept file"
    assert kept["env_name"] == "no-gpu" and kept["results"] == {"a": [1], "b": [3]}


def test_the_previous_commit_is_the_newest_measured_ancestor(tmp_path, monkeypatch):
    tool = bench_tool()
    monkeypatch.setattr(tool, "RESULTS", tmp_path)
    monkeypatch.setattr(tool, "git", lambda *arguments: "bbbbbbbb1\naaaaaaaa1\n")
    assert tool.previous_commit("m", "cccccccc1") is None
    (tmp_path / "m").mkdir()
    for name in ("aaaaaaaa-m.json", "dddddddd-m.json", "machine.json"):
        (tmp_path / "m" / name).write_text("{}")
    assert tool.previous_commit("m", "cccccccc1") == "aaaaaaaa"


def test_the_machine_is_named_by_its_gpu(monkeypatch):
    tool = bench_tool()
    monkeypatch.setattr(tool, "query_gpu", lambda: None)
    assert tool.machine()[0] == "no-gpu"
    monkeypatch.setattr(tool, "query_gpu", lambda: {"name": "NVIDIA H200", "driver": "580.1", "clock": "1980 MHz", "power": "700 W"})
    name, details = tool.machine()
    assert name == "nvidia-h200" and "NVIDIA H200, driver 580.1, SM clock up to 1980 MHz" in details["cpu"]


@pytest.mark.slow
def test_asv_runs_an_offline_benchmark(tmp_path):
    if importlib.util.find_spec("asv") is None:
        benchmark = compile_time.Compile()
        benchmark.setup("expand")
        assert 0 < benchmark.track_warm_ms("expand") < 1000
        return  # without asv (extra `bench`) at least the benchmark itself runs
    if not (ROOT / ".git").exists():
        pytest.skip("asv reads the git history, and this tree has none")
    environment = {**os.environ, "HOME": str(tmp_path), "ASV_PYTHONPATH": str(ROOT)}
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
    subprocess.run([sys.executable, "-m", "asv", "machine", "--yes", *common_arguments], env=environment, check=True, capture_output=True)
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
