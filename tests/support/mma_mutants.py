"""Known ways to break `mma`, as data (see mutant_list.py): wrong numbers here; each barrier and each wait left out once, by mutants.py.

One that is not here, since it does not show: a tail that is not filled with zeros. NaN in it is a hidden score that is not finite, and so
zeroed like that of a draft row.
"""

from __future__ import annotations

from dataclasses import replace

from numba_verify.kernels.mma_config import MMA_TILES, MmaTile

from .cases import chain
from .mma_cases import MMA, SIBLINGS
from .mutant_list import GUARD, NAN_OUT, OUTSIDE, RACE, WRONG_LSE, WRONG_OUT, Mutant
from .problems import Case

#: Two groups of two warps, four groups of one, and the tile whose ring has fewer blocks than a step of every group takes.
PAIRS, SINGLES, SHORT_RING = (next(tile for tile in MMA_TILES if wanted(tile)) for wanted in (
    lambda tile: tile.row_warps == 2 and tile.rows == 32, lambda tile: tile.groups == 4 and tile.keys == 16,
    lambda tile: tile.blocks < tile.full_barriers))
#: Value warps hold back; in blocks a step and barriers the second is as the tile of 64 rows.
HOLDING = replace(PAIRS, holds_back=True)
HOLDING_LONG = MmaTile(32, 32, 8, 2, holds_back=True)

WORDS = replace(MMA, name="words", trees=(chain(40),), prefix=(21,), heads=1)
ROUNDS = replace(MMA, name="rounds", trees=(SIBLINGS,), prefix=(250,))
RISES = replace(MMA, name="rises", trees=(SIBLINGS,), prefix=(150,), rises=((20, 9.0), (70, 9.0), (150, 9.0)))
# What comes before the rise still counts, a little; four groups of 32 keys, and it is the last one's step.
LATE_RISE = replace(RISES, name="late_rise", prefix=(110,), rises=((100, 6.8),), dtype="float16")
# Of the rows of the group's first warp only, in a step of the group that opened the piece.
SOME_RISE = replace(RISES, name="some_rise", prefix=(130,), heads=6, rises=((64, 9.0),), rise_rows=(0, 16))
# One step of one group, after which scores are as before.
HUMP = replace(RISES, name="hump", rises=((64, 9.0), (80, -9.0)))
# 44 and 22 steps of 16 keys for 4 CTAs.
CUT = replace(MMA, name="cut", trees=((-1, 0), (-1,)), prefix=(700, 350), rises=((400, 3.0),))
FIXED = replace(MMA, name="fixed", trees=((-1,), (-1, 0)), prefix=(1050, 9), heads=1, rope_dim=0, deterministic=True)
ASIDE = replace(MMA, name="aside", draft_in_cache=False)
CAP = replace(MMA, name="cap", logit_cap=2.0)
HIDDEN_NAN = replace(MMA, name="hidden_nan", nan_at=(1, 19))
NO_PADDING = replace(MMA, name="no_padding", padding_rows=0)
# What every role waits for: several pieces a CTA, masked steps, poison, blocks used again.
SIGNALS_CASE = replace(MMA, name="signals", trees=((-1,), SIBLINGS, (-1, 0), SIBLINGS, (-1,), SIBLINGS, (-1,), SIBLINGS),
                       prefix=(3, 90, 5, 40, 2, 30, 1, 50), nan_at=(1, 92), heads=5)
FAR = replace(MMA, name="mutant_far", trees=((-1,),), prefix=(1,), heads=1)


def one(name: str, module: str, old: str, new: str, case: Case, caught: str, tile=None, races: bool = False) -> Mutant:
    return Mutant(name, "mma", ((module, old, new),), case, caught, races, tile)


STUCK = r"no thread can go on|comes twice in one phase|race on the mbarrier|completed without this thread|there is no mbarrier"
ANY = f"{WRONG_OUT}|{NAN_OUT}"
ANY_OR_STUCK = f"{ANY}|{STUCK}"

