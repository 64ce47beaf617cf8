# Every target sets up .venv by itself; nothing has to be installed first but Python 3.10 or later.

PYTHON ?= python3
VENV := .venv/bin/python
# One worker per core. Give TEST_ARGS="-x -k tree" and the like to change that.
TEST_ARGS ?= -n auto

.PHONY: help demo test bench bench-check bench-publish plots clean

help:
	@echo "make demo           verify one draft tree and show tree, mask and result (GPU, or CPU where there is none)"
	@echo "make test           run the test suite (TEST_ARGS=... goes to pytest)"
	@echo "make bench          measure this commit with airspeed velocity and keep the figures (BENCH_ARGS=\"--bench Offline\" for a part)"
	@echo "make bench-check    compare this commit's figures with those before it; fails on a regression (BENCH_ARGS=\"--factor 1.05\")"
	@echo "make bench-publish  build the pages of airspeed velocity in asv_bench/html"
	@echo "make plots          draw the plots of README and docs from the committed figures"
	@echo "make clean          remove .venv, caches and built files"

demo:
	@$(PYTHON) tools/bootstrap.py
	@$(VENV) -m numba_verify demo

test:
	@$(PYTHON) tools/bootstrap.py --extra test
	@$(VENV) -m pytest $(TEST_ARGS)

bench:
	@$(PYTHON) tools/bootstrap.py
	@$(VENV) tools/bench.py $(BENCH_ARGS)

bench-check:
	@$(PYTHON) tools/bootstrap.py
	@$(VENV) tools/regressions.py $(BENCH_ARGS)

bench-publish:
	@$(PYTHON) tools/bootstrap.py --extra bench
	@$(VENV) tools/publish.py $(BENCH_ARGS)

plots:
	@$(PYTHON) tools/bootstrap.py --extra plots
	@$(VENV) tools/plots.py

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .hypothesis .ruff_cache asv_bench/env asv_bench/html
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
