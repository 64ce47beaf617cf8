"""Where kernels ran, counted and said in the summary line; Hypothesis profiles; one cubin cache a session."""

import os

# One thread a worker, set before NumPy is imported anywhere: with a worker a core, and in each a BLAS with a thread a core, products of the
# references waited for each other (16 cores: minutes instead of 3 s).
for _name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402
from support import machine  # noqa: E402

# The same draws on every run of CI; `--hypothesis-profile=nightly` draws new and more ones.
settings.register_profile("ci", derandomize=True, deadline=None, max_examples=20)
settings.register_profile("nightly", deadline=None, max_examples=2000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_report_header():
    return f"kernels run on: {machine.PLACE}"


def pytest_collection_modifyitems(items):
    if machine.HAS_GPU:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


def pytest_terminal_summary(terminalreporter):
    """One line for people and for CI: a suite in which every kernel test was skipped is green as well, and proves nothing."""
    ran = [report for report in terminalreporter.stats.get("passed", []) if "kernel" in report.keywords]
    terminalreporter.write_line(f"kernel tests: {len(ran)} on {machine.PLACE}")
