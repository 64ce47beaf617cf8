"""Programs around single parts of cuda_ref: support/*_unit.cu, built with g++, with g++ and sanitizers, and with nvcc for this machine's GPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from cuda_ref import build, toolchain
from numba_verify.gpu import driver

SOURCES = build.SOURCE_DIR


def _nvcc_is_missing() -> bool:
    try:
        toolchain.find_nvcc()
    except toolchain.BuildError:
        return True
    return False


needs_nvcc = pytest.mark.skipif(_nvcc_is_missing(), reason="needs nvcc: on PATH, in CUDA_HOME or as a wheel")
#: Places where a unit runs, for parametrize.
PLACES = ["fast", "sanitized", pytest.param("gpu", marks=[pytest.mark.gpu, needs_nvcc])]


def compile_host(sources: Sequence[Path], target: Path, sanitize: bool) -> Path:
    """`sources` and the layer that runs kernels on the CPU -> the program `target`."""
    path, _ = toolchain.find_host_compiler()
    flags = [*build.HOST_FLAGS, *(build.SANITIZE_FLAGS if sanitize else ())]
    layer = [SOURCES / "device.cu", *(SOURCES / name for name in build.HOST_SOURCES)]
    toolchain.run([path, *flags, f"-I{SOURCES}", "-x", "c++", *map(str, [*sources, *layer]), "-o", str(target)], "compiling failed")
    return target


def compile_gpu(source: Path, target: Path) -> Path:
    """`source` -> the program `target` for GPU 0."""
    nvcc, arch = toolchain.find_nvcc(), build.architecture_name(*driver.device_info(0).capability)
    code = ["-gencode", f"arch=compute_{arch},code=sm_{arch}", "-cudart", "static"]
    files = [str(source), str(SOURCES / "device.cu"), "-o", str(target)]
    toolchain.run([str(nvcc.path), *build.NVCC_FLAGS, *nvcc.flags, *code, f"-I{SOURCES}", *files], "compiling failed")
    return target


class Programs:
    """The unit `source` in each place, compiled into `folder` when first asked for."""

    def __init__(self, source: Path, folder: Path):
        self._source, self._folder, self._made = source, folder, {}

    def __call__(self, place: str) -> Path:
        if place not in self._made:
            target = self._folder / place
            self._made[place] = compile_gpu(self._source, target) if place == "gpu" else compile_host([self._source], target, place == "sanitized")
        return self._made[place]
