"""The numba kernels behind a plan: which kernel with which tile, where its arrays lie in the workspace, what it is launched with.

On a GPU the kernels are compiled and launched by gpu/launch.py; for NumPy arrays the same kernel sources run in the simulator. The
arguments differ only in what an address is: an integer there, the array itself here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from . import reference
from .errors import NoDeviceError, UnsupportedError
from .gpu import driver
from .gpu.compile import KernelSource
from .kernels import combine, expand, flash, mma, mma_config, naive, paged, scans, schedule, wgmma, wgmma_config, work
from .kernels.config import SMALLEST_SHARED_BYTES, Shape, TileConfig, choose_tile, unsupported_shape
from .kernels.mma_config import TENSOR_KERNELS, MmaConfig, MmaTile, choose_mma_tile, unsupported_tensor_shape
from .kernels.wgmma_config import HOPPER_SHARED_BYTES, WgmmaConfig, WgmmaTile, choose_wgmma_tile
from .memory import Workspace, align
from .problem import Enqueue, IndexArrays, PlanSpec, Tensors

#: Kernels of this version, fastest first: what "auto" looks through on a GPU; see `planner.choose_kernel`.
AVAILABLE = ("wgmma", "mma", "paged", "flash", "naive")
#: Kernels that cut tiles over CTAs and so need `combine`.
SPLITTING = ("wgmma", "mma", "paged")
#: The only architecture with wgmma.
WGMMA_ARCH = "sm_90a"
#: bfloat16 conversions and cp.async begin with Ampere.
OLDEST_CAPABILITY = (8, 0)
#: From Hopper on a warp can sleep at an mbarrier (try_wait), and a grid can start before the one before it has ended.
HOPPER_CAPABILITY = (9, 0)
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
    """What a plan asks of an implementation. The C library's adapter has the same face.

    `prepare_update` and `prepare_run` return the function that does the work, for addresses in the order of `IndexArrays.arrays` and
    `Tensors.arrays`. On a GPU it keeps no array and serves every later call of the same layout; a plan calls it from one thread at a time.
    """

    workspace_bytes: int

    def bind(self, workspace: Workspace) -> None: ...
    def prepare_update(self, indices: IndexArrays) -> Enqueue: ...
    def prepare_run(self, tensors: Tensors) -> Enqueue: ...


class Field(NamedTuple):
    """An array inside the workspace."""

    offset: int
    nbytes: int


def _split_sources(shape: Shape, split: work.ScheduleConfig, base2: bool, overlap: bool) -> dict[str, KernelSource]:
    """What goes before and after a kernel that works by the schedule `split`. `overlap`: that kernel lets `combine` start early."""
    return {
        "combine": KernelSource("combine", combine.build, combine.CombineConfig(shape, split, base2, overlap), combine.SIGNATURE,
                                combine.THREADS, combine.BLOCKS_PER_SM, combine.shared_bytes(), overlap),
        "schedule": KernelSource("schedule", schedule.build_schedule, split, schedule.SCHEDULE_SIGNATURE,
                                 scans.SCHEDULE_THREADS, shared_bytes=scans.shared_bytes()),
        "expand": KernelSource("expand", expand.build_expand, schedule.ExpandConfig(), schedule.EXPAND_SIGNATURE,
                               schedule.EXPAND_THREADS),
    }


def kernel_sources(shape: Shape, tile: TileConfig | None, num_heads: int, deterministic: bool) -> dict[str, KernelSource]:
    """naive, flash and paged of one configuration, and what goes with them. `tile`: None lets the number of heads choose."""
    tile = tile or choose_tile(num_heads)
    split = paged.PagedConfig(shape, tile, deterministic)
    shared = tile.shared_bytes(shape)
    return {
        "naive": KernelSource("naive", naive.build, naive.NaiveConfig(shape), naive.SIGNATURE, naive.THREADS),
        "flash": KernelSource("flash", flash.build, flash.FlashConfig(shape, tile), flash.SIGNATURE, flash.THREADS,
                              TILE_BLOCKS_PER_SM, shared),
        "paged": KernelSource("paged", paged.build, split, paged.SIGNATURE, paged.THREADS, TILE_BLOCKS_PER_SM, shared),
        **_split_sources(shape, split.schedule, base2=False, overlap=False),
    }


def mma_sources(shape: Shape, tile: MmaTile, deterministic: bool, sm_90: bool) -> dict[str, KernelSource]:
    """mma with one tile, and what goes with it. `sm_90`: the GPU is that or later."""
    config = MmaConfig(shape, tile, deterministic, sm_90)
    return {
        "mma": KernelSource("mma", mma.build, config, mma.SIGNATURE, mma_config.THREADS, shared_bytes=tile.shared_bytes(shape)),
        **_split_sources(shape, config.schedule, base2=True, overlap=sm_90),
    }


def wgmma_sources(shape: Shape, tile: WgmmaTile, deterministic: bool) -> dict[str, KernelSource]:
    """wgmma with one tile, and what goes with it."""
    config = WgmmaConfig(shape, tile, deterministic)
    return {
        "wgmma": KernelSource("wgmma", wgmma.build, config, wgmma.SIGNATURE, wgmma_config.THREADS, shared_bytes=tile.shared_bytes(shape)),
        **_split_sources(shape, config.schedule, base2=True, overlap=True),
    }


def support(kernel: str, num_heads: int, latent_dim: int, rope_dim: int, dtype: str, page_size: int, device: int | None,
            tile: TileConfig | None = None) -> str:
    """Why `kernel` cannot run so; the empty string when it can. `tile`: of flash and paged, where it is not to be chosen."""
    if kernel == "reference":
        return "" if device is None else "kernel='reference' runs on NumPy arrays only; copy the arrays to the host, or use kernel='paged'"
    if num_heads > MAX_HEADS:
        return f"num_heads={num_heads:,}: the kernels take at most {MAX_HEADS:,} heads"
    if kernel not in AVAILABLE:
        return f"kernel={kernel!r} is not part of this version; {', '.join(AVAILABLE)} would run"
    if kernel in TENSOR_KERNELS:
        reason = unsupported_tensor_shape(kernel, latent_dim, rope_dim, dtype)
    else:
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
    if kernel == "mma":
        if mma_tile(shape, 1, info) is None:
            least = min(t.shared_bytes(shape) for t in mma_config.MMA_TILES)
            raise UnsupportedError(f"kernel='mma' needs {least:,} B of shared memory at least, {info.name} has {info.shared_bytes:,} B; "
                                   "kernel='paged' would run")
    elif kernel == "wgmma":
        if info.arch != WGMMA_ARCH:
            raise UnsupportedError(f"kernel='wgmma' needs {WGMMA_ARCH} (Hopper), {info.name} is {info.arch}; kernel='mma' would run")
        if wgmma_tile(shape, info) is None:
            least = min(t.shared_bytes(shape) for t in wgmma_config.WGMMA_TILES)
            raise UnsupportedError(f"kernel='wgmma' needs {least:,} B of shared memory for {shape.latent_dim}/{shape.rope_dim}, {info.name} has "
                                   f"{info.shared_bytes:,} B; kernel='mma' would run")
    elif kernel != "naive":
        tile.check_device(shape, info.shared_bytes, info.name)


def mma_tile(shape: Shape, rows: int, info: driver.DeviceInfo | None) -> MmaTile | None:
    """The tile of mma for requests of `rows` query rows; None when none fits the GPU. The simulator (None) takes those of the smallest GPU."""
    if info is None:
        return choose_mma_tile(shape, rows, SMALLEST_SHARED_BYTES, hands_over=False)
    return choose_mma_tile(shape, rows, info.shared_bytes, info.arch.endswith("a"))


def wgmma_tile(shape: Shape, info: driver.DeviceInfo | None) -> WgmmaTile | None:
    """The tile of wgmma; None when none fits. The simulator (None) has the shared memory of a Hopper GPU."""
    return choose_wgmma_tile(shape, HOPPER_SHARED_BYTES if info is None else info.shared_bytes)


class ReferenceExecutor:
    """kernel="reference": keeps the index arrays (a copy, like every plan) and computes in float64 when asked."""

    workspace_bytes = 0

    def __init__(self, spec: PlanSpec):
        self._spec = spec

    def bind(self, workspace: Workspace) -> None:
        """Nothing to lay out."""

    def prepare_update(self, indices: IndexArrays) -> Enqueue:
        def own(array):
            return None if array is None else array._replace(owner=array.owner.copy())

        def keep(stream: int, addresses: Sequence[int]) -> None:
            self._indices = IndexArrays(indices.batch, own(indices.qo_indptr), own(indices.kv_indptr), own(indices.kv_indices),
                                        own(indices.kv_lens), indices.tree._replace(array=own(indices.tree.array)))

        return keep

    def prepare_run(self, tensors: Tensors) -> Enqueue:
        return lambda stream, addresses: reference.run(self._spec, self._indices, tensors)


class KernelExecutor:
    """naive, flash, paged, mma or wgmma, with what goes before and after it, for one plan."""

    def __init__(self, spec: PlanSpec, tile: TileConfig | MmaTile | WgmmaTile | None = None):
        self._spec = spec
        shape, info = Shape(spec.latent_dim, spec.rope_dim, spec.dtype), None if spec.device is None else driver.device_info(spec.device)
        if spec.kernel == "mma":
            self.tile = tile or mma_tile(shape, spec.rows_of_a_request, info)
            self._sources = mma_sources(shape, self.tile, spec.deterministic, info is None or info.capability >= HOPPER_CAPABILITY)
            self.tile_rows, self._row_heads, most = self.tile.rows, spec.num_heads, 1
        elif spec.kernel == "wgmma":
            self.tile = tile or wgmma_tile(shape, info)
            self._sources = wgmma_sources(shape, self.tile, spec.deterministic)
            self.tile_rows, self._row_heads, most = self.tile.rows, spec.num_heads, 1
        else:
            self.tile = tile or choose_tile(spec.num_heads)
            self._sources = kernel_sources(shape, self.tile, spec.num_heads, spec.deterministic)
            self.tile_rows, most = self.tile.head_tile, TILE_BLOCKS_PER_SM
            self._row_heads = -(-spec.num_heads // self.tile_rows) * self.tile_rows
        self._sm_count = SIMULATED_SMS if info is None else info.sm_count
        self.num_ctas = self._sm_count
        if info is not None:
            resident = info.shared_bytes_per_sm // (self.tile.shared_bytes(shape) + RESERVED_SHARED_BYTES)
            self.num_ctas *= max(1, min(resident, most))
        self._partials = 0
        if spec.kernel in SPLITTING:
            self._partials = work.partial_slots(self._sources["schedule"].config, self.num_ctas, spec.max_batch, spec.max_total_q,
                                                    spec.max_kv_tokens, self._row_heads)
        self.fields, self.workspace_bytes = self._layout()
        self._launchers = {name: _launcher(self._sources[name], spec.device) for name in launched_kernels(spec.kernel)}

    def _layout(self) -> tuple[dict[str, Field], int]:
        spec = self._spec
        sizes = {
            "requests": 8 * work.REQUEST_FIELDS * spec.max_batch,
            "ctas": 8 * work.CTA_FIELDS * (self.num_ctas + 1),
            "merges": 8 * work.MERGE_FIELDS * work.merge_rows(self._partials),
            "slots": 4 * spec.max_kv_tokens,
            "visibility": 4 * spec.max_total_q * spec.visibility_words,
            "row_request": 4 * spec.max_total_q,
        }
        if spec.kernel in SPLITTING:
            sizes["partial_out"] = 4 * self._partials * self.tile_rows * spec.latent_dim
            sizes["statistics"] = 8 * self._partials * self.tile_rows
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

    def prepare_update(self, indices: IndexArrays) -> Enqueue:
        """Two launches: `schedule`, then `expand`."""
        spec, place = self._spec, self._place
        batch, tree, lens = indices.batch, indices.tree, indices.kv_lens

        def wide(array, bit):
            return bit if array is not None and array.dtype == "int64" else 0

        # No entry at or after this one is read, whatever kv_indptr says.
        entries = min(spec.max_kv_entries, indices.kv_indices.shape[0])
        widths = wide(indices.qo_indptr, 1) | wide(indices.kv_indptr, 2) | wide(lens, 4)
        flags = (lens is not None) | (0 if spec.draft_in_cache else 2)
        schedule_fixed = (place["requests"], place["ctas"], place["merges"], batch, spec.page_size, self._row_heads, widths, int(flags),
                          spec.max_total_q, entries, self.num_ctas, self._partials)
        widths = wide(indices.kv_indptr, 1) | wide(indices.kv_indices, 2) | wide(indices.qo_indptr, 4)
        grid = (1 if spec.device is None else EXPAND_BLOCKS_PER_SM * self._sm_count, 1)
        expand_fixed = (place["requests"], place["slots"], place["visibility"], place["row_request"],
                        batch, spec.page_size, schedule.TREE_KINDS.index(tree.kind), tree.stride, tree.length, spec.visibility_words, widths,
                        spec.max_total_q, entries)
        plan, widen = self._launchers["schedule"], self._launchers["expand"]

        def enqueue(stream: int, places: Sequence) -> None:
            qo, kv, pages, lengths, mask = places
            plan(stream, (1, 1), (qo, kv, lengths), schedule_fixed)
            widen(stream, grid, (qo, kv, pages, mask), expand_fixed)

        return _placed(enqueue, indices.arrays, spec.device)

    def prepare_run(self, tensors: Tensors) -> Enqueue:
        """One launch; two for kernels that cut tiles."""
        spec, place = self._spec, self._place
        flags = (work.FLAG_LSE if tensors.lse is not None else 0) | (0 if spec.draft_in_cache else work.FLAG_DRAFT_ASIDE)
        rows = min(tensors.num_rows, spec.max_total_q)
        page_gap = tensors.kv_page_stride - spec.page_size * tensors.kv_token_stride
        tables = (place["requests"], place["ctas" if spec.kernel in SPLITTING else "row_request"], place["slots"], place["visibility"])
        numbers = (tensors.q_row_stride, tensors.q_head_stride, tensors.kv_token_stride, spec.page_size, page_gap,
                   tensors.draft_row_stride, tensors.out_row_stride, tensors.out_head_stride, spec.num_heads, spec.visibility_words, flags)
        scalars = (np.float32(tensors.sm_scale), np.float32(tensors.logit_cap))
        attend = self._launchers[spec.kernel]
        if spec.kernel in SPLITTING:
            partials = (place["partial_out"], place["statistics"])
            grid, fixed = (self.num_ctas, 1), (*tables, *partials, *numbers, rows, *scalars)
            merge, merge_grid = self._launchers["combine"], combine.grid(self._sources["combine"].config, self._sm_count, self._partials)
            merge_fixed = (place["merges"], *partials, tensors.out_row_stride, tensors.out_head_stride, self._row_heads, spec.num_heads, flags,
                           rows)

            def enqueue(stream: int, places: Sequence) -> None:
                attend(stream, grid, places, fixed)
                merge(stream, merge_grid, places[3:], merge_fixed)  # out and lse
        else:
            module = flash if spec.kernel == "flash" else naive
            grid, fixed = module.grid(self._sources[spec.kernel].config, rows, spec.num_heads), (*tables, *numbers, *scalars)

            def enqueue(stream: int, places: Sequence) -> None:
                attend(stream, grid, places, fixed)

        return _placed(enqueue, tensors.arrays, spec.device)


def make_executor(spec: PlanSpec, tile: TileConfig | MmaTile | WgmmaTile | None = None) -> Executor:
    """The executor of a checked spec. `tile`: instead of the one that the shape chooses."""
    return ReferenceExecutor(spec) if spec.kernel == "reference" else KernelExecutor(spec, tile)


def launched_kernels(kernel: str) -> tuple[str, ...]:
    """Names of the kernels one step of `kernel` launches."""
    return ("schedule", "expand", kernel) + (("combine",) if kernel in SPLITTING else ())


def warm(device: int, kernel: str, num_heads: int, latent_dim: int, rope_dim: int, dtype: str,
         deterministic: bool) -> Iterator[tuple[str, Callable[[], Any]]]:
    """(name, function that makes it ready) of every kernel a plan of this shape launches on GPU `device`."""
    shape, info = Shape(latent_dim, rope_dim, dtype), driver.device_info(device)
    families = [kernel_sources(shape, None, num_heads, deterministic)]
    if kernel == "mma":  # how many draft tokens there will be is not known: every tile that may be chosen for some number of them
        tiles = dict.fromkeys(mma_tile(shape, 64 if deterministic else num_heads * drafts, info) for drafts in (1, 2, 4, 64))
        families = [mma_sources(shape, tile, deterministic, info.capability >= HOPPER_CAPABILITY) for tile in tiles]
    elif kernel == "wgmma":
        families = [wgmma_sources(shape, wgmma_tile(shape, info), deterministic)]
    for sources in families:
        for name in launched_kernels(kernel):
            yield sources[name].variant, functools.partial(_launcher, sources[name], device)


# What a kernel gets for an array that is not there: it never follows the address, but the simulator wants memory behind every one.
_NOTHING = np.zeros(16, np.uint8)


def _placed(enqueue: Enqueue, arrays: tuple, device: int | None) -> Enqueue:
    """`enqueue` for addresses; for the simulator, whose memory the arrays themselves are, for these very arrays."""
    if device is not None:
        return enqueue
    owners = tuple(_NOTHING if array is None or array.owner.size == 0 else array.owner for array in arrays)
    return lambda stream, addresses: enqueue(stream, owners)


@functools.cache
def _simulated(build: Callable, config: Any) -> Callable:
    """The kernel in the simulator's vocabulary."""
    from .gpu import simulator

    return build(simulator.language(), config)


def _launcher(source: KernelSource, device: int | None):
    """A function (stream, grid, leading arguments, the others) that runs `source` on `device`, compiled and loaded now."""
    if device is None:
        from .gpu import simulator

        kernel = _simulated(source.build, source.config)

        def simulate(stream: int, grid: tuple[int, int], leading: Sequence, fixed: tuple) -> None:
            simulator.launch(kernel, grid=grid, block=source.threads, shared_bytes=source.shared_bytes, args=[*leading, *fixed],
                             overlaps=source.overlaps)

        return simulate
    from .gpu import launch

    return launch.Launcher(launch.load(source, device))
