"""How long does a user wait for a kernel, the first time and every other time? No GPU needed. Lower is better.

numba_verify only: cuda_ref is one library of all variants, which nvcc builds ahead of time.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time

try:
    from . import common
except ImportError:  # run as a script
    import common

ARCHITECTURE = "sm_90a"  # one for all machines: the figures are the host's
REPEATS = 3


class Compile:
    """One variant of 512/64 in bfloat16, tile 16 x 16."""

    params = [("paged", "flash", "naive", "schedule", "expand", "combine")]
    param_names = ["kernel"]
    timeout = 120

    def setup(self, kernel):
        try:
            from numba_verify import backend
            from numba_verify.gpu.compile import compile_uncached
            from numba_verify.kernels.config import TILE_CONFIGS, Shape
        except ImportError as error:
            raise common.skip(str(error)) from error
        sources = backend.kernel_sources(Shape(512, 64, "bfloat16"), TILE_CONFIGS[1], 16, False)
        self.source = sources[kernel]
        # Importing the compiler and its first kernel cost a second that a process pays once, not once a variant.
        compile_uncached(sources["expand"], ARCHITECTURE)

    def track_cold_s(self, kernel):
        """Compile with nothing cached."""
        from numba_verify.gpu.compile import compile_uncached

        return _median(lambda: compile_uncached(self.source, ARCHITECTURE))

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

                return 1e3 * _median(load)
            finally:
                if before is None:
                    del os.environ["NUMBA_VERIFY_CACHE_DIR"]
                else:
                    os.environ["NUMBA_VERIFY_CACHE_DIR"] = before

    track_cold_s.unit, track_warm_ms.unit = "s", "ms"
    track_cold_s.version = track_warm_ms.version = "1"


def _median(call):
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


if __name__ == "__main__":
    common.run_script(Compile)
