"""`python -m numba_verify bench` and the benchmarks of asv: one shape, one implementation, one kernel, in microseconds of the device."""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

from . import shapes
from .api import make_api
from .gpu import driver
from .gpu.device_array import DeviceArray, empty, tiled, to_device
from .planner import Implementation
from .timing import COLD_BYTES, Timing, graph_time
from .tree import DraftTree

#: Rows of random numbers that are drawn; pools are tiled from them.
DRAWN_ROWS = 1 << 15
#: A graph holds at least so many calls, so that its launch is a small part of a replay.
CALLS = 8


def plan_with_tile(module: ModuleType, tile: Any):
    """`plan` of an implementation whose kernels run with `tile`, to measure and test what the shape would not choose."""
    backend = importlib.import_module(f"{module.__name__}.backend")
    make = functools.partial(backend.make_executor, tile=tile)
    return make_api(Implementation(f"{module.__name__} {tile}", backend.AVAILABLE, backend.support, make, "reference"), backend.warm).plan


class Workload:
    """The arrays of one shape on GPU `ordinal`: page size 1, KV scattered token by token, several pools so that KV is cold in L2."""

    def __init__(self, shape: shapes.Shape, ordinal: int = 0):
        self.shape, self.ordinal = shape, ordinal
        self._known: dict[tuple[int, int], list[tuple[int, int, np.ndarray]]] = {}
        rng = np.random.default_rng(shapes.TREE_SEED)
        bf16 = np.dtype(ml_dtypes.bfloat16)
        # Queries of their own: one that equals a key would see that key alone.
        self.block, self.queries = (rng.standard_normal((DRAWN_ROWS, 576), np.float32).astype(bf16) for _ in range(2))
        tokens = shape.batch * (shape.context + shape.drafts)
        rows = shape.batch * shape.drafts
        self.total_q, self.sm_scale = rows, 576 ** -0.5
        self.parents = shapes.draft_tree(shape)
        self.visible_drafts = int(DraftTree.from_lists([self.parents]).depth.sum()) + shape.drafts
        l2_bytes = driver.device_info(ordinal).l2_bytes
        self.pools = [tiled(self.block, tokens, ordinal) for _ in range(max(1, math.ceil(max(COLD_BYTES, 2 * l2_bytes) / (tokens * 1152))))]
        self.q = tiled(self.queries.reshape(-1)[:rows * shape.heads * 576].reshape(-1, 576), rows * shape.heads, ordinal)
        self.q = DeviceArray(self.q.buffer, (rows, shape.heads, 576), bf16)
        self.out, self.lse = empty((rows, shape.heads, 512), bf16, ordinal), empty((rows, shape.heads), np.float32, ordinal)
        self.qo_indptr = to_device(np.arange(shape.batch + 1, dtype=np.int32) * shape.drafts, ordinal)
        self.kv_indptr = to_device(np.arange(shape.batch + 1, dtype=np.int32) * (shape.context + shape.drafts), ordinal)
        self.kv_indices = to_device(rng.permutation(tokens).astype(np.int32), ordinal)
        self.tree = to_device(np.tile(np.array(self.parents, np.int32), shape.batch), ordinal)

    def plan(self, module: ModuleType, kernel: str, tile: Any = None, **options: Any):
        """A plan of `module` (numba_verify or cuda_ref) for this shape. `tile`: instead of the one that the shape chooses."""
        make = module.plan if tile is None else plan_with_tile(module, tile)
        return make(self.qo_indptr, self.kv_indptr, self.kv_indices, tree=self.tree, num_heads=self.shape.heads, kernel=kernel, **options)

    def run(self, plan: Any, pool: int = 0, stream: int = 0) -> None:
        """One call on one of the pools."""
        plan.run(self.q, self.pools[pool], sm_scale=self.sm_scale, out=self.out, lse=self.lse, stream=stream)

    def calls(self, plan: Any, warm: bool = False) -> list[Callable[[int], None]]:
        """What a graph is captured from: calls on all pools in turn, or with `warm` on one pool, whose KV then stays in L2 if it fits."""
        pools = [0 if warm else i % len(self.pools) for i in range(CALLS if warm else max(CALLS, len(self.pools)))]
        return [functools.partial(self.run, plan, pool) for pool in pools]

    def time(self, plan: Any, replays: int = 30) -> Timing:
        """Device time of `plan.run`, KV cold in L2."""
        return graph_time(self.ordinal, self.calls(plan), replays)

    def floor_us(self) -> float | None:
        """The shape's floor on this GPU."""
        return shapes.floor_us(self.shape, self.visible_drafts, driver.device_info(self.ordinal).name)

    def check(self, out: np.ndarray | None = None, rows: int = 4, seed: int = 0) -> float:
        """Largest relative error of a few rows of `out` (self.out as it stands, from pool 0) against float64; NaN counts as infinite."""
        out, worst = self.out.numpy() if out is None else out, 0.0
        for row, head, expected in self._expected(rows, seed):
            error = np.linalg.norm(out[row, head].astype(np.float64) - expected) / np.linalg.norm(expected)
            worst = max(worst, float(error) if np.isfinite(error) else math.inf)
        return worst

    def _expected(self, rows: int, seed: int) -> list[tuple[int, int, np.ndarray]]:
        """(row, head, float64 result) of a few random rows, the same for every kernel that is checked on them."""
        if (rows, seed) in self._known:
            return self._known[rows, seed]
        shape, rng = self.shape, np.random.default_rng(seed)
        visible, indices = DraftTree.from_lists([self.parents]), self.kv_indices.numpy()
        # Pools and queries are these blocks over and over, so a key is a row of the block, seen as often as it is listed.
        block, expected = self.block.astype(np.float64), []
        for row in rng.choice(self.total_q, min(rows, self.total_q), replace=False):
            r, i = divmod(int(row), shape.drafts)
            begin = r * (shape.context + shape.drafts)
            bits = np.unpackbits(visible.visibility[i].view(np.uint8), bitorder="little")[:shape.drafts].astype(bool)
            listed = indices[begin:begin + shape.context + shape.drafts][np.concatenate([np.ones(shape.context, bool), bits])]
            seen = np.bincount(listed % DRAWN_ROWS, minlength=DRAWN_ROWS)
            head = int(rng.integers(shape.heads))
            score = self.sm_scale * (block @ self.queries[(row * shape.heads + head) % DRAWN_ROWS].astype(np.float64))
            weight = seen * np.exp(score - score[seen > 0].max())
            expected.append((int(row), head, (weight / weight.sum()) @ block[:, :512]))
        self._known[rows, seed] = expected
        return expected
