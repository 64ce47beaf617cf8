"""Known ways to break `wgmma`, as data (see mutant_list.py and mma_mutants.py). What it shares with `mma` is broken there."""

from __future__ import annotations

from dataclasses import replace

from numba_verify.kernels.mma_config import Registers
from numba_verify.kernels.wgmma_config import WgmmaTile

from .mma_cases import MMA
from .mma_mutants import ANY, ASIDE, CUT, FIXED, HIDDEN_NAN, LATE_RISE, NO_PADDING, RISES, ROUNDS, SIGNALS_CASE, STUCK, WORDS
from .mutant_list import GUARD, OUTSIDE, RACE, WRONG_LSE, WRONG_OUT, Mutant
from .problems import Case

#: As a plan takes it, but both value warpgroups wait for the next step's scores; Q in registers and in shared memory at 128/64 too; a slot of
#: the ring more than a step and Q need, so that nobody is held up by that.
DELAYED = WgmmaTile(32, 4, 2, Registers(168, 160, 24), delayed=2)
PROXY = "proxy"
# Steps that all rows see as a whole come first, and two others after them.
LONG_WORDS = replace(WORDS, name="long_words", prefix=(130,))
ANY_OR_STUCK = f"{ANY}|{STUCK}"


def one(name: str, module: str, old: str, new: str, case: Case, caught: str, tile=None, races: bool = False) -> Mutant:
    return Mutant(f"wgmma_{name}", "wgmma", ((module, old, new),), case, caught, races, tile)


