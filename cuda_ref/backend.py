"""The CUDA C library behind a plan: what `numba_verify.planner.Implementation` asks for.

It sees only checked, normalised records (numba_verify/problem.py). The library of a GPU is built by nvcc, that of NumPy arrays by g++;
both on first use. The C side checks everything once more and its texts come up as they are.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from numba_verify.backend import mma_tile, wgmma_tile
from numba_verify.errors import NoDeviceError
from numba_verify.gpu import driver
from numba_verify.kernels.config import TILE_CONFIGS, Shape, TileConfig
from numba_verify.kernels.mma_config import MMA_TILES, TENSOR_KERNELS, MmaTile, unsupported_tensor_shape
from numba_verify.kernels.wgmma_config import WGMMA_TILES, WgmmaTile
from numba_verify.problem import Enqueue

from . import binding, build

#: Kernels, fastest first: what "auto" looks through on a GPU.
AVAILABLE = ("wgmma", "mma", "paged", "flash", "naive")
#: Tiles in the order of nvr_tile_config, nvr_mma_tile and WgmmaTiles, which count them from 1 on.
TILES = {"naive": TILE_CONFIGS, "flash": TILE_CONFIGS, "paged": TILE_CONFIGS, "mma": MMA_TILES, "wgmma": WGMMA_TILES}
_INDEX_WIDTHS = {"int32": 4, "int64": 8}


@functools.cache
def library_of(device: int | None) -> ctypes.CDLL:
    """The g++ build for None, else the nvcc build with code for that GPU; built on first use."""
    if device is None:
        return binding.load(build.build_host())
    return binding.load(build.build(build.architecture_name(*driver.device_info(device).capability)))


def tile_number(spec, tile: TileConfig | MmaTile | WgmmaTile | None) -> int:
    """`nvr_plan_config.tile_config` of a plan. None: of flash and paged 0, the library chooses; of the others the one that numba_verify takes."""
    if spec.kernel in TENSOR_KERNELS and tile is None:
        shape, info = Shape(spec.latent_dim, spec.rope_dim, spec.dtype), None if spec.device is None else driver.device_info(spec.device)
        tile = mma_tile(shape, spec.rows_of_a_request, info) if spec.kernel == "mma" else wgmma_tile(shape, info)
    return 0 if tile is None else 1 + TILES[spec.kernel].index(tile)


def _config(spec, tile_config: int) -> binding.PlanConfig:
    return binding.PlanConfig(
        device=0 if spec.device is None else spec.device,
        dtype=binding.DTYPES[spec.dtype],
        num_heads=spec.num_heads,
        latent_dim=spec.latent_dim,
        rope_dim=spec.rope_dim,
        page_size=spec.page_size,
        draft_in_cache=spec.draft_in_cache,
        deterministic=spec.deterministic,
        tile_config=tile_config,
        kernel=binding.KERNELS[spec.kernel],
        max_batch=spec.max_batch,
        max_total_q=spec.max_total_q,
        max_kv_entries=spec.max_kv_entries,
    )


def _index_array(view) -> binding.IndexArray:
    if view is None:
        return binding.IndexArray(data=None, length=0, width=4)
    return binding.IndexArray(data=view.address, length=view.shape[0], width=_INDEX_WIDTHS[view.dtype])


def _tree(tree) -> binding.Tree:
    kind = binding.TREE_KINDS[tree.kind]
    if tree.array is None:
        return binding.Tree(kind=kind)
    return binding.Tree(kind=kind, data=tree.array.address, length=tree.length, stride=tree.stride)


def _tensors(tensors) -> binding.Tensors:
    draft, lse = tensors.draft_kv, tensors.lse
    return binding.Tensors(
        q=tensors.q.address,
        kv_cache=tensors.kv_cache.address,
        draft_kv=None if draft is None else draft.address,
        out=tensors.out.address,
        lse=None if lse is None else lse.address,
        q_rows=tensors.num_rows,
        kv_pages=tensors.kv_cache.shape[0],
        draft_rows=0 if draft is None else draft.shape[0],
        out_rows=tensors.num_rows,
        q_row_stride=tensors.q_row_stride,
        q_head_stride=tensors.q_head_stride,
        kv_page_stride=tensors.kv_page_stride,
        kv_token_stride=tensors.kv_token_stride,
        draft_row_stride=tensors.draft_row_stride,
        out_row_stride=tensors.out_row_stride,
        out_head_stride=tensors.out_head_stride,
        sm_scale=tensors.sm_scale,
        logit_cap=tensors.logit_cap,
    )


class Executor:
    """naive, flash, paged, mma or wgmma for one plan (`numba_verify.backend.Executor`). Streams are plain integers, 0 = the default stream."""

    def __init__(self, spec, tile_config: int = 0):
        """`tile_config`: of nvr_plan_config; 0 lets the library choose."""
        self._library, self._config = library_of(spec.device), _config(spec, tile_config)
        self._verify = getattr(self._library, f"nvr_verify_{spec.kernel}")
        size = ctypes.c_uint64()
        binding.check(self._library, self._library.nvr_workspace_bytes(self._config, size))
        self.workspace_bytes = size.value
        self._address = 0

    def bind(self, workspace) -> None:
        """Work in `workspace`, which the caller keeps alive."""
        self._address = workspace.address

    def prepare_update(self, indices) -> Enqueue:
        """The two planning kernels."""
        record = binding.Indices(
            batch=indices.batch,
            qo_indptr=_index_array(indices.qo_indptr),
            kv_indptr=_index_array(indices.kv_indptr),
            kv_indices=_index_array(indices.kv_indices),
            kv_lens=_index_array(indices.kv_lens),
            tree=_tree(indices.tree),
        )
        places = record.qo_indptr, record.kv_indptr, record.kv_indices, record.kv_lens, record.tree

        def enqueue(stream: int, addresses: Sequence[int]) -> None:
            for place, address in zip(places, addresses, strict=True):
                place.data = address
            status = self._library.nvr_plan_update(self._config, record, self._address, self.workspace_bytes, stream)
            binding.check(self._library, status)

        return enqueue

    def prepare_run(self, tensors) -> Enqueue:
        """The attention: one launch, two for `paged`, `mma` and `wgmma`."""
        record = _tensors(tensors)

        def enqueue(stream: int, addresses: Sequence[int]) -> None:
            record.q, record.kv_cache, record.draft_kv, record.out, record.lse = addresses
            status = self._verify(self._config, record, self._address, self.workspace_bytes, stream)
            binding.check(self._library, status)

        return enqueue


def make_executor(spec, tile: TileConfig | MmaTile | WgmmaTile | None = None) -> Any:
    """The executor of a checked spec; "reference" is numba_verify's own."""
    if spec.kernel == "reference":
        from numba_verify.backend import ReferenceExecutor

        return ReferenceExecutor(spec)
    return Executor(spec, tile_number(spec, tile))


