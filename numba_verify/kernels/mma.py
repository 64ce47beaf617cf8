"""mma: tree-verify attention on tensor cores by mma.sync, for every GPU from sm_80 on (bfloat16 and float16).

    grid (CTAs), 512 threads: CTA p walks its share of the line of work (see `schedule`); a unit is one step of `keys` KV rows for one tile
    of `rows` query rows. A query row is (draft token, head): all heads of all draft tokens of a request share each fetched KV row.

              producer warps             score warps                           value warps
              kv_indices -> ring         S = Q K^T, mask, P = 2^(S - peak)     O = alpha O + P V
                     |      full[b]         |  Q      ready |  P, alpha           |  O (registers)
                     +-----------------> ring of KV <-------+---------------------+
                     <---------------------- empty[b] ----------------------------+
                                            <--------------- free ----------------+

    ring: blocks of 16 KV rows, read twice: as keys (whole rows) and as values (their latent part). While the value warps multiply step j, the
    score warps work on step j + 1 and the producers fetch what comes after: tensor cores, softmax and memory are busy at once.

    a block:  full    producers' copies have landed        -> score warps read keys (value warps follow through `ready`)
              empty   every value warp has read its values -> producers refill it
    a step:   ready   P, alpha, flags (and the sums at the end of a piece) are written   -> value warps
              free    the value warps have read them                                    -> score warps write the next
              scored  its scores are made, tensor cores are free (tiles that hold back) -> value warps of the same SM quarter

A tile that a share's border cuts is finished by `combine`: its pieces leave (peak, total) and a normalised partial, peaks in log2 units.

The schedule of roles follows FlashAttention-3 and FlashMLA (warp specialisation), the lazy rescaling FlashAttention-4; layout and code are
this project's own. Sources: arXiv:2407.08608, github.com/deepseek-ai/FlashMLA, docs/how-it-works.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .config import WARP
from .mma_config import PRODUCER_THREADS, SCORE_THREADS, VALUE_THREADS, VALUE_WARPS, MmaConfig, layout
from .mma_producer import producer_role
from .mma_score import score_role
from .mma_value import value_role
from .mma_work import parts
from .work import FLAG_DRAFT_ASIDE

SIGNATURE = ("address",) * 11 + ("i64",) * 12 + ("f32",) * 2


def _hand_over(lang: Any, config: MmaConfig) -> tuple[Callable, Callable, Callable]:
    """Functions that set a role's registers; they do nothing where every thread keeps what it has."""
    registers = config.tile.registers
    if registers is None:

        @lang.device
        def keep():
            return None

        return keep, keep, keep
    launched = 65_536 // (SCORE_THREADS + VALUE_THREADS + PRODUCER_THREADS)
    return tuple(lang.set_max_registers(count, count > launched) for count in registers)


def build(lang: Any, config: MmaConfig) -> Callable:
    """The kernel for `config` in the vocabulary `lang`."""
    uint32, uint64, int64, pointer, i64, u32 = lang.uint32, lang.uint64, lang.int64, lang.pointer, lang.i64, lang.u32
    tid, block_x, bar_sync, init, shared_address = lang.tid_x, lang.ctaid_x, lang.bar_sync, lang.mbarrier_init, lang.shared_address
    common = parts(lang, config)
    score, value, produce = score_role(lang, config, common), value_role(lang, config, common), producer_role(lang, config, common)
    score_registers, value_registers, producer_registers = _hand_over(lang, config)
    sm_90, let_combine_start = config.sm_90, lang.griddepcontrol_launch_dependents
    at, blocks, full_barriers = layout(config.shape, config.tile), config.tile.blocks, config.tile.full_barriers
    scored_barriers, ready_barriers = config.tile.scored_steps * config.tile.row_warps, config.tile.ready_barriers
    group_threads = uint32(config.tile.row_warps * WARP)
    first_value, first_producer = uint32(SCORE_THREADS), uint32(SCORE_THREADS + VALUE_THREADS)
    full, empty, ready, scored, producers, values = (uint32(at.full), uint32(at.empty), uint32(at.ready), uint32(at.scored),
                                                     uint32(PRODUCER_THREADS), uint32(VALUE_WARPS))

    def mma(q_address, kv_address, draft_address, out_address, lse_address,
            requests_address, ctas_address, slots_address, visibility_address, partial_address, statistics_address,
            q_row, q_head, token_stride, page_size, page_gap, draft_stride, out_row, out_head, num_heads, words, flags, num_rows,
            sm_scale, logit_cap):
        t, p = tid(), int64(block_x())
        base = shared_address(uint32(0))
        requests, ctas = pointer(requests_address, i64), pointer(ctas_address, i64)
        if t == uint32(0):
            for b in range(full_barriers):
                init(uint32(base + full + uint32(8 * b)), producers)
            for b in range(blocks):
                init(uint32(base + empty + uint32(8 * b)), values)
            for b in range(ready_barriers):
                init(uint32(base + ready + uint32(8 * b)), group_threads)
            for b in range(scored_barriers):
                init(uint32(base + scored + uint32(8 * b)), uint32(1))
        # The mbarriers exist before anybody uses them.
        bar_sync()
        if sm_90:
            # As soon as a CTA of this kernel has left room for it; `combine` itself waits for all of them.
            let_combine_start()
        if t < first_value:
            score_registers()
            score(base, t, ctas, p, requests, q_address, uint64(q_row), uint64(q_head), uint32(num_heads), pointer(visibility_address, u32), words,
                  num_rows, sm_scale, logit_cap)
        elif t < first_producer:
            value_registers()
            value(base, uint32(t - first_value), ctas, p, requests, out_address, uint64(out_row), uint64(out_head), lse_address, partial_address,
                  statistics_address, uint32(num_heads), num_rows, flags)
        else:
            producer_registers()
            produce(base, uint32(t - first_producer), ctas, p, requests, pointer(slots_address, u32), kv_address, token_stride, page_size, page_gap,
                    draft_address, uint64(draft_stride), num_heads, flags & FLAG_DRAFT_ASIDE)

    return mma
