# make demo: set up, then train a classifier on 2 MPI ranks.   make test: set up, then run all tests.
# Variables: TORCH (pip's requirement for PyTorch), PYTHON, VENV; see env/setup.sh.

VENV ?= .venv
export VENV
BIN := $(VENV)/bin

.PHONY: demo test check bench clean setup setup-dev

demo: setup
	$(BIN)/hpctrain run -n 2 examples/digits-torch.yaml

test: setup-dev
	$(BIN)/python -m pytest

# before every commit: under a minute, no MPI
check: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/shellcheck env/*.sh .ci/run
	$(BIN)/python -m pytest -q -m "not slow" tests/unit

bench: setup-dev
	$(BIN)/python -m pytest -q tests/bench

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

setup:
	@env/setup.sh

setup-dev:
	@env/setup.sh --dev
