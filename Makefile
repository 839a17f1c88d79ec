# make demo | test | test-all | lint | real | fuzz | faults | gpu. The first of them makes .venv; PYTHON chooses the interpreter (3.10 or newer).
PYTHON ?= $(firstword $(foreach name,python3.12 python3.11 python3.13 python3.10 python3,$(if $(shell $(name) --version 2>/dev/null),$(name))))
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
OUT ?= out
MINUTES ?= 10
# The versions held are those of newer Pythons; some of them are not made for 3.10, which takes what pip finds.
HELD := -c 'import sys; print("--constraint constraints.txt" if sys.version_info >= (3, 11) else "")'
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadscope --no-loadscope-reorder

.PHONY: demo test test-all lint real fuzz faults gpu venv

demo: $(STAMP)  ## the whole road on rendered clips, within 4 CPU-minutes; ends with what to look at
	$(BIN)/gemel demo --out $(OUT)/demo

# Three at a time, since many wait for cameras and servers; of the exhaustive ones few do.
test: $(STAMP)  ## the tests, 8 to 16 minutes on 2 cores; PYTEST_ARGS="tests/models -k fold" for some of them
	$(PYTEST) --numprocesses 3 -m 'not exhaustive' $(PYTEST_ARGS)

test-all: $(STAMP)  ## those and the exhaustive ones: every model of the zoo, large detectors, fewer instructions
	$(PYTEST) $(PYTEST_ARGS)

lint: $(STAMP)  ## form, style and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

real: $(STAMP)  ## both real workloads, end to end; can be interrupted and resumed; GEMEL_DATA names the footage
	$(BIN)/python -m benchmarks.real.real $(REAL_ARGS)

fuzz: $(STAMP)  ## damaged files of every kind for MINUTES on all cores; findings go to out/fuzz; FUZZ_ARGS="--seed 1" repeats
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.hostile.mutated.fuzz --minutes $(MINUTES) --out $(OUT)/fuzz $(FUZZ_ARGS)

faults: $(STAMP)  ## all that a box withstands, in full (an hour): recorded, and the table in docs; goes on where it was interrupted
	$(BIN)/python -m tests.faults.measure --out $(OUT)/faults --record $(FAULTS_ARGS)

gpu:  ## what was built without a card, proved on one, ten minutes a run; GPU_ARGS="--device cpu --small" rehearses it (docs/gpu.md)
	$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m benchmarks.gpu.gpu $(GPU_ARGS)

venv: $(STAMP)

# Installed once, and again when what is needed changes. An environment made by hand is kept and completed.
$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || { PYTHON=$(PYTHON) .ci/system-packages && $(PYTHON) -m venv $(VENV); }
	$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed")'
	$(BIN)/python -m pip install --quiet $$($(BIN)/python $(HELD)) --editable '.[dev]'
	@touch $@
