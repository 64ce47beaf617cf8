"""Test this installation on this machine: a spread of the contract's promises with random inputs, one verdict line.

On a GPU every kernel that can run is tested there; without one the kernels run in the simulator and in the host build, with tiny shapes.
"""

from __future__ import annotations

import argparse
import time
import traceback
from typing import NamedTuple

import numpy as np

from ..gpu import driver
from .checks import CASES, PROPERTIES, Check, Context, Failure, Size, twins_agree
from .console import MAKING_READY, begun, count, one_line, say, step
from .places import Place, best_place
from .runners import GPU_KERNELS, IMPLEMENTATIONS, Runner, describe, find

GPU_SIZE = Size(heads=16, latent_dim=512, rope_dim=64, nodes=24, prefix=700, long_prefix=9000)
#: The simulator does a million multiply-adds a second.
CPU_SIZE = Size(heads=3, latent_dim=128, rope_dim=64, nodes=4, prefix=18, long_prefix=150)


class Outcome(NamedTuple):
    name: str
    fault: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=0, help="another seed draws other trees, lengths and numbers (default 0)")
    parser.add_argument("--kernel", action="append", choices=GPU_KERNELS, help="may be repeated; default: all that can run")
    parser.add_argument("--implementation", action="append", choices=IMPLEMENTATIONS, help="may be repeated; default: both")


def run(arguments: argparse.Namespace) -> int:
    if arguments.seed < 0:
        raise ValueError(f"--seed: expected 0 or more, got {arguments.seed}")
    place = best_place()
    size = CPU_SIZE if place.ordinal is None else GPU_SIZE
    if place.ordinal is None:
        say(f"No GPU ({driver.unavailable()}): kernels run in the simulator and in the host build, with tiny shapes.")
    with step(MAKING_READY):
        runners, absent = find(place, arguments.implementation or IMPLEMENTATIONS, arguments.kernel or GPU_KERNELS,
                               num_heads=size.heads, latent_dim=size.latent_dim, rope_dim=size.rope_dim)
    for line in describe(absent, in_full=arguments.kernel is not None):
        say(line)
    begin, outcomes = time.perf_counter(), []
    for name, check, context in listed([Context(runner, size, arguments.seed) for runner in runners]):
        outcomes.append(perform(name, check, context, arguments.traceback))
    return conclude(outcomes, place, runners, [missing.implementation for missing in absent if not missing.kernel],
                    time.perf_counter() - begin)


def listed(contexts: list[Context]) -> list[tuple[str, Check, Context]]:
    """(name, check, context) of everything to be tested, one context a runner."""
    checks = [(f"{context.runner.label}: {name}", check, context) for context in contexts for name, check in {**CASES, **PROPERTIES}.items()
              if (context.runner.place.ordinal is not None or not getattr(check, "gpu_only", False))
              and context.takes(getattr(check, "dtype", "bfloat16"))]
    ours = {context.runner.kernel: context.runner for context in contexts if context.runner.implementation == IMPLEMENTATIONS[0]}
    twins = [(context.runner, context) for context in contexts if context.runner.implementation != IMPLEMENTATIONS[0]]
    return checks + [(f"{twin.label}: agrees with numba_verify {twin.kernel}", twins_agree(ours[twin.kernel]), context)
                     for twin, context in twins if twin.kernel in ours]


def perform(name: str, check: Check, context: Context, with_traceback: bool) -> Outcome:
    """One check, one line. Whatever it raises is a failure of the check and not the end of the others."""
    fault = ""
    with begun(name) as end:
        try:
            with np.errstate(invalid="ignore"):
                check(context)
        except Failure as failure:
            fault = str(failure)
        except Exception as error:
            fault = f"{type(error).__name__}: {one_line(error)}"
            if with_traceback:
                traceback.print_exc()
        end(f"FAILED: {fault}" if fault else "ok")
    return Outcome(name, fault)


def conclude(outcomes: list[Outcome], place: Place, runners: list[Runner], missing: list[str], seconds: float) -> int:
    """The verdict line and the exit status."""
    failed = [outcome.name for outcome in outcomes if outcome.fault]
    how = ", ".join(dict.fromkeys(runner.how for runner in runners))
    where = place.name if place.ordinal is not None else f"the CPU ({how})"
    notes = "".join(f"; {name} was not checked" for name in missing)
    if not outcomes:
        say(f"numba_verify check: FAILED, no kernel can run on {place.name}")
        return 1
    checks = count(len(outcomes), "check")
    if failed:
        say(f"numba_verify check: FAILED, {len(failed)} of {checks} on {where}: {'; '.join(failed)}{notes}")
        return 1
    say(f"numba_verify check: OK, {checks} on {where} in {seconds:.0f} s{notes}")
    return 0
