"""Configurations of the Hopper kernel `wgmma`, and where its arrays lie in shared memory."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from .config import WARP, Shape
from .mma_config import CURSOR_WORDS, ITEMSIZE, SEGMENT_BYTES, Registers, TensorConfig

#: Threads of a warpgroup, which issues a wgmma together.
WARPGROUP = 4 * WARP
#: Warpgroups by role: one scores, two share the columns of the output, 64 x 512 float32 in 128 registers a thread; one fetches.
VALUE_GROUPS = 2
THREADS = (1 + VALUE_GROUPS + 1) * WARPGROUP
VALUE_WARPS = VALUE_GROUPS * WARPGROUP // WARP
#: Query rows of a tile: the m extent of wgmma.
ROWS = 64
#: k steps of 16 dims, one wgmma each, in a segment of 128 bytes.
SEGMENT_STEPS = SEGMENT_BYTES // ITEMSIZE // 16
#: With fewer rows a request most of the tile is empty: `mma`, which has tiles of 16 and 32 rows, is as fast or faster (docs/wgmma.md).
FEWEST_ROWS = 33
#: Places for the sums that end a piece, taken in turn; see `WgmmaTile.__post_init__`.
SUM_PLACES = 2
#: Alignment of the 128-byte swizzle's pattern, 8 rows of 128 bytes.
PATTERN_BYTES = 1024
#: Shared memory that a block may have on GPUs with wgmma.
HOPPER_SHARED_BYTES = 232_448


@dataclass(frozen=True)
class WgmmaTile:
    """64 query rows meet `keys` keys a step; `slots` slots of `keys` KV rows in the ring.

    q_segments: segments (64 dims) of Q that the score warps keep in registers, 16 a thread each; the others lie in shared memory.
    registers: a thread's, by role (setmaxnreg). delayed: value warpgroups that begin a step only when the next one has been scored (if its keys are
    there), so that the tensor cores have work while its softmax is made.
    """

    keys: int
    slots: int
    q_segments: int
    registers: Registers
    delayed: int = 0

    def __post_init__(self) -> None:
        if self.keys not in (32, 48, 64):
            raise ValueError(f"keys: expected 32, 48 or 64, got {self.keys}")
        # The sums of a piece stay until the value warps have read them, and only then give back the slot of the piece's last step. Two pieces
        # on, at the earliest, the same place is written: by then at least this many slots have come and gone.
        if not 2 <= self.slots <= SUM_PLACES * (self.q_slots + 1):
            raise ValueError(f"slots: expected 2 to {SUM_PLACES * (self.q_slots + 1)} of {self.keys} keys, got {self.slots}")
        if self.q_segments < 1:  # the first product, which begins the sums, is one of Q in registers
            raise ValueError(f"q_segments: expected at least 1, got {self.q_segments}")
        if not 0 <= self.delayed <= VALUE_GROUPS:
            raise ValueError(f"delayed: expected 0 to {VALUE_GROUPS} value warpgroups, got {self.delayed}")
        if self.registers.score + VALUE_GROUPS * self.registers.value + self.registers.producer > 65_536 // WARPGROUP:
            raise ValueError(f"registers: {self.registers} are more than the {65_536 // WARPGROUP} that four warpgroups have together")

    #: All score warps are one group and share no row: what `mma_softmax` and `mma_mask` want to know.
    rows, row_warps, warp_rows = ROWS, WARPGROUP // WARP, 16

    @property
    def block_keys(self) -> int:
        """Keys of a block that is fetched and given back at once: a whole slot."""
        return self.keys

    @property
    def q_slots(self) -> int:
        """Slots that Q passes through on its way."""
        return -(-ROWS // self.keys)

    def shared_bytes(self, shape: Shape) -> int:
        return layout(shape, self).end

    def __str__(self) -> str:
        return f"w{ROWS}k{self.keys}s{self.slots}q{self.q_segments}d{self.delayed}"


#: The tile. At 512/64 it takes 211,840 of the 232,448 B that a block may have. Registers: 128 of a value thread's are O, and ptxas keeps 24 below
#: the operands of wgmma; 6 segments of Q take 96 of a score thread's. See docs/wgmma.md.
WGMMA_TILES = (WgmmaTile(48, 3, 6, Registers(168, 160, 24), delayed=2),)


@functools.lru_cache(maxsize=64)  # `verify_mla` asks in every call
def choose_wgmma_tile(shape: Shape, shared_bytes: int) -> WgmmaTile | None:
    """The first tile that fits a block of `shared_bytes`; None when none does."""
    return next((tile for tile in WGMMA_TILES if tile.shared_bytes(shape) <= shared_bytes), None)


@dataclass(frozen=True)
class WgmmaConfig(TensorConfig):
    """`wgmma` with one `WgmmaTile`."""

    kernel: ClassVar[str] = "wgmma"
    merge_keys: ClassVar[int] = 5

    @property
    def layout(self) -> Layout:
        """Where its arrays lie in shared memory."""
        return layout(self.shape, self.tile)

    @property
    def segment_bytes(self) -> int:
        """Bytes of one segment of a slot: all its rows, 128 bytes each."""
        return self.tile.keys * SEGMENT_BYTES

    @property
    def segments(self) -> int:
        """Segments of a row."""
        return self.shape.row_dim * ITEMSIZE // SEGMENT_BYTES

    @property
    def weights_apart(self) -> bool:
        """Whether weights have a place of their own. Else they take that of their slot's last segment, which no value is made of, and score warps
        have to wait for each other before they write there: it holds keys."""
        return self.layout.weights < self.layout.end

    @property
    def weights(self) -> tuple[int, int]:
        """(byte offset of the weights of slot 0, bytes from there to those of the next slot)."""
        if self.weights_apart:
            return self.layout.weights, ROWS * self.tile.keys * ITEMSIZE
        return (self.segments - 1) * self.segment_bytes, self.segments * self.segment_bytes


class Layout(NamedTuple):
    """Byte offsets in dynamic shared memory.

    ring [slots][segments][keys][64] and q [segments - q_segments][64][64] are 16-bit, swizzled by 128 bytes; alpha [slots][64] and totals, rounded
    and references [SUM_PLACES][64] float32; flags [slots][4] and poison [4] uint32, one a score warp; cursors [12][CURSOR_WORDS] uint32, one a
    score warp, then one a value warp; full, empty, ready and scored [slots] mbarriers; weights [slots][64][keys] 16-bit, where there is room (see
    `WgmmaConfig.weights_apart`).
    """

    ring: int
    q: int
    alpha: int
    totals: int
    rounded: int
    references: int
    flags: int
    poison: int
    cursors: int
    full: int
    empty: int
    ready: int
    scored: int
    weights: int
    end: int


def layout(shape: Shape, tile: WgmmaTile) -> Layout:
    """Where everything lies. All offsets are multiples of 16; ring and q of 1024, which the swizzle counts from, and weights of 128, which a warp
    writes at once."""
    segments, slots = shape.row_dim * ITEMSIZE // SEGMENT_BYTES, tile.slots
    warps = WARPGROUP // WARP
    cursors = (warps + VALUE_WARPS) * CURSOR_WORDS
    sizes = (slots * segments * tile.keys * SEGMENT_BYTES, max(segments - tile.q_segments, 0) * ROWS * SEGMENT_BYTES,
             slots * ROWS * 4, *(SUM_PLACES * ROWS * 4,) * 3, 4 * slots * warps, 4 * warps, 4 * cursors, *(8 * slots,) * 4)
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + -(-size // 16) * 16)
    weights = -(-offsets.pop() // SEGMENT_BYTES) * SEGMENT_BYTES
    end = weights + slots * ROWS * tile.keys * ITEMSIZE
    # Rows without rope dims have no other place for them.
    return Layout(*offsets, weights, end if shape.rope_dim == 0 or end <= HOPPER_SHARED_BYTES else weights)
