"""Tables of the documentation from committed result files: `python tools/results_table.py [FILE ...] [--update DOCUMENT ...]`.

FILE is what `python -m numba_verify bench --json FILE` wrote; several are parts of one measurement (same GPU, same version). Without FILE:
docs/results/h200*.json. Without --update the results table is printed. With it, each DOCUMENT gets its tables rewritten, between

    <!-- results:begin -->  and  <!-- results:end -->      wgmma and mma beside the best peers (README.md)
    <!-- oracles:begin -->  and  <!-- oracles:end -->      paged, flash and naive (docs/how-it-works.md)
    <!-- tiles:begin -->    and  <!-- tiles:end -->        mma with every tile that was measured (docs/mma.md)
    <!-- peers:begin -->    and  <!-- peers:end -->        all figures of docs/results/peers_h200.json (docs/facts.md)

Standard library only. The ratio numba / CUDA C is formed within one file, since two kernels of two runs cannot be compared.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
PEERS = RESULTS / "peers_h200.json"
COMMAND = "python -m numba_verify bench --json docs/results/h200.json"
#: The kernels of the main table: for Hopper, and for all GPUs; and those for reading and checking.
HOPPER, MAIN, ORACLES = "wgmma", "mma", ("paged", "flash", "naive")
OURS, TWIN = "numba_verify", "cuda_ref"
#: SGLang's tree verify on Hopper: it has a column of its own.
CASCADE = "fa3_cascade"
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
    peers, results = json.loads(PEERS.read_text(encoding="utf-8")), read(files)
    return {"results": results_table(results, peers), "oracles": oracles_table(results, peers), "tiles": tiles_table(results),
            "peers": peers_table(peers)}


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
    """The result files as one: gpu, driver, version, dates, figures by (shape, implementation, kernel), and those of mma with a tile
    that the shape did not choose. A file with such, which `bench --tile` writes, has the chosen tile once more: it counts where no other file
    has it."""
    whole: dict[str, Any] = {"dates": {}, "figures": {}, "tiles": []}
    parts = [(path, json.loads(path.read_text(encoding="utf-8"))) for path in files]
    parts = [(any("override" in figure for figure in part["figures"]), path, part) for path, part in parts]
    for tiles, path, part in sorted(parts, key=lambda one: one[0]):
        for key in ("gpu", "driver", "version"):
            if whole.setdefault(key, part[key]) != part[key]:
                raise ValueError(f"{path.name}: expected {key} {whole[key]!r} like the files before it, got {part[key]!r}")
        whole["dates"][path.name] = part["date"][:10]
        for figure in part["figures"]:
            if "override" in figure:
                whole["tiles"].append({**figure, "file": path.name})
                continue
            key = (figure["shape"], figure["implementation"], figure["kernel"])
            if tiles and key in whole["figures"]:
                continue
            if key in whole["figures"]:
                raise ValueError(f"{path.name}: {' '.join(key)} was measured twice; keep one of the two")
            whole["figures"][key] = {**figure, "file": path.name}
    return whole


def results_table(results: dict[str, Any], peers: dict[str, Any]) -> str:
    """One row a shape: floor, the kernels with their twins, the peers: mma beside those that run where it does, the faster of both beside all."""
    headers = ["requests, prefix, draft tokens, heads", "floor", f"`{HOPPER}`: us (% of floor), ratio", f"`{MAIN}`: us (% of floor), ratio",
               "TFLOP/s", "TB/s", "best peer outside Hopper", f"`{CASCADE}`", "best peer, no tree mask"]

    def row(measured: dict[tuple[str, str], dict[str, Any]], us: dict[str, float | None]) -> list[str]:
        both = [measured.get((OURS, kernel), {}) for kernel in (HOPPER, MAIN)]
        fastest = min(both, key=lambda figure: figure.get("us", math.inf))
        floor = next((figure["floor_us"] for figure in both if figure.get("floor_us")), None)
        rates = [f"{fastest[of] / fastest['us'] / 1e6:{form}}" if "us" in fastest and of in fastest else "-"
                 for of, form in (("flop", ".0f"), ("bytes", ".2f"))]
        outside = {name: value for name, value in us.items() if not peers["peers"][name]["hopper_only"]}
        return [number(floor), cell(measured, HOPPER), cell(measured, MAIN), *rates, against(both[1], best_of(outside)),
                against(fastest, (us.get(CASCADE), "")), against(fastest, best_of(without_mask(us, peers)))]

    return shape_table(results, peers, headers, (HOPPER, MAIN), row)


def oracles_table(results: dict[str, Any], peers: dict[str, Any]) -> str:
    """One row a shape: floor, the kernels for reading and checking with their twins."""
    headers = ["requests, prefix, draft tokens, heads", "floor", *(f"`{kernel}`: us (% of floor), ratio" for kernel in ORACLES)]

    def row(measured: dict[tuple[str, str], dict[str, Any]], us: dict[str, float | None]) -> list[str]:
        floor = next((figure["floor_us"] for figure in measured.values() if figure.get("floor_us")), None)
        return [number(floor), *(cell(measured, kernel) for kernel in ORACLES)]

    return shape_table(results, peers, headers, ORACLES, row)


def shape_table(results: dict[str, Any], peers: dict[str, Any], headers: list[str], kernels: tuple[str, ...], row: Callable) -> str:
    """A table of the shapes at which numba_verify ran one of `kernels`, in the order of the peers' table; row(figures, peers' us) -> cells."""
    rows_of_peers = {entry["shape"]: entry for entry in peers["rows"]}
    shapes = list(dict.fromkeys(shape for shape, name, kernel in results["figures"] if name == OURS and kernel in kernels))
    if not shapes:
        return f"No results are committed yet. `{COMMAND}` on an H200 writes them."
    shapes.sort(key=lambda shape: list(rows_of_peers).index(shape) if shape in rows_of_peers else math.inf)
    rows, files = [], set()
    for shape in shapes:
        measured = {(name, kernel): figure for (of, name, kernel), figure in results["figures"].items() if of == shape}
        files |= {figure["file"] for (_, kernel), figure in measured.items() if kernel in kernels}
        rows.append([extents(shape), *row(measured, rows_of_peers.get(shape, {"us": {}})["us"])])
    dates = ", ".join(sorted({results["dates"][name] for name in files}))
    return f"{results['gpu']}, {results['driver']}, numba_verify {results['version']}, {dates}.\n\n" + markdown(headers, rows)


def tiles_table(results: dict[str, Any]) -> str:
    """One row a shape and implementation, one column a tile: microseconds."""
    figures = results["tiles"]
    if not figures:
        return "No tiles are measured yet."
    tiles = list(dict.fromkeys(figure["override"] for figure in figures))
    keys = list(dict.fromkeys((figure["shape"], figure["implementation"]) for figure in figures))
    times = {(figure["shape"], figure["implementation"], figure["override"]): timed(figure)[0] for figure in figures}
    rows = []
    for shape, name in keys:
        chosen = results["figures"].get((shape, name, MAIN))
        tile_taken = f" `{chosen['tile']}`" if chosen and chosen["tile"] else ""  # the twin does not say
        rows.append([f"{extents(shape)}: {name}", timed(chosen)[0] + tile_taken if chosen else "-",
                     *(times.get((shape, name, tile), "-") for tile in tiles)])
    dates = ", ".join(sorted({results["dates"][figure["file"]] for figure in figures}))
    return (f"{results['gpu']}, {results['driver']}, numba_verify {results['version']}, {dates}, microseconds.\n\n"
            + markdown(["requests, prefix, draft tokens, heads", "chosen", *(f"`{tile}`" for tile in tiles)], rows))


def timed(figure: dict[str, Any] | None) -> tuple[str, str]:
    """(`531`, ` (2.1 %)`): microseconds and percent of the floor; "wrong" where bench refused to time it."""
    if figure is None or "us" not in figure:
        return "wrong" if figure and figure.get("wrong") else "-", ""
    return number(figure["us"]), f" ({100 * figure['floor_us'] / figure['us']:.2g} %)" if figure.get("floor_us") else ""


def ratio(ours: dict[str, Any], twin: dict[str, Any] | None) -> str:
    """numba / CUDA C, of one run."""
    if "us" in ours and twin and "us" in twin and twin["file"] == ours["file"]:
        return f"{ours['us'] / twin['us']:.2f}"
    return "-"


def without_mask(us: dict[str, float | None], peers: dict[str, Any]) -> dict[str, float | None]:
    return {name: value for name, value in us.items() if not peers["peers"][name]["tree_mask"]}


def best_of(us: dict[str, float | None]) -> tuple[float | None, str]:
    """(microseconds, name) of the fastest."""
    return min(((value, name) for name, value in us.items() if value is not None), default=(None, ""))


def named(peer: tuple[float | None, str]) -> str:
    us, name = peer
    return "-" if us is None else f"{number(us)} `{name}`" if name else number(us)


def against(ours: dict[str, Any], peer: tuple[float | None, str]) -> str:
    """A peer's time, and how many times ours it is."""
    text = named(peer)
    return text if peer[0] is None or "us" not in ours else f"{text}, {peer[0] / ours['us']:.2f} x"


def cell(measured: dict[tuple[str, str], dict[str, Any]], kernel: str) -> str:
    """`531 (2.1 %), 1.02`: numba microseconds, percent of the floor, numba / CUDA C."""
    ours = measured.get((OURS, kernel))
    time, share = timed(ours)
    return time if ours is None or "us" not in ours else f"{time}{share}, {ratio(ours, measured.get((TWIN, kernel)))}"


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
