"""Verify published draft trees over a scattered paged cache; show a tree, the agreement of all kernels, and times.

On a GPU all kernels run at a real size. Without one they run on the CPU (numba_verify in the simulator, cuda_ref in its host build) at a
size that ends within a minute.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .. import __version__, drawing, published
from ..gpu import driver
from ..shapes import CEILINGS
from ..timing import COLD_BYTES, graph_time
from . import accuracy
from .batches import Batch, Layout, Values, draw, lay_out, tree_masks
from .console import MAKING_READY, begun, count, one_line, say, step, table
from .places import Place, best_place
from .runners import GPU_KERNELS, IMPLEMENTATIONS, REFERENCE, Absent, Call, Runner, describe, find
from .show_tree import add_picture_arguments, write_pictures

TREES = ("eagle-mc-sim-7b-63", "medusa-vicuna-7b-stage2", "sequoia-l40-cnn-68m-13b-stochastic-s16")
GPU_TREES = (*TREES, "sequoia-l40-cnn-68m-13b-stochastic-s128")
DTYPE, PAGE_SIZE, SEED = "bfloat16", 16, 2024
#: A graph holds at least so many calls, so that its launch is a small part of a replay.
CALLS = 8


class Size(NamedTuple):
    """Row layout, heads, and the prefix lengths that the requests take in turn."""

    heads: int
    latent_dim: int
    rope_dim: int
    prefix: tuple[int, ...]


GPU_SIZE = Size(heads=16, latent_dim=512, rope_dim=64, prefix=(4096, 3001, 5000, 2048))
#: The simulator does a million multiply-adds a second. Prefix and tree together fill 2, 5 and 2 KV tiles of 16.
CPU_SIZE = Size(heads=4, latent_dim=128, rope_dim=64, prefix=(6, 16, 13))


class Result(NamedTuple):
    """What one runner made of the batch."""

    runner: Runner
    call: Call
    out: np.ndarray
    verdict: accuracy.Verdict
    seconds: float  # wall time of one run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tree", action="append", metavar="NAME", choices=published.names(),
                        help="a published tree to verify, may be repeated; default: one each of EAGLE, Medusa and Sequoia")
    add_picture_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    place = best_place()
    size, names = (CPU_SIZE, arguments.tree or TREES) if place.ordinal is None else (GPU_SIZE, arguments.tree or GPU_TREES)
    say(f"numba_verify {__version__} demo on {place.name}")
    if place.ordinal is None:
        say(f"No GPU ({driver.unavailable()}): kernels run in the simulator and in the host build, at a small size.")
    show_tree(arguments, names[0])
    batch = make_batch(names, size)
    say(batch_table(batch, names, size))
    with step("computing the exact answer in float64"):
        answer = accuracy.solve(batch.values)
    results, absent = compare(batch, answer, place, size)
    faults = [f"{result.runner.label}: {result.verdict.fault}" for result in results if result.verdict.fault]
    say()
    say(agreement_table(results))
    faults += differences(results)
    say()
    say(host_times(results) if place.ordinal is None else gpu_times(batch, results, place))
    say()
    for line in describe(absent, in_full=False):
        say(line)
    say(f"numba_verify demo: FAILED on {place.name}: {'; '.join(faults)}" if faults else
        f"numba_verify demo: OK, the reference and {count(len(results) - 1, 'kernel')} agree with float64 on {place.name}")
    return 1 if faults else 0


def show_tree(arguments: argparse.Namespace, name: str) -> None:
    """One tree with its mask, and the pictures that were asked for."""
    tree = published.load(name)
    say(f"\nThe draft tree {name} and its mask; every draft token sees the whole prefix as well.\n")
    say(drawing.to_text(tree))
    write_pictures(arguments, tree, name)


def make_batch(names: Sequence[str], size: Size) -> Batch:
    """One request a tree."""
    rng = np.random.default_rng(SEED)
    prefix = [size.prefix[r % len(size.prefix)] for r in range(len(names))]
    masks = tree_masks([published.load(name).parents for name in names])
    values = draw(rng, masks, prefix, size.heads, size.latent_dim, size.rope_dim, DTYPE)
    return lay_out(rng, values, Layout(page_size=PAGE_SIZE))


def batch_table(batch: Batch, names: Sequence[str], size: Size) -> str:
    """The requests of the batch."""
    values = batch.values
    rows = [[r, name, values.counts[r], values.prefix[r]] for r, name in enumerate(names)]
    title = (f"\nThe batch: {count(values.total_q, 'draft token')}, {size.heads} heads, rows of {size.latent_dim} + {size.rope_dim} values "
             f"({DTYPE}), scattered pages of {PAGE_SIZE}\n")
    return title + table(["request", "tree", "draft tokens", "prefix"], rows, right=["request", "draft tokens", "prefix"]) + "\n"


def compare(batch: Batch, answer: accuracy.Answer, place: Place, size: Size) -> tuple[list[Result], list[Absent]]:
    """Run the batch on everything there is; (results, what is missing)."""
    with step(MAKING_READY):
        runners, absent = find(place, IMPLEMENTATIONS, GPU_KERNELS, num_heads=size.heads, latent_dim=size.latent_dim,
                               rope_dim=size.rope_dim, dtype=DTYPE, page_size=PAGE_SIZE)
    results = []
    for runner in (REFERENCE, *runners):
        with begun(f"{runner.label} ({runner.how})") as end:
            results.append(measure(runner, batch, answer))
            end(results[-1].verdict.fault or "agrees")
    return results, absent


def measure(runner: Runner, batch: Batch, answer: accuracy.Answer) -> Result:
    """One run, timed on the host's clock and compared with float64; an error is a fault, and the next runner goes on."""
    try:
        call = Call(runner, batch)
        begin = time.perf_counter()
        call.run()
        runner.place.synchronize()
        seconds = time.perf_counter() - begin
        out, lse = call.results()
        return Result(runner, call, out[:call.total_q], accuracy.judge(answer, out, lse), seconds)
    except (RuntimeError, ValueError, OSError) as error:
        return Result(runner, None, np.zeros(0), accuracy.Verdict(math.inf, math.inf, one_line(error)), math.nan)


