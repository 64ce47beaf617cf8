"""What did the compilers make of a kernel: registers, memory, machine instructions, for both implementations and with no GPU."""

from __future__ import annotations

import concurrent.futures
import functools
import importlib
import itertools
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

try:
    from . import common
except ImportError:  # imported by a benchmark file that runs as a script
    import common

ARCHITECTURES = ("sm_80", "sm_90a", "sm_120")
#: Shared memory that a block may have, bytes: what decides which tiles of mma run on an architecture.
SHARED_BYTES = {"sm_80": 166_912, "sm_90a": 232_448, "sm_120": 101_376}
#: Kernels of the offline figures, at the tuned row layout 512/64 in bfloat16; h16k16: the tile of 16 heads and 16 keys; m64k32b8: of 64 rows and
#: 32 keys, with 8 blocks in the ring; wgmma: with the tile that plans take.
COMPILED = (
    "wgmma",
    "mma_m64k32b8",
    "mma_m32k32b9",
    "mma_m32k32b6",
    "mma_m32k16b3",
    "mma_m16k32b11",
    "mma_m16k32b7",
    "mma_m16k16b4",
    "naive",
    "flash_h8k16",
    "flash_h16k16",
    "flash_h8k32",
    "paged_h8k16",
    "paged_h16k16",
    "paged_h8k32",
    "combine",
    "schedule",
    "expand",
)


class Resources(NamedTuple):
    """One kernel of one implementation on one architecture. `sass`: machine instructions, None when no disassembler was found."""

    impl: str
    kernel: str
    arch: str
    registers: int
    shared_bytes: int
    spill_bytes: int
    stack_bytes: int
    sass: int | None


def collect(keys: Iterable[tuple[str, ...]]) -> dict[tuple[str, str, str], dict[str, Any] | str]:
    """(implementation, kernel, architecture) -> Resources as a plain dict (asv pickles it), or a text as common.attempt gives it."""
    makers, found = {"numba_verify": numba_resources, "cuda_ref": cuda_ref_resources}, {}
    for impl, of_impl in itertools.groupby(sorted(keys), key=lambda key: key[0]):
        keys_of_impl = list(of_impl)
        architectures = [arch for arch in ARCHITECTURES if any(arch == key[2] for key in keys_of_impl)]
        kernels = [kernel for kernel in COMPILED if any(kernel == key[1] for key in keys_of_impl)]
        rows = common.attempt(functools.partial(makers[impl], architectures, kernels))
        if isinstance(rows, str):
            found.update(dict.fromkeys(keys_of_impl, rows))
        else:
            found.update({(row.impl, row.kernel, row.arch): row._asdict() for row in rows})
    return found


def numba_resources(architectures: Iterable[str] = ARCHITECTURES, kernels: Iterable[str] = COMPILED) -> list[Resources]:
    """Compiles what is not in the cubin cache, about 2 s a kernel, 5 s for mma, on all cores. Without tiles of mma that do not run on an
    architecture, and without what a past commit does not have."""
    pairs = list(itertools.product(kernels, architectures))
    if len(pairs) > 1:
        # Processes, since the compiler is Python and holds its lock; spawned, since a CUDA context does not survive a fork.
        with concurrent.futures.ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
            rows = list(pool.map(_numba_resources, *zip(*pairs, strict=True)))
    else:
        rows = [_numba_resources(*pair) for pair in pairs]
    return [row for row in rows if row is not None]


def _numba_resources(name: str, arch: str) -> Resources | None:
    from numba_verify.gpu import compile as compiler

    source = _numba_source(name, arch)
    if source is None:
        return None
    cubin, count = compiler.compile_kernel(source, arch), None
    try:
        from numba_verify.gpu import sass
    except ImportError:  # a past commit
        sass = None
    if sass and sass.find_nvdisasm():
        count = len(sass.instructions(cubin.code)[cubin.symbol])
    got = cubin.resources
    spilled = got.spill_store_bytes + got.spill_load_bytes
    return Resources("numba_verify", name, arch, got.registers, got.shared_bytes, spilled, got.stack_bytes, count)


def _numba_source(name: str, arch: str) -> Any:
    """The KernelSource of a name in COMPILED; None for wgmma where there is none, for a tile of mma that no GPU of the architecture has room or
    registers for, and for what a past commit does not have."""
    from numba_verify import backend
    from numba_verify.kernels.config import TILE_CONFIGS, Shape

    shape, (kernel, _, tile) = Shape(512, 64, "bfloat16"), name.partition("_")
    if kernel == "wgmma":
        if not hasattr(backend, "wgmma_sources") or arch != backend.WGMMA_ARCH:
            return None
        return backend.wgmma_sources(shape, backend.wgmma_tile(shape, None), False)["wgmma"]
    if kernel == "mma":
        try:
            from numba_verify.kernels.mma_config import MMA_TILES
        except ImportError:
            return None
        chosen = next((t for t in MMA_TILES if str(t) == tile), None)
        if chosen is None or chosen.shared_bytes(shape) > SHARED_BYTES[arch] or chosen.registers and not arch.endswith("a"):
            return None
        return backend.mma_sources(shape, chosen, False, arch != "sm_80")["mma"]
    tiles = {str(tile): tile for tile in TILE_CONFIGS}
    return backend.kernel_sources(shape, tiles.get(tile, tiles["h16k16"]), 16, False)[kernel]


