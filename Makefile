# make demo   set up, then train a classifier on 2 MPI ranks
# make test   set up, then every unit test, and each thing that a user can do once on real ranks (marked tour); Slurm if installed
# make test-all  every test: unit tests, and everything on real ranks, in Slurm jobs and on GPUs, as far as there are any
# make check  before every commit: style, types, the unit tests that are not slow; 100 s of processor, on two cores
# make torture  kill and stop ranks, agents, launchers and supervisors 600 times under six plans; kill ranks 200 times
#               while they save, and resume; damage checkpoints of plans 12,000 times for every
#               reader; train every layer on 4 ranks; kill and resume every ported program on
#               1, 2 and 4; attack the monitor's network with 4,500 intruders, and users by prepared run folders, as a
#               user who is not root; kill each of 8 ranks that share out models; compare programs of others with their
#               own launchers; relaunch jobs of Slurm 200 times after the loss of a node or a rank; train 50 updates by
#               each plan in float32; leave each exchange of each plan out once, which a test has to see; over two hours.
#               Parts that have passed are not repeated after an interruption. Installs what programs of others need
#               (env/foreign.txt) into build/foreign
# make docs   build the site of docs/ in build/docs; a dead link or an undocumented public name fails
# make docs-pictures  make the pictures in docs/pictures again, from real runs; needs chromium
# make mutants  make 200 small mistakes in the modules that decide: tests have to see nine of ten; half an hour
# make dist   sdist and wheel of the last commit in dist/: built twice to the same bytes, checked by twine, installed and tried
#             in fresh environments without a compiler and MPI on PATH, with Horovod at the end
# make bench  measure on this machine what the documentation states; nothing else should run on it
# Variables: TORCH (pip's requirement for PyTorch), PYTHON, VENV; see env/setup.sh. OR_AGAIN is what follows when tests have failed.

VENV ?= .venv
export VENV
BIN := $(VENV)/bin
# The longest files first (tests/conftest.py), then those with most tests, as xdist orders them: files whose ranks spin then
# run beside files that wait. The tests of Slurm, which mostly wait, keep one worker
ON_RANKS = $(BIN)/python -m pytest -n 3 --dist loadfile tests/slurm tests/dist tests/gpu
TORTURE := chaos kills plans sweep ports intruders grid programs relaunches updates collectives

.PHONY: demo test test-all test-unit check lint docs docs-pictures torture mutants bench dist clean setup setup-dev

demo: setup
	$(BIN)/hpctrain run -n 2 examples/digits-torch.yaml --reduce.kind horovod
	@echo "Done: the results are in runs/digits-torch. Next:"
	@echo "  $(BIN)/hpctrain report runs/digits-torch    # one HTML page with all curves"
	@echo "  $(BIN)/hpctrain init NAME                   # writes a task and a run file to start from"

test: test-unit
	$(ON_RANKS) -m tour $(OR_AGAIN)

test-all: test-unit
	$(ON_RANKS) -m "not alone" $(OR_AGAIN)
	$(BIN)/python -m pytest -m alone tests/dist $(OR_AGAIN)

test-unit: setup-dev
	$(BIN)/python -m pytest -n 2 tests/unit $(OR_AGAIN)

check: lint
	$(BIN)/python -m pytest -q -n 2 -m "not slow" tests/unit

lint: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/shellcheck env/*.sh env/gpu-proof .ci/run
	$(BIN)/python -m tests.language

docs: setup-dev
	TF_CPP_MIN_LOG_LEVEL=3 $(BIN)/sphinx-build -W --keep-going -q -b html docs build/docs
	@echo "Site: build/docs/index.html"

docs-pictures: setup-dev
	$(BIN)/python -m tests.support.pictures docs/pictures

torture: $(TORTURE:%=build/torture/%)
	rm -r build/torture

build/torture/kills: TESTS := HPCTRAIN_KILLS=200 tests/dist/test_checkpoint_kills.py
build/torture/chaos: TESTS := HPCTRAIN_CHAOS=65 tests/dist/test_chaos.py
build/torture/plans: TESTS := HPCTRAIN_CORRUPTIONS=12000 tests/unit/checkpoint/test_corruptions.py
build/torture/sweep: TESTS := HPCTRAIN_SWEEP_RANKS=4 tests/dist/test_sweep.py
build/torture/ports: TESTS := HPCTRAIN_PORTS=all tests/dist/test_ports.py
build/torture/grid: TESTS := HPCTRAIN_GRID_KILLS=all tests/dist/test_grid_kills.py
build/torture/programs: TESTS := HPCTRAIN_FOREIGN=all $(addprefix tests/,dist/test_foreign_programs.py dist/test_migrate_page.py \
	slurm/test_foreign_programs.py slurm/test_programs_at_limits.py dist/test_recipes.py::test_a_llama_is_trained_in_full_and_by_an_adapter_and_exported \
	dist/test_engines.py::test_programs_of_others_give_the_numbers_of_their_own_launchers_on_two_hosts)
build/torture/intruders: TESTS := HPCTRAIN_INTRUDERS=4500 $(addprefix tests/unit/,monitor/test_door.py monitor/test_agents.py \
	run/test_prepared_folder.py run/test_foreign_folder.py system/test_files.py)
build/torture/intruders: AS_SOMEBODY := -m tests.support.somebody
build/torture/relaunches: TESTS := HPCTRAIN_RELAUNCHES=200 tests/slurm/test_relaunches.py

build/torture/updates: TESTS := HPCTRAIN_UPDATES=all tests/dist/test_plans.py::test_fifty_updates_are_those_of_one_process

build/torture/collectives: | setup-dev
	$(BIN)/python -m tests.mutants.collectives build/torture/seen
	@touch $@

build/torture/ports build/torture/programs: | build/foreign
build/torture/ports build/torture/programs: private export PYTHONPATH := $(CURDIR)/build/foreign

build/foreign: env/foreign.txt | setup-dev
	rm -rf $@ $@.part
	PATH=$(abspath $(BIN)):$$PATH DS_BUILD_OPS=0 DS_BUILD_SHM_COMM=1 $(BIN)/python -m pip install --no-cache-dir --no-deps \
	  --no-build-isolation --target $@.part -r $<
	mv $@.part $@

build/torture/%: | setup-dev
	env $(firstword $(TESTS)) $(BIN)/python $(AS_SOMEBODY) -m pytest -q $(wordlist 2,9,$(TESTS))
	@mkdir -p $(@D) && touch $@

mutants: setup-dev
	$(BIN)/python -m tests.mutants.run

bench: setup-dev
	$(BIN)/python -m pytest -q tests/bench
	$(BIN)/hpctrain bench data
	$(BIN)/hpctrain bench scaling examples/chartext.yaml --ranks 1,2 --output "$$(mktemp -d)"
	for name in step checkpoint reduce parallel straggler; do $(BIN)/python -m benchmarks.$$name || exit; done

dist: setup-dev
	$(BIN)/python env/dist.py

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

setup:
	@env/setup.sh

setup-dev:
	@env/setup.sh --dev
