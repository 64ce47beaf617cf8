"""`make bench`: measures this commit with airspeed velocity, in the interpreter at hand, and keeps the result under the machine's name.

Standard library only; works with no network. With a GPU every family runs, with none the offline ones. The result goes to
asv_bench/results/MACHINE/COMMIT-MACHINE.json, where asv's own name would hold the path of an interpreter. When files that are measured
differ from HEAD the figures would be filed under the wrong commit: they are shown and not kept.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "asv_bench" / "asv.conf.json"
RESULTS = ROOT / "asv_bench" / "results"
#: What a figure depends on; a change here that is not committed makes it nobody's.
MEASURED = ("numba_verify", "cuda_ref", "asv_bench/benchmarks")
NO_GPU = "no-gpu"


def main() -> int:
    parser = argparse.ArgumentParser(prog="make bench", description="Measure this commit with airspeed velocity.")
    parser.add_argument("--bench", action="append", default=[], metavar="REGEX", help="only these benchmarks, for example Offline")
    parser.add_argument("--dry-run", action="store_true", help="show the figures, keep nothing")
    options = parser.parse_args()
    commit, why = measured_commit()
    if why and not options.dry_run:
        print(f"bench: {why}; the figures are shown and not kept")
    dry = options.dry_run or bool(why)
    name, details = machine()
    asv("machine", "--machine", name, *[part for key, value in details.items() for part in (f"--{key}", value)])
    selection = [part for pattern in options.bench for part in ("--bench", pattern)]
    keep = ["--dry-run"] if dry else ["--set-commit-hash", commit]
    status = asv(
        "run",
        "--environment",
        f"existing:{sys.executable}",
        "--machine",
        name,
        "--launch-method",
        "spawn",
        "--show-stderr",
        *keep,
        *selection,
    )
    # asv run answers 2 when a benchmark failed (a wrong result, say): what could be measured is kept all the same.
    if not dry and status in (0, 2):
        print(f"bench: kept in {file_by_machine(name, commit).relative_to(ROOT)}")
        previous = previous_commit(name, commit)
        if previous:
            print(f"bench: compared with {previous}, the last commit that this machine measured")
            asv("compare", "--machine", name, "--factor", "1.1", "--split", previous, commit)
    return status


def asv(*arguments: str) -> int:
    # asv drops PYTHONPATH; this one it passes on, and the checkout need not be installed.
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command, rest = arguments[0], arguments[1:]
    done = subprocess.run(
        [sys.executable, "-m", "asv", command, "--config", str(CONFIG), *rest],
        cwd=ROOT / "asv_bench",
        env={**os.environ, "ASV_PYTHONPATH": path},
    )
    return done.returncode


def git(*arguments: str) -> str | None:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def measured_commit() -> tuple[str, str]:
    """(HEAD, why its figures cannot be kept or "")."""
    commit = git("rev-parse", "HEAD")
    if not commit:
        return "", "there is no commit to file the figures under"
    changed = git("status", "--porcelain", "--", *MEASURED)
    return commit, f"files that are measured differ from HEAD ({changed.splitlines()[0].strip()}, ...)" if changed else ""


def machine() -> tuple[str, dict[str, str]]:
    """(name, what `asv machine` records). Named by its GPU: figures are compared on one machine only."""
    cpu, gpu = cpu_name(), query_gpu()
    name = re.sub(r"[^a-z0-9]+", "-", gpu["name"].lower()).strip("-") if gpu else NO_GPU
    about_gpu = f" + {gpu['name']}, driver {gpu['driver']}, SM clock up to {gpu['clock']}, power limit {gpu['power']}" if gpu else ""
    memory = re.search(r"MemTotal:\s+(\d+)", read("/proc/meminfo"))
    return name, {
        "os": platform.platform(),
        "arch": platform.machine(),
        "cpu": cpu + about_gpu,
        "num_cpu": str(os.cpu_count() or 1),
        "ram": memory.group(1) if memory else "unknown",
    }


def query_gpu() -> dict[str, str] | None:
    """Name, driver, highest SM clock and power limit of GPU 0; None when there is none."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=name,driver_version,clocks.max.sm,power.limit", "--format=csv,noheader", "--id=0"],
            capture_output=True,
            text=True,
        )
    except OSError:
        return None
    fields = [field.strip() for field in done.stdout.strip().split(",")]
    return dict(zip(("name", "driver", "clock", "power"), fields, strict=True)) if done.returncode == 0 and len(fields) == 4 else None


def cpu_name() -> str:
    found = re.search(r"model name\s*:\s*(.+)", read("/proc/cpuinfo"))
    return found.group(1) if found else platform.processor() or "unknown"


def read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def file_by_machine(name: str, commit: str) -> Path:
    """Move the figures that asv just wrote into the machine's file of this commit; figures of other benchmarks there stay."""
    folder = RESULTS / name
    target = folder / f"{commit[:8]}-{name}.json"
    for fresh in sorted(folder.glob(f"{commit[:8]}-existing-*.json")):
        data = json.loads(fresh.read_text())
        data["env_name"] = name
        # asv records the path of the interpreter, which means something on this machine alone; its version is what explains a figure.
        data["python"] = data.setdefault("params", {})["python"] = platform.python_version()
        if target.exists():
            before = json.loads(target.read_text())
            if before["result_columns"] == data["result_columns"]:
                data["results"] = {**before["results"], **data["results"]}
        target.write_text(json.dumps(data, indent=1) + "\n")
        fresh.unlink()
    return target


def previous_commit(name: str, commit: str) -> str | None:
    """The newest ancestor of `commit` with a result of this machine."""
    measured = {path.name[:8] for path in (RESULTS / name).glob("*.json") if "-" in path.name}
    ancestors = (git("rev-list", f"{commit}^") or "").split()
    return next((hash_[:8] for hash_ in ancestors if hash_[:8] in measured), None)


if __name__ == "__main__":
    sys.exit(main())
