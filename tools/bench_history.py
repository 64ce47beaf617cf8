"""Measures past commits: `python tools/bench_history.py [COMMIT ...] [--output FILE.tar.gz]`.

Without COMMIT: HEAD and every commit before it that changed a kernel, newest first. Each is taken out of the repository into a scratch
folder, the benchmark code of the present tree is laid over it (what it calls, a past commit may lack: that reads n/a), all are compiled
side by side, and then measured one after another within a time of their own. Figures are filed as `make bench` files them; a commit that
has figures of this machine is left out. One that does not build or gives wrong results says so, and the others go on.

For a GPU that is only lent, without network and for minutes: `--output` also packs the new files, to be unpacked in asv_bench/results
elsewhere, and `--repository` takes a git bundle where the history itself does not travel. Standard library only.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import bench
import results

#: What decides about a kernel's speed.
KERNELS = ("numba_verify/kernels", "cuda_ref")
#: The method of measuring, laid over a past commit: else a change of the method would look like one of the kernels.
METHOD = ("asv_bench/measure.py", "asv_bench/benchmarks", "numba_verify/bench.py", "numba_verify/timing.py", "numba_verify/shapes.py")
#: Families measured by default: of the device where there is one, else what the compilers made of the kernels. Times of the host (compile,
#: import) would be those of a machine that has just compiled.
GPU_FILES, OFFLINE_FILES = ("device", "host"), ("offline",)
#: Seconds beyond its own time after which a commit is stopped: a kernel that hangs, or one shape that takes long.
GRACE = 40


class Checkout(NamedTuple):
    commit: str
    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """Caches in the scratch folder: what a past commit compiles belongs to no one."""
        return {"NUMBA_VERIFY_CACHE_DIR": str(self.folder / "cache" / "numba"), "CUDA_REF_CACHE_DIR": str(self.folder / "cache" / "cuda_ref"),
                "PYTHONDONTWRITEBYTECODE": "1"}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure past commits.")
    parser.add_argument("commits", nargs="*", metavar="COMMIT", help="default: HEAD and every earlier commit that changed a kernel")
    parser.add_argument("--repository", default=str(results.ROOT), metavar="PATH", help="a repository or a git bundle (default: this one)")
    parser.add_argument("--seconds", type=float, default=30, metavar="S", help="for measuring one commit (default 30)")
    parser.add_argument("--total", type=float, default=480, metavar="S", help="for everything; no commit is begun that would end later (default 480)")
    parser.add_argument("--jobs", type=int, default=0, metavar="N", help="commits compiled side by side (default: one for every two cores)")
    parser.add_argument("--file", action="append", default=[], metavar="NAME", help="files of benchmarks (default: device and host, else offline)")
    parser.add_argument("--bench", action="append", default=[], metavar="REGEX", help="only benchmarks that match, as for make bench")
    parser.add_argument("--output", type=Path, metavar="FILE", help="pack the new result files as .tar.gz too")
    options = parser.parse_args(arguments)
    begin, about = time.monotonic(), results.machine()
    files = options.file or (GPU_FILES if about[0] != results.NO_GPU else OFFLINE_FILES)
    with tempfile.TemporaryDirectory(prefix="bench_history.") as scratch:
        repository = Path(scratch) / "repository"
        if clone(options.repository, repository):
            return 2
        commits = resolve(repository, options.commits)
        wanted = [commit for commit in commits if not results.has_figures(results.file_of(about[0], commit), rf"^({'|'.join(files)})\.")]
        say(begin, f"{about[0]}: {len(wanted)} of {len(commits)} commits to measure: {' '.join(commit[:8] for commit in wanted)}")
        checkouts = prepared([check_out(repository, commit, Path(scratch)) for commit in wanted], options.jobs, begin, options.total, files)
        written = []
        for checkout in checkouts:
            if time.monotonic() - begin + options.seconds > options.total:
                say(begin, f"{checkout.commit[:8]}: not measured, {options.total:.0f} s would be exceeded")
                continue
            written += measured(checkout, repository, files, options, about, begin)
        if options.output and written:
            pack(options.output, written)
            say(begin, f"packed: {options.output} ({len(written)} commits); unpack it with tar -C asv_bench/results -xzf")
    say(begin, f"{len(written)} of {len(wanted)} measured")
    return 0 if len(written) == len(wanted) else 1


def clone(source: str, target: Path) -> int:
    """A bare copy, so that nothing of the repository at hand is touched. The owner of a copied repository is often not who runs this."""
    allowed = ["-c", "safe.directory=*"]
    return subprocess.run(["git", *allowed, "clone", "--quiet", "--bare", source, str(target)],
                          env={**os.environ, "GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"}).returncode


def git(repository: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", str(repository), *arguments], capture_output=True, text=True, check=True).stdout.strip()


def resolve(repository: Path, names: list[str]) -> list[str]:
    """Full hashes, newest first."""
    if names:
        return [git(repository, "rev-parse", "--verify", f"{name}^{{commit}}") for name in names]
    head = git(repository, "rev-parse", "HEAD")
    changed = git(repository, "log", "--format=%H", "HEAD", "--", *KERNELS).split()
    return list(dict.fromkeys([head, *changed]))


def check_out(repository: Path, commit: str, scratch: Path) -> Checkout:
    """The commit's tree with the present method laid over it."""
    folder = scratch / commit[:8]
    archive = subprocess.run(["git", "-C", str(repository), "archive", commit], stdout=subprocess.PIPE, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        opened.extractall(folder, filter="data")
    for name in METHOD:
        source, target = results.ROOT / name, folder / name
        if source.is_dir():
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
    return Checkout(commit, folder)


def prepared(checkouts: list[Checkout], jobs: int, begin: float, total: float, files: tuple[str, ...]) -> list[Checkout]:
    """Compile all of them side by side, while nothing is timed. Without those that take more than half of the whole time."""
    if not set(files) & set(GPU_FILES):
        return checkouts  # offline figures are what compiling gives

    def prepare(checkout: Checkout) -> Checkout | None:
        log = checkout.folder / "prepare.log"
        command = [sys.executable, str(checkout.folder / "asv_bench" / "measure.py"), "--prepare"]
        with open(log, "w", encoding="utf-8") as out:
            try:
                status = subprocess.run(command, cwd=checkout.folder, env={**os.environ, **checkout.environment}, stdout=out, stderr=out,
                                        timeout=max(1.0, total / 2 - (time.monotonic() - begin))).returncode
            except subprocess.TimeoutExpired:
                status = 124
        said = [line for line in dict.fromkeys(log.read_text(encoding="utf-8").splitlines()) if line.strip()]
        say(begin, f"{checkout.commit[:8]}: {'compiled' if status == 0 else f'did not compile (exit status {status})'}")
        for line in said[-6:]:
            print(f"    {line[:200]}", flush=True)
        return checkout if status == 0 else None

    with concurrent.futures.ThreadPoolExecutor(jobs or max(1, (os.cpu_count() or 1) // 2)) as pool:
        return [checkout for checkout in pool.map(prepare, checkouts) if checkout]


def measured(checkout: Checkout, repository: Path, files: tuple[str, ...], options: argparse.Namespace, about: tuple, begin: float) -> list[Path]:
    """The result file of a checkout, or nothing when nothing could be measured."""
    arguments = [part for name in files for part in ("--file", name)] + [part for pattern in options.bench for part in ("--bench", pattern)]
    found, status = bench.measure(checkout.folder, [*arguments, "--seconds", str(options.seconds)], checkout.environment, options.seconds + GRACE)
    numbers = sum(value is not None and value == value for row in (found or {"results": {}})["results"].values() for value in row[0])
    say(begin, f"{checkout.commit[:8]}: {numbers} figures" + (f", {len(found['failures'])} failed" if found and found["failures"] else ""))
    if not numbers:
        return []
    date = 1000 * int(git(repository, "show", "--no-patch", "--format=%at", checkout.commit))
    return [results.store(checkout.commit, date, found, about)]


def pack(output: Path, written: list[Path]) -> None:
    with tarfile.open(output, "w:gz") as archive:
        for path in [*written, written[0].parent / "machine.json"]:
            archive.add(path, path.relative_to(results.RESULTS))


def say(begin: float, text: str) -> None:
    print(f"bench_history: {time.monotonic() - begin:4.0f} s  {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
