"""The command line: every command, its texts, its exit status. Kernels run where they run for the rest of the suite."""

import json
import math
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from support import machine

import numba_verify
from numba_verify import DraftTree, __main__, published
from numba_verify.commands import accuracy, batches, bench, check, checks, console, env, runners
from numba_verify.commands.places import HOST

ROOT = Path(__file__).resolve().parents[1]
SMALL_TREE = "sequoia-l40-cnn-68m-13b-stochastic-s16"


@pytest.fixture
def cli(capsys):
    """Runs one command in this process; (exit status, stdout, stderr)."""
    def call(*arguments):
        status = __main__.main(list(arguments))
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


def lines_of(text, start):
    return [line for line in text.splitlines() if line.startswith(start)]


# ---- the entry point

def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit) as end:
        __main__.main(["--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert all(f"    {name}" in text for name in ("env", "demo", "check", "show-tree", "bench", "cache"))


def test_no_command_and_an_unknown_one_are_refused(capsys):
    for arguments in ([], ["tune"]):
        with pytest.raises(SystemExit) as end:
            __main__.main(arguments)
        assert end.value.code == 2
    assert "invalid choice: 'tune'" in capsys.readouterr().err


def test_runs_as_a_module_and_ends_quietly_when_nobody_reads_on():
    command = [sys.executable, "-m", "numba_verify", "show-tree", "sequoia-1x128-tree"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 0


def test_a_terminal_without_box_drawing_characters_is_no_error():
    command = [sys.executable, "-m", "numba_verify", "show-tree", "-1,0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={"PYTHONIOENCODING": "ascii", "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0 and "?? 1" in done.stdout


def test_an_error_is_one_line_and_traceback_shows_where_it_came_from(cli):
    status, out, err = cli("show-tree", "-1,2")
    assert (status, out) == (2, "")
    assert err == ("numba_verify show-tree: request 0, node 1: expected a parent of -1 (a root) or 0 .. 1 (an index within the request), "
                   "got 2\n")
    with pytest.raises(IndexError):
        cli("show-tree", "-1,2", "--traceback")


def test_an_interrupt_ends_without_a_traceback(cli, monkeypatch):
    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(__main__.COMMANDS["cache"], "run", interrupted)
    assert cli("cache") == (130, "", "")


# ---- show-tree

def test_show_tree_draws_parents(cli):
    status, out, _ = cli("show-tree", "-1,0,0,1; -1")
    assert status == 0
    assert out == str(DraftTree.from_lists([[-1, 0, 0, 1], [-1]])) + "\n"


def test_show_tree_without_the_mask(cli):
    assert cli("show-tree", "-1 0 0 1", "--no-mask")[1].splitlines() == [
        "1 request, 4 draft tokens", "", "request 0: 4 draft tokens, depth 2", "0", "├─ 1", "│  └─ 3", "└─ 2"]


def test_show_tree_writes_pictures(cli, tmp_path):
    svg, html = tmp_path / "tree.svg", tmp_path / "tree.html"
    status, out, _ = cli("show-tree", SMALL_TREE, "--svg", str(svg), "--html", str(html))
    assert status == 0 and lines_of(out, "written: ") == [f"written: {svg}", f"written: {html}"]
    assert ElementTree.fromstring(svg.read_text(encoding="utf-8")).tag.endswith("svg")
    assert SMALL_TREE in html.read_text(encoding="utf-8")


def test_show_tree_lists_the_published_trees(cli):
    status, out, _ = cli("show-tree", "--list")
    assert status == 0 and cli("show-tree")[1] == out
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines()[2:]}
    assert sorted(rows) == published.names()
    assert rows["sequoia-8-chain"] == ["8", "7", "1"]


@pytest.mark.parametrize("text, message", [
    ("medusa", "expected the name of a published tree, one of eagle-mc-sim-7b-63, "),
    ("-1,x", "request 0: expected parents such as -1,0,0,1, got '-1,x'"),
    ("-1;0", "request 1, node 0: the node is its own parent"),
])
def test_show_tree_refuses(cli, text, message):
    status, _, err = cli("show-tree", text)
    assert status == 2 and message in err and err.count("\n") == 1


def test_a_picture_that_cannot_be_written_is_one_line(cli, tmp_path):
    status, _, err = cli("show-tree", "-1", "--svg", str(tmp_path / "no" / "such" / "folder.svg"))
    assert status == 2 and "No such file or directory" in err and err.count("\n") == 1


# ---- env

def test_env_reports_versions_kernels_and_variables(cli, monkeypatch):
    monkeypatch.setenv("NUMBA_VERIFY_VALIDATE", "1")
    status, out, _ = cli("env", "--json")
    found = json.loads(out)
    assert status == 0 and list(found) == list(env.PROBES)
    packages = {row["package"]: row for row in found["packages"]}
    assert packages["numpy"]["installed"] == np.__version__ and packages["numpy"]["loaded"].startswith(np.__version__)
    assert found["environment"]["NUMBA_VERIFY_VALIDATE"] == "1"
    can = {(row["implementation"], row["kernel"], row["on"]): row["can run"] for row in found["kernels"]}
    assert can["numba_verify", "reference", "CPU"] == can["numba_verify", "paged", "CPU"] == "yes"
    assert can["numba_verify", "wgmma", "CPU"] == "yes"


def test_env_as_text_has_every_section(cli):
    out = cli("env")[1]
    assert [line for line in out.splitlines() if line and not line.startswith(" ")] == list(env.PROBES)
    assert "NVIDIA" in out or "none: the CUDA driver" in out


def test_env_goes_on_after_a_probe_that_fails(cli, monkeypatch):
    def broken():
        raise SystemError("no such thing")

    monkeypatch.setitem(env.PROBES, "libraries", broken)
    found = json.loads(cli("env", "--json")[1])
    assert found["libraries"] == "error: SystemError: no such thing"
    assert found["packages"] and found["kernels"]


def test_env_names_a_package_that_does_not_load(monkeypatch):
    monkeypatch.setitem(env.LOADED, "numpy", "numpy.no_such_module")
    row = next(row for row in env.packages() if row["package"] == "numpy")
    assert row["installed"] == np.__version__ and row["loaded"].startswith("error: ModuleNotFoundError")


# ---- cache

def test_cache_shows_and_clears(cli, monkeypatch, tmp_path):
    cubins, builds = tmp_path / "cubin", tmp_path / "builds"
    monkeypatch.setenv("NUMBA_VERIFY_CACHE_DIR", str(cubins))
    monkeypatch.setenv("CUDA_REF_CACHE_DIR", str(builds))
    empty = [f"numba_verify: 0 kernels, 0 bytes, in {cubins}", f"cuda_ref: 0 builds, 0 bytes, in {builds}"]
    assert cli("cache")[:2] == (0, "\n".join(empty) + "\n")

    cubins.mkdir()
    (cubins / f"{'a' * 40}.json").write_text(json.dumps({"variant": "paged_512_64", "arch": "sm_90a"}))
    (cubins / f"{'a' * 40}.cubin").write_bytes(bytes(1000))
    (cubins / f"{'b' * 40}.json").write_text("torn")
    (cubins / "notes.json").write_text("a file of somebody else in the same folder")
    for folder in ("cuda-0123", "host-4567", "cuda-89ab.xyz.tmp"):
        (builds / folder).mkdir(parents=True)
        (builds / folder / "libverify_attn.so").write_bytes(bytes(5000))
    (builds / "cuda-0123" / "resources.json").write_text(json.dumps([{"arch": "90a"}, {"arch": "120"}, {"arch": "120"}]))
    (builds / "cuda-0123.lock").touch()

    out = cli("cache", "show")[1]
    assert "numba_verify: 2 kernels, 1,0" in out and "cuda_ref: 2 builds, 10,0" in out
    assert lines_of(out, "paged_512_64")[0].split()[1:] == ["sm_90a", "1,045"] and lines_of(out, "(damaged)")
    assert lines_of(out, "cuda-0123")[0].split()[1:3] == ["120,", "90a"] and lines_of(out, "host-4567")[0].split()[1] == "CPU"

    status, out, _ = cli("cache", "clear")
    assert status == 0 and "numba_verify: cleared 2 kernels" in out and "cuda_ref: cleared 2 builds" in out
    assert [path.name for path in cubins.iterdir()] == ["notes.json"]
    # A build in progress and its lock are somebody else's.
    assert sorted(path.name for path in builds.iterdir()) == ["cuda-0123.lock", "cuda-89ab.xyz.tmp"]


# ---- bench

def test_bench_lists_its_shapes(cli):
    status, out, _ = cli("bench", "--list")
    assert status == 0 and lines_of(out, "     6  b1_kv185000_t8_h8 ")


@pytest.mark.parametrize("text, name", [
    ("6", "b1_kv185000_t8_h8"), ("b64_kv2048_t1_h128", "b64_kv2048_t1_h128"), ("2,100,4,16", "b2_kv100_t4_h16")])
def test_bench_takes_a_shape_by_name_number_or_extents(text, name):
    assert bench.parse_shape(text).name == name


@pytest.mark.parametrize("text", ["99", "-1", "1,2,3", "0,1,1,1", "1,2,3,x", "large"])
def test_bench_refuses_other_shapes(cli, text):
    status, _, err = cli("bench", f"--shape={text}")
    assert status == 2 and err.startswith("numba_verify bench: --shape: expected a name or number of --list") and repr(text) in err


def test_bench_refuses_no_replays(cli):
    assert cli("bench", "--replays", "0")[2] == "numba_verify bench: --replays: expected at least 1, got 0\n"


@pytest.mark.skipif(machine.HAS_GPU, reason="is about a machine with no GPU")
def test_bench_without_a_gpu_says_so_in_one_line(cli):
    status, out, err = cli("bench", "--shape", "0")
    assert (status, out) == (2, "")
    assert err.startswith("numba_verify bench: bench needs a GPU: the CUDA driver cannot be used: ") and err.count("\n") == 1


def test_bench_report_gives_a_wrong_result_no_time():
    timed = {"shape": "s", "implementation": "numba_verify", "kernel": "paged", "floor_us": 50.0, "wrong": "", "error": 0.0021,
             "tile": "h8k16", "us": 200.0, "low_us": 199.0, "high_us": 1234.5, "replays": 30, "calls": 8}
    wrong = {"shape": "s", "implementation": "numba_verify", "kernel": "flash", "floor_us": 50.0, "wrong": "wrong result", "error": None}
    header, _, first, second = bench.report([timed, wrong], warm=False).splitlines()
    assert header.split()[:5] == ["shape", "implementation", "kernel", "tile", "error"]
    assert first.split() == ["s", "numba_verify", "paged", "h8k16", "2.1e-03", "200.0", "199.0", "1,234.5", "30", "25.0"]
    assert second.split() == ["s", "numba_verify", "flash", *"-" * 7]
    unknown = bench.report([{**timed, "floor_us": None}], warm=True)
    assert "warm us" in unknown and "the ceilings of this GPU are not known" in unknown


@pytest.mark.gpu
@pytest.mark.kernel
def test_bench_times_what_it_has_checked(cli, tmp_path):
    path = tmp_path / "figures.json"
    status, out, _ = cli("bench", "--shape", "2,300,4,16", "--replays", "3", "--warm", "--json", str(path))
    assert status == 0, out
    written = json.loads(path.read_text())
    assert written["gpu"] == machine.PLACE and {figure["kernel"] for figure in written["figures"]} == set(machine.KERNELS)
    assert all(figure["error"] <= bench.ALLOWED and figure["us"] > 0 and figure["warm_us"] > 0 for figure in written["figures"])


# ---- demo

@pytest.mark.kernel
def test_demo_shows_a_tree_the_agreement_and_times(cli, tmp_path):
    page = tmp_path / "tree.html"
    status, out, _ = cli("demo", "--tree", SMALL_TREE, "--html", str(page))
    assert status == 0, out
    assert str(published.load(SMALL_TREE)) in out and page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    for name in machine.IMPLEMENTATIONS:
        for kernel in machine.KERNELS:
            (row, timed) = [line.split() for line in lines_of(out, f"{name} ") if line.split()[1] == kernel and "..." not in line
                            and "against" not in line]
            assert row[-1] == "ok" and float(timed[-2 if machine.HAS_GPU else -1].replace(",", "")) > 0
    assert ("% of the floor" if machine.HAS_GPU else "This is no measure of the kernels") in out
    count = len(machine.IMPLEMENTATIONS) * len(machine.KERNELS)
    place = machine.PLACE if machine.HAS_GPU else "the CPU"
    assert out.splitlines()[-1] == f"numba_verify demo: OK, the reference and {count} kernels agree with float64 on {place}"


def test_demo_fails_on_a_wrong_result(cli, monkeypatch):
    spoil_results(monkeypatch)
    monkeypatch.setattr(runners, "unusable", lambda implementation, place: "left out of this test")
    status, out, _ = cli("demo", "--tree", SMALL_TREE)
    assert status == 1 and out.splitlines()[-1].startswith("numba_verify demo: FAILED on ")
    assert "cuda_ref cannot be used: left out of this test" in out


def spoil_results(monkeypatch):
    """One value of one row comes back 2 % of the row's norm too large."""
    honest = runners.Call.results

    def results(call):
        out, lse = honest(call)
        row = out[0, 0].astype(np.float64)
        row[3] += 0.02 * np.linalg.norm(row)
        out[0, 0] = row.astype(out.dtype)
        return out, lse

    monkeypatch.setattr(runners.Call, "results", results)


# ---- check

@pytest.mark.kernel
def test_check_ends_with_one_verdict_line(cli):
    status, out, _ = cli("check", "--kernel", "naive", "--seed", "5")
    assert status == 0, out
    verdict = out.splitlines()[-1]
    count = sum(line.rstrip().endswith(" ok") or " ok (" in line for line in out.splitlines())
    place = machine.PLACE if machine.HAS_GPU else "the CPU (simulator, host build)"
    assert verdict.startswith(f"numba_verify check: OK, {count} checks on {place} in ")
    assert count == 2 * (len(checks.CASES) + len(checks.PROPERTIES) - (not machine.HAS_GPU)) + 1


@pytest.mark.kernel
@pytest.mark.slow
def test_check_covers_every_kernel(cli):
    status, out, _ = cli("check")
    assert status == 0, out
    for name in machine.IMPLEMENTATIONS:
        assert all(f"{name} {kernel}: another step in the same plan ..." in out for kernel in machine.KERNELS)
        # All checks but that of float32, which tensor cores do not take.
        counts = {kernel: out.count(f"\n{name} {kernel}: ") for kernel in machine.KERNELS}
        assert f"{name} paged: float32" in out
        for kernel in machine.TENSOR:
            assert counts[kernel] == counts["paged"] - 1 and f"{name} {kernel}: float32" not in out


@pytest.mark.kernel
def test_check_fails_and_names_what_failed(cli, monkeypatch):
    spoil_results(monkeypatch)
    status, out, _ = cli("check", "--kernel", "naive", "--implementation", "numba_verify")
    verdict = out.splitlines()[-1]
    assert status == 1 and verdict.startswith("numba_verify check: FAILED, ")
    assert "numba_verify naive: bfloat16, draft trees, scattered slots" in verdict
    assert "FAILED: out: 1 of " in out


@pytest.fixture
def no_wgmma(monkeypatch):
    """A place where wgmma cannot run: it answers for rows that it does not take."""
    can_run = numba_verify.can_run

    def answer(kernel, **problem):
        return can_run(kernel=kernel, **problem, **({"dtype": "float32"} if kernel == "wgmma" else {}))

    monkeypatch.setattr(numba_verify, "can_run", answer)


def test_check_with_nothing_to_run_is_a_failure(cli, no_wgmma):
    status, out, _ = cli("check", "--kernel", "wgmma", "--implementation", "numba_verify")
    assert "numba_verify wgmma cannot be used: dtype float32: " in out
    assert status == 1 and out.splitlines()[-1].startswith("numba_verify check: FAILED, no kernel can run on ")


def test_check_refuses_a_negative_seed(cli):
    assert cli("check", "--seed", "-3")[2] == "numba_verify check: --seed: expected 0 or more, got -3\n"


def test_an_implementation_that_cannot_be_used_is_named_and_the_rest_goes_on(monkeypatch, no_wgmma):
    def no_compiler(name):
        if name == "cuda_ref":
            raise RuntimeError("no g++ on PATH")
        return __import__(name)

    monkeypatch.setattr(runners.importlib, "import_module", no_compiler)
    found, absent = runners.find(HOST, runners.IMPLEMENTATIONS, ["naive", "mma", "wgmma"], num_heads=1)
    assert [runner.label for runner in found] == ["numba_verify naive", "numba_verify mma"]
    assert runners.describe(absent, in_full=False) == [
        "cuda_ref cannot be used: no g++ on PATH", "not run, since they cannot (env says why): numba_verify wgmma"]


@pytest.mark.parametrize("error", [checks.Failure("rows differ"), ZeroDivisionError("a defect of the check itself")])
def test_whatever_a_check_raises_is_its_failure(error, capsys):
    def raises(context):
        raise error

    outcome = check.perform("name", raises, None, with_traceback=False)
    assert str(error) in outcome.fault
    assert capsys.readouterr().out == f"name ... FAILED: {outcome.fault}\n"


def test_expect_wants_the_error_and_its_text():
    def refuse():
        raise ValueError("q: too long")

    checks.expect(ValueError, "too long", refuse)
    for error, text, call in ((TypeError, "too long", refuse), (ValueError, "too short", refuse), (ValueError, "", lambda: None)):
        with pytest.raises(checks.Failure):
            checks.expect(error, text, call)


# ---- what the commands judge by

def small_values(dtype="bfloat16"):
    rng = np.random.default_rng(1)
    masks = batches.tree_masks([[-1, 0, 0], [-1]])
    return batches.draw(rng, masks, [5, 0], heads=2, latent_dim=32, rope_dim=32, dtype=dtype)


def rounded(answer, dtype):
    return answer.out.astype(dtype), answer.lse.astype(np.float32)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_judge_takes_the_rounded_answer(dtype):
    values = small_values(dtype)
    answer = accuracy.solve(values)
    verdict = accuracy.judge(answer, *rounded(answer, values.q[0].dtype))
    assert verdict.fault == "" and 0 < verdict.relative < accuracy.FLOOR[dtype] * 2


@pytest.mark.parametrize("where, value, fault", [
    (("out", 1, 0, 4), math.nan, "out: 1 of 8 vectors are wrong, first row 1, head 0"),
    (("out", 2, 1, 0), 9.0, "out: 1 of 8 vectors are wrong, first row 2, head 1"),
    (("lse", 3, 1), math.nan, "lse: 1 of 8 vectors are wrong, first row 3, head 1"),
    (("lse", 0, 0), -math.inf, "lse: 1 of 8 vectors are wrong, first row 0, head 0"),
])
def test_judge_sees_one_wrong_value(where, value, fault):
    values = small_values()
    answer = accuracy.solve(values)
    out, lse = rounded(answer, values.q[0].dtype)
    {"out": out, "lse": lse}[where[0]][where[1:]] = value
    assert accuracy.judge(answer, out, lse).fault.startswith(fault)


def test_judge_wants_nan_and_minus_infinity_where_they_are_due():
    values = small_values()
    values.masks[1][:] = False  # a row that sees nothing
    values.keys[0][-1] = np.nan  # draft token 2, which only itself sees
    answer = accuracy.solve(values)
    out, lse = rounded(answer, values.q[0].dtype)
    assert accuracy.judge(answer, out, lse).fault == ""
    assert np.isnan(out[2].astype(float)).all() and (out[3] == 0).all() and (lse[3] == -np.inf).all()
    for row, array in ((2, out), (2, lse), (3, out), (3, lse)):
        kept = array[row].copy()
        array[row] = 1
        assert accuracy.judge(answer, out, lse).fault
        array[row] = kept


def test_largest_difference_of_a_nan_is_infinite():
    ones = np.ones((2, 1, 4))
    assert accuracy.largest_difference(ones, ones) == 0
    assert accuracy.largest_difference(np.where(np.arange(4) == 1, np.nan, ones), ones) == math.inf


@pytest.mark.parametrize("layout", [
    batches.Layout(4, tree=tree, aside=aside, index_dtype=width) for tree, aside, width in (
        ("draft_tree", False, "int32"), ("parents", True, "int64"), ("bits", False, "int64"), ("dense", True, "int32"),
        ("full_mask", False, "int32"))
], ids=lambda layout: layout.tree)
def test_every_layout_means_the_same_numbers(layout):
    """The reference reads the arrays, `solve` the numbers."""
    values = small_values("float32")
    call = runners.Call(runners.REFERENCE, batches.lay_out(np.random.default_rng(2), values, layout))
    assert accuracy.judge(accuracy.solve(values), *call()).fault == ""


def test_rows_written_behind_the_last_draft_token_are_seen():
    call = runners.Call(runners.REFERENCE, batches.lay_out(np.random.default_rng(2), small_values(), batches.Layout()))
    call.run()
    call.outputs["lse"][-1, 0] = 0
    with pytest.raises(ValueError, match="lse: rows after the last draft token"):
        call.results()


# ---- lines and tables

def test_a_table_is_as_wide_as_its_entries():
    assert console.table(["name", "us"], [["naive", "1,234.5"], ["a", 2]], right=["us"]).splitlines() == [
        "name        us", "-----  -------", "naive  1,234.5", "a            2"]


def test_a_step_shows_that_it_goes_on_and_never_leaves_its_line_open(capsys, monkeypatch):
    monkeypatch.setattr(console, "DOT_SECONDS", 0.01)
    monkeypatch.setattr(console, "SHORT_SECONDS", 0.0)
    with console.step("compiling"):
        console.threading.Event().wait(0.1)
    with pytest.raises(OSError), console.step("writing"):
        raise OSError
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("compiling .....") and first.endswith("s)") and " done (0.1" in first
    assert second.startswith("writing ...") and " failed (" in second
