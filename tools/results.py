"""Result files of airspeed velocity: what this machine is, reading, writing, and which commits were measured. Standard library only.

A file is asv_bench/results/MACHINE/COMMIT-MACHINE.json in asv's format, where asv's own name would hold the path of an interpreter. It has
one key more than asv writes: `conditions`, what the figures depend on beside the commit. asv leaves that alone; tools/regressions.py reads it.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "asv_bench" / "asv.conf.json"
RESULTS = ROOT / "asv_bench" / "results"
NO_GPU = "no-gpu"
#: asv's format of a result file, and the columns of a row that are used here (asv allows a row to be shorter than the columns).
VERSION = 2
COLUMNS = ["result", "params", "version", "started_at", "duration"]

#: (benchmark, parameters) -> number; NaN = skipped, None = failed or not measured.
Figures = dict[tuple[str, tuple[str, ...]], "float | None"]


def config() -> dict[str, Any]:
    """asv.conf.json, whose comments are lines of their own."""
    return json.loads(re.sub(r"^\s*//.*$", "", CONFIG.read_text(encoding="utf-8"), flags=re.MULTILINE))


def git(*arguments: str) -> str | None:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


# --- the machine ------------------------------------------------------------------------------------------------------------------


def machine() -> tuple[str, dict[str, str], dict[str, str]]:
    """(name, what asv records of a machine, what its figures depend on). Named by its GPU: figures are compared on one machine only."""
    gpu = query_gpu()
    name = re.sub(r"[^a-z0-9]+", "-", gpu["gpu"].lower()).strip("-") if gpu else NO_GPU
    conditions = {"cpu": cpu_name(), "cores": str(os.cpu_count() or 1), "kernel": platform.release(), **(gpu or {})}
    about_gpu = f" + {gpu['gpu']}, driver {gpu['driver']}, SM clock up to {gpu['sm_clock']}, power limit {gpu['power_limit']}" if gpu else ""
    memory = re.search(r"MemTotal:\s+(\d+)", _read("/proc/meminfo"))
    # asv draws one line for each combination of these: kernel versions and kilobytes would cut the history of one kind of machine.
    return name, {"arch": platform.machine(), "cpu": conditions["cpu"] + about_gpu, "num_cpu": conditions["cores"], "os": platform.system(),
                  "ram": f"{round(int(memory[1]) / 2**20)} GiB" if memory else "unknown"}, conditions


def query_gpu() -> dict[str, str] | None:
    """Name, driver, highest SM clock and power limit of GPU 0; None when there is none."""
    fields = {"gpu": "name", "driver": "driver_version", "sm_clock": "clocks.max.sm", "power_limit": "power.limit", "compute": "compute_cap"}
    try:
        command = ["nvidia-smi", f"--query-gpu={','.join(fields.values())}", "--format=csv,noheader", "--id=0"]
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return None
    values = [value.strip() for value in done.stdout.strip().split(",")]
    return dict(zip(fields, values, strict=True)) if done.returncode == 0 and len(values) == len(fields) else None


def cpu_name() -> str:
    found = re.search(r"model name\s*:\s*(.+)", _read("/proc/cpuinfo"))
    return found[1] if found else platform.processor() or "unknown"


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


# --- files ------------------------------------------------------------------------------------------------------------------------


def file_of(name: str, commit: str, folder: Path | None = None) -> Path:
    return (folder or RESULTS) / name / f"{commit[:8]}-{name}.json"


def load(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def figures(data: dict[str, Any]) -> Figures:
    """Every figure of a result file. Parameters as plain texts, without the quotes of asv's reprs."""
    found: Figures = {}
    for benchmark, row in data["results"].items():
        entry = dict(zip(data["result_columns"], row, strict=False))
        values = entry["result"] or []
        for params, value in zip(_product(entry["params"]), values, strict=True):
            found[benchmark, params] = value
    return found


