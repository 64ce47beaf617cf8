"""Known ways to break the kernels, as data: what is edited, on which case it shows, and the message of the check that has to see it.

What applies and runs them is in mutants.py. Cases are the smallest that show the defect: the simulator runs most in under a second.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from numba_verify.kernels.mma_config import MmaTile

from .problems import Case

# What reports a mutant: patterns of the messages of the checks that exist.
WRONG_OUT = r"out: \d+ of \d+ \(row, head\) vectors are off"
WRONG_LSE = r"lse: \d+ of \d+ entries are off"
NAN_OUT = r"out: NaN stands in"
GUARD = r"bytes changed that no kernel may write"
RACE = r"race on bytes"
OUTSIDE = r"outside|out of range|out of bounds"

SIBLINGS = ((-1, 0), (-1, 0, 0, 1, 2))
SMALL = Case("mutant", "the smallest row layout: two KV tiles, a tail, two trees", SIBLINGS, (20, 17), heads=2, latent_dim=32, rope_dim=32)
PARENTS = replace(SMALL, name="mutant_parents", tree_form="parents")
PAGES = replace(SMALL, name="mutant_pages", page_size=4)
CAP = replace(SMALL, name="mutant_cap", logit_cap=2.0)
ASIDE = replace(SMALL, name="mutant_aside", draft_in_cache=False)
HIDDEN_NAN = replace(SMALL, name="mutant_hidden_nan", nan_at=(1, 19))
# 29, 10, 1, 1 and 1 KV tiles, cut evenly after 11, 22 and 33: the third CTA ends one tile and begins the next, and so leaves two partials; the
# last one has whole tiles as well.
SPLIT = replace(SMALL, name="mutant_split", trees=((-1,), (-1,), (-1, 0, 0)), prefix=(460, 150, 5))
# 26 KV tiles of one row on CTAs of their own, 7 each: some neither begin the tile nor end it.
APART = replace(SMALL, name="mutant_apart", trees=((-1,),), prefix=(400,))
# 25 and 15, two CTAs each. Request r has its first CTA from thread r, and CTA r looks for it.
TWO_APART = replace(SMALL, name="mutant_two_apart", trees=((), (), (-1,), (-1,)), prefix=(0, 0, 390, 230))
# Pieces of 1024 keys: two of the first request, and a request that is not cut.
FIXED = replace(SMALL, name="mutant_fixed", trees=((-1,), (-1,)), prefix=(1030, 9), heads=1, deterministic=True)
FAR = replace(SMALL, name="mutant_far", trees=((-1,),), prefix=(1,), heads=1)


@dataclass(frozen=True)
class Mutant:
    """`edits`: (module of kernels/, text that stands there once, its replacement). `caught`: the message of the check that sees it, a
    pattern. `tile`: of `mma`, where it matters."""

    name: str
    kernel: str
    edits: tuple[tuple[str, str, str], ...]
    case: Case
    caught: str
    races: bool = False
    tile: MmaTile | None = None

    def __str__(self) -> str:
        return f"{self.name}-{self.kernel}"


def one(name: str, kernels: str, module: str, old: str, new: str, case: Case, caught: str, races: bool = False) -> list[Mutant]:
    """The same edit for each of `kernels` (a text with spaces)."""
    return [Mutant(name, kernel, ((module, old, new),), case, caught, races) for kernel in kernels.split()]


MUTANTS = [
    # Keys: which are read, and where they lie.
    *one("drop_last_key", "naive", "naive", "for key in range(kv_len):", "for key in range(kv_len - 1):", SMALL, WRONG_OUT),
    *one("drop_last_key", "flash paged", "tile", "elif key < kv_len:", "elif key < kv_len - 1:", SMALL, WRONG_OUT),
    *one(
        "drop_first_key",
        "flash paged",
        "tile",
        "        if key < prefix:\n",
        "        if key == 0:\n            seen = uint32(0)\n        elif key < prefix:\n",
        SMALL,
        WRONG_OUT,
    ),
    *one("skip_tail_tile", "flash", "flash", "(kv_len + uint32(kv_tile - 1)) // uint32(kv_tile)", "kv_len // uint32(kv_tile)", SMALL, WRONG_OUT),
    *one(
        "skip_tail_tile",
        "paged",
        "work",
        "units = (kv_len + int64(kv_tile - 1)) // int64(kv_tile)",
        "units = kv_len // int64(kv_tile)",
        SMALL,
        WRONG_OUT,
    ),
    *one(
        "off_by_one_in_the_tail",
        "flash",
        "flash",
        "(kv_len + uint32(kv_tile - 1)) // uint32(kv_tile)",
        "(kv_len - 1 + uint32(kv_tile - 1)) // uint32(kv_tile)",
        replace(SMALL, prefix=(31, 12)),
        WRONG_OUT,
    ),
    *one(
        "one_page_beyond",
        "naive flash paged",
        "expand",
        "uint32(page * page_size + (",
        "uint32((page + int64(1)) * page_size + (",
        PAGES,
        f"{NAN_OUT}|{WRONG_OUT}|{OUTSIDE}",
    ),
    *one(
        "ignore_kv_lens",
        "naive flash",
        "schedule",
        "if has_lens != 0:",
        "if False:",
        replace(PAGES, prefix=(20, 18)),
        f"{NAN_OUT}|{WRONG_OUT}",
    ),
    *one(
        "slots_of_the_first_request",
        "naive flash paged",
        "schedule",
        "requests[row + SLOT_BEGIN] = kv_begin * page_size",
        "requests[row + SLOT_BEGIN] = int64(0)",
        SMALL,
        WRONG_OUT,
    ),
    *one("draft_row_off_by_one", "naive", "naive", "uint64(key - aside)", "uint64(key - aside + 1)", ASIDE, f"{NAN_OUT}|{WRONG_OUT}"),
    *one("draft_row_off_by_one", "flash paged", "tile", "uint64(key - aside)", "uint64(key - aside + 1)", ASIDE, f"{NAN_OUT}|{WRONG_OUT}"),
    *one(
        "draft_rows_of_the_first_request",
        "flash paged",
        "schedule",
        "requests[row + Q_BEGIN] = begin\n",
        "requests[row + Q_BEGIN] = begin if (flags & 2) == 0 else int64(0)\n",
        ASIDE,
        f"{NAN_OUT}|{WRONG_OUT}|{GUARD}",
    ),
    *one(
        "slot_address_of_32_bits",
        "naive flash paged",
        "tile",
        "elements_before = uint64(slot) * uint64(token_stride)",
        "elements_before = uint32(slot * token_stride)",
        FAR,
        f"{NAN_OUT}|{WRONG_OUT}",
    ),
    *one(
        "byte_address_of_32_bits",
        "naive flash paged",
        "tile",
        "return elements_before * item",
        "return uint32(elements_before * item)",
        FAR,
        f"{NAN_OUT}|{WRONG_OUT}",
    ),
    # The mask.
    *one(
        "ignore_the_mask",
        "naive flash paged",
        "tile",
        "seen = (visibility[bits + uint64(draft >> uint32(5))] >> (draft & uint32(31))) & uint32(1)",
        "seen = uint32(1)",
        SMALL,
        WRONG_OUT,
    ),
    *one(
        "bit_of_the_neighbour",
        "naive flash paged",
        "tile",
        "(draft & uint32(31))) & uint32(1)",
        "((draft + 1) & uint32(31))) & uint32(1)",
        SMALL,
        WRONG_OUT,
    ),
    *one(
        "swap_two_children",
        "naive flash paged",
        "expand",
        "(uint32(node) & uint32(31))))",
        "((uint32(node) ^ uint32(1)) & uint32(31))))",
        PARENTS,
        WRONG_OUT,
    ),
    *one("parent_of_the_wrong_request", "naive flash paged", "expand", "parents[row0 + node]", "parents[node]", PARENTS, WRONG_OUT),
    *one(
        "stop_at_the_grandparent",
        "naive flash paged",
        "expand",
        "and node < n and step < n:",
        "and node < n and step < 2:",
        replace(PARENTS, trees=((-1, 0, 1, 2), (-1, 0, 0, 1, 3))),
        WRONG_OUT,
    ),
    *one(
        "nan_of_a_hidden_row",
        "flash paged",
        "tile",
        "            if visible(key, prefix, kv_len, visibility, bits) != uint32(0):\n                if",
        "            if key < kv_len:\n                if",
        HIDDEN_NAN,
        NAN_OUT,
    ),
    # Scores and softmax.
    *one(
        "ignore_rope",
        "naive",
        "naive",
        "dims, columns = shape.row_dim // WARP",
        "dims, columns = shape.latent_dim // WARP",
        SMALL,
        WRONG_OUT,
    ),
    *one(
        "ignore_rope",
        "flash paged",
        "tile",
        "shape.row_dim, shape.row_dim // WARP",
        "shape.row_dim, shape.latent_dim // WARP",
        SMALL,
        WRONG_OUT,
    ),
    *one(
        "values_from_the_rope_slice",
        "flash paged",
        "tile",
        "row = uint32(key) * row_dim + t\n",
        "row = uint32(key) * row_dim + t + uint32(row_dim - latent)\n",
        SMALL,
        WRONG_OUT,
    ),
    *one("forget_logit_cap", "naive flash paged", "tile", "if logit_cap > float32(0):", "if logit_cap > float32(1e30):", CAP, WRONG_OUT),
    *one(
        "cap_before_scale",
        "naive flash paged",
        "tile",
        "score = logit_cap * tanh(score / logit_cap)",
        "score = logit_cap * tanh(dot / logit_cap) * sm_scale",
        CAP,
        WRONG_OUT,
    ),
    *one("forget_log2e", "naive", "naive", "exp2((score - base) * log2e)", "exp2(score - base)", SMALL, WRONG_OUT),
    *one("forget_log2e", "flash paged", "tile", "weight = exp2((x - base) * log2e)", "weight = exp2(x - base)", SMALL, WRONG_OUT),
    *one(
        "skip_the_rescale",
        "naive",
        "naive",
        "rescale = exp2((peak - score) * log2e)",
        "rescale = float32(1)",
        SMALL,
        WRONG_OUT,
    ),
    *one("skip_the_rescale", "flash paged", "tile", "rescale = exp2((peak[g] - base) * log2e)", "rescale = float32(1)", SMALL, WRONG_OUT),
    *one(
        "skip_the_rescale_of_the_output",
        "flash paged",
        "tile",
        "acc[h * columns + c] = acc[h * columns + c] * rescale +",
        "acc[h * columns + c] = acc[h * columns + c] +",
        SMALL,
        WRONG_OUT,
    ),
    *one(
        "skip_the_rescale_of_the_sum", "flash paged", "tile", "total[g] = total[g] * rescale +", "total[g] = total[g] +", SMALL, WRONG_OUT
    ),
    *one(
        "lse_in_base_2", "naive", "naive", "value = peak + log2(total) * ln2", "value = (peak + log2(total) * ln2) / ln2", SMALL, WRONG_LSE
    ),
    *one(
        "lse_in_base_2",
        "flash paged",
        "tile",
        "value = peak[g] + log2(total[g]) * ln2",
        "value = (peak[g] + log2(total[g]) * ln2) / ln2",
        SMALL,
        WRONG_LSE,
    ),
    *one("lse_without_the_peak", "naive", "naive", "value = peak + log2(total) * ln2", "value = log2(total) * ln2", SMALL, WRONG_LSE),
    *one(
        "undivided_output", "flash paged", "tile", "value = acc[h * columns + c] / total", "value = acc[h * columns + c]", SMALL, WRONG_OUT
    ),
    # Split and merge.
    *one(
        "combine_weight_without_log2e",
        "paged",
        "combine",
        "exp2(difference if base2 else difference * log2e)",
        "exp2(difference)",
        SPLIT,
        WRONG_OUT,
    ),
    *one(
        "combine_weight_of_one",
        "paged",
        "combine",
        "return total * exp2(difference if base2 else difference * log2e)",
        "return total",
        SPLIT,
        WRONG_OUT,
    ),
    *one(
        "combined_lse_in_base_2", "paged", "combine", "else base + log2(total) * ln2", "else base + log2(total)", SPLIT, WRONG_LSE
    ),
    *one(
        "combine_drops_a_piece",
        "paged",
        "combine",
        "uint32(merges[at + MERGE_PIECES])",
        "uint32(merges[at + MERGE_PIECES] - 1)",
        SPLIT,
        WRONG_OUT,
    ),
    *one(
        "combine_forgets_the_sums",
        "paged",
        "combine",
        "return total * exp2(",
        "return exp2(",
        SPLIT,
        WRONG_OUT,
    ),
    *one("combine_does_not_wait", "paged", "combine", "cp_async_wait_group(BATCHES - 1)", "cp_async_wait_group(BATCHES)", SPLIT, NAN_OUT),
    *one(
        "last_piece_not_counted",
        "paged",
        "merges",
        "- unit + share - int64(1)) // share",
        "- unit) // share",
        SPLIT,
        f"{WRONG_OUT}|{NAN_OUT}",
    ),
    *one(
        "whole_share_not_merged",
        "paged",
        "merges",
        "if unit > int64(0) and unit <= share:",
        "if unit > int64(0) and unit < share:",
        APART,
        NAN_OUT,
    ),
    *one(
        "one_cta_too_few",
        "paged",
        "cuts",
        "<= num_ctas:\n                found",
        "<= num_ctas + int64(1):\n                found",
        TWO_APART,
        f"{WRONG_OUT}|{NAN_OUT}|{OUTSIDE}",
    ),
    *one(
        "all_requests_from_the_first_cta",
        "paged",
        "cuts",
        "requests[r * fields + PIECE_BEGIN] = used + before",
        "requests[r * fields + PIECE_BEGIN] = used",
        TWO_APART,
        f"{WRONG_OUT}|{NAN_OUT}|{OUTSIDE}",
    ),
    *one(
        "begin_of_the_first_tile",
        "paged",
        "cuts",
        "begin = requests[row + UNIT_BEGIN] + tile * units + unit",
        "begin = requests[row + UNIT_BEGIN] + unit",
        SMALL,
        f"{WRONG_OUT}|{NAN_OUT}|{OUTSIDE}",
    ),
    *one("forget_the_last_group", "naive", "naive", "value = (acc[i] + group[i]) / total", "value = acc[i] / total", SMALL, WRONG_OUT),
    *one(
        "one_partial_slot_a_cta",
        "paged",
        "paged",
        "slot = int64(2) * p + (int64(1) if unit == int64(0) else int64(0))",
        "slot = int64(2) * p",
        SPLIT,
        WRONG_OUT + "|" + NAN_OUT,
    ),
    *one(
        "unwritten_partial",
        "paged",
        "paged",
        "requests[table + PIECE_BEGIN] + tile * (",
        "requests[table + PIECE_BEGIN] + int64(1) + tile * (",
        FIXED,
        f"{WRONG_OUT}|{NAN_OUT}|{OUTSIDE}",
    ),
    *one(
        "share_one_unit_short",
        "paged",
        "cuts",
        "ctas[row + CTA_COUNT] = count",
        "ctas[row + CTA_COUNT] = count - (p > 0)",
        SPLIT,
        f"{WRONG_OUT}|{NAN_OUT}|{OUTSIDE}",
    ),
    # Where results go.
    *one(
        "write_padding_rows",
        "flash",
        "flash",
        "request = pointer(rows_address, i32)[row]\n",
        "request = max(pointer(rows_address, i32)[row], 0)\n",
        SMALL,
        GUARD,
    ),
    *one(
        "write_padding_rows",
        "naive",
        "naive",
        "request = pointer(rows_address, i32)[row]\n",
        "request = max(pointer(rows_address, i32)[row], 0)\n",
        SMALL,
        GUARD,
    ),
    *one(
        "write_padding_heads",
        "flash",
        "attend",
        "if uint32(h) < heads and column < uint32(latent):",
        "if column < uint32(latent):",
        SMALL,
        f"{GUARD}|{OUTSIDE}|{WRONG_OUT}",
    ),
    *one(
        "write_padding_lse",
        "flash paged",
        "tile",
        "if wants_lse != 0 and head < heads:",
        "if wants_lse != 0:",
        SMALL,
        f"{GUARD}|{OUTSIDE}|{WRONG_LSE}",
    ),
    *one(
        "write_beyond_the_latent",
        "flash",
        "attend",
        "if uint32(h) < heads and column < uint32(latent):",
        "if uint32(h) < heads:",
        SMALL,
        f"{GUARD}|{OUTSIDE}|{WRONG_OUT}",
    ),
]

NO_REQUESTS = replace(SMALL, name="mutant_no_requests", trees=(), prefix=())
# schedule scans two chunks of 256 requests.
CHUNKS = replace(SMALL, name="mutant_chunks", trees=((-1,),) * 258, prefix=(1,) * 258, heads=1, rope_dim=0, deterministic=True)
#: Modules with barriers: the kernel that is run for them, and a case in which their barriers matter.
BARRIERS = {
    "attend": ("paged", SPLIT),
    "cuts": ("naive", TWO_APART),
    "merges": ("naive", CHUNKS),
    "scans": ("naive", SMALL),
    "schedule": ("naive", SMALL),
}
#: Barriers, by the comment above them, that order global memory, which the race checker does not follow: kernel, case, what is seen instead.
SPECIAL_CASES = {
    "# The request table is complete before any thread looks up a request of another; and the sums are read before the next overwrite them.": (
        "paged",
        SPLIT,
        f"{NAN_OUT}|{OUTSIDE}",
    ),
    "# The first CTAs are written before any thread looks up a request by them, and the sums read before the next overwrite them.": (
        "paged",
        TWO_APART,
        f"{WRONG_OUT}|{NAN_OUT}",
    ),
    "# The CTA table is complete before any thread looks at where the next CTA begins.": ("paged", SPLIT, NAN_OUT),
}
