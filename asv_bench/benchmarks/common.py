"""What the benchmark files share: parameters by name, who can run here, resource tables, and running a file as a script.

Nothing of numba_verify, NumPy or CUDA is imported at module level: asv imports every benchmark file once a parameter, and discovery has to
work on a machine without them.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
# A file run as a script finds the checkout it lies in; under asv the package is installed or on ASV_PYTHONPATH.
if importlib.util.find_spec("numba_verify") is None:
    sys.path.insert(0, str(ROOT))

IMPLEMENTATIONS = ("numba_verify", "cuda_ref")
KERNELS = ("paged", "flash", "naive")
#: The first nine shapes of the peers' table, by the names numba_verify.shapes gives them. Strings: they are the axis of a graph.
SHAPES = (
    "b1_kv4096_t16_h64",
    "b1_kv32768_t16_h64",
    "b1_kv131072_t16_h64",
    "b8_kv8192_t16_h64",
    "b32_kv4096_t8_h64",
    "b128_kv4096_t4_h16",
    "b1_kv185000_t8_h8",
    "b16_kv16384_t32_h128",
    "b64_kv2048_t1_h128",
)
ARCHITECTURES = ("sm_80", "sm_90a", "sm_120")
#: Shared memory that a block may have, bytes: what decides which tiles of mma run on an architecture.
SHARED_BYTES = {"sm_80": 166_912, "sm_90a": 232_448, "sm_120": 101_376}
#: Kernels of the offline figures, at the tuned row layout 512/64 in bfloat16; h16k16: the tile of 16 heads and 16 keys; m64k32b8: of 64 rows and
#: 32 keys, with 8 blocks in the ring.
COMPILED = (
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
#: Twice the rounding of a bfloat16 result, as a part of a row's norm: contract, promise 7.
ERROR_BOUND = 2 * 2.3e-3


def skip(reason: str) -> NotImplementedError:
    """What asv takes for "not here": raise it in `setup`, and the benchmark reads n/a."""
    return NotImplementedError(reason)


def gpu_reason() -> str:
    """Why device benchmarks cannot run here; empty when they can."""
    try:
        from numba_verify.gpu import driver
    except ImportError as error:
        return f"numba_verify cannot be imported: {error}"
    return driver.unavailable()


def require_gpu() -> None:
    reason = gpu_reason()
    if reason:
        raise skip(f"needs a GPU: {reason}")


def find_nvcc() -> str | None:
    """Path of the nvcc that cuda_ref would use."""
    try:
        toolchain = importlib.import_module("cuda_ref.toolchain")
        return str(toolchain.find_nvcc().path)
    except (ImportError, RuntimeError):  # BuildError is one
        return None


def implementation(name: str) -> ModuleType:
    """The module, ready to plan; skips when it cannot be built here."""
    if name == "cuda_ref" and find_nvcc() is None:
        raise skip("cuda_ref needs nvcc")
    return importlib.import_module(name)


def shape_of(name: str) -> Any:
    """numba_verify.shapes.Shape of that name."""
    from numba_verify import shapes

    return next(shape for shape in shapes.SHAPES if shape.name == name)


def workload(name: str) -> Any:
    """The arrays of a shape on GPU 0."""
    from numba_verify import bench

    return bench.Workload(shape_of(name))


def run_checked(work: Any, plan: Any) -> None:
    """Run once into poisoned outputs and compare rows of the result with float64: a wrong kernel gets no time."""
    from numba_verify.gpu import driver

    with driver.context(work.ordinal):
        for array in (work.out, work.lse):
            driver.call("cuMemsetD8", array.buffer.address, 0xFF, array.buffer.nbytes)  # NaN in bfloat16 and float32
        work.run(plan)
        driver.synchronize(0)
    error = work.check()
    if not error <= ERROR_BOUND:
        raise RuntimeError(f"wrong result: error {error:.3g} of a row's norm, allowed {ERROR_BOUND:.3g}")


# --- what the compilers made --------------------------------------------------------------------------------------------------


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


def numba_resources(architectures: Iterable[str] = ARCHITECTURES, kernels: Iterable[str] = COMPILED) -> list[Resources]:
    """Compiles what is not in the cubin cache, about 2 s a kernel, 5 s for mma. Without tiles of mma that do not run on an architecture."""
    from numba_verify.gpu import sass
    from numba_verify.gpu.compile import compile_kernel

    rows = []
    for name, arch in itertools.product(kernels, architectures):
        source = _numba_source(name, arch)
        if source is None:
            continue
        cubin = compile_kernel(source, arch)
        got, count = cubin.resources, None
        if sass.find_nvdisasm():
            count = len(sass.opcodes(cubin.code)[cubin.symbol])
        rows.append(
            Resources(
                "numba_verify",
                name,
                arch,
                got.registers,
                got.shared_bytes,
                got.spill_store_bytes + got.spill_load_bytes,
                got.stack_bytes,
                count,
            )
        )
    return rows


def _numba_source(name: str, arch: str) -> Any:
    """The KernelSource of a name in COMPILED; None for a tile of mma that no GPU of the architecture has room or registers for."""
    from numba_verify import backend
    from numba_verify.kernels.config import TILE_CONFIGS, Shape
    from numba_verify.kernels.mma_config import MMA_TILES

    shape, (kernel, _, tile) = Shape(512, 64, "bfloat16"), name.partition("_")
    if kernel == "mma":
        chosen = next(t for t in MMA_TILES if str(t) == tile)
        if chosen.shared_bytes(shape) > SHARED_BYTES[arch] or chosen.registers and not arch.endswith("a"):
            return None
        return backend.mma_sources(shape, chosen, False, arch != "sm_80")["mma"]
    tiles = {str(tile): tile for tile in TILE_CONFIGS}
    return backend.kernel_sources(shape, tiles.get(tile, tiles["h16k16"]), 16, False)[kernel]


#: How cuda_ref names these kernels, without spaces. `schedule` and `expand` are no templates.
_TWIN_NAMES = {
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
    if find_nvcc() is None:
        return []
    build = importlib.import_module("cuda_ref.build")
    names = tuple(arch.removeprefix("sm_") for arch in architectures)
    report = {(row["arch"], row["kernel"].replace(" ", "")): row for row in build.resource_report(names)}
    counts = _twin_instruction_counts(build.build(names))
    rows = []
    for name, arch in itertools.product(kernels, architectures):
        row = report.get((arch.removeprefix("sm_"), _TWIN_NAMES[name]))
        if row is not None:
            rows.append(
                Resources(
                    "cuda_ref",
                    name,
                    arch,
                    row["registers"],
                    row["static_shared"] + row["dynamic_shared"],
                    row["spill_stores"] + row["spill_loads"],
                    row["stack"],
                    counts.get((arch, _TWIN_NAMES[name])),
                )
            )
    return rows


def _twin_instruction_counts(library: Path) -> dict[tuple[str, str], int]:
    """(architecture, kernel) -> instructions; empty when cuobjdump, nvdisasm or c++filt is missing. The library's cubins are compressed and
    only cuobjdump unpacks them."""
    from numba_verify.gpu import sass

    tool = _find_tool("cuobjdump")
    if tool is None or sass.find_nvdisasm() is None or shutil.which("c++filt") is None:
        return {}
    counts = {}
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([tool, "-xelf", "all", str(library)], cwd=folder, check=True, capture_output=True)
        for cubin in Path(folder).glob("*.cubin"):
            arch = re.search(r"sm_\w+?(?=\.)", cubin.name).group()
            listing = sass.opcodes(cubin.read_bytes())
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
        + "".join(f"{impl:>14}: {'regs':>4} {'shared':>7} {'spill':>5} {'stack':>5} {'sass':>6}" for impl in IMPLEMENTATIONS)
    ]
    for (kernel, arch), pair in table.items():
        cells = []
        for impl in IMPLEMENTATIONS:
            row = pair.get(impl)
            values = ("-",) * 5 if row is None else (row.registers, row.shared_bytes, row.spill_bytes, row.stack_bytes, row.sass or "-")
            cells.append(f"{'':15} " + "{:>4} {:>7} {:>5} {:>5} {:>6}".format(*values))
        lines.append(f"{kernel:14} {arch:7} " + "".join(cells))
    return "\n".join(lines)


# --- a benchmark file as a script -----------------------------------------------------------------------------------------------


def run_script(benchmark: type) -> None:
    """Every track_ function of a class for all of its parameters, printed as asv would record it."""
    instance = benchmark()
    cached = (instance.setup_cache(),) if hasattr(instance, "setup_cache") else ()
    for name in [name for name in vars(benchmark) if name.startswith("track_")]:
        for values in itertools.product(*benchmark.params):
            label = f"{benchmark.__name__}.{name}({', '.join(map(str, values))})"
            try:
                instance.setup(*cached, *values)
                print(f"{label:80} {getattr(instance, name)(*cached, *values):12.6g} {getattr(benchmark, name).unit}", flush=True)
            except NotImplementedError as reason:
                print(f"{label:80} n/a: {reason}", flush=True)
