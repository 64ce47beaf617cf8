"""The offline figures of this tree against the last commit that has a record."""

import importlib
import sys
from pathlib import Path

from asv_bench import measure
from asv_bench.benchmarks import offline

from . import bench_data

#: Another version of these makes other registers, and that is nobody's regression.
COMPILERS = ("numba", "numba-cuda", "nvidia-nvvm", "nvidia-nvjitlink", "nvcc")
TRACKS = {(offline.Offline, "track_registers"): "registers", (offline.Offline, "track_shared_bytes"): "shared_bytes",
          (offline.Offline, "track_spill_bytes"): "spill_bytes", (offline.Offline, "track_stack_bytes"): "stack_bytes",
          (offline.Instructions, "track_sass_instructions"): "sass"}


def worse_than_recorded(rows, folder):
    """(commit, what is worse) of resources.Resources; (None, []) when there is no record by the compilers that are here."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
    try:
        regressions, results = (importlib.import_module(name) for name in ("regressions", "results"))
    finally:
        sys.path.pop(0)
    commit = results.newest_commit(results.NO_GPU)
    if commit is None:
        return None, []
    before, versions = results.load(results.file_of(results.NO_GPU, commit)), measure.versions()
    if any(before["conditions"]["versions"].get(name) != versions.get(name) for name in COMPILERS):
        return None, []
    now = {"results": {}, "measured": {}, "versions": versions, "under_load": {}}
    for (family, track), field in TRACKS.items():
        values = {(row.impl, row.kernel, row.arch): getattr(row, field) for row in rows if getattr(row, field) is not None}
        one = bench_data.measured(family, track, values)
        now["results"].update(one["results"])
        now["measured"].update(one["measured"])
    after = results.load(results.store("0" * 40, 0, now, results.machine(), folder))
    return commit, [change for change in regressions.compare(before, after).changes if change.worse]
