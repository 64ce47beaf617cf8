"""The numba kernels behind a plan: which kernel with which tile, where its arrays lie in the workspace, what it is launched with.

On a GPU the kernels are compiled and launched through cuda.core; for NumPy arrays the same kernel sources run in the simulator. The
arguments differ only in what an address is: an integer there, the array itself here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np

from . import reference
from .errors import NoDeviceError, UnsupportedError
from .gpu import driver
from .gpu.compile import KernelSource
from .kernels import combine, expand, flash, naive, paged, schedule
from .kernels.config import Shape, TileConfig, choose_tile, unsupported_shape
from .memory import Workspace, align
from .problem import IndexArrays, PlanSpec, Tensors

#: Kernels of this version, fastest first: what "auto" looks through on a GPU.
AVAILABLE = ("paged", "flash", "naive")
#: bfloat16 conversions and cp.async begin with Ampere.
OLDEST_CAPABILITY = (8, 0)
#: A grid has at most 65,535 blocks in y, and `naive` puts 4 heads in a block.
MAX_HEADS = 4 * 65_535
#: SMs of the simulated device: enough that work is split and merged at shapes a simulator can run.
SIMULATED_SMS = 4
#: Blocks of `expand` per SM; it only moves a few bytes a row, so this is plenty to hide latency.
EXPAND_BLOCKS_PER_SM = 4
#: Blocks of `paged` and `flash` an SM should hold: while one waits for its KV tile the other computes. Registers are capped to suit.
TILE_BLOCKS_PER_SM = 2
#: Shared memory the driver keeps of every resident block.
RESERVED_SHARED_BYTES = 1024


class Executor(Protocol):
    """What a plan asks of an implementation. The C library's adapter has the same face."""

    workspace_bytes: int

    def bind(self, workspace: Workspace) -> None: ...
    def update(self, indices: IndexArrays, stream: int) -> None: ...
    def run(self, tensors: Tensors, stream: int) -> None: ...


class Field(NamedTuple):
    """An array inside the workspace."""

    offset: int
    nbytes: int


def kernel_sources(shape: Shape, tile: TileConfig | None, num_heads: int, deterministic: bool) -> dict[str, KernelSource]:
    """Every kernel of one configuration by name. `tile`: None lets the number of heads choose."""
    tile = tile or choose_tile(num_heads)
    split = paged.PagedConfig(shape, tile, deterministic)
    shared = tile.shared_bytes(shape)
    return {
        "naive": KernelSource("naive", naive.build, naive.NaiveConfig(shape), naive.SIGNATURE, naive.THREADS),
        "flash": KernelSource("flash", flash.build, flash.FlashConfig(shape, tile), flash.SIGNATURE, flash.THREADS,
                              TILE_BLOCKS_PER_SM, shared),
        "paged": KernelSource("paged", paged.build, split, paged.SIGNATURE, paged.THREADS, TILE_BLOCKS_PER_SM, shared),
        "combine": KernelSource("combine", combine.build, combine.CombineConfig(split), combine.SIGNATURE, combine.THREADS),
        "schedule": KernelSource("schedule", schedule.build_schedule, split.schedule, schedule.SCHEDULE_SIGNATURE,
                                 schedule.SCHEDULE_THREADS, shared_bytes=schedule.shared_bytes()),
        "expand": KernelSource("expand", expand.build_expand, schedule.ExpandConfig(), schedule.EXPAND_SIGNATURE,
                               schedule.EXPAND_THREADS),
    }


def support(kernel: str, num_heads: int, latent_dim: int, rope_dim: int, dtype: str, page_size: int, device: int | None,
            tile: TileConfig | None = None) -> str:
    """Why `kernel` cannot run so; the empty string when it can."""
    if kernel == "reference":
        return "" if device is None else "kernel='reference' runs on NumPy arrays only; copy the arrays to the host, or use kernel='paged'"
    if num_heads > MAX_HEADS:
        return f"num_heads={num_heads:,}: the kernels take at most {MAX_HEADS:,} heads"
    if kernel not in AVAILABLE:
        return f"kernel={kernel!r} is not part of this version; {', '.join(AVAILABLE)} would run"
    reason = unsupported_shape(latent_dim, rope_dim)
    if not reason and device is not None:
        try:
            check_device(kernel, tile or choose_tile(num_heads), Shape(latent_dim, rope_dim, dtype), driver.device_info(device))
        except (UnsupportedError, NoDeviceError) as error:
            reason = str(error)
    return reason


