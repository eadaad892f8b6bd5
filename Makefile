# Two commands: `make train` and `make test`. Each installs what it still needs into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
ARGS ?=
# Threads that wait for one another by spinning starve when anything else runs: 12 s a step instead of 2.6 was seen.
export OMP_WAIT_POLICY = PASSIVE

.PHONY: train test lint types pytest clean

train: $(VENV)/.core
	$(BIN)/octavo train $(ARGS)

test: lint types pytest

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

pytest: $(VENV)/.dev
	$(BIN)/pytest -n 2 $(ARGS)

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Octavo needs Python 3.11 or newer; set PYTHON=...")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.core: $(VENV)/bin/python pyproject.toml constraints.txt
	@echo "Installing Octavo into $(VENV) (once; about a minute)"
	$(PIP) -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.core
	@echo "Installing the development tools into $(VENV) (once)"
	$(PIP) -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
