"""Frozen tile configurations. A configuration that does not add up, or that a device cannot hold, refuses itself, with the numbers."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import UnsupportedError

WARP = 32
#: One block of the tile kernels: 8 warps share a KV tile; with 512 latent values a thread then owns two output columns.
TILE_THREADS = 256
#: Draft tokens of one request. DDTree asks for up to 1024 nodes; the visibility bits of a row are then 32 words, one a lane of a warp.
MAX_DRAFT_TOKENS = 1024
#: Opt-in shared memory of one block on sm_120, sm_89 and sm_86, the smallest of the GPUs served (99 KB).
SMALLEST_SHARED_BYTES = 101_376


@dataclass(frozen=True)
class Shape:
    """What a kernel is compiled for besides its tiles: row layout and dtype."""

    latent_dim: int
    rope_dim: int
    dtype: str

    def __post_init__(self) -> None:
        reason = unsupported_shape(self.latent_dim, self.rope_dim)
        if reason:
            raise UnsupportedError(reason)

    @property
    def row_dim(self) -> int:
        return self.latent_dim + self.rope_dim


def unsupported_shape(latent_dim: int, rope_dim: int) -> str:
    """Why the kernels cannot take these dimensions; the empty string when they can.

    Lanes split a row in steps of 32 and a thread owns whole columns, hence the multiples; 512 is what two columns a thread make.
    """
    if latent_dim % WARP or not WARP <= latent_dim <= 2 * TILE_THREADS:
        return f"latent_dim={latent_dim}: the kernels take multiples of 32 from 32 to 512; kernel='reference' takes any on NumPy arrays"
    if rope_dim % WARP or not 0 <= rope_dim <= 128:
        return f"rope_dim={rope_dim}: the kernels take multiples of 32 from 0 to 128; kernel='reference' takes any on NumPy arrays"
    return ""


@dataclass(frozen=True)
class TileConfig:
    """`head_tile` heads of one draft token meet `kv_tile` KV rows at a time in shared memory (flash and paged)."""

    head_tile: int
    kv_tile: int

    def __post_init__(self) -> None:
        warps = TILE_THREADS // WARP
        if self.kv_tile not in (16, 32):
            raise ValueError(f"kv_tile: expected 16 or 32 (a softmax row is one warp wide, whole keys a warp), got {self.kv_tile}")
        if self.head_tile % warps or self.head_tile < warps:
            raise ValueError(f"head_tile: expected a multiple of the {warps} warps of a block, got {self.head_tile}")
        if self.scores_per_lane not in (16, 32):
            raise ValueError(f"head_tile {self.head_tile} x kv_tile {self.kv_tile}: a warp's scores must be 16 or 32 to reduce into one "
                             f"score a lane, got {self.scores_per_lane}")

    @property
    def keys_per_warp(self) -> int:
        return self.kv_tile * WARP // TILE_THREADS

    @property
    def scores_per_lane(self) -> int:
        """Partial scores a lane holds: its warp's keys times all heads of the tile."""
        return self.head_tile * self.keys_per_warp

    @property
    def heads_per_warp(self) -> int:
        """Softmax rows a warp owns."""
        return self.head_tile * WARP // TILE_THREADS

    def shared_bytes(self, shape: Shape) -> int:
        """float32 query tile, KV tile, scores, and one rescale factor and one final sum a head."""
        floats = (self.head_tile + self.kv_tile) * shape.row_dim + self.head_tile * self.kv_tile + 2 * self.head_tile
        return 4 * floats

    def check_device(self, shape: Shape, shared_limit: int, device_name: str) -> None:
        """UnsupportedError, with the numbers and what would run, when a block needs more shared memory than the device gives."""
        need = self.shared_bytes(shape)
        if need > shared_limit:
            fits = [f"head_tile={c.head_tile}, kv_tile={c.kv_tile}" for c in TILE_CONFIGS if c.shared_bytes(shape) <= shared_limit]
            raise UnsupportedError(
                f"head_tile={self.head_tile}, kv_tile={self.kv_tile} needs {need:,} B of shared memory, {device_name} has {shared_limit:,} B; "
                + (f"would run: {'; '.join(fits)}" if fits else "kernel='naive' needs none and would run"))

    def __str__(self) -> str:
        return f"h{self.head_tile}k{self.kv_tile}"


#: The three tilings of the original design. All fit the smallest device at 512/64: 55,872, 74,880 and 93,248 B.
TILE_CONFIGS = (TileConfig(8, 16), TileConfig(16, 16), TileConfig(8, 32))


def choose_tile(num_heads: int) -> TileConfig:
    """16 heads share a fetch when there are more than 8: global KV traffic falls by the head tile; fewer heads would compute padding."""
    return TILE_CONFIGS[1] if num_heads > 8 else TILE_CONFIGS[0]
