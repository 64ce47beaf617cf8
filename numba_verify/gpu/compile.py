"""Kernel factory -> LTO-IR -> cubin, with the compiler's resource report and a disk cache. Works with no GPU.

LTO-IR and not PTX goes into the linker: with PTX nvJitLink compiles relocatable code, ignores setmaxnreg and often needs more registers
(docs/facts.md). numba's own dispatcher and cache are not used: its cache does not see edits in imported modules and its launch costs
tens of microseconds.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from ..errors import UnsupportedError
from . import frontend

#: Architectures the offline tests compile for: Ampere, Hopper with wgmma, and the workstation Blackwell this project is for.
OFFLINE_ARCHITECTURES = ("sm_80", "sm_90a", "sm_120")
#: Distributions whose version changes the code they generate.
_TOOLCHAIN = ("numba-cuda", "numba", "llvmlite", "cuda-core", "nvidia-nvvm", "nvidia-cuda-nvrtc", "nvidia-nvjitlink")


@dataclass(frozen=True)
class KernelSource:
    """One kernel variant: how to build it and what it is launched with.

    `build(lang, config)` returns the Python kernel; `signature` names its arguments "address", "i64" or "f32".
    `min_blocks` is the second launch bound: blocks per SM the compiler has to leave registers for. `overlaps`: the grid may start before the
    one before it in the stream has ended, for which it waits itself (see `grids`); sm_90 and later.
    """

    name: str
    build: Callable[[Any, Any], Callable]
    config: Any
    signature: tuple[str, ...]
    threads: int
    min_blocks: int = 1
    shared_bytes: int = 0
    overlaps: bool = False

    @property
    def variant(self) -> str:
        """Readable identity: kernel and configuration."""
        return f"{self.name}_{self.config}"


@dataclass(frozen=True)
class Resources:
    """What ptxas reports of a kernel, bytes per thread but for shared memory (dynamic, bytes per block)."""

    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    shared_bytes: int


@dataclass(frozen=True)
class Cubin:
    """Machine code of one kernel for one architecture. `cached`: it came from the disk cache."""

    code: bytes
    symbol: str
    arch: str
    resources: Resources
    cached: bool


def cache_directory() -> Path:
    """`NUMBA_VERIFY_CACHE_DIR`, else the user's cache folder."""
    chosen = os.environ.get("NUMBA_VERIFY_CACHE_DIR")
    if chosen:
        return Path(chosen)
    try:
        user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # a user with no home directory, as containers have them
        user = Path(tempfile.gettempdir()) / f"cache-{os.getuid()}"
    return user / "numba_verify" / "cubin"


@functools.cache
def _source_digest() -> bytes:
    """Hash of the sources that make code: kernels/ and gpu/, which import nothing else of the package but the error classes."""
    root = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for path in sorted([*root.glob("kernels/*.py"), *root.glob("gpu/*.py")]):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.digest()


@functools.cache
def toolchain_versions() -> dict[str, str]:
    """Version of each package that takes part in compiling, "absent" for one that is not installed."""
    versions = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in _TOOLCHAIN:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "absent"
    # Where a CUDA toolkit stands in for the wheels, only the library itself knows its version.
    from cuda.bindings import nvjitlink

    versions["nvJitLink library"] = ".".join(map(str, nvjitlink.version()))
    return versions


def cache_key(source: KernelSource, arch: str) -> str:
    """Everything that changes the code: variant, launch bounds, architecture, package sources, toolchain."""
    text = json.dumps([source.name, repr(source.config), source.signature, source.threads, source.min_blocks, arch, toolchain_versions()])
    return hashlib.sha256(_source_digest() + text.encode()).hexdigest()[:40]


# One compile at a time: numba's compiler has a global lock anyway, and two threads that want the same kernel should not both pay.
_lock = threading.Lock()
_memory: dict[str, Cubin] = {}


def compile_kernel(source: KernelSource, arch: str) -> Cubin:
    """The cubin of `source` for `arch` ("sm_90a"): from memory, from disk, or compiled now."""
    key = cache_key(source, arch)
    with _lock:
        if key not in _memory:
            _memory[key] = _load(key, arch) or _compile_and_store(source, arch, key)
        return _memory[key]


def _paths(key: str) -> tuple[Path, Path]:
    folder = cache_directory()
    return folder / f"{key}.cubin", folder / f"{key}.json"


