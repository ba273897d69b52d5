# Everything this repository can do, from a fresh clone, with nothing but Python 3.10+ and make.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

# Jupyter refuses to run as root unless told; in a container root is all there is.
AS_ROOT := $(if $(filter 0,$(shell id -u)),--allow-root)

.DEFAULT_GOAL := help
.PHONY: help demo lab test check clean

help:  ## show this list
	@echo "jupyter-accel: each target first makes $(VENV) if it is missing or out of date."
	@echo
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "%-13s %s\n", $$1, $$2}'
	@echo
	@echo "Another Python: make test PYTHON=python3.12"

demo: $(READY)  ## run the first lesson, cell by cell, and leave it as a page in build/demo/
	@$(BIN)/python scripts/run_demo.py notebooks/00_first_launch.ipynb build/demo

lab: $(READY)  ## open JupyterLab on the lessons
	@$(BIN)/jupyter lab --notebook-dir=notebooks $(AS_ROOT)

test: $(READY)  ## run every test, and every cell of the lessons
	@$(BIN)/python -m pytest --nbval-lax --nbval-current-env --nbval-cell-timeout=120 tests notebooks

check: $(READY)  ## style, types, layers and spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell

clean:  ## remove the environment and everything that was built
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .coverage
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is touched last, so an installation that failed half-way is tried again.
$(READY): pyproject.toml constraints/test.txt
	@command -v $(PYTHON) >/dev/null || { \
	  echo "'$(PYTHON)' was not found. Install Python 3.10 or newer, or name one: make PYTHON=/path/to/python"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "'$(PYTHON)' is $$($(PYTHON) --version 2>&1), but 3.10 or newer is needed. Name another: make PYTHON=/path/to/python"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "'$(PYTHON)' has no venv module (on Debian: apt-get install python3-venv). Install it, or name another: make PYTHON=/path/to/python"; exit 1; }
	@echo "Setting up $(VENV) (a minute or two) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints/test.txt -e '.[dev,demo]'
	@touch $@
