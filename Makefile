# make run        install what is pinned and run the main job      ARGS="model=... train.num_iterations=5" overrides
# make test       install, check style and types, run all tests but those marked slow
# make test-all   the same and those marked slow: kills, Slurm, sweeps, presets trained, browser; what CI runs
# make test-long  those marked long, half an hour: further whole runs, faults and benches, which CI does not run
#                 PYTEST_ARGS="-k gae" chooses; JOBS=4 runs so many at once
# make install | lock | clean
# PLATFORM=cuda installs for NVIDIA GPUs; EXTRAS=smollm2 adds the extra that model=smollm2_135m needs,
# EXTRAS=verifiers that of environment=verifiers, EXTRAS=wandb and EXTRAS=mlflow those of logger.wandb and logger.mlflow.

SHELL := /bin/bash
PYTHON := .venv/bin/python
PLATFORM ?= cpu
EXTRAS ?=
ARGS ?=
PYTEST_ARGS ?=
JOBS ?= 2

.PHONY: install run test test-all test-long check lock clean

install:
	@tools/install/install.sh $(PLATFORM) $(EXTRAS)

run: install
	$(PYTHON) -m megarl.train $(ARGS)

# Compiling is a third of a process's start.
PYTEST := PYTHONDONTWRITEBYTECODE= $(PYTHON) -m pytest -q --durations=15 --numprocesses=$(JOBS)

test: check
	$(PYTEST) -m "not slow" $(PYTEST_ARGS)

test-all: check
	$(PYTEST) -m "not long" $(PYTEST_ARGS)

test-long: check
	$(PYTEST) -m long $(PYTEST_ARGS)

check: install
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy

# The pins, made anew from pyproject.toml (tools/install/lock.py says how). UPGRADE=--upgrade takes the newest releases.
lock:
	python3.11 tools/install/lock.py $(UPGRADE)

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
