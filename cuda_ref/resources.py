"""What ptxas says of each kernel: registers, spills, stack, shared memory."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path
from typing import TypedDict

from . import binding


class KernelResources(TypedDict):
    """One kernel on one architecture. Sizes in bytes."""

    arch: str  # "80", "90a", "120"
    kernel: str  # "paged<Bf16, Tile<16, 16>, Dims<512, 64>>"; Dims<0, 0> reads its extents at run time
    registers: int
    spill_stores: int
    spill_loads: int
    stack: int
    static_shared: int
    dynamic_shared: int  # of the largest problem that the kernel serves


_ENTRY = re.compile(r"Compiling entry function '(\w+)' for 'sm_(\w+)'")
_SPILL = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
_TILE = re.compile(r"(flash|paged|mma|wgmma)<\w+, (?:Mma|Wgmma)?Tile<([\d, ]+)>, Dims<(\d+), (\d+)>")
# Template arguments of the tiles -> nvr_tile_config, nvr_mma_tile, number of WgmmaTiles.
_TILES = {"8, 16": 1, "16, 16": 2, "8, 32": 3,
          "64, 32, 8, 2": 1, "32, 32, 9, 1": 2, "32, 32, 6, 1": 3, "32, 16, 3, 2": 4, "16, 32, 11, 1": 5, "16, 32, 7, 1": 6, "16, 16, 4, 1": 7,
          "48, 3, 6, 168, 160, 24, 2": 1}
# Registers below which a kernel of mma or wgmma does nothing but trap: no GPU of the architecture has room for its tile, or none has its
# instructions (is_compiled in mma.cuh, is_wgmma_compiled in wgmma.cuh).
_LEAST_OF_MMA = 16
# ptxas saw the registers of a wgmma on its way touched, or could not rule it out, and put waits where the kernel has none.
_INJECTED_WAITS = re.compile(r"[^\n]*(?:\(C75(?:1\d|20)\)|wgmma\.mma_async instructions are serialized)[^\n]*")
# Extents of the largest problem of a kernel that reads them at run time: MAX_LATENT_DIM and MAX_ROPE_DIM of verify_attn.cuh.
_LARGEST_DIMS = (512, 128)


def _demangle(names: list[str]) -> list[str]:
    """Readable names, as they are when there is no c++filt."""
    tool = shutil.which("c++filt")
    if tool is None or not names:
        return names
    output = subprocess.run([tool], input="\n".join(names), stdout=subprocess.PIPE, text=True, check=True).stdout
    return [re.sub(r"nvr::|_kernel|\(nvr::\w+\)|^void ", "", line) for line in output.splitlines()]


def parse(output: str) -> list[KernelResources]:
    """Rows from the text of `ptxas -v`, dynamic shared memory still 0. Without those kernels of mma and wgmma that no GPU can run."""
    rows: list[KernelResources] = []
    for line in output.splitlines():
        if entry := _ENTRY.search(line):
            rows.append(KernelResources(arch=entry[2], kernel=entry[1], registers=0, spill_stores=0, spill_loads=0, stack=0,
                                        static_shared=0, dynamic_shared=0))  # fmt: skip
        elif rows and (spill := _SPILL.search(line)):
            rows[-1]["stack"], rows[-1]["spill_stores"], rows[-1]["spill_loads"] = (int(x) for x in spill.groups())
        elif rows and (used := _USED.search(line)):
            rows[-1]["registers"] = int(used[1])
            shared = _SHARED.search(line)
            rows[-1]["static_shared"] = int(shared[1]) if shared else 0
    for row, name in zip(rows, _demangle([row["kernel"] for row in rows]), strict=True):
        row["kernel"] = name
    return [row for row in rows if not row["kernel"].startswith(("mma<", "wgmma<")) or row["registers"] >= _LEAST_OF_MMA]


def injected_waits(output: str) -> list[str]:
    """What ptxas says of wgmma that it made wait for each other: right and slow, so a mistake of the kernel."""
    return _INJECTED_WAITS.findall(output)


def with_dynamic_shared(rows: list[KernelResources], library: Path) -> list[KernelResources]:
    """Fill in the dynamic shared memory, as the library itself computes it (no device is needed)."""
    loaded = ctypes.CDLL(str(library))
    for row in rows:
        if not (tile := _TILE.search(row["kernel"])):
            continue
        latent, rope = int(tile[3]), int(tile[4])
        latent, rope = (latent, rope) if latent else _LARGEST_DIMS
        size, kernel = ctypes.c_uint64(), binding.KERNELS[tile[1]]
        config = binding.PlanConfig(num_heads=1, latent_dim=latent, rope_dim=rope, page_size=1, tile_config=_TILES[tile[2]], kernel=kernel)
        if loaded.nvr_shared_bytes(ctypes.byref(config), kernel, ctypes.byref(size)) == 0:
            row["dynamic_shared"] = size.value
    return rows


def table(rows: list[KernelResources]) -> str:
    """The rows as text, one kernel a line."""
    lines = [f"{'arch':5} {'regs':>4} {'spill':>5} {'stack':>5} {'shared':>7}  kernel"]
    for row in sorted(rows, key=lambda row: (row["arch"], row["kernel"])):
        spill = row["spill_stores"] + row["spill_loads"]
        shared = row["static_shared"] + row["dynamic_shared"]
        lines.append(f"{row['arch']:5} {row['registers']:4} {spill:5} {row['stack']:5} {shared:7}  {row['kernel']}")
    return "\n".join(lines)
