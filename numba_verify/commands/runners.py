"""Who can compute an attention call here: each kernel of each implementation, on the GPU or on the host."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from ..problem import KERNELS
from .batches import Batch
from .console import one_line
from .places import HOST, Place

IMPLEMENTATIONS = ("numba_verify", "cuda_ref")
#: The kernels of an implementation; the reference is a call of its own, on the host.
GPU_KERNELS = tuple(name for name in KERNELS if name != "reference")
#: Every byte of an output before the call: NaN in all dtypes, so that a row nobody wrote is seen.
UNWRITTEN = 0xFF


class Runner(NamedTuple):
    """One kernel of one implementation at one place."""

    implementation: str
    kernel: str
    place: Place

    @property
    def module(self) -> ModuleType:
        return importlib.import_module(self.implementation)

    @property
    def label(self) -> str:
        return f"{self.implementation} {self.kernel}"

    @property
    def how(self) -> str:
        """What runs the kernel."""
        if self.place.ordinal is not None:
            return "GPU"
        if self.kernel == "reference":
            return "NumPy"
        return "simulator" if self.implementation == "numba_verify" else "host build"


class Absent(NamedTuple):
    """A kernel that cannot run here, and why; kernel "" for a whole implementation."""

    implementation: str
    kernel: str
    reason: str


REFERENCE = Runner("numba_verify", "reference", HOST)


def find(place: Place, implementations: Sequence[str], kernels: Sequence[str], **problem: Any) -> tuple[list[Runner], list[Absent]]:
    """Runners for a problem (the arguments of `can_run`), and what is missing. An implementation that has nothing to run is named once."""
    runners, absent = [], []
    for name in implementations:
        reason = unusable(name, place)
        if reason:
            absent.append(Absent(name, "", reason))
            continue
        for kernel in kernels:
            support = importlib.import_module(name).can_run(kernel=kernel, device=place.ordinal, **problem)
            if support:
                runners.append(Runner(name, kernel, place))
            else:
                absent.append(Absent(name, kernel, support.reason))
    return runners, absent


def describe(absent: list[Absent], in_full: bool) -> list[str]:
    """Lines about what cannot run: with every reason when those kernels were asked for, else kernels by their names alone."""
    lines = [f"{missing.implementation} {missing.kernel}".rstrip() + f" cannot be used: {missing.reason}"
             for missing in absent if in_full or not missing.kernel]
    others = [f"{missing.implementation} {missing.kernel}" for missing in absent if missing.kernel]
    return lines if in_full or not others else [*lines, f"not run, since they cannot (env says why): {', '.join(others)}"]


def unusable(implementation: str, place: Place) -> str:
    """Why nothing of an implementation can run; empty when it can. Builds the library of cuda_ref, which takes a compiler and a minute."""
    try:
        module = importlib.import_module(implementation)
        support = module.can_run(kernel="naive", num_heads=1, device=place.ordinal)
        if support:
            none = place.put(np.zeros(1, np.int32))
            module.plan(none, none, place.put(np.zeros(1, np.int32)), num_heads=1, max_total_q=1, kernel="naive")
        return support.reason
    except (ImportError, AttributeError, RuntimeError, OSError) as error:  # no compiler, one that fails, a library that does not load
        return one_line(error)


class Call:
    """A batch laid out for one runner: its arrays at the runner's place, outputs that show what was written, and a plan."""

    def __init__(self, runner: Runner, batch: Batch, **options: Any):
        self.runner, self.place, values = runner, runner.place, batch.values
        names = ("q", "kv_cache", "draft_kv", "qo_indptr", "kv_indptr", "kv_indices", "kv_lens", "tree")
        self.arrays = {name: self.place.put(getattr(batch, name)) for name in names}
        shape = (len(batch.q), values.num_heads, values.latent_dim)
        self.host_outputs = {"out": _unwritten(shape, batch.q.dtype), "lse": _unwritten(shape[:2], np.dtype(np.float32))}
        self.outputs = {name: self.place.put(array) for name, array in self.host_outputs.items()}
        self.scalars = {"sm_scale": values.sm_scale, "logit_cap": values.logit_cap}
        self.total_q = values.total_q
        self.plan = runner.module.plan(
            *self._indices(), tree=self.arrays["tree"], kv_lens=self.arrays["kv_lens"], num_heads=values.num_heads,
            latent_dim=values.latent_dim, rope_dim=values.row_dim - values.latent_dim, dtype=batch.q.dtype.name,
            page_size=batch.layout.page_size, draft_in_cache=not batch.layout.aside, kernel=runner.kernel, max_total_q=len(batch.q),
            **options)

    def _indices(self) -> list[Any]:
        return [self.arrays[name] for name in ("qo_indptr", "kv_indptr", "kv_indices")]

    def load(self, batch: Batch) -> None:
        """Another batch with the same capacities, into the same memory."""
        for name, target in self.arrays.items():
            values = getattr(batch, name)
            if isinstance(values, np.ndarray):
                self.place.overwrite(target, values)
        for name, target in self.outputs.items():
            self.place.overwrite(target, self.host_outputs[name])
        self.total_q = batch.values.total_q

    def update(self, stream: int | None = None) -> None:
        """Plan the step that the arrays hold now."""
        self.plan.update(*self._indices(), tree=self.arrays["tree"], kv_lens=self.arrays["kv_lens"], stream=stream)

    def run(self, stream: int | None = None, kv_cache: Any = None) -> None:
        """Enqueue one run; `kv_cache` in place of the batch's own."""
        self.plan.run(self.arrays["q"], self.arrays["kv_cache"] if kv_cache is None else kv_cache, draft_kv=self.arrays["draft_kv"],
                      **self.scalars, **self.outputs, stream=stream)

    def results(self) -> tuple[np.ndarray, np.ndarray]:
        """out and lse as they stand. ValueError when a row after the last draft token was written."""
        out, lse = self.place.get(self.outputs["out"]), self.place.get(self.outputs["lse"])
        for name, array in (("out", out), ("lse", lse)):
            if (array[self.total_q:].view(np.uint8) != UNWRITTEN).any():
                raise ValueError(f"{name}: rows after the last draft token (row {self.total_q}) were written")
        return out, lse

    def untouched(self) -> bool:
        """Whether nothing at all was written to out and lse."""
        return all((self.place.get(array).view(np.uint8) == UNWRITTEN).all() for array in self.outputs.values())

    def __call__(self) -> tuple[np.ndarray, np.ndarray]:
        self.run()
        return self.results()


def _unwritten(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    return np.full(int(np.prod(shape)) * dtype.itemsize, UNWRITTEN, np.uint8).view(dtype).reshape(shape)