WGMMA_MUTANTS = [
    # Keys and queries: which are read, and where they lie.
    one("draft_row_off_by_one", "wgmma_producer", "uint64(key - pooled)", "uint64(key - pooled + 1)", ASIDE, ANY),
    one("slots_of_this_step", "wgmma_producer", "found[i] = slot_of(slots, slot0, uint32(key + uint32(keys)), pooled)",
        "found[i] = slot_of(slots, slot0, key, pooled)", ROUNDS, WRONG_OUT),
    one("head_of_the_next_row", "wgmma_producer", "uint64(flat - token * row_heads) * q_head", "uint64(uint32(flat + 1) % row_heads) * q_head", MMA,
        WRONG_OUT),
    one("queries_beyond_the_request", "wgmma_producer", "valid, source = flat < rows, q_address", "valid, source = True, q_address", NO_PADDING,
        OUTSIDE),
    one("queries_of_the_first_slot", "wgmma_score", "slot, row = first // slot_rows, first % slot_rows", "slot, row = uint32(0), first % slot_rows",
        replace(MMA, name="many_heads", heads=30), WRONG_OUT),
    one("a_swizzle_that_adds", "wgmma_score", "(lane_at ^ uint32(k << 5))", "(lane_at + uint32(k << 5))", MMA, f"{ANY}|{OUTSIDE}"),
    one("all_of_q_in_registers", "wgmma_score", "for s in range(held, segments):\n            unroll()", "for s in range(segments, segments):\n"
        "            unroll()", MMA, WRONG_OUT, DELAYED),
    # The mask.
    one("draft_tokens_unmasked", "wgmma_score", "masked = uint32(key0 + uint32(keys)) > ", "masked = key0 > ", WORDS, WRONG_OUT),
    one("rows_of_the_first_warp", "wgmma_score", "uint32(tile * uint32(ROWS) + w * uint32(16) + (lane >> uint32(2)))",
        "uint32(tile * uint32(ROWS) + (lane >> uint32(2)))", replace(MMA, name="many_heads", heads=30), WRONG_OUT),
    one("first_word_twice", "mma_mask", "uint32(key + uint32(s * WORD_KEYS))", "key", WORDS, WRONG_OUT),
    one("hidden_nan_stays", "wgmma_score", "if found != uint32(0):", "if False:", HIDDEN_NAN, ANY),
    # Scores and softmax.
    one("forget_log2e", "wgmma_score", "float32(sm_scale * log2e)", "float32(sm_scale)", MMA, WRONG_OUT),
    one("skip_the_rescale", "wgmma_value", "                    rescale(output,", "                    (output,", RISES, WRONG_OUT),
    one("factor_of_one", "wgmma_score", "alpha = exp2(peak[i] - step_peak[i])", "alpha = float32(1)", RISES, ANY),
    one("factors_of_slot_0", "wgmma_value", "rescale(output, uint32(place * uint32(ROWS) + w", "rescale(output, uint32(w",
        LATE_RISE, ANY),
    one("a_peak_that_never_moves", "wgmma_score", "if step_peak[i] > peak[i] + growth:", "if peak[i] == minus_infinity:",
        replace(RISES, name="high_rise", rises=((60, 100.0),)), ANY),
    # Plain steps.
    one("plain_past_the_prefix", "wgmma_score", "whole = uint32(uint32(prefix - key0) // uint32(keys))",
        "whole = uint32(uint32(prefix - key0) // uint32(keys) + uint32(1))", LONG_WORDS, WRONG_OUT),
    one("plain_to_the_end", "wgmma_score", "whole if whole < last else last", "whole if whole < count else count", CUT, ANY_OR_STUCK),
    one("plain_with_a_cap", "wgmma_score", "if key0 < prefix and not logit_cap > float32(0):", "if key0 < prefix:",
        replace(RISES, name="long_cap", rises=(), logit_cap=0.5), WRONG_OUT),
    one("plain_without_a_look", "wgmma_score", "if exact[i] > most or peak[i] == minus_infinity:", "if peak[i] == minus_infinity:",
        replace(RISES, name="high_rise", rises=((110, 200.0),)), ANY),
    one("plain_for_one_warp", "wgmma_score", "                if scored == uint32(0):\n                    # Otherwise", "                if True:\n"
        "                    # Otherwise", RISES, STUCK),
    one("plain_sums_left_out", "wgmma_score", "                    total[i], rounded[i] = total[i] + exact[i], rounded[i] + weighed[i]\n"
        "                if lane == uint32(0):\n                    marks[flags_at + now", "                    pass\n"
        "                if lane == uint32(0):\n                    marks[flags_at + now", RISES, WRONG_OUT),
    one("weights_of_the_other_half", "wgmma_score", "weights[2 * n + i]", "weights[2 * n + 1 - i]", MMA, WRONG_OUT),
    one("weights_without_their_warp", "wgmma_score", "place * weights_size + w * uint32(2 * chunks * 32) + lane", "place * weights_size + lane",
        replace(MMA, name="many_heads", heads=30), f"{ANY}|{RACE}"),
    # The ring and its pieces.
    one("values_of_the_first_half", "wgmma_value", "place * size + part * columns_bytes", "place * size", MMA, WRONG_OUT),
    one("sums_of_the_other_piece", "wgmma_value", "sums = uint32((piece % uint32(SUM_PLACES)) * uint32(ROWS))", "sums = uint32(0)",
        SIGNALS_CASE, f"{ANY}|{WRONG_LSE}"),
    one("parity_that_stays", "wgmma_value", "parities = uint32(parities ^ (uint32(1) << place))", "pass", ROUNDS, f"{RACE}|{STUCK}|{ANY}",
        races=True),
    one("delayed_to_the_end", "wgmma_value", "if part >= first_delayed and uint32(number + uint32(1)) != end:", "if part >= first_delayed:",
        replace(SIGNALS_CASE, name="signals_held"), STUCK, DELAYED),
    one("one_partial_slot_a_cta", "wgmma_value", "(uint32(1) if unit == uint32(0) else uint32(0))", "uint32(0)", CUT, ANY),
    one("partial_slot_of_the_cta", "wgmma_value", "if deterministic else slot", "if not deterministic else slot", FIXED, f"{ANY}|{OUTSIDE}"),
    one("write_padding_rows", "mma_write", "            if flat < valid:\n                token", "            if True:\n                token", MMA,
        f"{GUARD}|{OUTSIDE}|{WRONG_OUT}"),
]

#: Statements that wait, let others go on, or order memory, left out one by one; see mma_mutants.
WGMMA_SIGNAL_MODULES = ("wgmma_score", "wgmma_value", "wgmma_producer")
WGMMA_SIGNAL = r"(score_sync|warp_sync|wait|arrive|arrive_for|landed|proxy_fence|fence|commit|release)\(.*\)"
WGMMA_SIGNAL_CAUGHT = f"{RACE}|{STUCK}|{OUTSIDE}|{PROXY}|wgmma"
#: Comments before statements that other cases have to miss: the case, and the tile, None for the plan's.
WGMMA_SPECIAL_SIGNALS = {"# All score warps have read the step's keys: the weights may take the place of the last of their dims.":
                         (replace(ROUNDS, name="weights_in_slots", latent_dim=512, rope_dim=128), None)}
#: As in mutant_list.py.
WGMMA_BARRIERS = {"wgmma": ("wgmma", MMA)}
WGMMA_SPECIAL_CASES = {"# The mbarriers are there before anybody uses one.": ("wgmma", MMA, STUCK, True)}