def support(kernel: str, num_heads: int, latent_dim: int, rope_dim: int, dtype: str, page_size: int, device: int | None) -> str:
    """Why `kernel` cannot run so; the empty string when it can."""
    if kernel == "reference":
        return "" if device is None else "kernel='reference' runs on NumPy arrays only; copy the arrays to the host, or use kernel='paged'"
    if kernel not in binding.KERNELS:
        return f"cuda_ref has no kernel {kernel!r}; {', '.join(AVAILABLE)} would run"
    if kernel in TENSOR_KERNELS and (reason := unsupported_tensor_shape(kernel, latent_dim, rope_dim, dtype)):
        return reason
    try:
        library = library_of(device)
    except (build.BuildError, OSError) as error:
        return f"the library of cuda_ref cannot be built or loaded: {error}"
    except NoDeviceError as error:
        return str(error)
    config = binding.PlanConfig(
        device=0 if device is None else device, dtype=binding.DTYPES[dtype], num_heads=num_heads, latent_dim=latent_dim,
        rope_dim=rope_dim, page_size=page_size, kernel=binding.KERNELS[kernel], max_batch=1, max_total_q=1, max_kv_entries=1,
    )  # fmt: skip
    status = library.nvr_can_run(config, binding.KERNELS[kernel])
    return "" if status == binding.Status.OK else binding.error_text(library, status)


def warm(device: int, kernel: str, num_heads: int, latent_dim: int, rope_dim: int, dtype: str,
         deterministic: bool) -> Iterator[tuple[str, Callable[[], Any]]]:
    """(name, function that makes it ready): the one library holds every kernel."""
    yield "libverify_attn", functools.partial(library_of, device)
