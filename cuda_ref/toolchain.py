"""Finds the compilers: nvcc from PATH, CUDA_HOME or the PyPI wheels, and g++."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
import shutil
import subprocess
from pathlib import Path


class BuildError(RuntimeError):
    """A compiler is missing or refused the sources; the text holds what it said."""


@dataclasses.dataclass(frozen=True)
class Nvcc:
    """One nvcc and what it needs beyond its own defaults."""

    path: Path
    version: str
    flags: tuple[str, ...] = ()  # include and library folders of the wheels


def run(command: list[str], failure: str) -> str:
    """Run a compiler and return what it printed; `BuildError` with that text when it fails."""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    except OSError as error:
        raise BuildError(f"{failure}: cannot run {command[0]}: {error}") from error
    if done.returncode != 0:
        raise BuildError(f"{failure}: {' '.join(command)} ended with {done.returncode}:\n{done.stdout}")
    return done.stdout


def _wheel_roots() -> list[Path]:
    """Folders of the NVIDIA wheels that hold bin/, include/ and lib/, for example site-packages/nvidia/cu13."""
    spec = importlib.util.find_spec("nvidia")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    return [root for place in places for root in sorted(Path(place).glob("*")) if (root / "bin" / "nvcc").is_file()]


def _candidates() -> list[Path]:
    found = []
    if on_path := shutil.which("nvcc"):
        found.append(Path(on_path))
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(name):
            found.append(Path(os.environ[name]) / "bin" / "nvcc")
    found += [root / "bin" / "nvcc" for root in _wheel_roots()]
    found.append(Path("/usr/local/cuda/bin/nvcc"))
    return [path for path in found if path.is_file()]


def _wheel_flags(nvcc: Path) -> tuple[str, ...]:
    """The wheels keep their libraries in lib/, where nvcc (which expects lib64/) does not look."""
    root = nvcc.parent.parent
    if root not in _wheel_roots():
        return ()
    return (f"-I{root / 'include'}", f"-L{root / 'lib'}")


@functools.cache
def find_nvcc() -> Nvcc:
    """The first nvcc of PATH, CUDA_HOME, CUDA_PATH, the PyPI wheels, /usr/local/cuda. `BuildError` when there is none."""
    candidates = _candidates()
    if not candidates:
        raise BuildError(
            "no nvcc on PATH, in CUDA_HOME or among the PyPI wheels; "
            "install a CUDA toolkit, or: pip install 'cuda-toolkit[nvcc,cudart,cccl]'"
        )
    path = candidates[0]
    version = run([str(path), "--version"], "nvcc does not run").strip().splitlines()[-1]
    return Nvcc(path, version, _wheel_flags(path))


@functools.cache
def find_host_compiler() -> tuple[str, str]:
    """(path, version) of CXX or g++. `BuildError` when there is none."""
    path = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if not path:
        raise BuildError("no g++ on PATH and CXX is not set; install g++ (Debian, Ubuntu: apt-get install g++)")
    return path, run([path, "--version"], "the C++ compiler does not run").splitlines()[0]


def find_c_compiler() -> str:
    """Path of CC or gcc, for the C program of the smoke test."""
    path = os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc")
    if not path:
        raise BuildError("no gcc on PATH and CC is not set; install gcc (Debian, Ubuntu: apt-get install gcc)")
    return path
