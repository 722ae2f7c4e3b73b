# pipefit's commands; `make` alone lists them.
# The environment is .venv: a user's for `make demo`, to which the first other target adds the tools of development. Each
# is made once, and again only when pyproject.toml or constraints.txt change, so every later run works without a network. PIP_FIND_LINKS (a folder of wheels) is honoured.

SHELL       := bash
.SHELLFLAGS := -eu -o pipefail -c
MAKEFLAGS   += --no-print-directory
.DEFAULT_GOAL := help

PY         := .venv/bin/python
# Byte code is kept even where the environment says otherwise: without it every process compiles all of torch's Python
# anew, for as long as it takes to load it.
unexport PYTHONDONTWRITEBYTECODE

DEMO_ARGS  ?=
BENCH_ARGS ?= --help
ZOO        ?=
SHAM_ARGS  ?=
PYTEST     := $(PY) -m pytest -q
# Two workers; a file stays on one of them: what its tests share is made once.
BY_FILE    := -n 2 --dist loadfile
# Of all tests, without those that have a target of their own.
TEST       := not faults and not long
# The pure half: everything that never imports torch and whose docstrings are run as tests.
PURE := $(wildcard $(foreach part,errors.py units.py spec ir passes schedules verify simulate cost timeline partition \
	planner synthesize draw,src/pipefit/$(part)))

.NOTPARALLEL:
.PHONY: help venv demo test fast long gpu gpu-sham faults zoo check format lint types imports doctest docs golden bench clean

help: ## print this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-9s %s\n", $$1, $$2}'
	@echo; echo "  make PYTHON=/path/to/python3.12 …   uses that interpreter (3.11 or newer) for .venv"

venv: .venv/stamp ## create the environment in .venv (done by every other target)

.venv/stamp: pyproject.toml constraints.txt scripts/make-venv
	@PYTHON="$(PYTHON)" scripts/make-venv stamp

.venv/user-stamp: pyproject.toml constraints.txt scripts/make-venv
	@PYTHON="$(PYTHON)" scripts/make-venv user-stamp

demo: .venv/user-stamp ## train a network that reads digits over a pipeline of two processes; installs what a user needs
	@scripts/demo $(DEMO_ARGS)

test: .venv/stamp ## the tests
	@$(PYTEST) $(BY_FILE) -n 4 -m "$(TEST)"  # two workers more: many tests wait

fast: .venv/stamp ## the tests that take less than a minute: no further processes, nothing slow
	@$(PYTEST) $(BY_FILE) -m "not slow and not dist and $(TEST)"

long: .venv/stamp ## the tests that take more than ten seconds each: benchmarks, several machines, compilers, whole examples
	@$(PYTEST) $(BY_FILE) -m "long and not faults"

gpu: .venv/stamp ## the tests that need a CUDA device
	@$(PYTEST) -rs -m gpu tests/gpu

# Without a compiler there is nothing to run. A new wait of the host fails; PIPEFIT_SHAM_WRITE=1 with -n 0 lists it.
gpu-sham: .venv/stamp ## the same tests, and more, on simulated GPUs: a C++ file that is compiled once into .sham
	@library=$$($(PY) tests/sham/build.py) || { [ $$? -eq 3 ] && echo "gpu-sham: skipped, $$library" && exit 0; exit 1; }; \
	  PIPEFIT_SHAM=$$library PYTHONPATH=$(CURDIR)/tests/sham/site:$(CURDIR)/src:$(CURDIR) \
	  $(PYTEST) $(BY_FILE) -p tests.sham.plugin -m gpu tests/gpu tests/sham $(SHAM_ARGS)

faults: .venv/stamp ## trials of faults: signals, saves, networks, flipped bytes, random input; prints a table (PIPEFIT_TRIALS=all: every one)
	@$(PYTEST) -n 2 --dist worksteal -m faults tests/faults

# A run that was stopped resumes from runs/zoo.jsonl; remove that file to try all of them again.
zoo: .venv-zoo/stamp ## models of libraries and hand-written tricks against plain torch: docs/zoo.md, in more than an hour; ZOO=hand/state: a part
	@status=0; PYTHONPATH=src:. nice .venv-zoo/bin/python -m tests.zoo $(ZOO) || status=$$?; \
	  [ -n "$(ZOO)" ] || .venv-zoo/bin/python -m tests.zoo.table; exit $$status

.venv-zoo/stamp: pyproject.toml tests/zoo/constraints.txt scripts/make-zoo-venv
	@PYTHON="$(PYTHON)" scripts/make-zoo-venv

# Here `make test` runs those of `make long` too: in one run all are collected once, and those that wait leave their
# core to others.
check: TEST := not faults
check: lint types imports doctest docs test gpu-sham ## everything a change must pass

format: .venv/stamp ## rewrite the code in the house's form
	@$(PY) -m ruff format .
	@$(PY) -m ruff check --fix .

lint: .venv/stamp ## form and lint
	@$(PY) -m ruff format --check .
	@$(PY) -m ruff check .

types: .venv/stamp ## mypy: strict below torch, ordinary above
	@$(PY) -m mypy

imports: .venv/stamp ## the folder contract: imports only point down, and the pure half is without torch
	@.venv/bin/lint-imports --no-logo

doctest: .venv/stamp ## the examples in the docstrings of the pure half
	@$(PYTEST) --doctest-modules $(PURE) || test $$? -eq 5 # 5: no example yet

docs: .venv/stamp ## build the manual in docs/_build/html; a warning is an error
	@$(PY) -m sphinx -q -W --keep-going -b html docs docs/_build/html

golden: .venv/stamp ## rewrite the golden .pipe files of the tests; look at the diff before you commit it
	@$(PY) -m tests.golden

bench: .venv/stamp ## run a benchmark: make bench BENCH_ARGS=NAME
	@$(PY) -m benchmarks $(BENCH_ARGS)

clean: ## remove the environment, caches and built pages; runs/ stays
	rm -rf .venv .venv-zoo .sham build dist docs/_build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
