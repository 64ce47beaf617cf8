"""Configurations of the tensor-core kernel `mma`, where its arrays lie in shared memory, and which of them a plan takes."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from ..errors import UnsupportedError
from .config import WARP, Shape
from .work import ScheduleConfig

#: Warps by role. Four score warps, so that every SM quarter has one; eight value warps hold 64 x 512 float32 of output in 128 registers a
#: thread; four producer warps make a warpgroup, the unit in which registers are handed over.
SCORE_WARPS, VALUE_WARPS, PRODUCER_WARPS = 4, 8, 4
SCORE_THREADS, VALUE_THREADS, PRODUCER_THREADS = SCORE_WARPS * WARP, VALUE_WARPS * WARP, PRODUCER_WARPS * WARP
THREADS = SCORE_THREADS + VALUE_THREADS + PRODUCER_THREADS
#: Keys of one block of the ring: the k extent of one mma, so a block is handed back after one step of P V.
BLOCK_KEYS = 16
#: Bytes of the 128-byte swizzle: the 16-byte chunks of 128 bytes of a row change places by the row's number modulo 8, so that the 8 rows
#: of an ldmatrix lie in 8 different bank groups.
SEGMENT_BYTES = 128
ITEMSIZE = 2
#: Threads that fetch one KV or Q row together: 8 x 16 B = one segment a step.
THREADS_PER_ROW = SEGMENT_BYTES // 16
#: Words of a cursor (see `mma_work.Cursor`), and room to 32 bytes.
CURSOR_WORDS = 8
#: The word of it that holds the partial slot of the value warps' piece.
SLOT_WORD = 5


class Registers(NamedTuple):
    """Registers a thread by role (setmaxnreg); with 512 threads their mean is 128."""

    score: int
    value: int
    producer: int


#: Kernels on tensor cores, which take other rows than the rest.
TENSOR_KERNELS = ("mma", "wgmma")


def unsupported_tensor_shape(kernel: str, latent_dim: int, rope_dim: int, dtype: str) -> str:
    """Why `kernel`, one of TENSOR_KERNELS, cannot take such rows; the empty string when it can."""
    if dtype not in ("bfloat16", "float16"):
        return f"dtype {dtype}: kernel={kernel!r} takes bfloat16 and float16; kernel='paged' would run"
    if latent_dim not in (128, 256, 512):  # whole segments, of which a swizzled address steps through a value warp's share by XOR
        return f"latent_dim={latent_dim}: kernel={kernel!r} takes 128, 256 and 512; kernel='paged' would run"
    if rope_dim % (SEGMENT_BYTES // ITEMSIZE) or not 0 <= rope_dim <= 128:
        return f"rope_dim={rope_dim}: kernel={kernel!r} takes 0, 64 and 128; kernel='paged' would run"
    return ""


@dataclass(frozen=True)
class MmaTile:
    """`rows` query rows (draft token x head) meet `keys` keys a step; `blocks` blocks of 16 keys in the ring.

    `row_warps` score warps side by side over the rows make a group; the groups take steps in turn, so that one multiplies while another is
    at its softmax. `registers`: handed over between roles, for GPUs with setmaxnreg; None where every thread has the same. `holds_back`: a value warp
    may wait with a step until the score warp that it shares tensor cores with is at its softmax.
    """

    rows: int
    keys: int
    blocks: int
    row_warps: int
    registers: Registers | None = None
    holds_back: bool = False

    def __post_init__(self) -> None:
        if self.rows not in (16, 32, 64):
            raise ValueError(f"rows: expected 16, 32 or 64, got {self.rows}")
        if self.keys not in (16, 32):
            raise ValueError(f"keys: expected 16 or 32, got {self.keys}")
        if self.row_warps not in (1, 2) or self.warp_rows not in (16, 32):
            raise ValueError(f"row_warps: expected 1 or 2, for 16 or 32 rows a warp, got {self.row_warps} for {self.rows} rows")
        least = self.key_blocks * (2 if self.holds_back else 1)  # a step that is held back and the next, which it waits for
        if self.blocks < least:
            raise ValueError(f"blocks: expected at least {least} (for steps of {self.keys} keys), got {self.blocks}")
        if self.rows == 64 and self.registers is None:
            raise ValueError("rows=64: the output takes 128 registers a thread of the value warps, so registers must be handed over")

    @property
    def groups(self) -> int:
        """Groups of score warps."""
        return SCORE_WARPS // self.row_warps

    @property
    def key_blocks(self) -> int:
        """Ring blocks of one step."""
        return self.keys // BLOCK_KEYS

    @property
    def block_keys(self) -> int:
        return BLOCK_KEYS

    @property
    def warp_rows(self) -> int:
        return self.rows // self.row_warps

    @property
    def full_barriers(self) -> int:
        """Barriers `full`: a ring of their own, long enough for a step of every group.

        A group that waits for the keys of its next step has waited for none of the steps between. Were a barrier used again in one of those,
        the phase before it, complete since the group's last step or longer, would have the parity that the group waits for.
        """
        return max(self.blocks, self.groups * self.key_blocks)

    @property
    def scored_steps(self) -> int:
        """Steps whose barriers `scored` are apart: a value warp that waits for a step keeps the one before, or that step itself, in the ring,
        so that its barrier cannot be used once more meanwhile. Nor can it have been used for a phase that this one would be mistaken for:
        a step is ready only when all before it are scored."""
        return self.blocks // self.key_blocks if self.holds_back else 0

    @property
    def ready_barriers(self) -> int:
        """Mbarriers `ready`, one a group; 0 where it is a named barrier (see `mma_work.signals`)."""
        return self.groups if self.holds_back else 0

    def shared_bytes(self, shape: Shape) -> int:
        return layout(shape, self).end

    def __str__(self) -> str:
        return f"m{self.rows}k{self.keys}b{self.blocks}"


#: The tiles, the largest of each number of rows first. At 512/64 they take 232,208 B (H200), 213,600 and 226,880 B (H200), 158,256 and
#: 153,088 B (A100: 166,912 B) and 95,744 and 95,680 B (sm_120, sm_89, sm_86: 101,376 B). Only the largest holds back: the others are 2 to 13 % slower
#: if they do (docs/facts.md). Of more than 160 registers its value warps would make fragments fetched ahead, and take the tensor cores more often
#: from the score warps.
MMA_TILES = (MmaTile(64, 32, 8, 2, Registers(160, 160, 32), True),
             MmaTile(32, 32, 9, 1), MmaTile(32, 32, 6, 1), MmaTile(32, 16, 3, 2),
             MmaTile(16, 32, 11, 1), MmaTile(16, 32, 7, 1), MmaTile(16, 16, 4, 1))


def choose_mma_tile(shape: Shape, rows: int, shared_bytes: int, hands_over: bool) -> MmaTile | None:
    """The tile for requests of `rows` query rows (draft tokens x heads) on a device that gives a block `shared_bytes`; None when none fits.

    The fewest rows that hold a request: more would compute padding, fewer would fetch the KV rows again. `hands_over`: the device has
    setmaxnreg. Of the tiles with these rows, else with fewer, the first that fits. docs/how-it-works.md has the measurements.
    """
    return _first_tile(shape, 16 if rows <= 16 else 32 if rows <= 32 else 64, shared_bytes, hands_over)


@functools.lru_cache(maxsize=64)  # `verify_mla` asks in every call
def _first_tile(shape: Shape, wanted: int, shared_bytes: int, hands_over: bool) -> MmaTile | None:
    fitting = [tile for tile in MMA_TILES if tile.shared_bytes(shape) <= shared_bytes and (hands_over or tile.registers is None)]
    return next((tile for tile in fitting if tile.rows <= wanted), None)


@dataclass(frozen=True)
class TensorConfig:
    """What a kernel on tensor cores is compiled for: row layout, tile, and how the work was cut."""

    kernel: ClassVar[str]
    #: Of the schedule. Measured on an H200 with tiles of 64 rows (docs/facts.md): a partial result costs all some 0.1 us.
    merge_keys: ClassVar[int]
    shape: Shape
    tile: Any
    deterministic: bool

    def __post_init__(self) -> None:
        reason = unsupported_tensor_shape(self.kernel, self.shape.latent_dim, self.shape.rope_dim, self.shape.dtype)
        if reason:
            raise UnsupportedError(reason)

    @property
    def layout(self) -> Any:
        """Where its arrays lie in shared memory."""
        raise NotImplementedError

    @property
    def schedule(self) -> ScheduleConfig:
        """The schedule this kernel reads."""
        return ScheduleConfig(self.tile.keys, self.tile.rows, self.deterministic, merge_keys=self.merge_keys)

    def __str__(self) -> str:
        mode = "_deterministic" if self.deterministic else ""
        return f"{self.shape.latent_dim}_{self.shape.rope_dim}_{self.shape.dtype}_{self.tile}{mode}"


@dataclass(frozen=True)
class MmaConfig(TensorConfig):
    """`mma` with one `MmaTile`. `sm_90`: for GPUs from that on. It waits for an mbarrier by try_wait, else by polling, and lets `combine` start
    early."""

    kernel: ClassVar[str] = "mma"
    merge_keys: ClassVar[int] = 2
    sm_90: bool

    @property
    def layout(self) -> Layout:
        """Where its arrays lie in shared memory."""
        return layout(self.shape, self.tile)


class Layout(NamedTuple):
    """Byte offsets in dynamic shared memory.

    q [rows][row_dim], ring [blocks][16][row_dim] and weights [groups][rows][keys] are 16-bit and swizzled; peaks [rows], alpha, totals,
    rounded and references [groups][rows] are float32; flags and poison are one uint32 a score warp; cursors [1 + VALUE_WARPS][CURSOR_WORDS] are
    uint32: one of the score warps, one of each value warp; full [full_barriers], empty [blocks] and, where the tile holds back, ready [groups] and
    scored [scored_steps][row_warps] are mbarriers.
    """

    q: int
    ring: int
    weights: int
    peaks: int
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
    end: int


def layout(shape: Shape, tile: MmaTile) -> Layout:
    """Where everything lies. All offsets are multiples of 16; q and ring of 128, which the swizzle counts from."""
    row_bytes, rows = shape.row_dim * ITEMSIZE, tile.groups * tile.rows
    sizes = (tile.rows * row_bytes, tile.blocks * BLOCK_KEYS * row_bytes, rows * tile.keys * ITEMSIZE, tile.rows * 4,
             rows * 4, rows * 4, rows * 4, rows * 4,
             4 * SCORE_WARPS, 4 * SCORE_WARPS, 4 * (1 + VALUE_WARPS) * CURSOR_WORDS, 8 * tile.full_barriers, 8 * tile.blocks,
             8 * tile.ready_barriers, 8 * tile.scored_steps * tile.row_warps)
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + -(-size // 16) * 16)
    return Layout(*offsets)
