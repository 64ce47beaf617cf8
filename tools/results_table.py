"""Tables of the documentation from committed result files: `python tools/results_table.py [FILE ...] [--update DOCUMENT ...]`.

FILE is what `python -m numba_verify bench --json FILE` wrote; several are parts of one measurement (same GPU, same version). Without FILE:
docs/results/h200*.json. Without --update the results table is printed. With it, each DOCUMENT gets its tables rewritten, between

    <!-- results:begin -->  and  <!-- results:end -->      this project beside the best peers (README.md)
    <!-- peers:begin -->    and  <!-- peers:end -->        all figures of docs/results/peers_h200.json (docs/facts.md)

Standard library only. The ratio numba / CUDA C is formed within one file, since two kernels of two runs cannot be compared.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
PEERS = RESULTS / "peers_h200.json"
COMMAND = "python -m numba_verify bench --json docs/results/h200.json"
KERNELS = ("paged", "flash", "naive")
OURS, TWIN = "numba_verify", "cuda_ref"
#: The one peer with a tree mask that runs outside Hopper: it has a column of its own.
ELSEWHERE = "sgl_extend"
ALIGN = {"left": ":---", "right": "---:"}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Markdown tables from committed result files.")
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="results of bench --json (default: docs/results/h200*.json)")
    parser.add_argument("--update", nargs="+", type=Path, default=[], metavar="DOCUMENT", help="rewrite the tables of these documents")
    chosen = parser.parse_args(arguments)
    try:
        tables = all_tables(chosen.files or result_files())
        if not chosen.update:
            print(tables["results"])
        for document in chosen.update:
            document.write_text(replaced(document.read_text(encoding="utf-8"), tables, str(document)), encoding="utf-8")
            print(f"updated: {document}")
    except (OSError, ValueError) as error:
        print(f"results_table: {error}", file=sys.stderr)
        return 2
    return 0


def result_files() -> list[Path]:
    """The committed results of this project."""
    return sorted(RESULTS.glob("h200*.json"))


def all_tables(files: list[Path]) -> dict[str, str]:
    """Name of a pair of markers -> what belongs between them."""
    peers = json.loads(PEERS.read_text(encoding="utf-8"))
    return {"results": results_table(read(files), peers), "peers": peers_table(peers)}


def replaced(text: str, tables: dict[str, str], name: str) -> str:
    """`text` with every marked part rewritten. ValueError when nothing is marked."""
    found = 0
    for key, table in tables.items():
        pattern = re.compile(rf"(<!-- {key}:begin -->\n).*?(<!-- {key}:end -->)", re.DOTALL)
        text, count = pattern.subn(lambda match, table=table: f"{match[1]}\n{table}\n\n{match[2]}", text)
        found += count
    if not found:
        raise ValueError(f"{name}: expected a part between <!-- results:begin --> and <!-- results:end -->, found none")
    return text


def read(files: list[Path]) -> dict[str, Any]:
    """The result files as one: gpu, driver, version, dates, and figures by (shape, implementation, kernel)."""
    whole: dict[str, Any] = {"dates": [], "figures": {}}
    for path in files:
        part = json.loads(path.read_text(encoding="utf-8"))
        for key in ("gpu", "driver", "version"):
            if whole.setdefault(key, part[key]) != part[key]:
                raise ValueError(f"{path.name}: expected {key} {whole[key]!r} like the files before it, got {part[key]!r}")
        whole["dates"].append(part["date"][:10])
        for figure in part["figures"]:
            key = (figure["shape"], figure["implementation"], figure["kernel"])
            if key in whole["figures"]:
                raise ValueError(f"{path.name}: {' '.join(key)} was measured twice; keep one of the two")
            whole["figures"][key] = {**figure, "file": path.name}
    return whole


def results_table(results: dict[str, Any], peers: dict[str, Any]) -> str:
    """One row a shape: floor, our kernels with their twins, the best peers."""
    if not results["figures"]:
        return f"No results are committed yet. `{COMMAND}` on an H200 writes them."
    rows_of_peers = {row["shape"]: row for row in peers["rows"]}
    shapes = list(dict.fromkeys(shape for shape, _, _ in results["figures"]))
    shapes.sort(key=lambda shape: list(rows_of_peers).index(shape) if shape in rows_of_peers else math.inf)
    headers = ["requests, prefix, draft tokens, heads", "floor", *(f"{kernel}: us (% of floor), ratio" for kernel in KERNELS),
               "best peer, tree mask", f"`{ELSEWHERE}`", "best peer, no tree mask"]
    rows = []
    for shape in shapes:
        measured = {(name, kernel): figure for (of, name, kernel), figure in results["figures"].items() if of == shape}
        floor = next((figure["floor_us"] for figure in measured.values() if figure.get("floor_us")), None)
        times = rows_of_peers.get(shape, {"us": {}})["us"]
        rows.append([extents(shape), number(floor), *(cell(measured, kernel) for kernel in KERNELS),
                     best(times, peers, True), number(times.get(ELSEWHERE)), best(times, peers, False)])
    dates = ", ".join(sorted(set(results["dates"])))
    return f"{results['gpu']}, {results['driver']}, numba_verify {results['version']}, {dates}.\n\n" + markdown(headers, rows)


def cell(measured: dict[tuple[str, str], dict[str, Any]], kernel: str) -> str:
    """`531 (2.1 %), 1.02`: numba microseconds, percent of the floor, numba / CUDA C. "wrong" where bench refused to time it."""
    ours, twin = measured.get((OURS, kernel)), measured.get((TWIN, kernel))
    if ours is None or "us" not in ours:
        return "wrong" if ours and ours.get("wrong") else "-"
    share = f" ({100 * ours['floor_us'] / ours['us']:.2g} %)" if ours.get("floor_us") else ""
    ratio = "-"
    if twin and "us" in twin and twin["file"] == ours["file"]:
        ratio = f"{ours['us'] / twin['us']:.2f}"
    return f"{number(ours['us'])}{share}, {ratio}"


def best(times: dict[str, float | None], peers: dict[str, Any], tree_mask: bool) -> str:
    """The fastest peer that has (or has not) a tree mask."""
    candidates = [(us, name) for name, us in times.items() if us is not None and peers["peers"][name]["tree_mask"] == tree_mask]
    if not candidates:
        return "-"
    us, name = min(candidates)
    return f"{number(us)} `{name}`"


def peers_table(peers: dict[str, Any]) -> str:
    """Every figure of the peers."""
    names = list(peers["peers"])
    headers = ["requests, prefix, draft tokens, heads", "floor", *(f"`{name}`" for name in names)]
    rows = [[extents(row["shape"]), number(row["floor_us"]), *(number(row["us"][name]) for name in names)] for row in peers["rows"]]
    return markdown(headers, rows)


def markdown(headers: list[str], rows: list[list[str]]) -> str:
    """A table; the first column is text, the rest numbers."""
    lines = [headers, [ALIGN["left"]] + [ALIGN["right"]] * (len(headers) - 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def extents(shape: str) -> str:
    """`1, 4096, 16, 64` from `b1_kv4096_t16_h64`."""
    match = re.fullmatch(r"b(\d+)_kv(\d+)_t(\d+)_h(\d+)", shape)
    if match is None:
        raise ValueError(f"expected a shape such as b1_kv4096_t16_h64, got {shape!r}")
    return ", ".join(match.groups())


def number(value: float | None) -> str:
    """Three digits and no more than one decimal: 11.4, 531, 63,856."""
    if value is None:
        return "-"
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


if __name__ == "__main__":
    sys.exit(main())
