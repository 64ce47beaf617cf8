"""Measures benchmarks of this folder in one process and writes the figures as JSON: `python asv_bench/measure.py --out FILE`.

asv starts a process for every parameter of every benchmark, about a thousand of them here, and each would import CUDA to say one number.
This gives the same figures in minutes; tools/bench.py files them as asv does. It needs neither asv nor the network, and measures the
checkout that it lies in, so a past commit is measured by laying this folder over it (tools/bench_history.py).
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import math
import platform
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# The checkout, whatever else is installed.
sys.path.insert(0, str(ROOT))

from asv_bench.benchmarks import common  # noqa: E402  found by the line above

#: What a figure depends on beside the commit.
PACKAGES = ("numba-cuda", "numba", "numpy", "ml_dtypes", "cuda-core", "cuda-bindings", "nvidia-nvvm", "nvidia-nvjitlink", "torch")
#: What nvidia-smi is asked while the GPU is still warm from the measurement.
UNDER_LOAD = ("clocks.sm", "clocks.mem", "temperature.gpu", "power.draw", "clocks_event_reasons.active")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure benchmarks in one process.")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the figures go (default: they are printed only)")
    parser.add_argument("--bench", action="append", default=[], metavar="REGEX", help="only what matches, as for asv, for example device or "
                        r"track_registers\('cuda_ref'; may be repeated")
    parser.add_argument("--file", action="append", default=[], metavar="NAME", help="only this file, for example device; may be repeated")
    parser.add_argument("--seconds", type=float, metavar="S", help="begin no shape of the device families after so long")
    parser.add_argument("--prepare", action="store_true", help="only compile and run every kernel once, so that a measurement finds it cached")
    options = parser.parse_args(arguments)
    if options.prepare:
        return prepare()
    if options.seconds is not None:
        common.deadline = time.monotonic() + options.seconds
    found = measure(options.bench, options.file)
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 1 if found["failures"] else 0


def files() -> list[str]:
    return sorted(path.stem for path in (ROOT / "asv_bench" / "benchmarks").glob("[a-z]*.py"))


def families(stems: list[str]) -> dict[str, type]:
    """Name as asv gives it ("device.Device") -> class, of the files named."""
    found = {}
    for stem in stems:
        for name, value in vars(importlib.import_module(f"asv_bench.benchmarks.{stem}")).items():
            if isinstance(value, type) and not name.startswith("_") and common.tracks(value):
                found[f"{stem}.{name}"] = value
    return found


def measure(patterns: list[str], stems: list[str]) -> dict[str, Any]:
    """Figures in the columns of asv's result files (result, params, version, started_at, duration), what they depend on, and what failed."""
    names = {family: name for name, family in families(stems or files()).items()}

    def wanted(family: type, track: str, params: tuple[str, ...]) -> bool:
        label = f"{names[family]}.{track}({', '.join(map(repr, params))})"
        return not patterns or any(re.search(pattern, label) for pattern in patterns)

    results: dict[str, list[Any]] = {}
    failures, skipped, begin = {}, {}, time.time()
    for family, (track, params, value, why) in common.measured(names, wanted):
        name = f"{names[family]}.{track}"
        keys = common.all_keys(family)
        if name not in results:
            reprs = [[repr(value) for value in axis] for axis in family.params]
            results[name] = [[math.nan] * len(keys), reprs, getattr(family, track).version, round(1e3 * time.time()), 0.0, []]
        row = results[name]
        row[0][keys.index(params)] = value
        row[4] = round(time.time() - begin, 3)
        row[5].append(keys.index(params))
        label = f"{name}({', '.join(params)})"
        if value is None:
            failures[label] = why
            print(f"{label:95} failed: {why.splitlines()[0][:150]}", flush=True)
        elif why:
            skipped[name, why] = skipped.get((name, why), 0) + 1
        else:
            print(f"{label:95} {value:,.6g} {getattr(family, track).unit}", flush=True)
    for (name, why), count in skipped.items():
        print(f"{name}: {count} of {len(results[name][0])} n/a: {why.splitlines()[0][:150]}", flush=True)
    measured = {name: row.pop() for name, row in results.items()}
    return {"results": results, "measured": measured, "failures": failures, "versions": versions(),
            "under_load": under_load() if any(name.startswith(("device.", "peers.")) for name in results) else {}}


def versions() -> dict[str, str]:
    """Of the interpreter, the packages and nvcc."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    nvcc = common.find_nvcc()
    if nvcc:
        text = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
        release = re.search(r"V([\d.]+)", text)
        found["nvcc"] = release[1] if release else "unknown"
    return found


def under_load() -> dict[str, str]:
    """Clocks, temperature and power of GPU 0 right after the last figure; empty with no GPU."""
    try:
        query = ["nvidia-smi", f"--query-gpu={','.join(UNDER_LOAD)}", "--format=csv,noheader", "--id=0"]
        done = subprocess.run(query, capture_output=True, text=True)
    except OSError:
        return {}
    fields = [field.strip() for field in done.stdout.strip().split(",")]
    return dict(zip(UNDER_LOAD, fields, strict=True)) if done.returncode == 0 and len(fields) == len(UNDER_LOAD) else {}


def prepare() -> int:
    """Compile what the device families need: every kernel of both implementations, at the heads and draft tokens of every shape.

    Tiles are chosen by the rows of a request, not by batch or context, so one short request will do. Says what cannot be prepared and goes on.
    """
    if reason := common.gpu_reason():
        print(f"nothing to prepare: needs a GPU: {reason}")
        return 0
    for name in common.SHAPES:
        shape = common.shape_of(name)
        work = common.workload(shape._replace(batch=1, context=4096))
        for kernel in common.KERNELS:
            for implementation in common.IMPLEMENTATIONS:
                found = common.attempt(lambda work=work, kernel=kernel, of=implementation:
                                       common.run_checked(work, work.plan(common.implementation(of), kernel)))
                if isinstance(found, str):
                    print(f"{name} {kernel} {implementation}: {found.splitlines()[0][:200]}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
