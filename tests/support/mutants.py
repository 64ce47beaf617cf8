"""Puts defects into copies of the kernels and runs them in the simulator; the defects themselves are in mutant_list.py.

A mutant is a replacement of source text in modules of numba_verify/kernels. The text must be found exactly once, else the mutant is
stale and its test says so. All modules of the folder are copied, so that a change in tile.py reaches flash and paged; the copies live in
a package of their own beside the real one, and the real one is never touched.
"""

from __future__ import annotations

import importlib
import mmap
import re
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import numba_verify.kernels
from numba_verify import backend, memory, planner
from numba_verify.gpu import simulator
from numba_verify.kernels.mma_config import MmaTile
from numba_verify.kernels.wgmma_config import WgmmaTile

from . import machine, oracle
from .mma_mutants import HOLDING, MMA_BARRIERS, MMA_SPECIAL_CASES, PAIRS, READY_SIGNAL, SIGNAL, SIGNAL_CAUGHT, SIGNAL_MODULES, SIGNALS_CASE
from .mutant_list import BARRIERS, FAR, RACE, SPECIAL_CASES, Mutant
from .problems import Case, Problem, build
from .wgmma_mutants import (
    DELAYED,
    WGMMA_BARRIERS,
    WGMMA_SIGNAL,
    WGMMA_SIGNAL_CAUGHT,
    WGMMA_SIGNAL_MODULES,
    WGMMA_SPECIAL_CASES,
    WGMMA_SPECIAL_SIGNALS,
)

KERNELS_FOLDER = Path(numba_verify.kernels.__file__).parent
#: Modules of kernels/ that backend.py holds by name.
HELD_BY_BACKEND = ("combine", "expand", "flash", "mma", "naive", "paged", "scans", "schedule", "wgmma", "work")
MODULES_WITH_BARRIERS, SPECIAL_BARRIERS = BARRIERS | MMA_BARRIERS | WGMMA_BARRIERS, SPECIAL_CASES | MMA_SPECIAL_CASES | WGMMA_SPECIAL_CASES


def source_of(module: str) -> str:
    return (KERNELS_FOLDER / f"{module}.py").read_text(encoding="utf-8")


def barrier_mutants() -> list[Mutant]:
    """Each bar_sync() of each module left out once. The comment above it is its name; the lines around make the edit unique."""
    mutants = []
    for module, (kernel, case) in MODULES_WITH_BARRIERS.items():
        lines = source_of(module).splitlines(keepends=True)
        for i, line in enumerate(lines):
            if line.strip() != "bar_sync()":
                continue
            comment = lines[i - 1].strip()
            before, after = "".join(lines[i - 3 : i]), "".join(lines[i + 1 : i + 3])
            edit = (module, before + line + after, before + line.replace("bar_sync()", "pass") + after)
            name = f"no_barrier_{module}_line_{i + 1}"
            if comment in SPECIAL_BARRIERS:
                mutants.append(Mutant(name, SPECIAL_BARRIERS[comment][0], (edit,), *SPECIAL_BARRIERS[comment][1:]))
            else:
                mutants.append(Mutant(name, kernel, (edit,), case, RACE, races=True))
    return mutants


def signal_mutants() -> list[Mutant]:
    """Each statement of `mma` and `wgmma` that waits for others, lets them go on, or orders memory, left out once."""
    mutants = []
    for kernel, modules, signal, caught, tile in (("mma", SIGNAL_MODULES, SIGNAL, SIGNAL_CAUGHT, HOLDING),
                                                  ("mma", SIGNAL_MODULES, READY_SIGNAL, SIGNAL_CAUGHT, PAIRS),
                                                  ("wgmma", WGMMA_SIGNAL_MODULES, WGMMA_SIGNAL, WGMMA_SIGNAL_CAUGHT, DELAYED)):
        for module in modules:
            lines = source_of(module).splitlines(keepends=True)
            for i, line in enumerate(lines):
                found = re.fullmatch(signal, line.strip())
                if found:
                    before, after = "".join(lines[i - 2 : i]), "".join(lines[i + 1 : i + 3])
                    edit = (module, before + line + after, before + line.replace(line.strip(), "pass") + after)
                    case = WGMMA_SPECIAL_SIGNALS.get(lines[i - 1].strip(), (SIGNALS_CASE, tile))
                    name = f"no_{found.group(1)}_{module}_line_{i + 1}{'_named' if signal == READY_SIGNAL else ''}"
                    mutants.append(Mutant(name, kernel, (edit,), case[0], caught, True, case[1]))
    return mutants


class StaleMutant(AssertionError):
    """The text that a mutant replaces does not stand in the source exactly once."""


