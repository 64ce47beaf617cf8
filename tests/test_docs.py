"""README and docs/ against the code: examples run, pictures and tables are what their sources make, names exist, numbers add up."""

import ast
import importlib.util
import inspect
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import numba_verify as nv
from numba_verify import backend, published, shapes
from numba_verify.__main__ import COMMANDS
from numba_verify.commands import env
from numba_verify.kernels.config import TILE_CONFIGS, Shape, choose_tile
from numba_verify.problem import PlanSpec

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
CONTRACT, HOW, FACTS, MMA = (ROOT / "docs" / f"{name}.md" for name in ("contract", "how-it-works", "facts", "mma"))
PAGES = [README, CONTRACT, HOW, FACTS]
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def text_of(page):
    return page.read_text(encoding="utf-8")


def load_tool(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tool, asv_results = load_tool("results_table"), load_tool("results")


# --- examples -----------------------------------------------------------------------------------------------------------------


def run_example(name):
    """The names that the example `name` of the README leaves behind."""
    found = re.findall(rf"<!-- example: {name} -->\n```python\n(.*?)```", text_of(README), re.DOTALL)
    assert len(found) == 1, f"README.md: expected one example marked {name}, got {len(found)}"
    names = {}
    exec(compile(found[0], f"README.md example {name}", "exec"), names)
    return names


def check_example(q, kv_cache, kv_indices, out, lse):
    """Draft token 3 of request 0 sees the prefix and tokens 0, 1 and 3; token 1 of request 1 sees all of its list. Dense float64."""
    assert out.shape == (6, 16, 512) and lse.shape == (6, 16)
    for row, listed in ((3, kv_indices[[*range(301), 301, 303]]), (5, kv_indices[304:])):
        keys = kv_cache[listed].astype(np.float64)
        score = 192 ** -0.5 * (q[row].astype(np.float64) @ keys.T)
        peak = score.max(axis=1, keepdims=True)
        weight = np.exp(score - peak)
        expected = weight @ keys[:, :512] / weight.sum(axis=1, keepdims=True)
        error = np.linalg.norm(out[row].astype(np.float64) - expected, axis=1) / np.linalg.norm(expected, axis=1)
        assert not error.max() > 2 * 2.3e-3
        np.testing.assert_allclose(lse[row], (peak + np.log(weight.sum(axis=1, keepdims=True)))[:, 0], rtol=1e-5, atol=1e-4)


def test_example_on_numpy_arrays(capsys):
    names = run_example("numpy")
    check_example(*(names[key] for key in ("q", "kv_cache", "kv_indices", "out", "lse")))
    assert names["out"].dtype == ml_dtypes.bfloat16 and names["lse"].dtype == np.float32
    assert capsys.readouterr().out == f"(6, 16, 512) (6, 16)\n{names['tree']}\n"


@pytest.mark.gpu
@pytest.mark.kernel
def test_example_with_torch():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    names = run_example("torch")
    names["plan"].run(names["q"], names["kv_cache"], sm_scale=192 ** -0.5, out=names["out"], lse=names["lse"])  # after the update
    torch.cuda.synchronize()
    check_example(*(names[key].float().cpu().numpy() for key in ("q", "kv_cache")), names["kv_indices"].cpu().numpy(),
                  names["out"].float().cpu().numpy(), names["lse"].cpu().numpy())


# --- generated parts ----------------------------------------------------------------------------------------------------------


def test_picture():
    name = "eagle-mc-sim-7b-63"
    picture = text_of(ROOT / "docs/images/tree.svg")
    assert picture == published.load(name).to_svg(title=f"Draft tree {name}"), \
        f"draw it again: python -m numba_verify show-tree {name} --svg docs/images/tree.svg"
    assert str(published.load(name).num_nodes) in text_of(README)


@pytest.mark.parametrize("page", [README, FACTS, MMA, HOW], ids=lambda page: page.name)
def test_tables_are_those_of_the_result_files(page):
    text = text_of(page)
    assert tool.replaced(text, tool.all_tables(tool.result_files()), page.name) == text, \
        f"run: python tools/results_table.py --update {page.relative_to(ROOT)}"


def test_readme_counts_what_its_table_shows():
    """How many shapes are won and lost, by cells such as `1,158 `fi_fa2`, 1.43 x`: peer / ours."""
    text = text_of(README)
    rows = rows_of(text[text.index("<!-- results:begin -->"):text.index("<!-- results:end -->")])
    unfused, cascade, maskless = ([float(row[column].split()[-2]) for row in rows if row[column].endswith(" x") and name in row[column]]
                                  for column, name in ((6, "unfused"), (7, ""), (8, "")))
    prose = " ".join(text.split())
    assert f"at {sum(x > 1 for x in cascade)} of {len(rows)} shapes" in prose
    assert f"without a tree mask is faster at {sum(x < 1 for x in maskless)}," in prose
    assert f"faster than `mma` at {sum(x < 1 for x in unfused) or 'none'}" in prose


def test_peers_are_measured_on_the_benchmarks_shapes():
    peers = json.loads(text_of(tool.PEERS))
    assert [row["shape"] for row in peers["rows"]] == [shape.name for shape in shapes.SHAPES]
    for row, shape in zip(peers["rows"], shapes.SHAPES, strict=True):
        assert set(row["us"]) == set(peers["peers"])
        if row["floor_us"]:  # theirs counts the visible pairs of its own tree, ours those of ours
            assert row["floor_us"] == pytest.approx(shapes.floor_us(shape, shape.drafts, peers["gpu"]), rel=0.02)


# --- tools/results_table.py ---------------------------------------------------------------------------------------------------


def figure(kernel="paged", implementation="numba_verify", us=100.0, shape="b1_kv4096_t16_h64", **more):
    return {"shape": shape, "implementation": implementation, "kernel": kernel, "floor_us": 11.4, "wrong": "", "us": us, **more}


def result_file(folder, name, figures, **more):
    path = folder / name
    path.write_text(json.dumps({"gpu": "NVIDIA H200", "driver": "driver 580", "version": "0.1.0", "date": "2026-11-30T10:00:00+00:00",
                                "figures": figures, **more}))
    return path


def rows_of(table):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("|")][2:]


