"""What an update leaves in the workspace: request table, pool rows, mask bits, and a division of the work that covers it exactly and is cheap.

The arrays are looked at themselves: an attention result within tolerance would forgive a mask bit too many over a long prefix.
"""

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from support import cases, lines, machine, units
from support.lines import Batch, Line, scheduled, slots_written
from support.problems import build

from numba_verify.backend import AVAILABLE, KernelExecutor
from numba_verify.gpu import simulator
from numba_verify.kernels import cuts, scans, work
from numba_verify.memory import Workspace
from numba_verify.planner import Implementation, Plan, PlanArguments, make_spec
from numba_verify.problem import check_index_array

pytestmark = pytest.mark.kernel


def planned(case, kernel="paged"):
    """(problem, spec, executor, workspace) after one update."""
    problem = build(case)
    executors = []

    def keep(spec):
        executors.append(KernelExecutor(spec))
        return executors[-1]

    implementation = Implementation("numba_verify", AVAILABLE, lambda *a: "", keep, "reference")
    placed = {name: machine.put_guarded(guard) for name, guard in problem.guarded.guards.items()}
    qo, pages = (check_index_array(placed[name], name) for name in ("qo_indptr", "kv_indices"))
    given = PlanArguments(case.heads, case.latent_dim, case.rope_dim, case.dtype, case.page_size, case.draft_in_cache, kernel,
                          case.deterministic, None, problem.q.shape[0], None)
    spec = make_spec(implementation, qo, pages, None, given, 0)
    plan = Plan(implementation, spec, validate=False)
    plan.update(placed["qo_indptr"], placed["kv_indptr"], placed["kv_indices"], tree=placed.get("tree", problem.tree),
                kv_lens=placed.get("kv_lens"))
    return problem, spec, executors[0], plan


def field(plan, executor, name, dtype):
    return workspace_bytes(plan._workspace)[executor.fields[name].offset:][:executor.fields[name].nbytes].view(dtype)


def workspace_bytes(workspace: Workspace) -> np.ndarray:
    if workspace.host is not None:
        return workspace.host
    from numba_verify.gpu import driver

    raw = np.empty(workspace.nbytes, np.uint8)
    with driver.context(workspace.device):
        driver.copy_to_host(raw, workspace.address, 0)
    return raw


@pytest.mark.parametrize("case", [c for c in cases.CORRECTNESS if c.size != "gpu" and c.nan_at is None], ids=str)
def test_tables_and_mask_bits(case):
    problem, spec, executor, plan = planned(case, "naive")
    total, words = problem.total_q, spec.visibility_words
    table = field(plan, executor, "requests", np.int64).reshape(-1, work.REQUEST_FIELDS)[:len(case.trees)]
    counts = [len(tree) for tree in case.trees]
    assert table[:, work.Q_BEGIN].tolist() == problem.qo_indptr[:-1].tolist()
    assert table[:, work.Q_LEN].tolist() == counts
    assert table[:, work.PREFIX].tolist() == list(case.prefix)
    assert table[:, work.KV_LEN].tolist() == [p + n for p, n in zip(case.prefix, counts, strict=True)]

    owner = field(plan, executor, "row_request", np.int32)[:spec.max_total_q]
    assert owner[:total].tolist() == [r for r, n in enumerate(counts) for _ in range(n)]
    assert (owner[total:] == -1).all()

    bits = field(plan, executor, "visibility", np.uint32)[:spec.max_total_q * words].reshape(-1, words)
    row = 0
    for n, prefix, visible in zip(counts, case.prefix, problem.visible, strict=True):
        unpacked = np.unpackbits(bits[row:row + n].view(np.uint8), axis=1, bitorder="little").astype(bool)
        np.testing.assert_array_equal(unpacked[:, :n], visible[:, prefix:])
        assert not unpacked[:, n:].any(), "bits at and after n are to be clear"
        row += n

    slots = field(plan, executor, "slots", np.uint32)
    pool = problem.kv_cache.reshape(-1, spec.row_dim) if not case.row_gap else np.ascontiguousarray(problem.kv_cache).reshape(-1, spec.row_dim)
    for r, keys in enumerate(problem.keys):
        listed = keys if case.draft_in_cache else keys[:case.prefix[r]]
        begin = table[r, work.SLOT_BEGIN]
        rows = pool[slots[begin:begin + len(listed)]]
        np.testing.assert_array_equal(rows.view(np.uint8), listed.view(np.uint8))


