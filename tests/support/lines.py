"""The schedule of a line of work by itself: its tables from numba_verify and from the twin, and the walk that kernels make over them."""

from __future__ import annotations

import os
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import numpy as np

from numba_verify.gpu.compile import KernelSource
from numba_verify.kernels import cuts, scans, schedule, work

from . import machine

UNIT = Path(__file__).parent / "schedule_unit.cu"


class Line(NamedTuple):
    """How a kernel's work is laid out: heads to a row of tiles, and the schedule."""

    row_heads: int
    config: work.ScheduleConfig
    num_ctas: int

    @property
    def piece_cost(self) -> int:
        """Units."""
        return -(-cuts.PIECE_COST_KEYS // self.config.kv_tile)

    def tiles(self, n: int) -> int:
        """Of a request of n draft tokens."""
        return -(-n * self.row_heads // self.config.tile_rows)

    def units(self, kv_len: int) -> int:
        """Of a tile."""
        return max(1, -(-kv_len // self.config.kv_tile))

    def pieces(self, kv_len: int, tiles: int) -> tuple[int, int]:
        """(pieces of a tile by the deterministic rule, units of one)."""
        units = self.units(kv_len)
        length = -(-units // max(1, min(-(-units // (work.PIECE_KEYS // self.config.kv_tile)), work.MAX_PIECES // tiles)))
        return -(-units // length), length


class Batch(NamedTuple):
    """Draft tokens and prefix of each request. Page size 1, draft rows in the cache."""

    counts: tuple[int, ...]
    prefix: tuple[int, ...]

    @property
    def tokens(self) -> list[int]:
        """Keys of each request."""
        return [n + p for n, p in zip(self.counts, self.prefix, strict=True)]

    @property
    def indptr(self) -> list[np.ndarray]:
        """qo_indptr and kv_indptr."""
        return [np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32) for lengths in (self.counts, self.tokens)]


class Tables(NamedTuple):
    """What `schedule` leaves; of merges without the header: rows of few pieces, then of many."""

    requests: np.ndarray
    ctas: np.ndarray
    few: np.ndarray
    many: np.ndarray


def partials(line: Line, batch: Batch) -> int:
    return work.partial_slots(line.config, line.num_ctas, len(batch.counts), sum(batch.counts), sum(batch.tokens), line.row_heads)


def scheduled(line: Line, batch: Batch) -> Tables:
    """By numba_verify. Nothing but merges is written to the merge table."""
    config, count, slots = line.config, len(batch.counts), partials(line, batch)
    tables = [np.full((rows, fields), -7, np.int64) for rows, fields in (
        (max(count, 1), work.REQUEST_FIELDS), (line.num_ctas + 1, work.CTA_FIELDS), (work.merge_rows(slots), work.MERGE_FIELDS))]
    source = KernelSource("schedule", schedule.build_schedule, config, schedule.SCHEDULE_SIGNATURE, scans.SCHEDULE_THREADS,
                          shared_bytes=scans.shared_bytes())
    machine.launch(source, (1, 1), [*batch.indptr, np.zeros(1, np.int32), *tables, count, 1, line.row_heads, 0, 0, sum(batch.counts),
                                    sum(batch.tokens), line.num_ctas, slots])
    requests, ctas, merges = tables
    few, many, last = merges[0, :3].tolist()
    assert last == len(merges) - 1
    assert (merges[1 + few:last + 1 - many] == -7).all()
    return Tables(requests[:count], ctas, merges[1:1 + few], merges[last + 1 - many:][::-1])


#: Records of cuda_ref/verify_attn.cuh.
COUNTS = np.dtype([("batch", "i8"), ("entries", "i8"), ("few", "i4"), ("many", "i4")])
CURSOR = np.dtype([("unit", "i8"), ("request", "i4"), ("tile", "i4"), ("block", "i4"), ("length", "i4")])
MERGE = np.dtype((np.int32, work.MERGE_FIELDS))


def scheduled_by_the_twin(program: Path, line: Line, batch: Batch, seed: int = 0) -> Tables:
    """By cuda_ref: `program` is a build of schedule_unit.cu. `seed`: order of the threads in the host build."""
    config, count, slots = line.config, len(batch.counts), partials(line, batch)
    header = [count, line.num_ctas, line.row_heads, config.tile_rows, config.kv_tile, config.min_keys, config.merge_keys,
              config.deterministic, slots, sum(batch.counts), sum(batch.tokens)]
    given = np.array(header, np.int64).tobytes() + b"".join(array.tobytes() for array in batch.indptr)
    done = subprocess.run([program], input=given, capture_output=True, timeout=60, env={**os.environ, "CUDA_REF_HOST_SEED": str(seed)})
    assert done.returncode == 0, done.stderr.decode()
    tables, at = [], 0
    for dtype, rows in ((COUNTS, 1), (np.dtype((np.int64, work.REQUEST_FIELDS)), count), (CURSOR, line.num_ctas + 1), (MERGE, slots // 2)):
        tables.append(np.frombuffer(done.stdout, dtype, rows, at))
        at += rows * dtype.itemsize
    assert at == len(done.stdout)
    (counts,), requests, starts, merges = tables
    assert counts["batch"] == count and counts["entries"] == sum(batch.tokens)
    few, many = int(counts["few"]), int(counts["many"])
    assert (merges[few:len(merges) - many] == -1).all()
    share = np.append(np.diff(starts["unit"]), 0)
    ctas = np.stack([starts["request"], starts["tile"], starts["block"], starts["unit"], share], axis=1)
    return Tables(requests, ctas, merges[:few], merges[len(merges) - many:][::-1])


def slots_written(line, requests, ctas):
    """The walk over the shares, as kernels do it: tile -> [(first unit, slot), ...] of its pieces, and the units it visits."""
    pieces, visited = defaultdict(list), []
    for p, (r, tile, unit, _, left) in enumerate(ctas[:line.num_ctas].tolist()):
        while left:
            tiles = line.tiles(requests[r, work.Q_LEN])
            if tile == tiles:
                r, tile = r + 1, 0
                continue
            units = line.units(requests[r, work.KV_LEN])
            length = line.pieces(requests[r, work.KV_LEN], tiles)[1] if line.config.deterministic else units
            stop = min((unit // length + 1) * length, units, unit + left)
            slot = 2 * p + (unit == 0)
            if line.config.deterministic:
                slot = requests[r, work.PIECE_BEGIN] + tile * -(-units // length) + unit // length
            pieces[r, tile].append((unit, slot))
            visited += [(r, tile, u) for u in range(unit, stop)]
            left, unit = left - (stop - unit), stop
            if unit == units:
                tile, unit = tile + 1, 0
    return pieces, visited
