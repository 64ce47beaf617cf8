"""What an update leaves in the workspace: request table, pool rows, mask bits, and a division of the work that covers it exactly.

The arrays are looked at themselves: an attention result within tolerance would forgive a mask bit too many over a long prefix.
"""

import numpy as np
import pytest
from support import cases, machine
from support.problems import Case, build

from numba_verify.backend import AVAILABLE, KernelExecutor
from numba_verify.kernels import schedule
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
    table = field(plan, executor, "requests", np.int64).reshape(-1, schedule.REQUEST_FIELDS)[:len(case.trees)]
    counts = [len(tree) for tree in case.trees]
    assert table[:, schedule.Q_BEGIN].tolist() == problem.qo_indptr[:-1].tolist()
    assert table[:, schedule.Q_LEN].tolist() == counts
    assert table[:, schedule.PREFIX].tolist() == list(case.prefix)
    assert table[:, schedule.KV_LEN].tolist() == [p + n for p, n in zip(case.prefix, counts, strict=True)]

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
        begin = table[r, schedule.SLOT_BEGIN]
        rows = pool[slots[begin:begin + len(listed)]]
        np.testing.assert_array_equal(rows.view(np.uint8), listed.view(np.uint8))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("trees, prefix", [
    (cases.RAGGED, (5, 33, 0, 16)), ((), ()), (((), ()), (5, 0)), ((cases.chain(1),), (5000,)), ((cases.chain(9),) * 40, tuple(range(0, 400, 10))),
    ((cases.chain(2), (), cases.chain(1)), (3000, 100, 0)), ((cases.chain(1),) * 300, (7,) * 300)],
    ids=["ragged", "none", "no_rows", "one_long", "forty", "uneven", "300_requests"])
def test_every_unit_of_work_has_one_owner(trees, prefix, deterministic):
    """The shares of the CTAs, laid end to end, are the line of all units: nothing twice, nothing left out, every cut where it may be."""
    case = Case("work", "", trees, prefix, heads=9, latent_dim=32, rope_dim=0, deterministic=deterministic, tree_form="none")
    problem, spec, executor, plan = planned(case)
    table = field(plan, executor, "requests", np.int64).reshape(-1, schedule.REQUEST_FIELDS)
    ctas = field(plan, executor, "ctas", np.int64).reshape(-1, schedule.CTA_FIELDS)[:executor.num_ctas]
    kv_tile, head_tiles = executor.tile.kv_tile, -(-case.heads // executor.tile.head_tile)
    line, starts = [], {}
    for r, (tree, p) in enumerate(zip(trees, prefix, strict=True)):
        blocks, tiles = max(1, -(-(p + len(tree)) // kv_tile)), len(tree) * head_tiles
        if tiles:
            assert table[r, schedule.UNIT_BEGIN] == len(line)
        pieces = max(1, min(-(-blocks * kv_tile // schedule.PIECE_KEYS), schedule.MAX_PIECES // tiles)) if tiles and deterministic else 1
        length = -(-blocks // pieces)
        for tile in range(tiles):
            for unit in range(blocks):
                starts[len(line)] = not deterministic or unit % length == 0
                line.append((r, tile, unit))
    at = 0
    for request, tile, unit, count in ctas.tolist():
        if count:
            assert line[at] == (request, tile, unit)
            assert starts[at], "deterministic: a share begins where a piece does"
        at += count
    assert at == len(line)
    if not deterministic and line:
        assert max(ctas[:, schedule.CTA_COUNT]) <= max(-(-len(line) // executor.num_ctas), schedule.MIN_UNITS)