#: 9 heads: filled up to two tiles of 8, as `paged` does; and in tiles of 16 rows that span tokens and requests' ends, as `mma` does.
LINES = {
    "paged": Line(16, work.ScheduleConfig(16, 8, False), 4),
    "paged_fixed": Line(16, work.ScheduleConfig(16, 8, True), 4),
    "mma": Line(9, work.ScheduleConfig(32, 16, False, merge_keys=2), 7),
    "mma_fixed": Line(9, work.ScheduleConfig(32, 16, True, merge_keys=2), 7),
    # Units of which no whole number is PIECE_KEYS.
    "wgmma": Line(9, work.ScheduleConfig(48, 64, False, merge_keys=5), 7),
    "wgmma_fixed": Line(9, work.ScheduleConfig(48, 64, True, merge_keys=5), 7),
    "h200": Line(16, work.ScheduleConfig(64, 64, False), 132),
    "one_cta": Line(9, work.ScheduleConfig(64, 64, False), 1),
    "more_ctas_than_threads": Line(9, work.ScheduleConfig(16, 16, False, 16), 300),
}
BATCHES = {
    "ragged": Batch((3, 4, 0, 2), (5, 33, 0, 16)),
    "none": Batch((), ()),
    "no_rows": Batch((0, 0), (5, 0)),
    "one_long": Batch((1,), (5000,)),
    "just_two_pieces": Batch((2,), (1008,)),
    "forty": Batch((9,) * 40, tuple(range(0, 400, 10))),
    "uneven": Batch((2, 0, 1), (3000, 100, 0)),
    "300_requests": Batch((1,) * 300, (7,) * 300),
    "many_pieces": Batch((40, 1), (900, 2000)),
    "empty_around_long": Batch((0, 2, 0, 0, 1, 0), (9, 9000, 70, 0, 700, 3)),
    "300_empty_and_long": Batch((*(0,) * 299, 1, 0, 2), (*(0,) * 299, 4000, 5, 900)),
}
each_line, each_batch = (pytest.mark.parametrize(name, names) for name, names in (("line", LINES), ("batch", BATCHES)))


@each_line
@each_batch
def test_every_unit_of_work_has_one_owner(batch, line):
    """The shares of the CTAs, laid end to end, are the line of all units: nothing twice, nothing left out, every cut where it may be. And
    the merge table names every tile that is in pieces, and no other, with the slots they were left in."""
    line, batch = LINES[line], BATCHES[batch]
    tables = scheduled(line, batch)
    pieces, visited = slots_written(line, tables.requests, tables.ctas)
    check_shares(line, batch, tables, pieces, visited)
    check_merges(line, batch, tables, pieces)
    if not line.config.deterministic and visited:
        assert cost_of(line, tables, pieces) <= cost_of_the_ways(line, batch)


def check_shares(line, batch, tables, pieces, visited):
    in_order = []
    for r, (n, keys) in enumerate(zip(batch.counts, batch.tokens, strict=True)):
        assert not n or tables.requests[r, work.UNIT_BEGIN] == len(in_order)
        in_order += [(r, tile, unit) for tile in range(line.tiles(n)) for unit in range(line.units(keys))]
    assert visited == in_order
    assert tables.ctas[-1, work.CTA_BEGIN] == len(in_order)
    starts = {(r, tile, unit) for (r, tile), parts in pieces.items() for unit, _ in parts}
    assert all(tuple(row[:3]) in starts for row in tables.ctas[:-1].tolist() if row[work.CTA_COUNT])
    if line.config.deterministic:
        for (r, _), parts in pieces.items():
            count, length = line.pieces(batch.tokens[r], line.tiles(batch.counts[r]))
            assert [unit for unit, _ in parts] == [k * length for k in range(count)]


def check_merges(line, batch, tables, pieces):
    rows = np.concatenate([tables.few, tables.many]).tolist()
    begins = dict(zip(tables.requests[:, work.Q_BEGIN].tolist(), range(len(batch.counts)), strict=True))  # of empty requests, the last owns it
    slot_of = work.work_split(simulator.language(), line.config).slot
    listed = {(begins[begin], tile): [slot_of(slot, k) for k in range(count)] for slot, count, tile, begin, _ in rows}
    assert listed == {tile: [slot for _, slot in parts] for tile, parts in pieces.items() if len(parts) > 1}
    assert len(listed) == len(rows)
    assert all(row[work.MERGE_TOKENS] == batch.counts[begins[row[work.MERGE_ROW]]] for row in rows)
    assert (tables.few[:, work.MERGE_PIECES] <= work.FEW_PIECES).all() and (tables.many[:, work.MERGE_PIECES] > work.FEW_PIECES).all()


