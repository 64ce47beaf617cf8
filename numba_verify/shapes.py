"""The benchmark's shapes and their floors: the least time the hardware allows, from measured ceilings."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

#: Draft trees of the benchmark are drawn with this seed, so every run and every implementation verifies the same trees.
TREE_SEED = 20261130


class Shape(NamedTuple):
    """`batch` requests of `context` cached tokens and `drafts` draft tokens each, `heads` query heads; 512/64, bfloat16."""

    batch: int
    context: int
    drafts: int
    heads: int

    @property
    def name(self) -> str:
        """Identity in tables and benchmark results."""
        return f"b{self.batch}_kv{self.context}_t{self.drafts}_h{self.heads}"

    def flop(self, visible_drafts: int) -> float:
        """2 * visible (query, key) pairs * (576 + 512); `visible_drafts`: (draft, draft) pairs of one request's tree."""
        return 2.0 * self.batch * (self.drafts * self.context + visible_drafts) * self.heads * 1088

    @property
    def bytes(self) -> float:
        """KV once, q and out, bfloat16."""
        return 2.0 * self.batch * ((self.context + self.drafts) * 576 + self.drafts * self.heads * 1088)


#: Shapes of the peers' table (docs/facts.md), in its order.
SHAPES = tuple(Shape(*s) for s in (
    (1, 4096, 16, 64), (1, 32768, 16, 64), (1, 131072, 16, 64), (8, 8192, 16, 64), (32, 4096, 8, 64), (128, 4096, 4, 16), (1, 185000, 8, 8),
    (16, 16384, 32, 128), (64, 2048, 1, 128), (4, 16000, 4, 16), (1, 8192, 16, 16), (1, 32768, 4, 16), (8, 8192, 16, 16), (1, 32768, 64, 64),
    (128, 4096, 1, 16), (1, 32768, 1, 16)))


class Ceilings(NamedTuple):
    """What a GPU was measured, or is stated, to do: dense bfloat16 FLOP/s and bytes/s read."""

    flops: float
    bytes: float
    source: str


CEILINGS = {
    "NVIDIA H200": Ceilings(800e12, 4.48e12, "measured 2026-11-30: bf16 8192^3 matmul, read-only kernel"),
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": Ceilings(503.8e12, 1.792e12, "data sheet"),
}


def floor_us(shape: Shape, visible_drafts: int, device_name: str) -> float | None:
    """Microseconds below which no kernel can be on this GPU; None when its ceilings are not known."""
    ceilings = CEILINGS.get(device_name)
    if ceilings is None:
        return None
    return 1e6 * max(shape.flop(visible_drafts) / ceilings.flops, shape.bytes / ceilings.bytes)


def draft_tree(shape: Shape) -> list[int]:
    """Parents of the tree every request of the shape verifies: a random recursive tree, parents first."""
    rng = np.random.default_rng(TREE_SEED)
    return [-1] + [int(rng.integers(0, i)) for i in range(1, shape.drafts)]
