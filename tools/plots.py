"""Draws the plots of README and docs from committed result files: `python tools/plots.py`. Needs the extra `plots` (matplotlib).

    docs/images/floor.svg     percent of the floor at every shape            docs/results/h200*.json (bench --json), peers_h200.json
    docs/images/context.svg   latency against context length                 docs/results/sweep_h200.json (asv_bench/sweep.py)
    docs/images/drafts.svg    latency against tree size                      the same
    docs/images/heads.svg     latency against heads                          the same
    docs/images/history.svg   numba / CUDA C and latency, commit by commit   asv_bench/results/nvidia-h200

A plot whose data is not there yet is left out, and said so. The same data gives the same bytes.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

import matplotlib
import results
import results_table

matplotlib.use("svg")
from matplotlib import pyplot

IMAGES, MACHINE = results.ROOT / "docs" / "images", "nvidia-h200"
OURS, TWIN = "numba_verify", "cuda_ref"
#: Okabe and Ito's colours, which the colour-blind tell apart; ours are the strong ones.
COLOURS = {OURS: "#0072B2", TWIN: "#D55E00", "unfused": "#009E73", "fi_fa2": "#CC79A7", "fa3_cascade": "#E69F00", "flashmla": "#56B4E9"}
MARKERS = {OURS: "o", TWIN: "s", "unfused": "^", "fi_fa2": "v", "fa3_cascade": "D", "flashmla": "P"}
LABELS = {OURS: "numba_verify", TWIN: "cuda_ref (CUDA C)", "unfused": "unfused torch", "fi_fa2": "FlashInfer fa2, no tree mask",
          "fa3_cascade": "FlashAttention-3 cascade", "flashmla": "FlashMLA, no tree mask"}
#: Kernels of the history: not the colours of the implementations.
GREYS = ("#000000", "#666666", "#999999", "#bbbbbb")
#: Peers of the other run that are drawn: the tree verify on Hopper, the fastest there, and the one that runs on every GPU.
PEERS = ("fa3_cascade", "flashmla", "fi_fa2", "unfused")
#: Sweep -> what moves, its place in a shape, what stays.
AXES = {"context": ("cached tokens", 1, "1 request, 16 draft tokens, 64 heads"),
        "drafts": ("draft tokens", 2, "1 request, 32,768 cached tokens, 16 heads"),
        "heads": ("heads", 3, "1 request, 32,768 cached tokens, 8 draft tokens")}
#: Shapes whose latency the history shows: bound by latency, by memory, by arithmetic.
FOLLOWED = ("b1_kv4096_t16_h64", "b128_kv4096_t4_h16", "b16_kv16384_t32_h128")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Draw the plots of README and docs.")
    parser.add_argument("--images", type=Path, default=IMAGES, help="where they go (default: docs/images)")
    options = parser.parse_args(arguments)
    options.images.mkdir(parents=True, exist_ok=True)
    with pyplot.rc_context({"svg.hashsalt": "numba_verify", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False,
                            "axes.grid": True, "grid.color": "#dddddd", "grid.linewidth": 0.6, "legend.frameon": False, "figure.dpi": 100}):
        for name, figure in figures(load()).items():
            if figure is None:
                print(f"plots: {name}: no data yet")
                continue
            figure.savefig(options.images / f"{name}.svg", metadata={"Date": None}, bbox_inches="tight")
            pyplot.close(figure)
            print(f"plots: {options.images / name}.svg")
    return 0


def load() -> dict[str, Any]:
    """All result files; what is missing is empty."""
    peers = json.loads(results_table.PEERS.read_text(encoding="utf-8"))
    sweep = results_table.RESULTS / "sweep_h200.json"
    history = sorted((results.load(path) for path in (results.RESULTS / MACHINE).glob("????????-*.json")), key=_order)
    return {"bench": results_table.read(results_table.result_files()), "peers": peers,
            "sweep": json.loads(sweep.read_text(encoding="utf-8")) if sweep.exists() else {"figures": []}, "history": history}


def figures(data: dict[str, Any]) -> dict[str, Any]:
    """Name -> figure, None where there is no data."""
    drawn = {"floor": draw_floor(data["bench"], data["peers"])}
    drawn.update({sweep: draw_sweep(sweep, data["sweep"], data["peers"]) for sweep in AXES})
    return {**drawn, "history": draw_history(data["history"])}


def draw_floor(bench: dict[str, Any], peers: dict[str, Any]) -> Any:
    """Bars: percent of the floor at every shape, of the faster of both kernels and its twin; marks: mma alone, and the peers, of their own run."""
    fastest = {(row["shape"], name): _fastest(bench, row["shape"], name) for row in peers["rows"] for name in (OURS, TWIN)}
    shapes = [row["shape"] for row in peers["rows"] if fastest[row["shape"], OURS]]
    if not shapes:
        return None
    figure, axes = pyplot.subplots(figsize=(9, 4.2))
    for name, offset in ((OURS, -0.2), (TWIN, 0.2)):
        share = {i: _share(fastest[shape, name]) for i, shape in enumerate(shapes) if fastest[shape, name]}
        axes.bar([i + offset for i in share], list(share.values()), 0.38, color=COLOURS[name], label=LABELS[name], zorder=2)
    alone = {i: bench["figures"].get((shape, OURS, results_table.MAIN), {}) for i, shape in enumerate(shapes)}
    marks = [(i - 0.2, _share(found)) for i, found in alone.items() if found.get("us")]
    if marks:
        axes.plot(*zip(*marks, strict=True), "_", color="white", markeredgewidth=2, markersize=11, zorder=3)
        axes.plot([], [], "s", color=COLOURS[OURS], label=f"up to the white line: {results_table.MAIN}, for every GPU")
    us = {row["shape"]: row["us"] for row in peers["rows"]}
    for name in PEERS:
        points = [(i, 100 * fastest[shape, OURS]["floor_us"] / us[shape][name]) for i, shape in enumerate(shapes) if us[shape][name]]
        axes.plot(*zip(*points, strict=True), MARKERS[name], color=COLOURS[name], markeredgecolor="black", markeredgewidth=0.6, markersize=6,
                  label=f"{LABELS[name]} (another run)", zorder=3)
    axes.set_xticks(range(len(shapes)), [results_table.extents(shape) for shape in shapes], rotation=40, ha="right")
    axes.set_xlabel("requests, cached tokens, draft tokens, heads")
    axes.set_ylabel("percent of the floor, higher is better")
    axes.set_ylim(0, 100)
    axes.grid(axis="x", visible=False)
    axes.set_title(f"{bench['gpu']}: share of what arithmetic and memory allow", fontsize=10)
    axes.legend(ncols=3, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.42))
    return figure


def _fastest(bench: dict[str, Any], shape: str, name: str) -> dict[str, Any] | None:
    """The figure of the faster of the kernels of the main table."""
    found = [bench["figures"].get((shape, name, kernel), {}) for kernel in (results_table.HOPPER, results_table.MAIN)]
    return min((figure for figure in found if figure.get("us") and figure.get("floor_us")), key=lambda figure: figure["us"], default=None)


def _share(figure: dict[str, Any]) -> float:
    return 100 * figure["floor_us"] / figure["us"]


def draw_sweep(sweep: str, data: dict[str, Any], peers: dict[str, Any]) -> Any:
    """Lines: what was measured in one run; hollow markers: peers of another run, where they were measured at such a shape."""
    title, place, rest = AXES[sweep]
    found = [figure for figure in data["figures"] if figure["sweep"] == sweep and figure["us"]]
    if not found:
        return None
    figure, axes = pyplot.subplots(figsize=(6, 4))
    for name in dict.fromkeys(figure["impl"] for figure in found):
        points = sorted((extent(one["shape"], place), one["us"]) for one in found if one["impl"] == name)
        axes.plot(*zip(*points, strict=True), marker=MARKERS[name], color=COLOURS[name], label=LABELS[name], zorder=3)
    floor = sorted({(extent(one["shape"], place), one["floor_us"]) for one in found if one["floor_us"]})
    if floor:
        axes.plot(*zip(*floor, strict=True), ":", color="black", label="floor")
    at = {one["shape"]: extent(one["shape"], place) for one in found}
    measured = {figure["impl"] for figure in found}
    for name in PEERS:
        points = [(at[row["shape"]], row["us"][name]) for row in peers["rows"] if row["shape"] in at and row["us"][name]]
        if points and name not in measured:
            axes.plot(*zip(*points, strict=True), MARKERS[name], color=COLOURS[name], markerfacecolor="none", markersize=7,
                      label=f"{LABELS[name]} (another run)")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = sorted(set(at.values()))
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.minorticks_off()
    low, high = axes.get_ylim()
    steps = [step * 10**power for power in range(0, 6) for step in (1, 2, 5) if low <= step * 10**power <= high]
    axes.set_yticks(steps, [f"{step:,}" for step in steps])
    axes.set_xlabel(title)
    axes.set_ylabel("microseconds a call, lower is better")
    axes.set_title(f"{data['gpu']}: {rest}", fontsize=10)
    axes.legend(fontsize=8, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.16))
    return figure


def draw_history(history: list[dict[str, Any]]) -> Any:
    """Above: numba / CUDA C by kernel, median over the shapes. Below: latency of the fastest kernel at three shapes."""
    commits = [(data["commit_hash"][:8], cold_times(data)) for data in history]
    commits = [(commit, times) for commit, times in commits if times]
    if len(commits) < 2:
        return None
    figure, (above, below) = pyplot.subplots(2, 1, figsize=(8, 6.5), sharex=True)
    places = range(len(commits))
    kernels = list(dict.fromkeys(kernel for _, times in reversed(commits) for _, kernel, _ in times))
    for i, kernel in enumerate(kernels):
        ratios = [_ratio(times, kernel) for _, times in commits]
        above.plot(places, ratios, marker="os^vDP"[i % 6], color=GREYS[i % len(GREYS)], label=kernel)
    above.axhspan(0.95, 1.05, color="#eeeeee", zorder=0)
    above.set_ylabel("numba / CUDA C, median of the shapes")
    above.set_title(f"{history[-1]['conditions'].get('gpu', MACHINE)}: device time, commit by commit", fontsize=10)
    above.legend(fontsize=8, ncols=len(kernels))
    for shape, style in zip(FOLLOWED, ("-", "--", ":"), strict=True):
        for name in (OURS, TWIN):
            best = [min((us for (impl, _, of), us in times.items() if (impl, of) == (name, shape)), default=math.nan) for _, times in commits]
            below.plot(places, best, style, marker=MARKERS[name], color=COLOURS[name],
                       label=f"{results_table.extents(shape)}: {'numba' if name == OURS else 'CUDA C'}")
    below.set_yscale("log")
    below.set_ylabel("microseconds, fastest kernel")
    below.set_xticks(places, [commit for commit, _ in commits], rotation=40, ha="right", family="monospace")
    below.legend(fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.32))
    return figure


def cold_times(data: dict[str, Any]) -> dict[tuple[str, str, str], float]:
    """(implementation, kernel, shape) -> microseconds with KV cold in L2."""
    return {params[:3]: value for (benchmark, params), value in results.figures(data).items()
            if benchmark == "device.Device.track_device_us" and params[3] == "cold" and value is not None and not math.isnan(value)}


def _ratio(times: dict[tuple[str, str, str], float], kernel: str) -> float:
    shapes = [shape for impl, of, shape in times if (impl, of) == (OURS, kernel) and (TWIN, kernel, shape) in times]
    return statistics.median(times[OURS, kernel, shape] / times[TWIN, kernel, shape] for shape in shapes) if shapes else math.nan


def _order(data: dict[str, Any]) -> tuple[int, int]:
    """By date; commits of one second as git has them, parents first."""
    count = results.git("rev-list", "--count", data["commit_hash"])
    return data["date"], int(count or 0)


def extent(shape: str, place: int) -> int:
    """One of the four numbers of a shape's name."""
    return int(results_table.extents(shape).split(", ")[place])


if __name__ == "__main__":
    sys.exit(main())
