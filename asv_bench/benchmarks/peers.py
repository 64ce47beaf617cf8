"""How long does one tree verify take with this package, and how long with other libraries? Device time, lower is better.

A peer that is not installed reads n/a. To add one: a class with `calls`, `replay_us`, `out` and `close` like Unfused, and its name in PEERS.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterable
from typing import Any

try:
    from . import common
except ImportError:  # run as a script
    import common

#: A peer has to compute the same thing, not to keep our contract: with scores rounded to bfloat16 Unfused errs up to 5e-3 of a row's norm.
PEER_ERROR_BOUND = 2 * common.ERROR_BOUND
WARM_UP, REPLAYS, REPLAYS_SLOW, SLOW_MS = 3, 30, 5, 2.0


class Unfused:
    """torch: matmul, masked softmax, matmul, by cuBLAS, on KV that was gathered beforehand; the gather is not timed. With the tree's mask."""

    module = "torch"

    def __init__(self, work: Any, device: str):
        import numpy as np
        import torch

        from numba_verify.tree import DraftTree

        shape, self._torch, self._device = work.shape, torch, device
        self._context, self._scale, self._shape = shape.context, work.sm_scale, (work.total_q, shape.heads, 512)

        def put(block):
            return torch.from_numpy(np.ascontiguousarray(block).view(np.int16)).view(torch.bfloat16).to(device)

        block, queries = put(work.block), put(work.queries)
        rows = torch.from_numpy(work.kv_indices.numpy() % len(work.block)).to(device=device, dtype=torch.int64)
        gathered = block[rows].reshape(shape.batch, shape.context + shape.drafts, 576)
        self._pools = [gathered.clone() for _ in work.pools]
        of_queries = torch.arange(work.total_q * shape.heads, device=device) % len(work.queries)
        self._q = queries[of_queries].reshape(shape.batch, shape.drafts * shape.heads, 576)
        bits = DraftTree.from_lists([work.parents]).visibility
        hidden = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")[:, :shape.drafts] == 0
        self._hidden = torch.from_numpy(hidden.repeat(shape.heads, 0)).to(device)
        self._graph = None

    def run(self, pool: int = 0) -> Any:
        """[total_q, heads, 512]."""
        torch, kv = self._torch, self._pools[pool]
        # beta=0: the first argument is not read. It carries the scale into the matmul, so that no pass over the scores is spent on it.
        scores = torch.baddbmm(self._q.new_empty(1, 1, 1), self._q, kv.transpose(1, 2), beta=0, alpha=self._scale)
        scores[..., self._context:].masked_fill_(self._hidden, float("-inf"))
        return torch.bmm(torch.softmax(scores, -1), kv[..., :512]).reshape(self._shape)

    def out(self) -> Any:
        """The result as a NumPy array."""
        return self.run().float().cpu().numpy()

    def capture(self) -> None:
        """A CUDA graph of one call for each pool, eight at least, in torch's way: it owns the memory that the calls allocate."""
        torch = self._torch
        pools = [i % len(self._pools) for i in range(max(8, len(self._pools)))]
        self.calls, self._graph = len(pools), torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            self.run()
        stream.synchronize()
        with torch.cuda.graph(self._graph, stream=stream):
            for pool in pools:
                self.run(pool)
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def replay_us(self) -> float:
        """Replay once: microseconds per call."""
        self._events[0].record()
        self._graph.replay()
        self._events[1].record()
        self._events[1].synchronize()
        return 1e3 * self._events[0].elapsed_time(self._events[1]) / self.calls

    def close(self) -> None:
        self._graph = self._pools = None
        self._torch.cuda.empty_cache()


#: Peers by the names they have in docs/results/peers_h200.json.
PEERS = {"unfused": Unfused}


def collect(keys: Iterable[tuple[str, ...]]) -> dict[tuple[str, str], float | str]:
    """(implementation or peer, shape) -> microseconds, or a text as common.attempt gives it. Empty with no GPU."""
    wanted = list(dict.fromkeys(keys))
    if common.gpu_reason():
        return {}
    figures: dict[tuple[str, str], float | str] = {}
    for shape in dict.fromkeys(shape for _, shape in wanted):
        names = [name for name, of in wanted if of == shape]
        if common.out_of_time():
            figures.update({(name, shape): "not measured: out of time" for name in names})
            continue
        figures.update({(name, shape): figure for name, figure in measure(common.workload(common.shape_of(shape)), names).items()})
    return figures


def measure(work: Any, names: list[str]) -> dict[str, float | str]:
    """Check all, then replay the graphs of those that are right in turn."""
    from numba_verify.timing import interleaved_times

    ready, figures = {}, {}
    for name in names:
        found = common.attempt(functools.partial(_peer if name in PEERS else _ours, work, name))
        (figures if isinstance(found, str) else ready)[name] = found
    try:
        slowest = max((graph.replay_us() for graph in ready.values()), default=0.0) / 1e3
        times = interleaved_times(list(ready.values()), REPLAYS if slowest < SLOW_MS else REPLAYS_SLOW, WARM_UP)
        figures.update({name: timing.median_us for name, timing in zip(ready, times, strict=True)})
    finally:
        for graph in ready.values():
            graph.close()
    return figures


def _ours(work: Any, name: str) -> Any:
    from numba_verify.timing import Replay

    plan = work.plan(common.implementation(name), "auto")
    common.run_checked(work, plan)
    return Replay(work.ordinal, work.calls(plan))


def _peer(work: Any, name: str) -> Any:
    peer = PEERS[name]
    if importlib.util.find_spec(peer.module) is None:
        raise common.skip(f"{peer.module} is not installed")
    made = peer(work, f"cuda:{work.ordinal}")
    common.require_right(work.check(made.out()), PEER_ERROR_BOUND)
    made.capture()
    return made


class Peers:
    """Device time of one call: kernel="auto" of both implementations beside peers, in one run."""

    params = [common.IMPLEMENTATIONS + tuple(PEERS), common.SHAPES]
    param_names = ["impl", "shape"]
    timeout = 60
    collect = staticmethod(collect)

    def setup_cache(self):
        return collect(common.all_keys(Peers))

    setup_cache.timeout = 600

    def setup(self, figures, impl, shape):
        if not figures:
            common.require_gpu()
        common.figure_or_skip(figures[impl, shape])

    def track_device_us(self, figures, impl, shape):
        return common.figure_or_failure(figures[impl, shape])

    track_device_us.unit = "us"
    track_device_us.version = "1"


if __name__ == "__main__":
    common.run_script(Peers)