def cost_of(line, tables, pieces):
    """Units: the longest share, and what pieces cost beyond one a tile; see cuts.py."""
    tiles_of_cta = [[tile for tile, parts in pieces.items() if any(slot // 2 == p for _, slot in parts)] for p in range(line.num_ctas)]
    cut = any(len(parts) > 1 for parts in pieces.values())
    second = any(len(tiles) > 1 and any(len(pieces[tile]) > 1 for tile in tiles) for tiles in tiles_of_cta)
    longest = tables.ctas[:-1, work.CTA_COUNT].max()
    return longest + (even_cost(line, longest) if cut and second else line.piece_cost * cut)


def even_cost(line, share):
    """What even cuts cost: two pieces, and what CTAs lose that do not read the same rows at the same time."""
    return 2 * line.piece_cost + share // cuts.OUT_OF_STEP


def cost_of_the_ways(line, batch):
    """The least of even cuts and, where no more tiles are than CTAs, of one CTA a tile and of the least common length of pieces that is tried."""
    tiles = [(line.tiles(n), line.units(keys)) for n, keys in zip(batch.counts, batch.tokens, strict=True) if n]
    units_in_all, config = sum(count * units for count, units in tiles), line.config
    shortest = max(-(-units_in_all // line.num_ctas), config.min_units)
    # Past sqrt(merge_keys * units / kv_tile) a longer one is dearer.
    longest = shortest + math.isqrt(config.merge_keys * units_in_all)
    payload = min(range(shortest, longest + 1), key=lambda share: share * config.kv_tile + Fraction(config.merge_keys * units_in_all, share))
    costs = [payload + even_cost(line, payload)]
    if sum(count for count, _ in tiles) <= line.num_ctas:
        costs.append(max(units for _, units in tiles))
        step = -(-(costs[0] - payload - line.piece_cost) // scans.WARPS)
        fitting = (length for length in range(payload, payload + scans.WARPS * step, step)
                   if sum(count * -(-units // length) for count, units in tiles) <= line.num_ctas)
        costs.append(next(fitting, costs[0]) + line.piece_cost)
    return min(costs)


H200 = LINES["h200"]
MANY = Line(16, work.ScheduleConfig(16, 16, False), 264)
MERGES = Line(64, work.ScheduleConfig(48, 64, False, merge_keys=5), 132)


def prefix_of(units, n):
    """Prefix of a request of n draft tokens whose tiles have so many units of 64 keys."""
    return 64 * units - n


#: line, batch, the shares of the CTAs, how many tiles are merged
CHOICES = {
    # Even cuts would be 126 units, of two tiles nearly everywhere.
    "one tile a CTA": (H200, Batch((4,) * 128, (prefix_of(129, 4),) * 128), [129] * 128 + [0] * 4, 0),
    # Even cuts would be 16 units.
    "eight CTAs a tile": (H200, Batch((64,), (prefix_of(129, 64),)), ([17] * 7 + [10]) * 16 + [0] * 4, 16),
    "all CTAs for one tile": (H200, Batch((1,), (prefix_of(10_000, 1),)), [76] * 131 + [44], 1),
    # A whole tile is 28 units more than an even share, two pieces cost 4, and there are not two CTAs for each tile.
    "even": (H200, Batch((4,) * 90, (prefix_of(91, 4),) * 90), [63] * 130 + [0] * 2, 90),
    # Even shares are 63 units, and 8 tiles one more.
    "even, moved to the borders of tiles": (H200, Batch((64,) * 64, (prefix_of(8, 64),) * 64), None, 0),
    # Even shares are 1001 units, and 8 tiles 31 more: less than 1 / 24.
    "many long tiles": (H200, Batch((64,) * 64, (prefix_of(129, 64),) * 64), None, 0),
    # Even shares are 879 units, and 7 tiles 136 more.
    "long tiles that would not come out even": (H200, Batch((64,) * 50, (prefix_of(145, 64),) * 50), [879] * 131 + [851], 131),
    "ragged": (H200, Batch((4,) * 4, (prefix_of(1000, 4), prefix_of(10, 4), prefix_of(300, 4), prefix_of(9, 4))), [10] * 131 + [9], 2),
    # A CTA takes at least 128 keys, but not the tiles of several CTAs that would have nothing to do.
    "short tiles, fewer than CTAs": (H200, Batch((4,) * 100, (0,) * 100), [1] * 100 + [0] * 32, 0),
    "short tiles, more than CTAs": (H200, Batch((4,) * 140, (0,) * 140), [2] * 70 + [0] * 62, 0),
    # 22 units a tile and 132 CTAs: shares of 3 would be 128 partial results.
    "few keys, many tiles": (MERGES, Batch((16,), (1024,)), [6, 6, 6, 4] * 16 + [0] * 68, 16),
    "few keys, one tile": (MERGES, Batch((1,), (1024,)), [3] * 7 + [1] + [0] * 124, 1),
    # 171 units: an even share is 6.
    "more keys, few tiles": (MERGES, Batch((4,), (8192,)), ([8] * 21 + [3]) * 4 + [0] * 44, 4),
    "two CTAs an SM": (MANY, Batch((8,) * 16, (4096 - 8,) * 16), [128] * 256 + [0] * 8, 128),
}


@pytest.mark.parametrize("name", CHOICES)
def test_the_cheapest_cuts_are_chosen(name):
    line, batch, shares, merged = CHOICES[name]
    tables = scheduled(line, batch)
    pieces, visited = slots_written(line, tables.requests, tables.ctas)
    check_shares(line, batch, tables, pieces, visited)
    check_merges(line, batch, tables, pieces)
    assert cost_of(line, tables, pieces) <= cost_of_the_ways(line, batch)
    if shares is not None:
        assert tables.ctas[:-1, work.CTA_COUNT].tolist() == shares
    assert len(tables.few) + len(tables.many) == merged


def test_deterministic_shares_are_even():
    """Their pieces are what they are: longer shares would give some CTAs two pieces, and others none."""
    line = MERGES._replace(config=replace(MERGES.config, deterministic=True))
    tables = scheduled(line, Batch((1,) * 132, (479,) * 132))
    assert tables.ctas[:-1, work.CTA_COUNT].tolist() == [10] * 132


# --- the twin -----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def twin(tmp_path_factory):
    return units.Programs(lines.UNIT, tmp_path_factory.mktemp("schedule"))


def check_twin(program, line, batch, seed=0):
    """The same requests, cuts and merges, number by number."""
    ours, theirs = scheduled(line, batch), lines.scheduled_by_the_twin(program, line, batch, seed)
    own, other = ours.requests.copy(), theirs.requests
    if line.config.deterministic:  # where nothing is split, each says so in its own way
        own[other[:, work.PIECE_BEGIN] < 0, work.PIECE_BEGIN] = -1
    np.testing.assert_array_equal(own, other)
    np.testing.assert_array_equal(ours.ctas[:-1], theirs.ctas[:-1])
    np.testing.assert_array_equal(ours.ctas[-1, :work.CTA_COUNT], theirs.ctas[-1, :work.CTA_COUNT])
    np.testing.assert_array_equal(ours.few, theirs.few)
    np.testing.assert_array_equal(ours.many, theirs.many)


@pytest.mark.parametrize("place", units.PLACES)
@each_line
@each_batch
def test_the_twin_has_the_same_tables(batch, line, place, twin):
    check_twin(twin(place), LINES[line], BATCHES[batch])


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", CHOICES)
def test_the_twin_chooses_the_same_cuts(name, deterministic, twin):
    line, batch = CHOICES[name][:2]
    check_twin(twin("fast"), line._replace(config=replace(line.config, deterministic=deterministic)), batch, seed=1)


@pytest.mark.parametrize("seed", range(12))
def test_random_lines(seed, twin):
    """Lengths of all orders of magnitude, on any number of CTAs."""
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 200))
    counts = rng.integers(0, 6, size) * (rng.random(size) < rng.choice([0.1, 0.5, 1]))
    batch = Batch(tuple(counts.tolist()), tuple(np.exp2(rng.uniform(0, 14, size)).astype(int).tolist()))
    config = work.ScheduleConfig(32, int(rng.choice([8, 16, 64])), seed % 6 == 5, 128, int(rng.choice([0, 2, 5, 40])))
    line = Line(9, config, int(rng.choice([3, 48, 132, 300])))
    tables = scheduled(line, batch)
    pieces, visited = slots_written(line, tables.requests, tables.ctas)
    check_shares(line, batch, tables, pieces, visited)
    check_merges(line, batch, tables, pieces)
    if not line.config.deterministic and visited:
        assert cost_of(line, tables, pieces) <= cost_of_the_ways(line, batch)
    check_twin(twin("fast"), line, batch, seed)