#: How cuda_ref names these kernels, without spaces. `schedule` and `expand` are no templates.
_TWIN_NAMES = {
    "wgmma": "wgmma<Bf16,WgmmaTile<48,3,6,168,160,24,2>,Dims<512,64>>",
    "naive": "naive<Bf16,Dims<512,64>>",
    "combine": "combine<Bf16,4>",
    "schedule": "schedule",
    "expand": "expand",
    **{
        f"{kernel}_h{heads}k{keys}": f"{kernel}<Bf16,Tile<{heads},{keys}>,Dims<512,64>>"
        for kernel in ("flash", "paged")
        for heads, keys in ((8, 16), (16, 16), (8, 32))
    },
    **{
        f"mma_m{rows}k{keys}b{blocks}": f"mma<Bf16,MmaTile<{rows},{keys},{blocks},{warps}>,Dims<512,64>>"
        for rows, keys, blocks, warps in (
            (64, 32, 8, 2), (32, 32, 9, 1), (32, 32, 6, 1), (32, 16, 3, 2), (16, 32, 11, 1), (16, 32, 7, 1), (16, 16, 4, 1))
    },
}


def cuda_ref_resources(architectures: Iterable[str] = ARCHITECTURES, kernels: Iterable[str] = COMPILED) -> list[Resources]:
    """From the build's own report; empty with no nvcc. Builds when the sources changed, one to two minutes on two cores."""
    common.require_written("cuda_ref")
    if common.find_nvcc() is None:
        return []
    build = importlib.import_module("cuda_ref.build")
    names = tuple(arch.removeprefix("sm_") for arch in architectures)
    report = {(row["arch"], row["kernel"].replace(" ", "")): row for row in build.resource_report(names)}
    counts = _twin_instruction_counts(build.build(names))
    rows = []
    for name, arch in itertools.product(kernels, architectures):
        row = report.get((arch.removeprefix("sm_"), _TWIN_NAMES[name]))
        if row is not None:
            shared, spilled = row["static_shared"] + row["dynamic_shared"], row["spill_stores"] + row["spill_loads"]
            count = counts.get((arch, _TWIN_NAMES[name]))
            rows.append(Resources("cuda_ref", name, arch, row["registers"], shared, spilled, row["stack"], count))
    return rows


def _twin_instruction_counts(library: Path) -> dict[tuple[str, str], int]:
    """(architecture, kernel) -> instructions; empty when cuobjdump, nvdisasm or c++filt is missing. The library's cubins are compressed and
    only cuobjdump unpacks them."""
    try:
        from numba_verify.gpu import sass
    except ImportError:  # a past commit
        return {}
    tool = _find_tool("cuobjdump")
    if tool is None or sass.find_nvdisasm() is None or shutil.which("c++filt") is None:
        return {}
    counts = {}
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([tool, "-xelf", "all", str(library)], cwd=folder, check=True, capture_output=True)
        for cubin in Path(folder).glob("*.cubin"):
            arch = re.search(r"sm_\w+?(?=\.)", cubin.name).group()
            listing = sass.instructions(cubin.read_bytes())
            clean = subprocess.run(["c++filt"], input="\n".join(listing), capture_output=True, text=True, check=True).stdout.splitlines()
            for symbol, name in zip(listing, clean, strict=True):
                counts[arch, _twin_name(name)] = len(listing[symbol])
    return counts


def _twin_name(demangled: str) -> str:
    """As cuda_ref.resources writes it, without spaces, from "void nvr::paged_kernel<nvr::Bf16, ...>(arguments)"."""
    return re.sub(r"nvr::|_kernel|^void |\([^()]*\)$| ", "", demangled)


def _find_tool(name: str) -> str | None:
    candidates = [shutil.which(name), *map(str, Path(sys.prefix).glob(f"lib/python*/site-packages/nvidia/*/bin/{name}"))]
    candidates += [f"{home}/bin/{name}" for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if home]
    return next((path for path in candidates if path and os.access(path, os.X_OK)), None)


def format_resources(rows: Iterable[Resources]) -> str:
    """Both implementations side by side, a kernel and architecture a line."""
    table: dict[tuple[str, str], dict[str, Resources]] = {}
    for row in rows:
        table.setdefault((row.kernel, row.arch), {})[row.impl] = row
    lines = [
        f"{'kernel':14} {'arch':7} "
        + "".join(f"{impl:>14}: {'regs':>4} {'shared':>7} {'spill':>5} {'stack':>5} {'sass':>6}" for impl in common.IMPLEMENTATIONS)
    ]
    for (kernel, arch), pair in table.items():
        cells = []
        for impl in common.IMPLEMENTATIONS:
            row = pair.get(impl)
            values = ("-",) * 5 if row is None else (row.registers, row.shared_bytes, row.spill_bytes, row.stack_bytes, row.sass or "-")
            cells.append(f"{'':15} " + "{:>4} {:>7} {:>5} {:>5} {:>6}".format(*values))
        lines.append(f"{kernel:14} {arch:7} " + "".join(cells))
    return "\n".join(lines)