def check_device(kernel: str, tile: TileConfig, shape: Shape, info: driver.DeviceInfo) -> None:
    """UnsupportedError, with the numbers, when this GPU is too old or gives a block too little shared memory."""
    if info.capability < OLDEST_CAPABILITY:
        raise UnsupportedError(f"{info.name} has compute capability {info.capability[0]}.{info.capability[1]}, the kernels need 8.0 or later; "
                               "NumPy arrays run anywhere")
    if kernel != "naive":
        tile.check_device(shape, info.shared_bytes, info.name)


class ReferenceExecutor:
    """kernel="reference": keeps the index arrays (a copy, like every plan) and computes in float64 when asked."""

    workspace_bytes = 0

    def __init__(self, spec: PlanSpec):
        self._spec = spec

    def bind(self, workspace: Workspace) -> None:
        """Nothing to lay out."""

    def update(self, indices: IndexArrays, stream: int) -> None:
        def own(array):
            return None if array is None else array._replace(owner=array.owner.copy())

        self._indices = IndexArrays(indices.batch, own(indices.qo_indptr), own(indices.kv_indptr), own(indices.kv_indices),
                                    own(indices.kv_lens), indices.tree._replace(array=own(indices.tree.array)))

    def run(self, tensors: Tensors, stream: int) -> None:
        reference.run(self._spec, self._indices, tensors)


