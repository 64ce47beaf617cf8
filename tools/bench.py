"""`make bench`: measures this commit, files the figures for airspeed velocity under the machine's name, and compares.

Standard library only; needs neither asv nor the network. With a GPU every family runs, with none the offline ones. Compared are the newest
ancestor that this machine measured, and the two implementations. When files that are measured differ from HEAD the figures would be filed
under the wrong commit: they are shown and not kept.

Each file of benchmarks is measured in a process of its own (asv_bench/measure.py says why not one for each figure).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import regressions
import results

ROOT = results.ROOT
#: What a figure depends on; a change here that is not committed makes it nobody's.
MEASURED = ("numba_verify", "cuda_ref", "asv_bench/benchmarks", "asv_bench/measure.py")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make bench", description="Measure this commit and keep the figures.")
    parser.add_argument("--bench", action="append", default=[], metavar="REGEX", help="only these benchmarks, for example Offline")
    parser.add_argument("--dry-run", action="store_true", help="show the figures, keep nothing")
    options = parser.parse_args(arguments)
    commit, why = measured_commit()
    if why and not options.dry_run:
        print(f"bench: {why}; the figures are shown and not kept")
    about = results.machine()
    print(f"bench: {commit[:8] or 'no commit'} on {about[0]}: {about[1]['cpu']}", flush=True)
    failed, target = False, None
    for name in files(ROOT):
        one, status = measure(ROOT, ["--file", name, *(part for pattern in options.bench for part in ("--bench", pattern))])
        failed |= status != 0
        if one and one["results"] and not (why or options.dry_run):
            # At once: a GPU that is lent may be taken back.
            target = results.store(commit, results.date_of(commit), one, about)
    if target:
        print(f"bench: kept in {target.relative_to(ROOT)}\n")
        compare(about[0], commit)
    return int(failed)


def files(checkout: Path) -> list[str]:
    """Names of the files of benchmarks, those with figures of the GPU first: a GPU that is lent may be taken back."""
    names = sorted(path.stem for path in (checkout / "asv_bench" / "benchmarks").glob("[a-z]*.py"))
    return sorted(names, key=lambda name: name not in ("device", "host", "peers"))


def measure(checkout: Path, arguments: list[str], environment: dict[str, str] | None = None, timeout: float | None = None,
            ) -> tuple[dict[str, Any] | None, int]:
    """(what asv_bench/measure.py of a checkout wrote, exit status): 1 when a benchmark failed; None when it wrote nothing."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        command = [sys.executable, str(checkout / "asv_bench" / "measure.py"), "--out", str(out), *arguments]
        try:
            status = subprocess.run(command, cwd=checkout, env={**os.environ, **(environment or {})}, timeout=timeout).returncode
        except subprocess.TimeoutExpired:
            print(f"bench: stopped after {timeout:.0f} s: {' '.join(arguments)}", file=sys.stderr)
            status = 124
        return (json.loads(out.read_text(encoding="utf-8")) if out.exists() else None), status


def measured_commit() -> tuple[str, str]:
    """(HEAD, why its figures cannot be kept or "")."""
    commit = results.git("rev-parse", "HEAD")
    if not commit:
        return "", "there is no commit to file the figures under"
    changed = results.git("status", "--porcelain", "--", *MEASURED)
    return commit, f"files that are measured differ from HEAD ({changed.splitlines()[0].strip()}, ...)" if changed else ""


def compare(name: str, commit: str) -> None:
    """With the last commit that this machine measured, if there is one, and with the twin."""
    previous = results.previous_commit(name, commit)
    if previous:
        regressions.report(name, previous, commit[:8])
    else:
        print("\n".join(regressions.twin_lines(results.load(results.file_of(name, commit)))))


if __name__ == "__main__":
    sys.exit(main())
