"""Builds the library: `python -m cuda_ref.build [--arch 80,90a,120] [--host] [--sanitize] [--force] [--verbose]`.

Three products, each in a folder of the cache (`CUDA_REF_CACHE_DIR`, else the user's cache folder / numba_verify / cuda_ref) named after a
hash of everything that goes into it:

* the nvcc library for GPUs (one cubin an architecture), with `resources.json` beside it: registers, spills, stack, shared memory;
* the g++ library, which runs the same kernels on the CPU (host/);
* with `--sanitize`, the smoke program: the g++ build under AddressSanitizer and UndefinedBehaviorSanitizer, driven from plain C.

Several processes may build at once: one holds a file lock and builds into a temporary folder, which is then renamed into place. The
kernel drops the lock of a process that dies.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from . import resources
from .toolchain import BuildError, find_c_compiler, find_host_compiler, find_nvcc, run

__all__ = ["DEFAULT_ARCHITECTURES", "BuildError", "build", "build_host", "build_smoke", "cache_dir", "resource_report"]

SOURCE_DIR = Path(__file__).resolve().parent
# Slowest first, so that no compiler is left alone at the end.
KERNEL_SOURCES = ("mma_m16.cu", "mma_m32.cu", "mma_m64.cu", "paged.cu", "wgmma_bf16.cu", "wgmma_fp16.cu", "flash.cu", "naive.cu", "schedule.cu",
                  "combine.cu", "mma.cu", "wgmma.cu", "capi.cu", "validate.cu", "device.cu")
HOST_SOURCES = ("host/matrix.cpp", "host/warpgroup.cpp", "host/async.cpp", "host/scheduler.cpp")
LIBRARY = "libverify_attn.so"
SMOKE = "smoke"

# sm_80 code runs on sm_86 and sm_89 as well; 90a is Hopper; 120 is RTX 50 and RTX PRO.
DEFAULT_ARCHITECTURES = ("80", "90a", "120")

NVCC_FLAGS = ("-std=c++17", "-O3", "-Xptxas", "-v", "-Xcompiler", "-fPIC,-fvisibility=hidden,-Wall,-Wextra")
# The kernels read 16 bytes of any element type at once, as CUDA allows: hence no strict aliasing.
HOST_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-fno-strict-aliasing", "-Wall", "-Wextra", "-Wno-unknown-pragmas")
SANITIZE_FLAGS = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def cache_dir() -> Path:
    """`CUDA_REF_CACHE_DIR`, else numba_verify/cuda_ref in the user's cache folder."""
    if override := os.environ.get("CUDA_REF_CACHE_DIR"):
        return Path(override)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "numba_verify" / "cuda_ref"


def _source_files() -> list[Path]:
    return sorted(path for pattern in ("*.cu", "*.cuh", "*.h", "host/*") for path in SOURCE_DIR.glob(pattern) if path.is_file())


