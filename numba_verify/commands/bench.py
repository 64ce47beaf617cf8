"""Time kernels on the GPU: microseconds and percent of the floor, each result checked first.

Device time by CUDA graph replay, median over replays, KV scattered token by token and cold in L2. A wrong result gives no time.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import time
from pathlib import Path
from typing import Any

from .. import __version__, shapes
from ..bench import CALLS, Workload
from ..errors import UnsupportedError
from ..gpu import driver
from ..kernels.mma_config import MMA_TILES, MmaTile
from ..kernels.wgmma_config import WGMMA_TILES, WgmmaTile
from ..shapes import SHAPES, Shape
from ..timing import Timing, graph_time
from . import accuracy
from .console import MAKING_READY, begun, one_line, say, step, table
from .places import Place, driver_text
from .runners import GPU_KERNELS, IMPLEMENTATIONS, UNWRITTEN, Runner, describe, find

#: Kernels with tiles that a shape chooses from.
TILES = {"mma": MMA_TILES, "wgmma": WGMMA_TILES}
#: Seconds that the replays of one figure may take; a slow kernel is replayed less often, but not less than LEAST_REPLAYS times.
SECONDS = 5.0
LEAST_REPLAYS = 5
#: From here on one call is timed on the host's clock: the launch is a ten-thousandth of it, and a graph of many would take minutes.
LONG_SECONDS = 0.2
#: bfloat16 and no peaked scores: the dense computation errs less than the floor of the contract.
ALLOWED = accuracy.FACTOR * accuracy.FLOOR["bfloat16"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", action="append", metavar="SHAPE",
                        help="name or number of a shape (--list), or requests,context,drafts,heads; may be repeated; default: all")
    parser.add_argument("--kernel", action="append", choices=GPU_KERNELS, help="may be repeated; default: all that can run")
    parser.add_argument("--tile", action="append", choices=[str(tile) for tiles in TILES.values() for tile in tiles], default=[],
                        help="run mma or wgmma with this tile too (rows, keys a step, blocks or slots in flight); may be repeated")
    parser.add_argument("--implementation", action="append", choices=IMPLEMENTATIONS, help="may be repeated; default: both")
    parser.add_argument("--replays", type=int, default=30, help="graph replays of a figure (default 30; fewer for slow kernels)")
    parser.add_argument("--warm", action="store_true", help="also time with KV warm in L2")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures as JSON")
    parser.add_argument("--list", action="store_true", help="list the shapes")


def run(arguments: argparse.Namespace) -> int:
    if arguments.list:
        say(list_of_shapes())
        return 0
    chosen = [parse_shape(text) for text in arguments.shape] if arguments.shape else list(SHAPES)
    if arguments.replays < 1:
        raise ValueError(f"--replays: expected at least 1, got {arguments.replays}")
    driver.require_device("bench")
    place, when = Place(0), datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    say(f"{place.name}, {driver_text()}, numba_verify {__version__}, {when}")
    kernels, implementations = arguments.kernel or GPU_KERNELS, arguments.implementation or IMPLEMENTATIONS
    with step(MAKING_READY):
        runners, absent = find(place, implementations, kernels, num_heads=16)
    for line in describe(absent, in_full=arguments.kernel is not None):
        say(line)
    if not runners:
        raise UnsupportedError("bench: none of the kernels asked for can run here")
    figures = [figure for shape in chosen for figure in bench_shape(shape, runners, arguments)]
    say()
    say(report(figures, arguments.warm))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"gpu": place.name, "driver": driver_text(), "version": __version__, "date": when,
                                              "figures": figures}, indent=1), encoding="utf-8")
        say(f"written: {arguments.json}")
    return 1 if any(figure["wrong"] for figure in figures) else 0


def parse_shape(text: str) -> Shape:
    """A shape by name, by its number in the list, or by its four numbers."""
    by_name = {shape.name: shape for shape in SHAPES}
    if text in by_name:
        return by_name[text]
    try:
        numbers = [int(field) for field in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) == 4 and min(numbers) >= 1:
        return Shape(*numbers)
    if len(numbers) == 1 and 0 <= numbers[0] < len(SHAPES):
        return SHAPES[numbers[0]]
    raise ValueError(f"--shape: expected a name or number of --list, or requests,context,drafts,heads such as 1,4096,16,64; got {text!r}")


def list_of_shapes() -> str:
    headers = ["number", "name", "requests", "context", "drafts", "heads"]
    return table(headers, [[i, shape.name, *shape] for i, shape in enumerate(SHAPES)], right=[name for name in headers if name != "name"])


def bench_shape(shape: Shape, runners: list[Runner], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The figures of one shape. An error of one runner (a kernel that cannot take the shape) is its figure, and the next goes on."""
    say(f"\n{shape.name}: {shape.batch} x {shape.context} cached tokens, {shape.drafts} draft tokens, {shape.heads} heads")
    try:
        workload = Workload(shape)
    except driver.DriverError as error:  # larger than this GPU's memory
        say(f"  left out: {one_line(error)}")
        return []
    figures = []
    tiles = {kernel: [tile for tile in some if str(tile) in arguments.tile] for kernel, some in TILES.items()}
    for runner, tile in [(one, tile) for one in runners for tile in (None, *tiles.get(one.kernel, ()))]:
        figure = {"shape": shape.name, "implementation": runner.implementation, "kernel": runner.kernel,
                  "floor_us": workload.floor_us(), "flop": shape.flop(workload.visible_drafts), "bytes": shape.bytes, "wrong": ""}
        if tile is not None:
            figure["override"] = str(tile)
        with begun(f"  {runner.label} {tile or ''}".rstrip()) as end:
            try:
                figure.update(measure(workload, runner, tile, arguments))
            except (RuntimeError, ValueError) as error:
                figure["wrong"] = one_line(error)
            end(figure["wrong"] or f"{figure['us']:,.1f} us")
        figures.append(figure)
    return figures


