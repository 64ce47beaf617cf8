"""`make bench-publish`: builds asv_bench/html, the pages of airspeed velocity, from the committed result files.

asv's pages load jQuery, Flot and Bootstrap from public servers. With --self-contained they are fetched once with npm, in pinned versions, and
put beside the pages, which then open on a network without internet too. Serve the folder (`python -m http.server --directory
asv_bench/html`): browsers load no data for a page that was opened as a file.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import results

HTML = results.ROOT / "asv_bench" / "html"
#: npm package -> files of it, in the order in which the page loads them. The versions that asv 0.6.6 names; of stupid-table the one that npm has.
LIBRARIES = {
    "jquery@3.3.1": ["dist/jquery.min.js"],
    "flot@0.8.3": [f"jquery.flot{part}.js" for part in ("", ".time", ".selection", ".categories")],
    "flot-orderbars@1.0.0": ["js/jquery.flot.orderBars.js"],
    "stupid-table-plugin@1.1.3": ["stupidtable.min.js"],
    "blueimp-md5@2.19.0": ["js/md5.min.js"],
    "bootstrap@3.1.1": ["dist/js/bootstrap.min.js", "dist/css/bootstrap.min.css"],
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make bench-publish", description="Build the pages of airspeed velocity.")
    parser.add_argument("--self-contained", action="store_true", help="put the JavaScript libraries beside the pages (needs npm)")
    parser.add_argument("--repository", type=Path, default=results.ROOT, help="whose commits and results (default: this one)")
    parser.add_argument("--html", type=Path, default=HTML, help="where the pages go (default: asv_bench/html)")
    options = parser.parse_args(arguments)
    publish(options.repository.resolve(), options.html.resolve())
    if options.self_contained:
        with tempfile.TemporaryDirectory() as folder:
            embed(options.html, fetch(Path(folder)))
    print(f"publish: {options.html}; to look at it: python -m http.server --directory {options.html}")
    return 0


def publish(repository: Path, html: Path) -> None:
    """Let asv look for the benchmarks (their names and units are on the pages) and make the pages.

    All that asv writes beside the pages goes to a scratch folder: a list of machines in the home folder, the benchmarks it found and a
    machine of its own among the results.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "results"
        shutil.copytree(repository / "asv_bench" / "results", folder)
        places = {"repo": repository, "benchmark_dir": repository / "asv_bench" / "benchmarks", "results_dir": folder, "html_dir": html}
        config = Path(scratch) / "asv.conf.json"
        config.write_text(json.dumps({**results.config(), **{key: str(path) for key, path in places.items()}}))

        def asv(command: str, *arguments: str) -> None:
            subprocess.run([sys.executable, "-m", "asv", command, "--config", str(config), *arguments], cwd=scratch,
                           env={**os.environ, "HOME": scratch, "ASV_PYTHONPATH": str(repository)}, check=True)

        asv("machine", "--yes", "--machine", "discovery")
        asv("run", "--machine", "discovery", "--bench", "just-discover", "--environment", f"existing:{sys.executable}", "--launch-method", "spawn")
        shutil.rmtree(folder / "discovery", ignore_errors=True)
        asv("publish")


def fetch(folder: Path) -> dict[str, Path]:
    """File name -> path of every library, downloaded into `folder`. npm compares each package with the registry's own hash."""
    npm = shutil.which("npm")
    if npm is None:
        raise SystemExit("publish: --self-contained needs npm, and there is none on PATH")
    done = subprocess.run([npm, "pack", "--silent", "--fetch-retries=1", *LIBRARIES], cwd=folder, stdout=subprocess.PIPE, text=True, check=True)
    found = {}
    for archive, paths in zip(done.stdout.split(), LIBRARIES.values(), strict=True):
        with tarfile.open(folder / archive) as opened:
            for path in paths:
                target = folder / Path(path).name
                target.write_bytes(opened.extractfile(f"package/{path}").read())
                found[target.name] = target
    return found


def embed(html: Path, libraries: dict[str, Path]) -> None:
    """Copy the libraries beside index.html and load them from there instead of from public servers."""
    (html / "libraries").mkdir(exist_ok=True)
    for path in libraries.values():
        shutil.copy(path, html / "libraries")
    page = (html / "index.html").read_text(encoding="utf-8")

    def local(match: re.Match[str]) -> str:
        tag, name = match[0], re.sub(r"-\d+(\.\d+)+", "", match[2].rsplit("/", 1)[-1])
        name = name if name in libraries else name.replace(".min.js", ".js")
        if name not in libraries:
            raise SystemExit(f"publish: the page loads {match[2]}, which is not among the pinned libraries; was asv updated?")
        tag = re.sub(r' (integrity|crossorigin|referrerpolicy)="[^"]*"', "", tag)
        return tag.replace(match[2], f"libraries/{name}")

    page = re.sub(r'<(script|link)\b[^>]*?(?:src|href)="(https://[^"]+\.(?:js|css))"[^>]*>', local, page)
    (html / "index.html").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
