"""wgmma: tree-verify attention for Hopper (sm_90a), on tensor cores by warpgroup (bfloat16 and float16).

    grid (CTAs), 512 threads: CTA p walks its share of the line of work (see `schedule`); a unit is one step of `keys` KV rows for one tile
    of 64 query rows. A query row is (draft token, head): all heads of all draft tokens of a request share each fetched KV row.

              producer warpgroup         score warpgroup                       two value warpgroups
              Q, kv_indices -> ring      Q to registers                        half of the columns each
                     |      full[s]      S = Q K^T, mask, P = 2^(S - peak)     O = alpha O + P V (registers)
                     |                         |    ready[s]: P, alpha               |
                     +-----------------> ring of slots <-----------------------------+
                     <---------------------- empty[s] -------------------------------+

    ring: slots of `keys` KV rows, read twice: as keys (whole rows) and as values (their latent part). While the value warpgroups multiply step j,
    the score warpgroup is at step j + 1 and the producers fetch step j + 2. A tile's Q comes through the same ring, ahead of its keys.

    a slot:  full    the producers' copies have landed                                -> score warps
             ready   P, alpha, flag and, in the last step, the sums are written       -> value warps
             scored  S is there: the tensor cores are free until its softmax is made   -> value warps that hold back (`delayed`)
             empty   the value warps have multiplied (of Q: the score warps read it)  -> producers

A tile that a share's border cuts is finished by `combine`: its pieces leave (peak, total) and a normalised partial, peaks in log2 units.

FlashMLA and FlashAttention-3 showed how to keep a Hopper SM busy with warpgroups that are at different steps, FlashAttention-4 the lazy rescaling.
That the roles are those of `mma`, with Q in registers and three slots, is this project's own. Sources: arXiv:2407.08608,
github.com/deepseek-ai/FlashMLA, docs/wgmma.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .wgmma_config import THREADS, VALUE_GROUPS, WARPGROUP, WgmmaConfig
from .wgmma_producer import producer_role
from .wgmma_score import WARPS as SCORE_WARPS
from .wgmma_score import score_role
from .wgmma_value import value_role
from .wgmma_work import parts
from .work import FLAG_DRAFT_ASIDE

SIGNATURE = ("address",) * 11 + ("i64",) * 12 + ("f32",) * 2


def build(lang: Any, config: WgmmaConfig) -> Callable:
    """The kernel for `config` in the vocabulary `lang`."""
    uint32, uint64, int64, pointer, u32 = lang.uint32, lang.uint64, lang.int64, lang.pointer, lang.u32
    tid, block_x, bar_sync, init, shared_address = lang.tid_x, lang.ctaid_x, lang.bar_sync, lang.mbarrier_init, lang.shared_address
    common, launched = parts(lang, config), 65_536 // THREADS
    score, value, produce = score_role(lang, config, common), value_role(lang, config, common), producer_role(lang, config, common)
    score_registers, value_registers, producer_registers = (lang.set_max_registers(n, n > launched) for n in config.tile.registers)
    let_combine_start = lang.griddepcontrol_launch_dependents
    at, slots, first_value, first_producer = config.layout, config.tile.slots, uint32(WARPGROUP), uint32((1 + VALUE_GROUPS) * WARPGROUP)
    full, empty, ready, scored = uint32(at.full), uint32(at.empty), uint32(at.ready), uint32(at.scored)

    def wgmma(q_address, kv_address, draft_address, out_address, lse_address,
              requests_address, ctas_address, slots_address, visibility_address, partial_address, statistics_address,
              q_row, q_head, token_stride, page_size, page_gap, draft_stride, out_row, out_head, num_heads, words, flags, num_rows,
              sm_scale, logit_cap):
        t, p = tid(), int64(block_x())
        base = shared_address(uint32(0))
        if t == uint32(0):
            for s in range(slots):
                init(uint32(base + full + uint32(8 * s)), uint32(WARPGROUP))
                init(uint32(base + empty + uint32(8 * s)), uint32(VALUE_GROUPS * WARPGROUP))
                init(uint32(base + ready + uint32(8 * s)), uint32(WARPGROUP))
                init(uint32(base + scored + uint32(8 * s)), uint32(SCORE_WARPS))
        # The mbarriers are there before anybody uses one.
        bar_sync()
        # As soon as a CTA of this kernel has left room for it; `combine` itself waits for all of them.
        let_combine_start()
        if t < first_value:
            score_registers()
            score(base, t, ctas_address, p, requests_address, uint32(num_heads), pointer(visibility_address, u32), words, sm_scale, logit_cap)
        elif t < first_producer:
            value_registers()
            value(base, uint32(t - first_value), ctas_address, p, requests_address, out_address, uint64(out_row), uint64(out_head), lse_address,
                  partial_address, statistics_address, uint32(num_heads), num_rows, flags)
        else:
            producer_registers()
            produce(base, uint32(t - first_producer), ctas_address, p, requests_address, pointer(slots_address, u32), q_address, uint64(q_row),
                    uint64(q_head), num_rows, kv_address, token_stride, page_size, page_gap, draft_address, uint64(draft_stride), uint32(num_heads),
                    flags & FLAG_DRAFT_ASIDE)

    return wgmma
