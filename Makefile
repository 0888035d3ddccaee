# make demo   set up, then train a classifier on 2 MPI ranks
# make test   set up, then run every test (those for Slurm and GPUs if there are any)
# make check  before every commit: style, types, unit tests; under a minute
# make torture  kill ranks 200 times at random moments, and resume; damage a checkpoint 18,000 times; train every layer on
#               4 ranks; kill and resume every ported program on 1, 2 and 4; attack the monitor's network with 4,500
#               intruders; half an hour. Parts that have passed are not repeated after an interruption
# make docs   build the site of docs/ in build/docs; a dead link or an undocumented public name fails
# make docs-pictures  make the pictures in docs/pictures again, from real runs; needs chromium
# make mutants  make 200 small mistakes in the modules that decide: tests have to see nine of ten; half an hour
# make bench  measure on this machine what the documentation states; nothing else should run on it
# Variables: TORCH (pip's requirement for PyTorch), PYTHON, VENV; see env/setup.sh.

VENV ?= .venv
export VENV
BIN := $(VENV)/bin
TORTURE := kills damage sweep ports intruders

.PHONY: demo test check lint docs docs-pictures torture mutants bench clean setup setup-dev

demo: setup
	$(BIN)/hpctrain run -n 2 examples/digits-torch.yaml --reduce.kind horovod
	@echo "Results: runs/digits-torch (events.jsonl, checkpoints/, logs/). A page of plots: $(BIN)/hpctrain report runs/digits-torch"

test: setup-dev
	$(BIN)/python -m pytest -n 2 tests/unit
	$(BIN)/python -m pytest --ignore tests/unit --ignore tests/bench

check: lint
	$(BIN)/python -m pytest -q -n 2 -m "not slow" tests/unit

lint: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/shellcheck env/*.sh .ci/run

docs: setup-dev
	TF_CPP_MIN_LOG_LEVEL=3 $(BIN)/sphinx-build -W --keep-going -q -b html docs build/docs
	@echo "Site: build/docs/index.html"

docs-pictures: setup-dev
	$(BIN)/python -m tests.support.pictures docs/pictures

torture: $(TORTURE:%=build/torture/%)
	rm -r build/torture

build/torture/kills: TESTS := HPCTRAIN_KILLS=200 tests/dist/test_checkpoint_kills.py
build/torture/damage: TESTS := HPCTRAIN_CORRUPTIONS=12000 tests/unit/checkpoint/test_damage.py
build/torture/sweep: TESTS := HPCTRAIN_SWEEP_RANKS=4 tests/dist/test_sweep.py
build/torture/ports: TESTS := HPCTRAIN_PORTS=all tests/dist/test_ports.py
build/torture/intruders: TESTS := HPCTRAIN_INTRUDERS=4500 tests/unit/monitor/test_door.py tests/unit/monitor/test_agents.py

build/torture/%: | setup-dev
	env $(firstword $(TESTS)) $(BIN)/python -m pytest -q $(wordlist 2,9,$(TESTS))
	@mkdir -p $(@D) && touch $@

mutants: setup-dev
	$(BIN)/python -m tests.mutants.run

bench: setup-dev
	$(BIN)/python -m pytest -q tests/bench
	for name in step reduce data checkpoint straggler; do $(BIN)/hpctrain bench $$name || exit; done
	$(BIN)/hpctrain bench scaling examples/chartext.yaml --ranks 1,2 --output "$$(mktemp -d)"

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

setup:
	@env/setup.sh

setup-dev:
	@env/setup.sh --dev