def _load(key: str, arch: str) -> Cubin | None:
    cubin_path, info_path = _paths(key)
    try:
        # The text is written last, so where it is whole the cubin is; the hash guards against a torn disk.
        info, code = json.loads(info_path.read_text()), cubin_path.read_bytes()
        if hashlib.sha256(code).hexdigest() != info["sha256"]:
            return None
        return Cubin(code, info["symbol"], arch, Resources(**info["resources"]), cached=True)
    except (OSError, ValueError, KeyError, TypeError):
        return None  # absent or damaged: compile again and overwrite


def _compile_and_store(source: KernelSource, arch: str, key: str) -> Cubin:
    cubin = compile_uncached(source, arch)
    info = {"variant": source.variant, "arch": arch, "symbol": cubin.symbol, "resources": asdict(cubin.resources),
            "sha256": hashlib.sha256(cubin.code).hexdigest()}
    cubin_path, info_path = _paths(key)
    try:
        _write_atomically(cubin_path, cubin.code)
        _write_atomically(info_path, json.dumps(info, indent=1).encode())
    except OSError:
        pass  # a read-only or full disk costs the next process a compile, not this one its result
    return cubin


def _write_atomically(path: Path, content: bytes) -> None:
    """Write beside and rename: a reader sees the old file, the new one or none, however many processes write at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        raise


def _capability(arch: str) -> tuple:
    match = re.fullmatch(r"sm_(\d+)(\d)([af]?)", arch)
    if match is None:
        raise ValueError(f"arch: expected a name like sm_90a, got {arch!r}")
    major, minor, suffix = match.groups()
    return (int(major), int(minor), suffix) if suffix else (int(major), int(minor))


def lower(source: KernelSource, arch: str, output: str) -> bytes | str:
    """The kernel as "ltoir" or "ptx" for `arch`."""
    from numba import cuda
    from numba.cuda import types

    from . import ptx

    tags = {"address": types.uint64, "i64": types.int64, "f32": types.float32}
    kernel = source.build(ptx, source.config)
    signature = types.void(*(tags[name] for name in source.signature))
    capability = _capability(arch)
    with frontend.prepared(capability):
        code, _ = frontend.call_with_room(cuda.compile, kernel, signature, device=False, abi="numba", output=output, cc=capability,
                                          launch_bounds=(source.threads, source.min_blocks), opt=True, debug=False, lineinfo=False)
    return code


def compile_uncached(source: KernelSource, arch: str) -> Cubin:
    """The cubin of `source` for `arch`, compiled now and kept nowhere."""
    from cuda.core import Linker, LinkerOptions, ObjectCode

    # no_cache: nvJitLink keeps results on disk, and one that it finds there comes without the compiler's report.
    options = LinkerOptions(arch=arch, link_time_optimization=True, ptxas_options=["-v"], no_cache=True)
    linker = Linker(ObjectCode.from_ltoir(lower(source, arch, "ltoir")), options=options)
    code = bytes(linker.link("cubin").code)
    log = linker.get_info_log()
    _refuse_injected_waits(log, source)
    # The log does not always name the entry; the section of its code does.
    symbol = re.search(rb"\.text\.([\w$]+)", code).group(1).decode()
    return Cubin(code, symbol, arch, _parse_report(log, source), cached=False)


def _refuse_injected_waits(log: str, source: KernelSource) -> None:
    """C7510 to C7520: ptxas saw the registers of a wgmma in flight touched, or could not rule it out, and put waits where the kernel has none.

    Right and slow: a mistake of the kernel, not of its caller.
    """
    notes = re.findall(r"[^\n]*(?:\(C75(?:1\d|20)\)|wgmma\.mma_async instructions are serialized)[^\n]*", log)
    if notes:
        raise RuntimeError(f"{source.variant}: the compiler put waits between its wgmma: {' '.join(notes)[:600]}")


def _parse_report(log: str, source: KernelSource) -> Resources:
    registers = re.search(r"Used (\d+) registers", log)
    frame = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    if registers is None or frame is None:
        raise UnsupportedError(f"{source.variant}: the linker gave no resource report; its log was: {log.strip()[:400]}")
    return Resources(int(registers.group(1)), *map(int, frame.groups()), source.shared_bytes)


def cached_files() -> list[Path]:
    """The files of the disk cache; files of others in the same folder are not among them."""
    return [path for path in cache_directory().glob("*") if re.fullmatch(r"[0-9a-f]{40}\.(cubin|json)", path.name)]


def clear_cache() -> int:
    """Delete every file of the disk cache; how many there were."""
    paths = cached_files()
    for path in paths:
        path.unlink(missing_ok=True)
    _memory.clear()
    return len(paths)