def _product(axes: list[list[str]]) -> Iterable[tuple[str, ...]]:
    keys: list[tuple[str, ...]] = [()]
    for axis in axes:
        keys = [(*key, value.strip("'")) for key in keys for value in axis]
    return keys


def store(commit: str, date: int, measured: dict[str, Any], about: tuple[str, dict[str, str], dict[str, str]], folder: Path | None = None) -> Path:
    """Write what asv_bench/measure.py found into the commit's file of this machine. Figures that were there and were not measured now stay.

    `date`: of the commit, in milliseconds. `folder`: instead of the repository's results.
    """
    name, details, conditions = about
    target = file_of(name, commit, folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    before = load(target) if target.exists() else {"results": {}, "conditions": {}, "result_columns": COLUMNS}
    results = {benchmark: row[:len(COLUMNS)] for benchmark, row in before["results"].items() if before["result_columns"][:len(COLUMNS)] == COLUMNS}
    for benchmark, row in measured["results"].items():
        results[benchmark] = _merged(results.get(benchmark), row, measured["measured"][benchmark])
    python = measured["versions"]["python"]
    data = {
        "commit_hash": commit,
        "env_name": name,
        "date": date,
        "params": {**details, "machine": name, "python": python},
        "python": python,
        "requirements": {},
        "env_vars": {},
        "result_columns": COLUMNS,
        "results": dict(sorted(results.items())),
        "durations": {},
        "version": VERSION,
        "conditions": {**before.get("conditions", {}), **conditions, "versions": measured["versions"],
                       **({"under_load": measured["under_load"]} if measured["under_load"] else {})},
    }
    target.write_text(_compact(data), encoding="utf-8")
    (target.parent / "machine.json").write_text(json.dumps({**details, "machine": name, "version": 1}, indent=4, sort_keys=True) + "\n")
    return target


def _merged(before: list[Any] | None, row: list[Any], measured: list[int]) -> list[Any]:
    """`row` with the figures of `before` where none was measured, if it is of the same parameters and version."""
    if not before or before[1:3] != row[1:3]:
        return row
    values = list(before[0] or [math.nan] * len(row[0]))
    for i in measured:
        values[i] = row[0][i]
    return [values, *row[1:]]


def _compact(data: dict[str, Any]) -> str:
    """JSON with a benchmark a line: readable in a diff, and a tenth of the lines of an indented file."""
    whole = json.dumps({**data, "results": None}, indent=1)
    rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in data["results"].items())
    return whole.replace('"results": null', f'"results": {{\n{rows}\n }}') + "\n"


# --- commits ----------------------------------------------------------------------------------------------------------------------


def date_of(commit: str) -> int:
    """Milliseconds, the author's date as asv takes it."""
    return 1000 * int(git("show", "--no-patch", "--format=%at", commit) or 0)


def measured_commits(name: str) -> set[str]:
    """First eight digits of every commit with a file of this machine."""
    return {path.name[:8] for path in (RESULTS / name).glob("????????-*.json")}


def previous_commit(name: str, commit: str) -> str | None:
    """The newest ancestor of `commit` with a result of this machine."""
    measured = measured_commits(name)
    ancestors = (git("rev-list", "--date-order", f"{commit}^") or "").split()
    return next((hash_[:8] for hash_ in ancestors if hash_[:8] in measured), None)


def newest_commit(name: str) -> str | None:
    """HEAD if it was measured on this machine, else its newest ancestor that was; without a git history the newest by date."""
    head = git("rev-parse", "HEAD")
    if head is None:
        files = sorted((RESULTS / name).glob("????????-*.json"), key=lambda path: load(path)["date"])
        return files[-1].name[:8] if files else None
    return head[:8] if head[:8] in measured_commits(name) else previous_commit(name, head)


def has_figures(path: Path, pattern: str) -> bool:
    """Whether the file exists and holds a number of a benchmark whose name matches."""
    if not path.exists():
        return False
    return any(re.search(pattern, benchmark) and value is not None and not math.isnan(value)
               for (benchmark, _), value in figures(load(path)).items())
