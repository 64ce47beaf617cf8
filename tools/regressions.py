"""Fails when a commit made something worse: `python tools/regressions.py [BEFORE [AFTER]] [--machine NAME] [--factor F]`.

Compares two measured commits of one machine, figure by figure. Without AFTER it is HEAD or its newest measured ancestor, without BEFORE the
newest measured ancestor of AFTER. Exit status 0: nothing is worse; 1: something is beyond its factor or failed; 2: cannot be compared.

The factor of a figure is 1 + its threshold in asv_bench/asv.conf.json, the same that asv's page of regressions uses. Times are compared
only when GPU, driver, clocks and power limit (for the host's times the processor as well) were the same; what a compiler made of a kernel
does not depend on the machine. Standard library only.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from typing import Any, NamedTuple

import results

#: Conditions that have to agree, by the name of a benchmark; the first that matches. Anything else can be compared.
SAME = (
    (r"^(device\.Device|peers)\.", ("gpu", "driver", "sm_clock", "power_limit")),
    (r"^host\.", ("gpu", "driver", "cpu", "cores")),
    (r"^compile_time\.", ("cpu", "cores")),
)
RATIO = "device.Device.track_device_us"
OURS, TWIN = "numba_verify", "cuda_ref"


class Change(NamedTuple):
    """One figure of two commits. `ratio`: after / before, above 1 is worse; infinite when something appeared or failed."""

    label: str
    before: float | None
    after: float | None
    ratio: float
    limit: float

    @property
    def worse(self) -> bool:
        return self.ratio > self.limit

    @property
    def better(self) -> bool:
        return self.ratio < 1 / self.limit


class Comparison(NamedTuple):
    changes: list[Change]
    refused: list[str]  # why some figures were not compared
    notes: list[str]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compare two measured commits; fail when something is worse.")
    parser.add_argument("before", nargs="?", help="a measured commit (default: the newest measured ancestor of AFTER)")
    parser.add_argument("after", nargs="?", default=None, help="a measured commit (default: HEAD, or its newest measured ancestor)")
    parser.add_argument("--machine", metavar="NAME", help="a folder of asv_bench/results (default: this machine)")
    parser.add_argument("--factor", type=float, metavar="F", help="one factor for all figures, such as 1.05")
    parser.add_argument("--bench", metavar="REGEX", default="", help="only benchmarks whose name matches")
    options = parser.parse_args(arguments)
    name = options.machine or results.machine()[0]
    try:
        after = _measured(name, options.after) if options.after else _newest(name)
        before = _measured(name, options.before) if options.before else results.previous_commit(name, after)
        if before is None:
            raise ValueError(f"no ancestor of {after} was measured on {name}; measured: {', '.join(sorted(results.measured_commits(name)))}")
    except ValueError as error:
        print(f"regressions: {error}", file=sys.stderr)
        return 2
    return report(name, before, after, options.factor, options.bench)


def _measured(name: str, commit: str) -> str:
    full = results.git("rev-parse", "--verify", f"{commit}^{{commit}}") or commit
    if full[:8] not in results.measured_commits(name):
        raise ValueError(f"{commit} was not measured on {name}; measured: {', '.join(sorted(results.measured_commits(name))) or 'none'}")
    return full[:8]


def _newest(name: str) -> str:
    found = results.newest_commit(name)
    if found is None:
        raise ValueError(f"neither HEAD nor an ancestor was measured on {name}")
    return found


def report(name: str, before: str, after: str, factor: float | None = None, pattern: str = "") -> int:
    """Print the comparison and the ratio to the twin; the exit status."""
    files = [results.load(results.file_of(name, commit)) for commit in (before, after)]
    found = compare(*files, factor, pattern)
    print(f"{name}: {before} -> {after}, {len(found.changes)} figures compared")
    for line in found.notes + found.refused:
        print(f"  {line}")
    for title, chosen in (("worse", [c for c in found.changes if c.worse]), ("better", [c for c in found.changes if c.better])):
        for change in sorted(chosen, key=lambda change: change.label):
            print(f"  {title:6} {change.label}: {_number(change.before)} -> {_number(change.after)} ({change.ratio:.2f} x, limit {change.limit:.2f})")
    worse = sum(change.worse for change in found.changes)
    print(f"  {worse} worse" if worse else "  nothing is worse")
    for line in twin_lines(files[1]):
        print(line)
    if worse:
        return 1
    return 2 if found.refused else 0


def compare(before: dict[str, Any], after: dict[str, Any], factor: float | None = None, pattern: str = "") -> Comparison:
    """Every figure that both files measured."""
    old, new = results.figures(before), results.figures(after)
    differing = {key for key in {*before.get("conditions", {}), *after.get("conditions", {})}
                 if before.get("conditions", {}).get(key) != after.get("conditions", {}).get(key)}
    changes, refused = [], {}
    for (benchmark, params), was in old.items():
        now = new.get((benchmark, params), math.nan)
        if not re.search(pattern, benchmark) or was is None or math.isnan(was) or (now is not None and math.isnan(now)):
            continue
        conflict = [key for key in needed(benchmark) if key in differing]
        if conflict:
            refused[benchmark] = f"not compared: {benchmark}, measured under another {_differences(before, after, conflict)}"
            continue
        limit = factor or 1 + threshold(benchmark)
        changes.append(Change(f"{benchmark}({', '.join(params)})", was, now, _ratio(was, now), limit))
    notes = []
    if "versions" in differing:
        one, other = (data.get("conditions", {}).get("versions", {}) for data in (before, after))
        moved = [f"{key} {one.get(key, '-')} -> {other.get(key, '-')}" for key in sorted({*one, *other}) if one.get(key) != other.get(key)]
        notes.append(f"other versions: {', '.join(moved)}")
    return Comparison(changes, list(refused.values()), notes)


def needed(benchmark: str) -> tuple[str, ...]:
    """The conditions under which figures of a benchmark can be compared."""
    return next((keys for pattern, keys in SAME if re.search(pattern, benchmark)), ())


def threshold(benchmark: str) -> float:
    """From asv.conf.json: the largest of the patterns that match, as asv takes it."""
    return max(value for pattern, value in results.config()["regressions_thresholds"].items() if re.match(pattern, benchmark))


def _ratio(was: float, now: float | None) -> float:
    if now is None:
        return math.inf
    if was == 0:
        return math.inf if now > 0 else 1.0
    return now / was


def _differences(before: dict[str, Any], after: dict[str, Any], keys: list[str]) -> str:
    return ", ".join(f"{key} ({before.get('conditions', {}).get(key)}; {after.get('conditions', {}).get(key)})" for key in keys)


def _number(value: float | None) -> str:
    return "failed" if value is None else f"{value:,.4g}"


def twin_lines(data: dict[str, Any]) -> list[str]:
    """Device time numba / CUDA C of one file, a line a shape; nothing when it has none."""
    cells: dict[str, dict[str, float]] = {}
    kernels: dict[str, None] = {}
    found = results.figures(data)
    for (benchmark, params), ours in found.items():
        twin = found.get((benchmark, (TWIN, *params[1:])))
        if benchmark != RATIO or params[0] != OURS or params[3] != "cold" or not _is_number(ours) or not _is_number(twin):
            continue
        cells.setdefault(params[2], {})[params[1]] = ours / twin
        kernels[params[1]] = None
    if not cells:
        return []
    lines = ["", "device time, numba / CUDA C (below 1: numba is faster)", f"{'shape':24}" + "".join(f"{kernel:>8}" for kernel in kernels)]
    return lines + [f"{shape:24}" + "".join(f"{row[kernel]:8.2f}" if kernel in row else f"{'-':>8}" for kernel in kernels)
                    for shape, row in cells.items()]


def _is_number(value: float | None) -> bool:
    return value is not None and not math.isnan(value)


if __name__ == "__main__":
    sys.exit(main())