def test_results_table(tmp_path, capsys):
    wrong = {**figure("mma", shape="b8_kv8192_t16_h64"), "wrong": "wrong result"}
    del wrong["us"]
    figures = [figure("mma", us=40.0, flop=9.1e9, bytes=7.1e6), figure("mma", "cuda_ref", us=38.0), figure(us=531.0), wrong,
               figure("wgmma", us=32.0, flop=9.1e9, bytes=7.1e6), figure("wgmma", "cuda_ref", us=32.0),
               figure("mma", us=12.3, shape="b2_kv100_t2_h8", floor_us=None)]
    assert tool.main([str(result_file(tmp_path, "a.json", figures))]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("NVIDIA H200, driver 580, numba_verify 0.1.0, 2026-11-30.\n\n| ")
    known, refused, unknown = rows_of(printed)
    assert known == ["1, 4096, 16, 64", "11.4", "32.0 (36 %), 1.00", "40.0 (28 %), 1.05", "284", "0.22", "41.7 `unfused`, 1.04 x", "51.3, 1.60 x",
                     "32.7 `fi_fa3`, 1.02 x"]
    assert refused[2:] == ["-", "wrong", "-", "-", "490 `unfused`", "275", "203 `flashmla`"]
    assert unknown == ["2, 100, 2, 8", "-", "-", "12.3, -", *["-"] * 5]


def test_oracles_table(tmp_path):
    wrong = {**figure("naive"), "wrong": "wrong result"}
    del wrong["us"]
    figures = [figure(us=531.0), figure(implementation="cuda_ref", us=520.0), figure("flash", us=1762.0), wrong, figure("mma", shape="b2_kv1_t1_h1")]
    results = tool.read([result_file(tmp_path, "a.json", figures)])
    assert rows_of(tool.oracles_table(results, json.loads(text_of(tool.PEERS)))) == [
        ["1, 4096, 16, 64", "11.4", "531 (2.1 %), 1.02", "1,762 (0.65 %), -", "wrong"]]


def test_tiles_table(tmp_path):
    figures = [figure("mma", us=40.0, tile="m64"), figure("mma", us=71.0, tile="m32", override="m32"),
               figure("mma", "cuda_ref", us=70.0, tile="m32", override="m32"), figure("mma", us=90.0, tile="m16", override="m16")]
    table = tool.tiles_table(tool.read([result_file(tmp_path, "a.json", figures)]))
    assert rows_of(table) == [["1, 4096, 16, 64: numba_verify", "40.0 `m64`", "71.0", "90.0"], ["1, 4096, 16, 64: cuda_ref", "-", "70.0", "-"]]
    assert tool.tiles_table(tool.read([])) == "No tiles are measured yet."


def test_ratios_are_formed_within_one_file(tmp_path):
    peers = json.loads(text_of(tool.PEERS))
    ours, twin = [figure("mma")], [figure("mma", "cuda_ref", us=50.0)]
    together = tool.read([result_file(tmp_path, "a.json", ours + twin)])
    apart = tool.read([result_file(tmp_path, "b.json", ours), result_file(tmp_path, "c.json", twin, date="2026-12-01T00:00:00")])
    assert rows_of(tool.results_table(together, peers))[0][3] == "100 (11 %), 2.00"
    table = tool.results_table(apart, peers)
    assert rows_of(table)[0][3] == "100 (11 %), -" and "2026-11-30, 2026-12-01." in table


def test_a_file_of_tiles_gives_tiles_alone(tmp_path):
    both = tool.read([result_file(tmp_path, "a.json", [figure("mma")]),
                      result_file(tmp_path, "b.json", [figure("mma", us=120.0), figure("mma", us=70.0, override="m16k16b4")])])
    assert [one["us"] for one in both["figures"].values()] == [100.0] and [one["us"] for one in both["tiles"]] == [70.0]


@pytest.mark.parametrize("second, text", [
    ({"figures": [figure()]}, "b.json: b1_kv4096_t16_h64 numba_verify paged was measured twice; keep one of the two"),
    ({"figures": [], "gpu": "Toy GPU"}, "b.json: expected gpu 'NVIDIA H200' like the files before it, got 'Toy GPU'"),
    ({"figures": [figure("mma", shape="large")]}, "expected a shape such as b1_kv4096_t16_h64, got 'large'")],
    ids=["twice", "another_gpu", "shape"])
def test_results_that_make_no_table(tmp_path, capsys, second, text):
    paths = [result_file(tmp_path, "a.json", [figure()]), result_file(tmp_path, "b.json", **second)]
    assert tool.main([str(path) for path in paths]) == 2
    assert capsys.readouterr().err == f"results_table: {text}\n"


def test_update_rewrites_what_is_marked_and_nothing_else(tmp_path, capsys):
    document = tmp_path / "page.md"
    document.write_text("before\n<!-- results:begin -->\nold\n<!-- results:end -->\nafter\n")
    results = result_file(tmp_path, "a.json", [figure("mma")])
    assert tool.main([str(results), "--update", str(document)]) == 0
    once = document.read_text()
    assert once.startswith("before\n<!-- results:begin -->\n\nNVIDIA H200") and once.endswith("|\n\n<!-- results:end -->\nafter\n")
    assert "old" not in once
    assert tool.main([str(results), "--update", str(document)]) == 0
    assert document.read_text() == once
    document.write_text("nothing here")
    assert tool.main([str(results), "--update", str(document)]) == 2
    assert "expected a part between <!-- results:begin --> and <!-- results:end -->, found none" in capsys.readouterr().err
    assert document.read_text() == "nothing here"


def test_no_results_yet():
    text = tool.results_table(tool.read([]), json.loads(text_of(tool.PEERS)))
    assert text == f"No results are committed yet. `{tool.COMMAND}` on an H200 writes them."


def test_the_tool_needs_nothing_installed():
    done = subprocess.run([sys.executable, "-S", ROOT / "tools" / "results_table.py", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "--update DOCUMENT" in done.stdout, done.stderr


# --- what is named exists -----------------------------------------------------------------------------------------------------


def functions_of(path):
    return {node.name for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.FunctionDef)}


@each_page
def test_every_test_named_exists(page):
    named = re.findall(r"`(?:tests/)?(test_\w+\.py)::(test_\w+)`", text_of(page))
    assert named or page in (README, HOW)
    functions = {file: functions_of(ROOT / "tests" / file) for file, _ in named if (ROOT / "tests" / file).is_file()}
    missing = [f"{file}::{name}" for file, name in named if name not in functions.get(file, ())]
    assert not missing, f"{page.name} names tests that do not exist: {', '.join(missing)}"


def test_every_promise_has_tests():
    """Sections of the contract that promise something end with the tests that hold it, and the promises are all there."""
    sections = re.split(r"\n##+ ", text_of(CONTRACT))[1:]
    promises = [section for section in sections if re.match(r"\d+\. ", section)]
    assert [int(section.split(".")[0]) for section in promises] == list(range(1, 14))
    headings = ("The operation", "The calls", "Arguments", "Arrays, libraries, streams", "Bad input", "DraftTree", "The C library")
    others = [section for section in sections if section.splitlines()[0] in headings]
    assert len(others) == len(headings)
    for section in promises + others:
        assert "\nTests: `test_" in section, section.splitlines()[0]


@each_page
def test_links_and_anchors(page):
    for target in re.findall(r"\]\(([^)]+)\)|<img src=\"([^\"]+)\"", text_of(page)):
        path, _, anchor = (target[0] or target[1]).partition("#")
        assert "://" not in path, f"{page.name}: an address that no test can follow: {path}"
        other = page.parent / path if path else page
        assert other.exists(), f"{page.name} links to {path}"
        if anchor:
            assert anchor in anchors(other), f"{page.name} links to {path}#{anchor}"


def anchors(page):
    """GitHub's names of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text_of(page), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_page
def test_files_named_exist(page):
    for name in re.findall(r"`((?:numba_verify|cuda_ref|tests|docs|tools)/[\w./-]*)`", text_of(page)):
        assert (ROOT / name).exists() or name == "docs/results/h200.json", f"{page.name} names {name}"


@each_page
def test_nothing_of_the_machine_or_of_a_registry(page):
    found = re.findall(r"/(?:work|root|home|tmp|opt)/|pypi\.org|files\.pythonhosted|https?://(?!github\.com/)\S+", text_of(page))
    assert not found


def test_every_argument_is_in_the_contract():
    text, own = text_of(CONTRACT), {"self"}
    for function in (nv.verify_mla, nv.plan, nv.can_run, nv.warmup, nv.Plan.run, nv.Plan.update):
        for name in set(inspect.signature(function).parameters) - own:
            assert re.search(rf"`[^`\n]*\b{name}\b[^`\n]*`", text), f"{function.__name__}: {name} is not in docs/contract.md"
    for name in nv.__all__:
        assert name in text


def test_every_c_function_is_in_the_contract():
    header = text_of(ROOT / "cuda_ref/verify_attn.h")
    functions = set(re.findall(r"^NVR_API [\w *]*?(nvr_\w+)\(", header, re.MULTILINE))
    assert functions and all(f"`{name}`" in text_of(CONTRACT) for name in functions)


def test_commands_and_targets_of_the_readme():
    commands = re.findall(r"python -m numba_verify ([a-z-]+)", "".join(map(text_of, PAGES)))
    assert {"check", "env"} <= set(commands) <= set(COMMANDS)
    makefile = text_of(ROOT / "Makefile")
    targets = re.findall(r"^make (\w+)", text_of(README), re.MULTILINE)
    assert {"demo", "test"} <= set(targets) and all(f"\n{target}:" in makefile for target in targets)


def test_environment_variables():
    """Every variable that the code asks for is in the README's table, and nothing else is."""
    table = text_of(README).split("## Environment variables")[1].split("\n## ")[0]
    listed = {name for line in table.splitlines() if line.startswith("| `") for name in re.findall(r"`([A-Z_]+)`", line.split("|")[1])}
    asked = set(env.VARIABLES)
    for folder in ("numba_verify", "cuda_ref", "tests", "tools"):
        for path in (ROOT / folder).rglob("*.py"):
            asked |= set(re.findall(r"\benviron(?:\.get\(|\[)\"([A-Z_]+)\"", path.read_text(encoding="utf-8")))
    assert listed == asked - {"PYTHONPATH", "HOME"}


# --- numbers ------------------------------------------------------------------------------------------------------------------


def three_digits(gigabytes):
    return f"{float(f'{gigabytes:.3g}'):g} GB"


def test_traffic_model():
    """The table of bytes in how-it-works.md, from its formulas."""
    row_bytes = 576 * 2
    for batch, context, drafts, heads in ((1, 4096, 16, 64), (1, 185000, 8, 8), (128, 4096, 4, 16)):
        rows, keys, tile = batch * drafts, context + drafts, choose_tile(heads).head_tile
        cells = [rows * heads * keys, rows * -(-heads // tile) * keys, batch * keys]
        line = f"| {batch}, {context}, {drafts}, {heads} | {' | '.join(three_digits(count * row_bytes / 1e9) for count in cells)} |"
        assert line in text_of(HOW), line


def test_clocks_of_a_tile():
    """The table of shared-memory clocks in how-it-works.md, and what it makes of two shapes."""
    text, totals = text_of(HOW), {}
    columns = {}
    for heads in (16, 8):
        keys, row, value = 16, 576, 512
        load, scores = keys * row * 4 // 128, 8 * row // 32 * (heads + keys // 8)
        accumulate = 8 * keys * (heads + value // 256)
        totals[heads] = load + scores + accumulate
        columns[heads] = {"load_keys": load, "scores": scores, "accumulate": accumulate, "sum": totals[heads],
                          "for scale: multiply-adds": heads * keys * (row + value) // 128}
    for name in columns[16]:
        assert re.search(rf"^\| {name} \|.*\| {columns[16][name]} \| {columns[8][name]} \|$", text, re.MULTILINE), name
    for batch, context, drafts, heads in ((1, 4096, 16, 64), (1, 185000, 8, 8)):
        tile = choose_tile(heads).head_tile
        tiles = batch * drafts * -(-heads // tile) * -(-(context + drafts) // 16)
        us = tiles * totals[tile] / 132 / 1.98e3
        assert f"{tiles:,}" in text and f"{us:.0f} us" in text


def test_tilings():
    sizes = [f"{tile.shared_bytes(Shape(512, 64, 'bfloat16')):,}" for tile in TILE_CONFIGS]
    assert f"{sizes[0]}, {sizes[1]} and {sizes[2]} B" in text_of(HOW)
    assert ", ".join(f"{tile.head_tile} x {tile.kv_tile}" for tile in TILE_CONFIGS) in text_of(HOW)


def test_host_times_of_the_readme():
    """The README's sentence on host time gives the least and the greatest of the committed figures of the record that it names."""
    record = ROOT / re.search(r"asv's record of \w+\]\((\S+)\)", text_of(README)).group(1)
    figures = asv_results.figures(asv_results.load(record))
    for implementation in ("numba_verify", "cuda_ref"):
        spans = []
        for call in ("run", "update"):
            us = [value for (name, params), value in figures.items() if name == "host.Host.track_host_us" and value is not None
                  and not math.isnan(value) and (params[0], params[-1]) == (implementation, call)]
            spans.append(f"`{call}` {min(us):.1f} to {max(us):.1f} us")
        assert f"{' and '.join(spans)} for {implementation}" in " ".join(text_of(README).split())


def executor(kernel="paged", deterministic=False, **capacities):
    sizes = {"max_batch": 3, "max_total_q": 70, "max_kv_entries": 900} | capacities
    return backend.KernelExecutor(PlanSpec(20, 128, 64, "bfloat16", 4, True, kernel, deterministic, **sizes, device=None))


@pytest.mark.parametrize("kernel, deterministic", [("naive", False), ("paged", False), ("paged", True)])
def test_workspace_table(kernel, deterministic):
    """The formulas of how-it-works.md give the bytes of every array; "paged alone" is so."""
    made = executor(kernel, deterministic)
    values = {"max_batch": 3, "max_total_q": 70, "max_kv_entries": 900, "page_size": 4, "latent_dim": 128, "words": 3,
              "CTAs": made.num_ctas, "HT": made.tile.head_tile, "P": 0 if kernel != "paged" else 128 * 3 if deterministic else 2 * made.num_ctas}
    table = text_of(HOW).split("## The workspace")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \| ([^|]*) \|$", table, re.MULTILINE)
    documented = {name: eval(formula, {}, values) for name, formula, note in rows if kernel == "paged" or "`paged` alone" not in note}
    assert {name: -(-size // 256) * 256 for name, size in documented.items()} == {name: field.nbytes for name, field in made.fields.items()}


def test_the_mask_costs_nothing_that_grows_with_the_prefix():
    """Contract promise 12: a longer prefix costs 4 B a token for its slot, and nothing else."""
    short, long = executor(max_kv_entries=1024), executor(max_kv_entries=1024 * 1024)
    assert long.workspace_bytes - short.workspace_bytes == 4 * 4 * (1024 * 1024 - 1024)
    assert short.fields["visibility"].nbytes == long.fields["visibility"].nbytes