def measure(workload: Workload, runner: Runner, tile: MmaTile | WgmmaTile | None, arguments: argparse.Namespace) -> dict[str, Any]:
    """Check one runner's result, then time it. The figure of a wrong result says so and holds no time. `tile`: None = the shape chooses."""
    plan = workload.plan(runner.module, runner.kernel, tile)
    out = workload.out.buffer
    with driver.context(workload.ordinal):
        # What the runner before left there must not pass for a result: every bit set is a NaN.
        driver.call("cuMemsetD8Async", out.address, UNWRITTEN, out.nbytes, 0)
        workload.run(plan)
        driver.synchronize(0)
        begin = time.perf_counter()
        workload.run(plan)
        driver.synchronize(0)
        seconds = time.perf_counter() - begin
    error = workload.check()
    figure = {"error": error if math.isfinite(error) else None, "tile": plan.tile, "workspace_bytes": plan.workspace_bytes}
    if not error <= ALLOWED:
        return {**figure, "wrong": f"wrong result, relative error {error:.2e}, allowed {ALLOWED:.2e}: not timed"}
    if seconds > LONG_SECONDS:
        return {**figure, **_entry("", Timing(1e6 * seconds, 1e6 * seconds, 1e6 * seconds, 1, 1))}
    replays = max(min(arguments.replays, int(SECONDS / (CALLS * seconds))), min(LEAST_REPLAYS, arguments.replays))
    figure.update(_entry("", workload.time(plan, replays)))
    if arguments.warm:
        calls = [lambda stream: workload.run(plan, 0, stream)] * CALLS
        figure.update(_entry("warm_", graph_time(workload.ordinal, calls, replays)))
    return figure


def _entry(prefix: str, timing: Timing) -> dict[str, Any]:
    return {f"{prefix}us": timing.median_us, f"{prefix}low_us": timing.low_us, f"{prefix}high_us": timing.high_us,
            f"{prefix}calls": timing.calls, f"{prefix}replays": timing.replays}


def report(figures: list[dict[str, Any]], warm: bool) -> str:
    """All figures as a table. Percent of the floor are of the cold time."""
    headers = ["shape", "implementation", "kernel", "tile", "error", "us", "low", "high", "replays", *["warm us"] * warm, "% of the floor"]
    rows = []
    for figure in figures:
        row = [figure["shape"], figure["implementation"], figure["kernel"], figure.get("tile") or "-", _number(figure.get("error"), ".1e")]
        row += [_number(figure.get(name), ",.1f") for name in ("us", "low_us", "high_us")] + [figure.get("replays", "-")]
        row += [_number(figure.get("warm_us"), ",.1f")] if warm else []
        share = 100 * figure["floor_us"] / figure["us"] if figure["floor_us"] and "us" in figure else None
        rows.append([*row, _number(share, ".1f")])
    text = table(headers, rows, right=headers[4:])
    if all(figure["floor_us"] for figure in figures):
        return text
    return f"{text}\nno floor: the ceilings of this GPU are not known (those of {', '.join(shapes.CEILINGS)} are)"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
