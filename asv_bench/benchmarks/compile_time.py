"""How long does a user wait for the package and for a kernel, the first time and every other time? No GPU needed. Lower is better.

Compile times are numba_verify's only: cuda_ref is one library of all variants, which nvcc builds ahead of time.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time

try:
    from . import common
except ImportError:  # run as a script
    import common

ARCHITECTURE = "sm_90a"  # one for all machines: the figures are the host's
REPEATS = 3
IMPORTS = 5


class Compile:
    """One variant of 512/64 in bfloat16: tile 16 x 16 of paged and flash, of mma the largest."""

    params = [("mma", "paged", "flash", "naive", "schedule", "expand", "combine")]
    param_names = ["kernel"]
    timeout = 120

    def setup(self, kernel):
        try:
            from numba_verify import backend
            from numba_verify.gpu.compile import compile_uncached
            from numba_verify.kernels.config import TILE_CONFIGS, Shape
        except ImportError as error:
            raise common.skip(str(error)) from error
        shape = Shape(512, 64, "bfloat16")
        sources = backend.kernel_sources(shape, TILE_CONFIGS[1], 16, False)
        if kernel == "mma":
            try:
                from numba_verify.kernels.mma_config import MMA_TILES
            except ImportError as error:  # a past commit
                raise common.skip("there is no mma") from error
            self.source = backend.mma_sources(shape, MMA_TILES[0], False, True)[kernel]
        else:
            self.source = sources[kernel]
        # Importing the compiler and its first kernel cost a second that a process pays once, not once a variant.
        compile_uncached(sources["expand"], ARCHITECTURE)

    def track_cold_s(self, kernel):
        """Compile with nothing cached."""
        from numba_verify.gpu.compile import compile_uncached

        return _median(lambda: compile_uncached(self.source, ARCHITECTURE), REPEATS)

    def track_warm_ms(self, kernel):
        """Load from the disk cache, as a new process does."""
        from numba_verify.gpu import compile as compiler

        before = os.environ.get("NUMBA_VERIFY_CACHE_DIR")
        with tempfile.TemporaryDirectory() as folder:
            os.environ["NUMBA_VERIFY_CACHE_DIR"] = folder
            try:
                compiler._memory.clear()
                compiler.compile_kernel(self.source, ARCHITECTURE)

                def load():
                    compiler._memory.clear()
                    if not compiler.compile_kernel(self.source, ARCHITECTURE).cached:
                        raise RuntimeError("the cubin did not come from the cache")

                return 1e3 * _median(load, REPEATS)
            finally:
                if before is None:
                    del os.environ["NUMBA_VERIFY_CACHE_DIR"]
                else:
                    os.environ["NUMBA_VERIFY_CACHE_DIR"] = before

    track_cold_s.unit, track_warm_ms.unit = "s", "ms"
    track_cold_s.version = track_warm_ms.version = "1"


class Import:
    """`import` in a new process until `plan` is there (cuda_ref looks it up late), NumPy included, the interpreter's own start left out."""

    params = [common.IMPLEMENTATIONS]
    param_names = ["impl"]
    timeout = 60

    def setup(self, impl):
        common.require_written(impl)
        begun = "import time; begin = time.perf_counter(); "
        self.command = [sys.executable, "-c", f"{begun}import {impl}; {impl}.plan; print(time.perf_counter() - begin)"]
        # Where the benchmark finds the package: asv drops PYTHONPATH from a benchmark's environment.
        self.environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        if self._seconds() is None:  # also writes the byte code
            raise common.skip(f"{impl} cannot be imported here")

    def _seconds(self):
        done = subprocess.run(self.command, env=self.environment, capture_output=True, text=True)
        return float(done.stdout) if done.returncode == 0 else None

    def track_import_ms(self, impl):
        return 1e3 * statistics.median(self._seconds() for _ in range(IMPORTS))

    track_import_ms.unit = "ms"
    track_import_ms.version = "1"


def _median(call, repeats):
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


if __name__ == "__main__":
    common.run_script(Compile, Import)