def mutate(source: str, old: str, new: str, name: str) -> str:
    count = source.count(old)
    if count != 1:
        raise StaleMutant(f"{name}: the mutation is stale: {old!r} stands {count} times in the source, expected once")
    return source.replace(old, new)


@contextmanager
def mutated_kernels(mutant: Mutant, folder: Path) -> Iterator[dict[str, types.ModuleType]]:
    """The modules that backend.py holds, from a copy of kernels/ in `folder` with the edits of `mutant` made."""
    package = f"numba_verify.mutant_{mutant.name}"  # beside kernels/, so that relative imports of gpu and errors mean the same
    for path in KERNELS_FOLDER.glob("*.py"):
        source = path.read_text(encoding="utf-8")
        for module, old, new in mutant.edits:
            if module == path.stem:
                source = mutate(source, old, new, f"{mutant} in {path.name}")
        (folder / path.name).write_text(source, encoding="utf-8")
    root = types.ModuleType(package)
    root.__path__ = [str(folder)]
    sys.modules[package] = root
    try:
        yield {name: importlib.import_module(f"{package}.{name}") for name in HELD_BY_BACKEND}
    finally:
        for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
            del sys.modules[name]


class PoisonedWorkspace(memory.Workspace):
    """Nobody may rely on what lay in a plan's memory before."""

    def __init__(self, nbytes: int, device: int | None):
        super().__init__(nbytes, device)
        self.host[:] = 0xFF


@contextmanager
def simulated(monkeypatch: Any, modules: dict[str, types.ModuleType] | None = None, tile: MmaTile | WgmmaTile | None = None,
              **launch_options: Any) -> Iterator[list[str]]:
    """Calls run in the simulator, also on a machine with a GPU, with `launch_options` (check_races, seed), with `modules` in place of the
    kernels, and `mma` or `wgmma` with `tile`, whatever the plan would choose. Yields the names of the kernels launched so far."""
    launched: list[str] = []
    real = simulator.launch

    def launch(kernel: Any, **arguments: Any) -> None:
        launched.append(kernel.__name__)
        real(kernel, **arguments, **launch_options)

    with monkeypatch.context() as patch:
        patch.setattr(machine, "HAS_GPU", False)
        patch.setattr(planner, "_kept", threading.local())  # verify_mla keeps plans, and they their kernels
        patch.setattr(planner, "Workspace", PoisonedWorkspace)
        patch.setattr(simulator, "launch", launch)
        for name, module in (modules or {}).items():
            patch.setattr(backend, name, module)
        if tile is not None:
            patch.setattr(backend, "wgmma_tile" if isinstance(tile, WgmmaTile) else "mma_tile", lambda *_: tile)
        try:
            yield launched
        finally:
            backend._simulated.cache_clear()  # a mutant must not outlive its test


#: Linux's number; the module mmap names it from Python 3.13 on. Without it the system may refuse to lend more than it has.
MAP_NORESERVE = 0x4000


class FarPool:
    """A pool [slots, D] of real rows that lie more than 2^32 elements apart, in memory that the system only lends where it is touched.

    Row 0 is owned by nobody and full of NaN: that is where an address cut to 32 bits comes out.
    """

    def __init__(self, pool: np.ndarray):
        slots, dims = pool.shape
        stride = (1 << 32) + dims  # elements; cut to 32 bits, slot s starts at s * dims, near the beginning
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", MAP_NORESERVE)
        lent = mmap.mmap(-1, (slots * stride + dims) * pool.itemsize, flags=flags)
        whole = np.frombuffer(lent, pool.dtype)
        whole[: (slots + 1) * dims] = np.nan
        self.array = np.lib.stride_tricks.as_strided(whole[dims:], pool.shape, (stride * pool.itemsize, pool.itemsize))
        self.array[1:] = pool[:-1]

    def check(self) -> None:
        """Nothing to compare: a kernel that wrote here would have had to touch gigabytes."""


def problem_of(case: Case) -> Problem:
    problem = build(case)
    if case.name == FAR.name:
        # Every slot number moves up by one: slot 0, which 32 bits could address, belongs to nobody.
        problem.guarded.guards["kv_cache"] = FarPool(problem.kv_cache)
        indices = problem.guarded.guards["kv_indices"]
        indices.array[: int(problem.kv_indptr[-1])] += 1
        indices.arm()
    return problem


def run_and_check(case: Case, kernel: str) -> tuple[np.ndarray, np.ndarray]:
    """One call of `kernel` with guarded arrays, compared with the oracle: what test_agreement does."""
    problem = problem_of(case)
    out, lse = machine.Call("numba_verify", kernel, problem)()
    oracle.check(problem, oracle.solve(problem), out, lse, f"{case} {kernel}")
    return out, lse
