# On a fresh machine: `make serve` or `make test`. Everything is installed into .venv and nothing else.
#   make serve ARGS="--port 9000"             more flags for nextn-serve
#   make test  ARGS="tests/tree -k accept"    more flags for pytest
#   make serve PIP_ARGS="..."                 more flags for pip, e.g. an index with CPU builds of torch
#   make serve CONSTRAINTS=                   newest releases instead of those that CI tests with

PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= requirements/constraints.txt
PIP_ARGS ?=
ARGS ?=

BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check \
	$(if $(CONSTRAINTS),--constraint $(CONSTRAINTS)) $(PIP_ARGS)
INPUTS := pyproject.toml $(CONSTRAINTS)

# Two test processes with one thread each: two OpenMP threads collapse as soon as another process is busy.
TEST_ENV := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
WORKERS ?= 2

.DEFAULT_GOAL := help
.PHONY: help serve test test-full lint types check format install clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

serve: $(VENV)/.runtime ## serve the demo model (or ARGS="MODEL ...") over the OpenAI API
	$(BIN)/nextn-serve $(ARGS)

test: $(VENV)/.dev ## run the test suite
	$(TEST_ENV) $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

test-full: $(VENV)/.dev ## run the test suite with the whole parity grid
	$(TEST_ENV) $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "" $(ARGS)

lint: $(VENV)/.dev ## check style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev ## check types
	$(BIN)/python -m mypy

check: lint types test ## everything that a change must pass

format: $(VENV)/.dev ## rewrite the sources in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

install: $(VENV)/.dev ## make the development environment

clean: ## remove the environment and what tools left behind
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "nextn needs Python 3.11 or newer; name one with PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo "this Python cannot make environments; on Debian: apt-get install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# --no-compile: bytecode for the few modules that are imported is made then, which is much faster in all.
$(VENV)/.runtime: $(INPUTS) | $(BIN)/python
	@echo "installing nextn into $(VENV): half a minute where packages are cached, else a download of torch"
	$(PIP_INSTALL) --no-compile --editable .
	@touch $@

$(VENV)/.dev: $(INPUTS) requirements/triton.txt | $(VENV)/.runtime
	@echo "installing test tools into $(VENV)"
	$(PIP_INSTALL) --no-compile --editable ".[dev]"
	$(BIN)/python -c 'import triton' 2>/dev/null || $(PIP_INSTALL) --no-compile --requirement requirements/triton.txt
	@touch $(VENV)/.runtime $@
