"""Latency against context length, tree size and heads, for the plots: `python asv_bench/sweep.py --out docs/results/sweep_h200.json`.

One extent moves and the others stay, which the shapes of the benchmarks do not. Both implementations (kernel="auto") and every peer that is
installed are checked and measured in turn, as in benchmarks/peers.py. About a minute on an H200.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# The checkout, whatever else is installed.
sys.path.insert(0, str(ROOT))

from asv_bench.benchmarks import common, peers  # noqa: E402  found by the line above

#: What moves -> (requests, context, draft tokens, heads) of its points.
SWEEPS = {
    "context": [(1, context, 16, 64) for context in (1024, 4096, 16384, 32768, 65536, 131072)],
    "drafts": [(1, 32768, drafts, 16) for drafts in (1, 2, 4, 8, 16, 32, 64, 128)],
    "heads": [(1, 32768, 8, heads) for heads in (8, 16, 32, 64, 128)],
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure latency against context length, tree size and heads.")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="where the figures go, as JSON")
    options = parser.parse_args(arguments)
    if reason := common.gpu_reason():
        print(f"sweep: needs a GPU: {reason}", file=sys.stderr)
        return 2
    from numba_verify.gpu import driver
    from numba_verify.shapes import Shape

    names, figures = common.IMPLEMENTATIONS + tuple(peers.PEERS), []
    for sweep, points in SWEEPS.items():
        for extents in points:
            shape = Shape(*extents)
            work = common.workload(shape)
            for name, found in peers.measure(work, list(names)).items():
                number = isinstance(found, float)
                figures.append({"sweep": sweep, "shape": shape.name, "impl": name, "us": found if number else None, "why": "" if number else found,
                                "floor_us": work.floor_us()})
                print(f"{sweep:8} {shape.name:22} {name:14} {f'{found:,.1f} us' if number else found[:100]}", flush=True)
    about = {"gpu": driver.device_info(0).name, "date": datetime.date.today().isoformat(), "command": "python asv_bench/sweep.py"}
    options.out.write_text(json.dumps({**about, "figures": figures}, indent=1) + "\n", encoding="utf-8")
    return 1 if any(figure["why"].startswith(common.FAILED) for figure in figures) else 0


if __name__ == "__main__":
    sys.exit(main())
