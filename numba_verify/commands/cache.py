"""Show or clear the compiled kernels on disk.

numba_verify keeps one cubin a kernel variant and architecture, cuda_ref one folder a build. Both compile again what is not there.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import NamedTuple

from cuda_ref import build as cuda_ref_build

from ..gpu import compile as numba_compile
from .console import count, say, table


class Kept(NamedTuple):
    """One thing in a cache: what it is, for which architecture, how large, and where."""

    name: str
    arch: str
    nbytes: int
    path: Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", nargs="?", choices=("show", "clear"), default="show", help="default: show")


def run(arguments: argparse.Namespace) -> int:
    for title, folder, kept, noun in (("numba_verify", numba_compile.cache_directory(), cubins(), "kernel"),
                                      ("cuda_ref", cuda_ref_build.cache_dir(), builds(), "build")):
        size = count(sum(entry.nbytes for entry in kept), "byte")
        if arguments.action == "clear":
            clear(title, kept)
            say(f"{title}: cleared {count(len(kept), noun)}, {size}, from {folder}")
            continue
        say(f"{title}: {count(len(kept), noun)}, {size}, in {folder}")
        if kept:
            say(table([noun, "architecture", "bytes"], [[entry.name, entry.arch, f"{entry.nbytes:,}"] for entry in kept], right=["bytes"]))
    return 0


def cubins() -> list[Kept]:
    """numba_verify's kernels, by variant and architecture; a damaged entry is one too."""
    kept = []
    for path in numba_compile.cached_files():
        if path.suffix != ".json":
            continue
        code = path.with_suffix(".cubin")
        size = path.stat().st_size + (code.stat().st_size if code.exists() else 0)
        try:
            info = json.loads(path.read_text(encoding="utf-8"))
            kept.append(Kept(info["variant"], info["arch"], size, path))
        except (ValueError, KeyError, TypeError):
            kept.append(Kept("(damaged)", "", size, path))
    return sorted(kept)


def builds() -> list[Kept]:
    """cuda_ref's libraries. Folders of a build in progress have another form of name."""
    kept = []
    for folder in cuda_ref_build.cache_dir().glob("*-*"):
        kind = folder.name.partition("-")[0]
        if kind not in ("cuda", "host", "smoke") or folder.suffix or not folder.is_dir():
            continue
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        kept.append(Kept(folder.name, architectures(folder) if kind == "cuda" else "CPU", size, folder))
    return sorted(kept)


def architectures(folder: Path) -> str:
    """What a GPU build was made for, from its resource report."""
    try:
        rows = json.loads((folder / "resources.json").read_text(encoding="utf-8"))
        return ", ".join(sorted({row["arch"] for row in rows}))
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def clear(title: str, kept: list[Kept]) -> None:
    """Delete what `cubins` or `builds` found."""
    if title == "numba_verify":
        numba_compile.clear_cache()
        return
    for entry in kept:
        shutil.rmtree(entry.path, ignore_errors=True)
