"""Show versions, GPUs, compilers, caches, and which kernels can run here and why not.

For bug reports. Every probe is on its own: one that fails shows its error and the rest goes on.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from .. import __version__
from ..gpu import driver
from ..gpu.compile import cache_directory
from .console import one_line, say, table
from .places import driver_text
from .runners import GPU_KERNELS, IMPLEMENTATIONS

#: Distribution and its module. Those are imported: what is loaded may be another copy than the one whose metadata was found.
LOADED = {"numpy": "numpy", "ml_dtypes": "ml_dtypes", "numba": "numba", "numba-cuda": "numba_cuda", "llvmlite": "llvmlite",
          "cuda-core": "cuda.core", "cuda-bindings": "cuda.bindings", "greenlet": "greenlet"}
#: Looked up but not imported: too heavy, or nothing to import.
INSTALLED = ("cuda-pathfinder", "cuda-toolkit", "nvidia-nvvm", "nvidia-cuda-nvrtc", "nvidia-nvjitlink", "nvidia-cuda-runtime",
             "nvidia-cuda-nvcc", "torch", "cupy-cuda12x", "cupy-cuda13x", "jax", "asv", "pytest")
LIBRARIES = ("nvvm", "nvrtc", "nvJitLink", "cuda")
VARIABLES = ("NUMBA_VERIFY_VALIDATE", "NUMBA_VERIFY_CACHE_DIR", "CUDA_REF_CACHE_DIR", "XDG_CACHE_HOME", "CUDA_HOME", "CUDA_PATH",
             "CUDA_VISIBLE_DEVICES", "CXX", "LD_LIBRARY_PATH")
#: The problem that the kernels are asked about: DeepSeek's rows, 16 heads.
ASKED = {"num_heads": 16, "latent_dim": 512, "rope_dim": 64, "dtype": "bfloat16", "page_size": 1}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    if arguments.json:
        say(json.dumps({title: attempt(probe) for title, probe in PROBES.items()}, indent=1))
        return 0
    for title, probe in PROBES.items():
        say(f"{title}")  # before the probe: cuda_ref builds its library to answer for its kernels
        say(as_text(attempt(probe)) + "\n")
    return 0


def attempt(probe: Callable[[], Any]) -> Any:
    """What `probe` finds, or its error as a text."""
    try:
        return probe()
    except Exception as error:  # whatever a broken installation raises is what the user has to see
        return f"error: {type(error).__name__}: {one_line(error)}"


def as_text(value: Any) -> str:
    """A list of rows as a table, a dict as lines, anything else as it is."""
    if isinstance(value, dict):
        width = max(map(len, value), default=0)
        return "\n".join(f"  {name.ljust(width)}  {'' if text is None else text}".rstrip() for name, text in value.items())
    if isinstance(value, list) and value:
        lines = table(list(value[0]), [row.values() for row in value])
        return "\n".join(f"  {line}" for line in lines.splitlines())
    return f"  {value}" if value else "  none"


def system() -> dict[str, Any]:
    return {"numba_verify": f"{__version__} from {Path(__file__).resolve().parents[1]}",
            "Python": f"{platform.python_version()} at {sys.executable}", "platform": platform.platform(), "CPUs": os.cpu_count()}


def packages() -> list[dict[str, Any]]:
    """Installed by the metadata, loaded by the module itself."""
    rows = []
    for name in (*LOADED, *INSTALLED):
        installed = attempt(lambda name=name: _installed(name))
        loaded = attempt(lambda name=name: _loaded(LOADED[name])) if name in LOADED else ""
        if installed or loaded:
            rows.append({"package": name, "installed": installed or "no", "loaded": loaded})
    return rows


def _installed(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _loaded(name: str) -> str:
    module = importlib.import_module(name)
    where = getattr(module, "__file__", None) or next(iter(module.__path__))
    return f"{getattr(module, '__version__', 'no version')} from {os.path.dirname(where)}"


def libraries() -> dict[str, Any]:
    """The shared libraries as they are found, which need not be those of the wheels."""
    from cuda.pathfinder import load_nvidia_dynamic_lib

    return {name: attempt(lambda name=name: load_nvidia_dynamic_lib(name).abs_path) for name in LIBRARIES}


def gpus() -> list[dict[str, Any]] | str:
    if driver.unavailable():
        return f"none: {driver.unavailable()}"
    return [_gpu(ordinal) for ordinal in range(driver.device_count())]


def _gpu(ordinal: int) -> dict[str, Any]:
    info = driver.device_info(ordinal)
    memory = driver.call("cuDeviceTotalMem", driver.call("cuDeviceGet", ordinal))
    return {"GPU": ordinal, "name": info.name, "compute capability": "{}.{}".format(*info.capability), "SMs": info.sm_count,
            "memory, GiB": round(memory / 2**30, 1), "shared memory a block, B": info.shared_bytes,
            "L2, MiB": round(info.l2_bytes / 2**20)}


def compilers() -> dict[str, Any]:
    """What cuda_ref would be built with."""
    from cuda_ref import toolchain

    def nvcc() -> str:
        found = toolchain.find_nvcc()
        return f"{found.path} ({found.version})"

    return {"nvcc": attempt(nvcc), "C++": attempt(lambda: "{} ({})".format(*toolchain.find_host_compiler()))}


def caches() -> dict[str, Any]:
    from cuda_ref import build

    return {"numba_verify": str(cache_directory()), "cuda_ref": str(build.cache_dir())}


def kernels() -> list[dict[str, Any]]:
    """can_run of every kernel on every GPU and on the host."""
    rows = []
    for name in IMPLEMENTATIONS:
        for ordinal in (*range(driver.device_count()), None):
            for kernel in ("reference", *GPU_KERNELS) if name == "numba_verify" else GPU_KERNELS:
                where = "CPU" if ordinal is None else f"cuda:{ordinal}"
                rows.append({"implementation": name, "kernel": kernel, "on": where,
                             "can run": attempt(lambda name=name, kernel=kernel, ordinal=ordinal: _can_run(name, kernel, ordinal))})
    return rows


def _can_run(implementation: str, kernel: str, ordinal: int | None) -> str:
    support = importlib.import_module(implementation).can_run(kernel=kernel, device=ordinal, **ASKED)
    return "yes" if support else f"no: {support.reason}"


def variables() -> dict[str, str]:
    return {name: os.environ[name] for name in VARIABLES if name in os.environ}


PROBES: dict[str, Callable[[], Any]] = {
    "system": system, "packages": packages, "libraries": libraries, "driver": driver_text, "GPUs": gpus, "compilers": compilers,
    "caches": caches, "kernels": kernels, "environment": variables,
}