def _key(*parts: str) -> str:
    """Hash of the sources (names and bytes) and of everything else that changes the product."""
    digest = hashlib.sha256()
    for path in _source_files():
        digest.update(f"{path.relative_to(SOURCE_DIR)}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    for part in parts:
        digest.update(f"{part}\0".encode())
    return digest.hexdigest()[:20]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock; whoever dies releases it. The file stays: removing it would let two processes lock two files."""
    with open(path, "w", encoding="ascii") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _product(name: str, artifact: str, make: Callable[[Path], None], force: bool) -> Path:
    """Path of `artifact` in the cache folder `name`; `make(folder)` builds it when it is not there."""
    root = cache_dir()
    root.mkdir(parents=True, exist_ok=True)
    target = root / name / artifact
    if target.is_file() and not force:
        return target
    started = time.time()
    with _locked(root / f"{name}.lock"):
        # Another process may have built it while this one waited; with force only a build younger than the request counts.
        if target.is_file() and not (force and target.stat().st_mtime < started):
            return target
        for left in root.glob(f"{name}.*.tmp"):  # of a builder that died: whoever builds this holds the lock
            shutil.rmtree(left, ignore_errors=True)
        scratch = Path(tempfile.mkdtemp(prefix=f"{name}.", suffix=".tmp", dir=root))
        try:
            make(scratch)
            if target.parent.exists():  # force: a loaded library keeps its own copy of the file open
                target.parent.rename(scratch / "replaced")
            keep = scratch / "product"
            keep.rename(target.parent)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return target


def _compile(commands: list[list[str]], verbose: bool) -> list[str]:
    """Run compile commands, as many at once as there are cores; returns what each printed."""
    if verbose:
        for command in commands:
            print(" ".join(command), file=sys.stderr)
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        return list(pool.map(lambda command: run(command, "compiling failed"), commands))


def _compile_all(folder: Path, sources: tuple[str, ...], compiler: list[str], verbose: bool) -> tuple[list[str], str]:
    """Compile sources into folder; returns the object files and everything that the compiler printed."""
    objects = [str(folder / (Path(source).name + ".o")) for source in sources]
    commands = [[*compiler, "-c", str(SOURCE_DIR / source), "-o", target] for source, target in zip(sources, objects, strict=True)]
    return objects, "".join(_compile(commands, verbose))


def _own_architectures() -> tuple[str, ...]:
    """Architectures of the GPUs of this machine, () without a driver."""
    try:
        from cuda.core import Device

        capabilities = {tuple(device.compute_capability) for device in Device.get_all_devices()}
    except Exception:  # no cuda.core, no driver and no device each raise a class of their own, and all mean "none"
        return ()
    return tuple(sorted(architecture_name(*capability) for capability in capabilities))


def architecture_name(major: int, minor: int) -> str:
    """nvcc's name of a compute capability; Hopper is built with its own instructions ("90a")."""
    return "90a" if (major, minor) == (9, 0) else f"{major}{minor}"


def _architectures(arch: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if arch is None:
        return _own_architectures() or DEFAULT_ARCHITECTURES
    names = tuple(arch.split(",")) if isinstance(arch, str) else tuple(arch)
    bad = [name for name in names if not name.rstrip("af").isdigit()]
    if bad or not names:
        raise ValueError(f"arch: expected compute capabilities such as '80,90a,120', got {arch!r}")
    return names


def build(arch: str | tuple[str, ...] | None = None, *, force: bool = False, verbose: bool = False) -> Path:
    """Build the GPU library and return its path.

    `arch`: "80,90a,120" or a tuple of such names; None = the architectures of this machine's GPUs, or 80, 90a and 120 when it has none.
    Raises `BuildError` with the compiler's text, `ValueError` for a name that is no architecture.
    """
    names = _architectures(arch)
    nvcc = find_nvcc()
    codes = [flag for name in names for flag in ("-gencode", f"arch=compute_{name},code=sm_{name}")]
    if "90a" in names:
        codes.append("-DNVR_SM_90A")  # host code then knows that there are kernels which hand registers over, and wgmma

    def make(scratch: Path) -> None:
        objects, output = _compile_all(scratch, KERNEL_SOURCES, [str(nvcc.path), *NVCC_FLAGS, *nvcc.flags, *codes], verbose)
        if notes := resources.injected_waits(output):
            raise BuildError(f"the compiler put waits between wgmma: {' '.join(notes)[:600]}")
        product = scratch / "product"
        product.mkdir()
        run([str(nvcc.path), "-shared", "-cudart", "static", *nvcc.flags, *objects, "-o", str(product / LIBRARY)], "linking failed")
        (product / "resources.json").write_text(json.dumps(resources.parse(output), indent=1), encoding="utf-8")

    return _product(f"cuda-{_key(nvcc.version, *NVCC_FLAGS, *nvcc.flags, *codes)}", LIBRARY, make, force)


def build_host(*, force: bool = False, verbose: bool = False) -> Path:
    """Build the library that runs the kernels on the CPU and return its path. Raises `BuildError`."""
    path, version = find_host_compiler()

    def make(scratch: Path) -> None:
        objects, _ = _compile_all(scratch, KERNEL_SOURCES + HOST_SOURCES, [path, *HOST_FLAGS, "-x", "c++"], verbose)
        product = scratch / "product"
        product.mkdir()
        run([path, "-shared", *objects, "-o", str(product / LIBRARY)], "linking failed")

    return _product(f"host-{_key(path, version, *HOST_FLAGS)}", LIBRARY, make, force)


def build_smoke(*, force: bool = False, verbose: bool = False) -> Path:
    """Build the smoke program under both sanitizers and return its path. Raises `BuildError`."""
    path, version = find_host_compiler()
    c_compiler = find_c_compiler()
    flags = [*HOST_FLAGS, *SANITIZE_FLAGS]

    def make(scratch: Path) -> None:
        objects, _ = _compile_all(scratch, KERNEL_SOURCES + HOST_SOURCES, [path, *flags, "-x", "c++"], verbose)
        program = str(scratch / "smoke.o")
        # C99 and no extension: the header has to be usable from the plainest C.
        run([c_compiler, "-std=c99", "-Wall", "-Wextra", "-Werror", *SANITIZE_FLAGS, "-D_ISOC11_SOURCE", "-c",
             str(SOURCE_DIR / "host" / "smoke.c"), "-o", program], "compiling the smoke program failed")  # fmt: skip
        product = scratch / "product"
        product.mkdir()
        run([path, *SANITIZE_FLAGS, *objects, program, "-lm", "-o", str(product / SMOKE)], "linking failed")

    return _product(f"smoke-{_key(path, version, c_compiler, *flags)}", SMOKE, make, force)


def resource_report(arch: str | tuple[str, ...] | None = None) -> list[resources.KernelResources]:
    """Registers, spills, stack and shared memory of every kernel, per architecture; builds when needed."""
    library = build(arch)
    rows = json.loads((library.parent / "resources.json").read_text(encoding="utf-8"))
    return resources.with_dynamic_shared(rows, library)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m cuda_ref.build", description="Build the CUDA C reference library.")
    parser.add_argument("--arch", help="compute capabilities, for example 80,90a,120; default: this machine's GPUs, else those three")
    parser.add_argument("--host", action="store_true", help="the g++ build that runs on the CPU")
    parser.add_argument("--sanitize", action="store_true", help="the smoke program under AddressSanitizer and UBSan")
    parser.add_argument("--force", action="store_true", help="build even when the cache has it")
    parser.add_argument("--verbose", action="store_true", help="print the compiler commands and the resource table")
    options = parser.parse_args(arguments)
    try:
        if options.sanitize:
            print(build_smoke(force=options.force, verbose=options.verbose))
        elif options.host:
            print(build_host(force=options.force, verbose=options.verbose))
        else:
            print(build(options.arch, force=options.force, verbose=options.verbose))
            if options.verbose:
                print(resources.table(resource_report(options.arch)))
    except (BuildError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
