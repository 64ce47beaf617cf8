"""What the benchmark files share: parameters by name, who can run here, checked runs, and how a family is measured in one process.

Nothing of numba_verify, NumPy or CUDA is imported at module level: asv imports every benchmark file once a parameter, and discovery has to
work on a machine without them.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import math
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
# A file run as a script finds the checkout it lies in; under asv the package is installed or on ASV_PYTHONPATH.
if importlib.util.find_spec("numba_verify") is None:
    sys.path.insert(0, str(ROOT))

IMPLEMENTATIONS = ("numba_verify", "cuda_ref")
#: Kernels with device figures, in the order in which they are measured. A kernel that a commit does not have reads n/a there.
KERNELS = (
    "mma",
    "wgmma",
    "paged",
    "flash",
    "naive",
)
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
#: Twice the rounding of a bfloat16 result, as a part of a row's norm: contract, promise 7.
ERROR_BOUND = 2 * 2.3e-3
#: What begins the text of a figure that failed, where any other text is the reason of a skip.
FAILED = "failed: "


class Failed(RuntimeError):
    """A figure that was measured together with others, and failed."""


#: time.monotonic() after which nothing new is measured; set by whoever has only so long.
deadline = math.inf


def skip(reason: str) -> NotImplementedError:
    """What asv takes for "not here": raise it in `setup`, and the benchmark reads n/a."""
    return NotImplementedError(reason)


def out_of_time() -> bool:
    return time.monotonic() > deadline


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


def require_written(name: str) -> None:
    """Skips what a past commit does not have; an import might find it in another checkout."""
    if not (ROOT / name).is_dir():
        raise skip(f"this commit has no {name}")


def implementation(name: str) -> ModuleType:
    """The module, ready to plan; skips when it cannot be built here."""
    require_written(name)
    if name == "cuda_ref" and find_nvcc() is None:
        raise skip("cuda_ref needs nvcc")
    module = importlib.import_module(name)
    if name == "cuda_ref" and (why := _why_not_built()):
        raise RuntimeError(why)
    return module


@functools.cache
def _why_not_built() -> str:
    """Why the C library cannot be built, "" when it can. A commit that does not build would else be compiled anew for every figure."""
    try:
        importlib.import_module("cuda_ref.build").build()
    except (RuntimeError, OSError) as error:
        return f"cuda_ref does not build: {str(error)[:2000]}"
    return ""


def shape_of(name: str) -> Any:
    """numba_verify.shapes.Shape of that name."""
    from numba_verify import shapes

    return next(shape for shape in shapes.SHAPES if shape.name == name)


def workload(shape: Any) -> Any:
    """The arrays of a numba_verify.shapes.Shape on GPU 0."""
    from numba_verify import bench

    return bench.Workload(shape)


def run_checked(work: Any, plan: Any) -> float:
    """Run once into poisoned outputs and compare rows of the result with float64: a wrong kernel gets no time. Returns the error."""
    from numba_verify.gpu import driver

    with driver.context(work.ordinal):
        for array in (work.out, work.lse):
            driver.call("cuMemsetD8", array.buffer.address, 0xFF, array.buffer.nbytes)  # NaN in bfloat16 and float32
        work.run(plan)
        driver.synchronize(0)
    return require_right(work.check())


def require_right(error: float, bound: float = ERROR_BOUND) -> float:
    """The error, or RuntimeError when it is beyond the bound, the contract's if no other is given. NaN is."""
    if not error <= bound:
        raise RuntimeError(f"wrong result: error {error:.3g} of a row's norm, allowed {bound:.3g}")
    return error


def attempt(call: Callable[[], Any]) -> Any:
    """call(), or the text of why it gave nothing: a skip's reason, or FAILED and what went wrong."""
    from numba_verify.errors import UnsupportedError

    try:
        return call()
    except (NotImplementedError, UnsupportedError) as reason:
        return str(reason)
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError, MemoryError) as error:
        # AttributeError and TypeError: a past commit whose call is another one.
        return f"{FAILED}{type(error).__name__}: {error}"


def figure_or_skip(figure: Any) -> None:
    """For `setup`: skips when the figure is the reason of a skip."""
    if isinstance(figure, str) and not figure.startswith(FAILED):
        raise skip(figure)


def figure_or_failure(figure: Any) -> float:
    """For a `track_` function: the number; raises Failed when it is the text of a failure."""
    if isinstance(figure, str):
        raise Failed(figure.removeprefix(FAILED))
    return figure


# --- a family in one process ------------------------------------------------------------------------------------------------------


class Value(NamedTuple):
    """One figure of a family. `value`: NaN = skipped, None = failed, as in asv's files; `why`: the text then."""

    track: str
    params: tuple[str, ...]
    value: float | None
    why: str = ""


def all_keys(family: type) -> list[tuple[str, ...]]:
    return list(itertools.product(*family.params))


def tracks(family: type) -> list[str]:
    return [name for name in vars(family) if name.startswith("track_")]


def measured(families: Iterable[type], wanted: Callable[[type, str, tuple[str, ...]], bool] = lambda *which: True) -> Iterator[tuple[type, Value]]:
    """Every wanted figure of the families, in this process; asv starts one process for each.

    `collect(keys)` of a family takes the figures that belong together; families with the same one share its result.
    """
    families = list(families)
    chosen = {(family, track): [key for key in all_keys(family) if wanted(family, track, key)] for family in families for track in tracks(family)}
    cached: dict[Any, Any] = {}
    for (family, track), keys in chosen.items():
        arguments = ()
        if hasattr(family, "collect") and keys:
            if family.collect not in cached:
                together = [key for (other, _), some in chosen.items() if getattr(other, "collect", None) is family.collect for key in some]
                cached[family.collect] = family.collect(dict.fromkeys(together))
            arguments = (cached[family.collect],)
        instance = family()
        for key in keys:
            try:
                instance.setup(*arguments, *key)
                value, why = float(getattr(instance, track)(*arguments, *key)), ""
            except NotImplementedError as reason:
                value, why = math.nan, str(reason)
            except Failed as error:
                value, why = None, str(error)
            except Exception as error:  # a benchmark that fails must not take the others with it
                value, why = None, "".join(traceback.format_exception_only(error)).strip()
            yield family, Value(track, key, value, why)


def run_script(*families: type) -> None:
    """The figures of families, printed as asv would record them."""
    for family, (track, params, value, why) in measured(families):
        label = f"{family.__name__}.{track}({', '.join(params)})"
        text = f"{value:12.6g} {getattr(family, track).unit}" if not why else f"n/a: {why}" if value is not None else f"failed: {why}"
        print(f"{label:90} {text}", flush=True)