def agreement_table(results: list[Result]) -> str:
    """Largest errors against float64."""
    rows = [[result.runner.implementation, result.runner.kernel, result.runner.how, f"{result.verdict.relative:.2e}",
             f"{result.verdict.lse_error:.2e}", "WRONG" if result.verdict.fault else "ok"] for result in results]
    headers = ["implementation", "kernel", "on", "error of a row / its norm", "error of lse", "contract"]
    return "Largest error against float64, row by row\n" + table(headers, rows, right=headers[3:5])


def differences(results: list[Result]) -> list[str]:
    """Compare the twins, kernel by kernel; what is wrong."""
    by_label = {(result.runner.implementation, result.runner.kernel): result.out for result in results if not result.verdict.fault}
    faults = []
    for kernel in GPU_KERNELS:
        if not all((name, kernel) in by_label for name in IMPLEMENTATIONS):
            continue
        found = accuracy.largest_difference(*[by_label[name, kernel] for name in IMPLEMENTATIONS])
        say(f"numba_verify {kernel} against cuda_ref {kernel}: rows differ by at most {found:.2e} of their norm")
        if not found <= accuracy.FACTOR * accuracy.FLOOR[DTYPE]:
            faults.append(f"numba_verify and cuda_ref {kernel} differ by {found:.2e}")
    return faults


def host_times(results: list[Result]) -> str:
    rows = [[result.runner.implementation, result.runner.kernel, result.runner.how, f"{1e3 * result.seconds:,.1f}"] for result in results]
    return ("Wall time of one run on the CPU. This is no measure of the kernels: a simulator and a host build stand in for the GPU.\n"
            + table(["implementation", "kernel", "on", "ms"], rows, right=["ms"]))


def gpu_times(batch: Batch, results: list[Result], place: Place) -> str:
    """Microseconds by graph replay, KV cold in L2, against the floor of the GPU."""
    pools = [place.put(batch.kv_cache) for _ in range(max(1, math.ceil(COLD_BYTES / batch.kv_cache.nbytes)))]
    floor, rows = floor_us(batch.values, place.name), []
    for result in results:
        if result.runner.kernel == "reference" or result.verdict.fault:
            continue
        rotated = [pools[i % len(pools)] for i in range(max(CALLS, len(pools)))]
        calls = [lambda stream, call=result.call, pool=pool: call.run(stream, pool) for pool in rotated]
        median = graph_time(place.ordinal, calls).median_us
        rows.append([result.runner.implementation, result.runner.kernel, f"{median:,.1f}", f"{100 * floor / median:.1f}" if floor else "?"])
    known = f"the floor is {floor:,.1f} us" if floor else f"no floor is known for {place.name}"
    return (f"Device time of one run by CUDA graph replay, KV cold in L2; {known}\n"
            + table(["implementation", "kernel", "us", "% of the floor"], rows, right=["us", "% of the floor"]))


def floor_us(values: Values, device_name: str) -> float | None:
    """The least microseconds a GPU of measured ceilings could take: every visible pair computed once, KV, q and out moved once."""
    ceilings = CEILINGS.get(device_name)
    if ceilings is None:
        return None
    width = values.row_dim + values.latent_dim
    flop = 2.0 * values.num_heads * width * sum(int(visible.sum()) for visible in values.visible)
    moved = 2.0 * (sum(map(len, values.keys)) * values.row_dim + values.total_q * values.num_heads * width)
    return 1e6 * max(flop / ceilings.flops, moved / ceilings.bytes)