class KernelExecutor:
    """naive, flash or paged, with their schedule and combine, for one plan."""

    def __init__(self, spec: PlanSpec, tile: TileConfig | None = None):
        self._spec = spec
        shape = Shape(spec.latent_dim, spec.rope_dim, spec.dtype)
        self.tile = tile or choose_tile(spec.num_heads)
        self._sources = kernel_sources(shape, self.tile, spec.num_heads, spec.deterministic)
        self.num_ctas, self._sm_count = self._grid_size()
        self._head_tiles = -(-spec.num_heads // self.tile.head_tile)
        self._partials = 2 * self.num_ctas
        if spec.deterministic:
            self._partials = schedule.partial_slots(spec.max_batch, spec.max_total_q, spec.max_kv_tokens, self._head_tiles)
        self.fields, self.workspace_bytes = self._layout()
        self._launchers = {name: _launcher(self._sources[name], spec.device) for name in launched_kernels(spec.kernel)}

    def _grid_size(self) -> tuple[int, int]:
        if self._spec.device is None:
            return SIMULATED_SMS, SIMULATED_SMS
        info = driver.device_info(self._spec.device)
        resident = info.shared_bytes_per_sm // (self._sources["paged"].shared_bytes + RESERVED_SHARED_BYTES)
        return info.sm_count * max(1, min(resident, TILE_BLOCKS_PER_SM)), info.sm_count

    def _layout(self) -> tuple[dict[str, Field], int]:
        spec, tile = self._spec, self.tile
        sizes = {
            "requests": 8 * schedule.REQUEST_FIELDS * spec.max_batch,
            "ctas": 8 * schedule.CTA_FIELDS * (self.num_ctas + 1),
            "slots": 4 * spec.max_kv_tokens,
            "visibility": 4 * spec.max_total_q * spec.visibility_words,
            "row_request": 4 * spec.max_total_q,
        }
        if spec.kernel == "paged":
            sizes["partial_out"] = 4 * self._partials * tile.head_tile * spec.latent_dim
            sizes["statistics"] = 8 * self._partials * tile.head_tile
        fields, offset = {}, 0
        for name, nbytes in sizes.items():
            fields[name] = Field(offset, align(max(nbytes, 1)))  # never empty: every array has an address
            offset += fields[name].nbytes
        return fields, offset

    def bind(self, workspace: Workspace) -> None:
        """Lay the plan's arrays into `workspace`, which the caller keeps alive."""
        if workspace.host is None:
            self._place = {name: workspace.address + field.offset for name, field in self.fields.items()}
        else:
            self._place = {name: workspace.host[field.offset:field.offset + field.nbytes] for name, field in self.fields.items()}

    def update(self, indices: IndexArrays, stream: int) -> None:
        """Two launches: `schedule`, then `expand`."""
        spec, place, at = self._spec, self._place, _address_of(self._spec.device)
        batch, tree, lens = indices.batch, indices.tree, indices.kv_lens

        def wide(array, bit):
            return bit if array is not None and array.dtype == "int64" else 0

        # No entry at or after this one is read, whatever kv_indptr says.
        entries = min(spec.max_kv_entries, indices.kv_indices.shape[0])
        widths = wide(indices.qo_indptr, 1) | wide(indices.kv_indptr, 2) | wide(lens, 4)
        flags = (lens is not None) | (0 if spec.draft_in_cache else 2)
        self._launchers["schedule"](stream, (1, 1), [
            at(indices.qo_indptr), at(indices.kv_indptr), at(lens), place["requests"], place["ctas"],
            batch, spec.page_size, self._head_tiles, widths, int(flags), spec.max_total_q, entries, self.num_ctas, self._partials])
        widths = wide(indices.kv_indptr, 1) | wide(indices.kv_indices, 2) | wide(indices.qo_indptr, 4)
        blocks = 1 if spec.device is None else EXPAND_BLOCKS_PER_SM * self._sm_count
        self._launchers["expand"](stream, (blocks, 1), [
            at(indices.qo_indptr), at(indices.kv_indptr), at(indices.kv_indices), at(tree.array),
            place["requests"], place["slots"], place["visibility"], place["row_request"],
            batch, spec.page_size, schedule.TREE_KINDS.index(tree.kind), tree.stride, tree.length, spec.visibility_words, widths,
            spec.max_total_q, entries])

    def run(self, tensors: Tensors, stream: int) -> None:
        """One launch; two for `paged`."""
        spec, place, at = self._spec, self._place, _address_of(self._spec.device)
        flags = (schedule.FLAG_LSE if tensors.lse is not None else 0) | (0 if spec.draft_in_cache else schedule.FLAG_DRAFT_ASIDE)
        rows = min(tensors.num_rows, spec.max_total_q)
        out, lse = at(tensors.out), at(tensors.lse)
        page_gap = tensors.kv_page_stride - spec.page_size * tensors.kv_token_stride
        arrays = [at(tensors.q), at(tensors.kv_cache), at(tensors.draft_kv), out, lse, place["requests"],
                  place["ctas" if spec.kernel == "paged" else "row_request"], place["slots"], place["visibility"]]
        numbers = [tensors.q_row_stride, tensors.q_head_stride, tensors.kv_token_stride, spec.page_size, page_gap,
                   tensors.draft_row_stride, tensors.out_row_stride, tensors.out_head_stride, spec.num_heads, spec.visibility_words, flags]
        scalars = [np.float32(tensors.sm_scale), np.float32(tensors.logit_cap)]
        launch = self._launchers[spec.kernel]
        if spec.kernel == "paged":
            partials = [place["partial_out"], place["statistics"]]
            launch(stream, (self.num_ctas, 1), arrays + partials + numbers + [rows] + scalars)
            self._launchers["combine"](stream, (self.num_ctas, self.tile.head_tile), [
                out, lse, place["requests"], place["ctas"], *partials,
                tensors.out_row_stride, tensors.out_head_stride, spec.num_heads, flags, rows])
        else:
            module = flash if spec.kernel == "flash" else naive
            launch(stream, module.grid(self._sources[spec.kernel].config, rows, spec.num_heads), arrays + numbers + scalars)


def make_executor(spec: PlanSpec, tile: TileConfig | None = None) -> Executor:
    """The executor of a checked spec."""
    return ReferenceExecutor(spec) if spec.kernel == "reference" else KernelExecutor(spec, tile)


def launched_kernels(kernel: str) -> tuple[str, ...]:
    """Names of the kernels one step of `kernel` launches."""
    return ("schedule", "expand", kernel) + (("combine",) if kernel == "paged" else ())


def warm(device: int, kernel: str, num_heads: int, latent_dim: int, rope_dim: int, dtype: str,
         deterministic: bool) -> Iterator[tuple[str, Callable[[], Any]]]:
    """(name, function that makes it ready) of every kernel a plan of this shape launches on GPU `device`."""
    sources = kernel_sources(Shape(latent_dim, rope_dim, dtype), None, num_heads, deterministic)
    for name in launched_kernels(kernel):
        yield sources[name].variant, functools.partial(_launcher, sources[name], device)


# What a kernel gets for an array that is not there: it never follows the address, but the simulator wants memory behind every one.
_NOTHING = np.zeros(16, np.uint8)


def _address_of(device: int | None):
    if device is None:
        return lambda array: _NOTHING if array is None or array.owner.size == 0 else array.owner
    return lambda array: 0 if array is None else array.address


@functools.cache
def _simulated(build: Callable, config: Any) -> Callable:
    """The kernel in the simulator's vocabulary."""
    from .gpu import simulator

    return build(simulator.language(), config)


def _launcher(source: KernelSource, device: int | None):
    """A function (stream, grid, arguments) that runs `source` on `device`, compiled and loaded now."""
    if device is None:
        from .gpu import simulator

        kernel = _simulated(source.build, source.config)

        def simulate(stream: int, grid: tuple[int, int], arguments: list[Any]) -> None:
            simulator.launch(kernel, grid=grid, block=source.threads, shared_bytes=source.shared_bytes, args=arguments)

        return simulate
    from .gpu import launch

    return launch.load(source, device).launch

