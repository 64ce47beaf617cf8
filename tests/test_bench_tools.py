"""What reads and writes benchmark results: files, comparison, history, pages, plots. Device figures are invented, offline figures are real."""

import importlib.util
import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from support import bench_data

from asv_bench import sweep
from asv_bench.benchmarks import common, offline

ROOT = Path(__file__).resolve().parents[1]
COMMIT, NEXT = "0123456789abcdef0123456789abcdef01234567", "fedcba9876543210fedcba9876543210fedcba98"
#: One figure that takes two seconds, whatever the machine.
EXPAND = r"Offline.track_(registers|spill_bytes)\('numba_verify', 'expand', 'sm_90a'\)"


@pytest.fixture
def tools(monkeypatch):
    """Imports a script of tools/, which find each other as they do when they are run."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module


def times(slower=1.0, kernel="mma", impl="numba_verify"):
    return bench_data.device_times(lambda name, of, shape: 100.0 * (slower if (name, of) == (impl, kernel) else 1.0))


def stored(results, folder, commit, measured, **conditions):
    return results.load(results.store(commit, 1000, measured, bench_data.about(**conditions), folder))


# --- files ------------------------------------------------------------------------------------------------------------------------


def test_figures_come_back_as_they_were_stored(tools, tmp_path):
    results = tools("results")
    path = results.store(COMMIT, 1000, times(1.5), bench_data.about(), tmp_path)
    assert path == tmp_path / "nvidia-h200" / "01234567-nvidia-h200.json"
    found = results.figures(results.load(path))
    assert found["device.Device.track_device_us", ("numba_verify", "mma", common.SHAPES[0], "cold")] == 150.0
    assert math.isnan(found["device.Device.track_device_us", ("numba_verify", "mma", common.SHAPES[0], "warm")])
    assert results.has_figures(path, r"^device\.") and not results.has_figures(path, r"^host\.")
    data = results.load(path)
    assert data["conditions"]["driver"] == "580.1" and data["conditions"]["versions"]["python"] == data["python"]
    assert json.loads((path.parent / "machine.json").read_text())["machine"] == "nvidia-h200"


def test_asv_reads_the_files(tools, tmp_path):
    pytest.importorskip("asv", reason="asv (extra bench) is not installed")
    from asv.results import Results

    results = tools("results")
    read = Results.load(str(results.store(COMMIT, 1000, times(1.5), bench_data.about(), tmp_path)), machine_name="nvidia-h200")
    name = "device.Device.track_device_us"
    assert read.commit_hash == COMMIT and read.get_result_keys({name: {"version": "1"}}) == {name}
    values = read.get_result_value(name, read.get_result_params(name))
    assert values[0] == 150.0 and math.isnan(values[1])


def test_what_was_not_measured_now_stays(tools, tmp_path):
    results = tools("results")
    key = ("numba_verify", "expand", "sm_90a")
    stored(results, tmp_path, COMMIT, bench_data.measured(offline.Offline, "track_registers", {key: 48.0, ("cuda_ref", *key[1:]): 34.0}))
    again = bench_data.measured(offline.Offline, "track_registers", {key: 50.0})
    again["measured"] = {"offline.Offline.track_registers": [common.all_keys(offline.Offline).index(key)]}
    stored(results, tmp_path, COMMIT, again)
    found = results.figures(stored(results, tmp_path, COMMIT, times()))
    name = "offline.Offline.track_registers"
    assert found[name, key] == 50.0 and found[name, ("cuda_ref", *key[1:])] == 34.0
    again["results"][name][2] = "2"  # another version of the benchmark: nothing before it counts
    found = results.figures(stored(results, tmp_path, COMMIT, again))
    assert found[name, key] == 50.0 and math.isnan(found[name, ("cuda_ref", *key[1:])])


def test_the_previous_commit_is_the_newest_measured_ancestor(tools, tmp_path, monkeypatch):
    results = tools("results")
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    monkeypatch.setattr(results, "git", lambda *arguments: "bbbbbbbb1\naaaaaaaa1\n")
    assert results.previous_commit("m", "cccccccc1") is None
    (tmp_path / "m").mkdir()
    for name in ("aaaaaaaa-m.json", "dddddddd-m.json", "machine.json"):
        (tmp_path / "m" / name).write_text("{}")
    assert results.previous_commit("m", "cccccccc1") == "aaaaaaaa"


def test_the_machine_is_named_by_its_gpu(tools, monkeypatch):
    results = tools("results")
    monkeypatch.setattr(results, "query_gpu", lambda: None)
    assert results.machine()[0] == "no-gpu"
    gpu = {"gpu": "NVIDIA H200", "driver": "580.1", "sm_clock": "1980 MHz", "power_limit": "700 W", "compute": "9.0"}
    monkeypatch.setattr(results, "query_gpu", lambda: gpu)
    name, details, conditions = results.machine()
    assert name == "nvidia-h200" and "NVIDIA H200, driver 580.1, SM clock up to 1980 MHz" in details["cpu"]
    assert conditions == {**conditions, **gpu} and platform.release() not in details["os"], "a kernel version would cut asv's graphs"


# --- comparison -------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def two_commits(tools, tmp_path, monkeypatch):
    """compare(before, after, ...): stores two measurements and reports on them; (exit status, output)."""
    results, regressions = tools("results"), tools("regressions")
    monkeypatch.setattr(results, "RESULTS", tmp_path)

    def compare(capsys, before, after, arguments=(), **conditions):
        stored(results, tmp_path, COMMIT, before)
        stored(results, tmp_path, NEXT, after, **conditions)
        status = regressions.main([COMMIT[:8], NEXT[:8], "--machine", "nvidia-h200", *arguments])
        return status, capsys.readouterr().out

    return compare


def test_a_slower_kernel_is_caught(two_commits, capsys):
    status, out = two_commits(capsys, times(), times(1.15))
    label = f"device.Device.track_device_us(numba_verify, mma, {common.SHAPES[0]}, cold)"
    assert status == 1 and f"worse  {label}: 100 -> 115 (1.15 x, limit 1.10)" in out
    assert f"{len(common.SHAPES)} worse" in out, "the other kernels and the twin are as they were"
    assert re.search(rf"{common.SHAPES[0]} +1\.15 +1\.00 +1\.00 +1\.00", out), "the ratio to the twin is shown"


def test_noise_and_gains_are_no_regression(two_commits, capsys):
    assert two_commits(capsys, times(), times(1.09))[0] == 0
    status, out = two_commits(capsys, times(), times(0.7))
    assert status == 0 and "better device.Device.track_device_us(numba_verify, mma" in out and "nothing is worse" in out


def test_the_factor_can_be_chosen(two_commits, capsys):
    assert two_commits(capsys, times(), times(1.09), ["--factor", "1.05"])[0] == 1
    assert two_commits(capsys, times(), times(1.15), ["--bench", "^host"])[0] == 0


def test_a_kernel_that_fails_now_is_worse(two_commits, capsys):
    now = times()
    now["results"]["device.Device.track_device_us"][0][0] = None
    status, out = two_commits(capsys, times(), now)
    assert status == 1 and "100 -> failed" in out


def test_a_first_spill_is_worse_and_a_skip_is_not(two_commits, capsys):
    key = ("numba_verify", "naive", "sm_80")
    before, spilled, absent = (bench_data.measured(offline.Offline, "track_spill_bytes", values) for values in ({key: 0.0}, {key: 8.0}, {}))
    assert two_commits(capsys, before, absent)[0] == 0
    status, out = two_commits(capsys, before, spilled)
    assert status == 1 and "track_spill_bytes(numba_verify, naive, sm_80): 0 -> 8 (inf x" in out


@pytest.mark.parametrize("condition", ["driver", "gpu", "sm_clock", "power_limit"])
def test_times_of_other_conditions_are_not_compared(condition, two_commits, capsys):
    status, out = two_commits(capsys, times(), times(2.0), **{condition: "another"})
    assert status == 2 and f"not compared: device.Device.track_device_us, measured under another {condition} (" in out


def test_registers_are_compared_whatever_the_machine(two_commits, capsys):
    key = ("numba_verify", "naive", "sm_80")
    one, other = (bench_data.measured(offline.Offline, "track_registers", {key: value}) for value in (96.0, 128.0))
    assert two_commits(capsys, one, other, driver="another")[0] == 1


def test_a_machine_or_commit_without_figures_is_refused(two_commits, tools, capsys):
    two_commits(capsys, times(), times())
    assert tools("regressions").main(["abcdef01", NEXT[:8], "--machine", "nvidia-h200"]) == 2
    assert "abcdef01 was not measured on nvidia-h200; measured: 01234567, fedcba98" in capsys.readouterr().err
    assert tools("regressions").main([COMMIT[:8], NEXT[:8], "--machine", "no-gpu"]) == 2


@pytest.mark.parametrize("tracked, allowed", [("device.Device.track_device_us", 0.1), ("peers.Peers.track_device_us", 0.1),
                                                ("offline.Offline.track_registers", 0.1), ("offline.Instructions.track_sass_instructions", 0.25),
                                                ("host.Host.track_host_us", 0.5), ("compile_time.Compile.track_cold_s", 0.5),
                                                ("device.Accuracy.track_max_relative_error", 0.5)])
def test_thresholds(tracked, allowed, tools):
    assert tools("regressions").threshold(tracked) == allowed


# --- real commits -----------------------------------------------------------------------------------------------------------------


def git(folder, *arguments):
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.org", "-c", "init.defaultBranch=main"]
    return subprocess.run(["git", *identity, "-C", str(folder), *arguments], check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """A repository of two commits: this tree, and one in which `expand` may have so few registers that it spills."""
    folder = tmp_path_factory.mktemp("scratch") / "repository"
    folder.mkdir()
    for name in ("numba_verify", "cuda_ref", "asv_bench", "tools"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "results", "html"))
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "-m", "as it is")
    backend = folder / "numba_verify" / "backend.py"
    text = backend.read_text()
    assert text.count("schedule.EXPAND_THREADS)") == 1
    backend.write_text(text.replace("schedule.EXPAND_THREADS)", "schedule.EXPAND_THREADS, 8)"))  # eight blocks an SM: 32 registers a thread
    kernel = folder / "numba_verify" / "kernels" / "expand.py"
    kernel.write_text(kernel.read_text() + "# eight blocks an SM\n")
    git(folder, "commit", "--quiet", "-am", "expand spills")
    return folder


def run_tool(repository, name, *arguments):
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run([sys.executable, f"tools/{name}.py", *arguments], cwd=repository, env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_a_slowdown_in_the_history_is_caught(repository):
    """Measures both commits with the benchmarks of the newer one, files them by commit, and finds what the second did."""
    packed = repository.parent / "history.tar.gz"
    done = run_tool(repository, "bench_history", "--file", "offline", "--bench", EXPAND, "--output", str(packed))
    assert done.returncode == 0, done.stdout + done.stderr
    newer, older = git(repository, "log", "--format=%h", "--abbrev=8").split()
    machine = next(path.name for path in (repository / "asv_bench" / "results").iterdir() if path.is_dir())
    listed = subprocess.run(["tar", "-tzf", str(packed)], capture_output=True, text=True, check=True).stdout.split()
    assert sorted(listed) == sorted(f"{machine}/{name}" for name in (f"{newer}-{machine}.json", f"{older}-{machine}.json", "machine.json"))
    done = run_tool(repository, "regressions")
    print(done.stdout)
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"worse  offline\.Offline\.track_spill_bytes\(numba_verify, expand, sm_90a\): 0 -> [1-9]", done.stdout)
    again = run_tool(repository, "bench_history", "--file", "offline", "--bench", EXPAND)
    assert "0 of 2 commits to measure" in again.stdout, "what is there is not measured again"


@pytest.mark.slow
def test_bench_measures_head_and_keeps_nothing_of_a_changed_tree(repository):
    done = run_tool(repository, "bench", "--bench", EXPAND)
    assert done.returncode == 0 and "bench: kept in asv_bench/results/" in done.stdout, done.stdout + done.stderr
    changed = repository / "numba_verify" / "tree.py"
    before = changed.read_text()
    changed.write_text(before + "# changed\n")
    try:
        done = run_tool(repository, "bench", "--bench", EXPAND)
    finally:
        changed.write_text(before)
    assert "files that are measured differ from HEAD" in done.stdout and "kept in" not in done.stdout


# --- pages and plots --------------------------------------------------------------------------------------------------------------


def find_chromium():
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.slow
@pytest.mark.skipif(find_chromium() is None, reason="no Chromium on PATH")
@pytest.mark.skipif(shutil.which("npm") is None, reason="no npm on PATH, which brings the libraries of asv's pages")
def test_the_pages_show_both_implementations_in_a_browser(repository, tools, tmp_path):
    pytest.importorskip("asv", reason="asv (extra bench) is not installed")
    results, html = tools("results"), tmp_path / "html"
    for commit, slower in zip(git(repository, "log", "--format=%H").split(), (1.2, 1.0), strict=True):
        date = 1000 * int(git(repository, "show", "--no-patch", "--format=%at", commit))
        results.store(commit, date, times(slower), bench_data.about(), repository / "asv_bench" / "results")
    done = run_tool(repository, "publish", "--self-contained", "--html", str(html))
    if "npm" in done.stderr and done.returncode:
        pytest.skip("npm reaches no registry here")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "https://" not in "".join(re.findall(r'<(?:script|link) [^>]*(?:src|href)="([^"]*\.(?:js|css))"', (html / "index.html").read_text()))
    handler = partial(SimpleHTTPRequestHandler, directory=str(html))
    handler.log_message = lambda *arguments: None
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        page = browse(f"http://127.0.0.1:{server.server_port}/#device.Device.track_device_us", tmp_path)
    finally:
        server.shutdown()
    legend = "".join(re.findall(r'class="legendLabel">(.*?)</td>', page))
    assert "numba_verify" in legend and "cuda_ref" in legend, page[:3000]
    assert "<canvas" in page and "Failed to load" not in page


def browse(url, folder):
    """The page as it stands after its scripts ran."""
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-component-update",
               "--disable-sync", f"--user-data-dir={folder / 'browser'}", "--virtual-time-budget=20000", "--dump-dom"]
    return subprocess.run([find_chromium(), *options, url], capture_output=True, text=True, timeout=120, check=True).stdout


def test_plots_are_drawn_from_result_files(tools, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="matplotlib (extra plots) is not installed")
    results, plots = tools("results"), tools("plots")
    monkeypatch.setattr(results, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(results, "git", lambda *arguments: None)
    empty = plots.load()
    assert {name for name, figure in plots.figures(empty).items() if figure is None} >= {"history"}
    for commit, slower in ((COMMIT, 1.2), (NEXT, 1.0)):
        results.store(commit, 1000, times(slower), bench_data.about(), tmp_path / "results")
    rows = [{"sweep": name, "shape": "b{}_kv{}_t{}_h{}".format(*extents), "impl": impl, "us": 10.0 + extents[1], "why": "", "floor_us": 5.0}
            for name, points in sweep.SWEEPS.items() for extents in points for impl in ("numba_verify", "cuda_ref", "unfused")]
    data = {**plots.load(), "sweep": {"gpu": "NVIDIA H200", "figures": rows}}
    monkeypatch.setattr(plots, "load", lambda: data)
    for folder in ("one", "other"):
        assert plots.main(["--images", str(tmp_path / folder)]) == 0
    for name in ("floor", "context", "drafts", "heads", "history"):
        one, other = ((tmp_path / folder / f"{name}.svg").read_text() for folder in ("one", "other"))
        assert one == other and "<path" in one, f"{name}: the same data gives the same bytes"


def test_the_history_is_of_the_median_ratio_and_the_fastest_kernel(tools, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib (extra plots) is not installed")
    results, plots = tools("results"), tools("plots")
    found = plots.cold_times(stored(results, tmp_path, COMMIT, times(1.2)))
    assert len(found) == len(common.IMPLEMENTATIONS) * len(common.KERNELS) * len(common.SHAPES)
    assert plots._ratio(found, "mma") == pytest.approx(1.2) and plots._ratio(found, "paged") == 1.0 and math.isnan(plots._ratio(found, "none"))