MMA_MUTANTS = [
    # Keys: which are read, and where they lie.
    one("draft_row_off_by_one", "mma_producer", "uint64(key - pooled)", "uint64(key - pooled + 1)", ASIDE, ANY),
    one("slots_of_the_step_before", "mma_producer", "slots_of(found, slots, slot0, uint32(key + uint32(keys)), pooled)",
        "slots_of(found, slots, slot0, key, pooled)", MMA, WRONG_OUT),
    one("one_slot_for_all_blocks", "mma_producer", "source = kv_address + byte_offset(sources[b],", "source = kv_address + byte_offset(sources[0],",
        MMA, WRONG_OUT),
    one("slot_address_of_32_bits", "tile", "elements_before = uint64(slot) * uint64(token_stride)", "elements_before = uint32(slot * token_stride)",
        FAR, ANY),
    # Rows: which query is read, and which row is written.
    one("head_of_the_next_row", "mma_products", "head = uint32(flat - token * row_heads)", "head = uint32(flat + 1) % row_heads", MMA, WRONG_OUT),
    one("queries_beyond_the_request", "mma_products", "valid = flat < rows", "valid = True", NO_PADDING, OUTSIDE),
    one("mask_of_the_first_row", "mma_mask", "quotient(uint32(flat + uint32(8 * i)), row_heads)", "quotient(flat, row_heads)", MMA, WRONG_OUT),
    one("head_of_a_finished_row", "mma_write", "head = uint32(flat - token * row_heads)", "head = flat % uint32(row_heads - 1)", MMA, ANY),
    one("write_padding_rows", "mma_write", "            if flat < valid:\n                token", "            if True:\n                token", MMA,
        f"{GUARD}|{OUTSIDE}|{WRONG_OUT}"),
    one("write_padding_lse", "mma_write", "(flags & FLAG_LSE) != 0 and flat < valid:", "(flags & FLAG_LSE) != 0:", MMA,
        f"{GUARD}|{OUTSIDE}|{WRONG_LSE}"),
    # The mask.
    one("draft_tokens_unmasked", "mma_score", "masked = uint32(key0 + uint32(keys)) > prefix", "masked = key0 > prefix",
        WORDS, WRONG_OUT),
    one("prefix_bit_too_many", "mma_mask", "count = uint32(prefix - key)", "count = uint32(prefix - key + 1)", MMA, WRONG_OUT),
    one("bit_of_the_neighbour", "mma_mask", "draft = uint32(key - prefix)", "draft = uint32(key - prefix + 1)", WORDS, WRONG_OUT),
    one("one_word_twice", "mma_mask", "uint32(index + uint32(1))", "index", WORDS, WRONG_OUT),
    one("bits_of_the_first_lane", "mma_mask", "uint32(bits >> uint32(uint32(2) * (lane & uint32(3))))", "bits", MMA, WRONG_OUT),
    one("hidden_nan_stays", "mma_score", "if found != uint32(0):", "if False:", HIDDEN_NAN, NAN_OUT),
    one("hidden_nan_of_the_other_warp", "mma_score", "found = marks[first] |", "found = uint32(0) &",
        replace(HIDDEN_NAN, name="hidden_nan_two_warps", trees=((-1, 0), (-1, 0, 0, 0, 0, 0)), nan_at=(1, 22)), NAN_OUT, PAIRS),
    one("poison_of_the_neighbour", "mma_mask", "place(uint32(number + key // block_keys))", "place(number)", HIDDEN_NAN, NAN_OUT),
    # Scores and softmax.
    one("ignore_rope", "mma_products", "segments = tile.warp_rows // 16, tile.keys // 8, config.shape.row_dim",
        "segments = tile.warp_rows // 16, tile.keys // 8, config.shape.latent_dim", MMA, WRONG_OUT),
    one("swapped_halves_of_keys", "mma_score", "row_offset(b_key, (lane >> uint32(3)) & uint32(1))",
        "row_offset(b_key, uint32(~lane >> uint32(3)) & uint32(1))", MMA, WRONG_OUT),
    one("a_swizzle_that_adds", "mma_products", "(q_at ^ uint32(k << 5))", "(q_at + uint32(k << 5))", MMA, f"{ANY}|{OUTSIDE}"),
    one("keys_of_the_neighbour", "mma_score", "row_offset(b_key, (lane", "row_offset(uint32(b_key ^ uint32(1)), (lane", MMA, WRONG_OUT),
    one("weights_of_the_next_row", "mma_score", "weight_offset(g, uint32(n))", "weight_offset(uint32(g ^ uint32(1)), uint32(n))", MMA, WRONG_OUT),
    one("forget_a_chain", "mma_products", "for c in range(1, chains):", "for c in range(2, chains):", MMA, WRONG_OUT, SINGLES),
    one("forget_logit_cap", "mma_softmax", "if logit_cap > float32(0):", "if logit_cap > float32(1e30):", CAP, WRONG_OUT),
    one("cap_in_base_2", "mma_softmax", "tanh(scores[i] * sm_scale / logit_cap) * log2e", "tanh(scores[i] * sm_scale / logit_cap)", CAP, WRONG_OUT),
    one("forget_log2e", "mma_score", "float32(sm_scale * log2e)", "float32(sm_scale)", MMA, WRONG_OUT),
    one("skip_the_rescale", "mma_value", "                    rescale(output,", "                    (output,", RISES, WRONG_OUT),
    one("factor_of_one", "mma_score", "exp2(before - step_peak[i])", "float32(1)", RISES,
        WRONG_OUT),
    one("factors_of_the_first_group", "mma_value", "rescale(output, uint32(turn * uint32(rows) + (", "rescale(output, uint32((", LATE_RISE,
        WRONG_OUT),
    one("flag_of_the_first_warp", "mma_score", "words[flags_at + w] = grew", "words[flags_at + w] = uint32(0)", RISES, WRONG_OUT),
    one("own_sums_stay", "mma_score", "            if moved > peak[i]:", "            if False:", RISES, f"{WRONG_OUT}|{WRONG_LSE}"),
    one("sums_of_other_groups_stay", "mma_write", "if reference < peak:", "if False:",
        replace(RISES, name="two_rises", rises=((20, 9.0), (140, 9.0))), f"{WRONG_OUT}|{WRONG_LSE}"),
    one("sums_of_one_group", "mma_write", "for k in range(groups):\n            unroll()", "for k in range(1):\n            unroll()", MMA,
        WRONG_OUT),
    one("peaks_of_the_own_group", "mma_score", "                before = floats[", "                before = peak[i] + float32(0) * floats[", RISES,
        WRONG_OUT),
    one("peaks_of_the_piece_before", "mma_score", "if not opening:", "if True:", MMA, f"{ANY}|lse: NaN stands in"),
    one("a_peak_that_never_moves", "mma_score", "if step_peak[i] > before + growth:", "if before == minus_infinity:",
        replace(RISES, name="high_rise", rises=((60, 100.0),)), ANY),
    # Plain steps.
    one("plain_past_the_prefix", "mma_score", "uint32(key0 + uint32(keys)) <= plain_end", "key0 < plain_end", replace(WORDS, prefix=(53,)), WRONG_OUT,
        PAIRS),
    one("plain_with_a_cap", "mma_score", "uint32(0) if logit_cap > float32(0) else prefix", "prefix",
        replace(RISES, name="long_cap", rises=(), logit_cap=0.5), WRONG_OUT, PAIRS),
    one("plain_without_a_look", "mma_score", "uint32(found | (maximum(exact[i], weighed[i]) > most))", "found",
        replace(RISES, name="high_rise", rises=((110, 200.0),)), ANY, PAIRS),
    one("plain_by_an_old_peak", "mma_score", "found | (before[i] != peak[i]) |", "found |", HUMP, WRONG_OUT, PAIRS),
    one("plain_though_outgrown", "mma_score", "                        settled = plain", "                        settled = True",
        replace(RISES, name="high_rise", rises=((110, 200.0),)), ANY_OR_STUCK, PAIRS),
    one("factors_of_before", "mma_score", "alpha[i] = float32(1)", "alpha[i] = alpha[i]", SOME_RISE, ANY, PAIRS),
    one("waits_twice_for_its_turn", "mma_score", "if not tried:", "if True:", RISES, STUCK, PAIRS),
    one("sums_left_out", "mma_score", "total[i], rounded[i] = total[i] + exact[i], rounded[i] + weighed[i]", "pass", MMA, f"{ANY}|{WRONG_LSE}"),
    one("lse_in_base_2", "mma_write", "value = (peak + log2(total)) * ln2", "value = peak + log2(total)", MMA, WRONG_LSE),
    one("lse_without_the_peak", "mma_write", "value = (peak + log2(total)) * ln2", "value = log2(total) * ln2", MMA, WRONG_LSE),
    one("undivided_output", "mma_write", "inverse = float32(1) / total", "inverse = float32(1)", MMA, WRONG_OUT),
    # The ring.
    one("ring_without_wrap", "mma_work", "return uint32(number % places)", "return number", ROUNDS, f"{RACE}|{OUTSIDE}|{STUCK}|overwritten"),
    one("one_parity", "mma_work", "return uint32((number // places) & uint32(1))", "return uint32(0)", ROUNDS, f"{RACE}|{STUCK}", races=True),
    # A group waits two rounds after its last step: the parity of the round between is the same.
    one("full_barriers_of_the_ring", "mma_work", "full = blocks if tile.full_barriers == tile.blocks else ring(lang, tile.full_barriers)",
        "full = blocks", ROUNDS, RACE, SHORT_RING, races=True),
    one("values_of_the_next_block", "mma_value", "load_values(values, 0, uint32(place_of(number) * size + values_at))",
        "load_values(values, 0, uint32(place_of(uint32(number + uint32(1))) * size + values_at))", MMA, f"{ANY}|{OUTSIDE}"),
    # Holding back.
    one("held_for_a_step_too_far", "mma_value", "else uint32(step + uint32(1))", "else uint32(step + uint32(3))", ROUNDS, STUCK, HOLDING),
    one("held_past_the_end", "mma_value", "== group and scored != end", "== group", ROUNDS, STUCK, HOLDING),
    one("one_barrier_for_all_steps", "mma_work", "ring(lang, max(tile.scored_steps, 1))", "ring(lang, 1)", ROUNDS, f"{RACE}|{STUCK}", HOLDING_LONG,
        races=True),
    one("nobody_tells", "mma_score", "                tell_scored(base, uint32(number // uint32(key_blocks)), row_warp, lane)\n", "", ROUNDS, STUCK,
        HOLDING),
    one("ready_for_half_a_group", "mma", "group_threads = uint32(config.tile.row_warps * WARP)", "group_threads = uint32(WARP)", ROUNDS,
        f"{RACE}|{STUCK}|{ANY}", HOLDING, races=True),
    one("one_cursor_for_all", "mma_value", "words_at = uint32(cursor_at + (t >> uint32(5)) * uint32(CURSOR_WORDS))", "words_at = cursor_at",
        SIGNALS_CASE, f"{RACE}|{STUCK}|{ANY}|{OUTSIDE}", HOLDING, races=True),
    one("one_parity_of_ready", "mma_work", "(step // groups) & uint32(1))", "uint32(0))", ROUNDS, f"{RACE}|{STUCK}", HOLDING, races=True),
    # Pieces.
    one("one_partial_slot_a_cta", "mma_value", "(uint32(1) if unit == uint32(0) else uint32(0))", "uint32(0)", CUT, ANY),
    one("unwritten_partial", "mma_work", "int64(unit // length)", "int64(unit // length) + int64(1)", FIXED, f"{ANY}|{OUTSIDE}"),
    one("combine_in_base_e", "combine", "exp2(difference if base2 else difference * log2e)", "exp2(difference * log2e)", CUT, WRONG_OUT),
    one("combined_lse_in_base_e", "combine", "value = (base + log2(total)) * ln2 if base2 else", "value = base + log2(total) * ln2 if base2 else",
        CUT, WRONG_LSE),
    one("combine_ends_early", "combine", "the other.\n        if overlap:\n            wait_for_partials()\n", "the other.\n", CUT,
        "ends without griddepcontrol_wait"),
    one("peaks_not_left", "mma_write", "statistics[where] = peak", "statistics[where] = total", CUT, WRONG_OUT),
    one("sums_not_left", "mma_write", "statistics[where + uint64(1)] = total", "statistics[where + uint64(1)] = peak", CUT, WRONG_OUT),
]

#: Modules in which a statement that waits for others, or lets them go on, is left out; and how such statements begin.
SIGNAL_MODULES = ("mma_products", "mma_score", "mma_value", "mma_producer")
SIGNAL = (r"(score_sync|group_sync|turn_sync|turn_arrive|ready_sync|ready_arrive|free_sync|free_arrive|bar_warp_sync|warp_sync|wait|arrive|landed)"
          r"\(.*\)")
#: Of these alone a tile that does not hold back has others: named barriers.
READY_SIGNAL = r"(ready_sync|ready_arrive)\(.*\)"
SIGNAL_CAUGHT = f"{RACE}|{STUCK}|{OUTSIDE}"
#: As in mutant_list.py.
MMA_BARRIERS = {"mma": ("mma", MMA)}
MMA_SPECIAL_CASES = {"# The mbarriers exist before anybody uses them.": ("mma", MMA, STUCK, True)}
