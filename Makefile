# The two commands of the README, and what they need. PYTHON chooses the interpreter, TORCH the torch to pin.
PYTHON ?= python3
TORCH ?= torch==2.13.0
BIN := .venv/bin
OVERRIDES ?=
# Processes that share the files of tests, in the order of their names: the last ones are short. Where there is
# memory, a third computes while others wait for disks, signals and peers; with a fourth, ranks that wait for each
# other take two cores from those that compute. One takes up to 3 GB with its ranks.
PROCESSES ?= $(shell cat /proc/meminfo 2>/dev/null | \
	awk '/MemAvailable/ {n = $$2 > 12e6 ? 3 : 2} END {print n ? n : 2}')
# Bytecode is kept also where an image forbids it: else each process compiles all modules and rewrites all tests.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(PROCESSES) --dist loadfile --no-loadscope-reorder

.PHONY: train test test-slow parity gpu check data clean

train: .venv/ready data ## train the quickstart: make train OVERRIDES="train.steps=100"
	$(BIN)/omni train experiment=quickstart $(OVERRIDES)

test: .venv/ready-dev ## run the tests
	$(PYTEST)

test-slow: .venv/ready-dev ## run the longer checks
	$(PYTEST) -m slow

parity: .venv/ready-dev ## run the whole parity matrix and write docs/parity.md
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python tests/omni/parity_report.py docs/parity.md

gpu: .venv/ready-dev ## a first day on GPUs, rung by rung (docs/first_gpu.md): make gpu RUNG=2
	$(BIN)/python benchmarks/gpu_day.py $(if $(RUNG),--rung $(RUNG))

check: .venv/ready-dev ## lint, format, types, layering
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

data: .venv/ready ## build the quickstart's datasets from what pip installed
	$(BIN)/omni data build --recipe quickstart --out data/quickstart

# torch first and by itself: asked for as a dependency, pip may fetch a build for another accelerator.
.venv/torch:
	@echo "installing $(TORCH) in .venv, which may be gigabytes to fetch: minutes"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	touch $@

.venv/ready: .venv/torch pyproject.toml constraints.txt
	rm -rf *.egg-info # one left from before would hide entry points that came since
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

.venv/ready-dev: .venv/torch pyproject.toml examples/baselines/pyproject.toml constraints.txt
	rm -rf *.egg-info examples/baselines/*.egg-info
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		-e ".[dev]" -e examples/baselines
	touch $@
	touch .venv/ready

clean: ## remove the environment and everything built
	rm -rf .venv build *.egg-info examples/*/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
