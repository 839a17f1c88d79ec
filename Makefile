# make demo | test | test-all | lint | real | fuzz | faults | gpu. The first call creates .venv with PYTHON (3.10 or newer).
PYTHON ?= $(firstword $(foreach name,python3.12 python3.11 python3.13 python3.10 python3,$(if $(shell $(name) --version 2>/dev/null),$(name))))
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
OUT ?= out
MINUTES ?= 10
# constraints.txt pins versions for Python 3.11 and newer; on 3.10 pip resolves.
CONSTRAINTS := -c 'import sys; print("--constraint constraints.txt" if sys.version_info >= (3, 11) else "")'
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadscope --no-loadscope-reorder

.PHONY: demo test test-all lint real fuzz faults gpu venv

demo: $(STAMP)  ## render clips, train, merge, run the box, write the report: about 3 CPU-minutes
	$(BIN)/gemel demo --out $(OUT)/demo

# Three processes on two cores, since many tests wait for cameras and servers.
test: $(STAMP)  ## the tests; PYTEST_ARGS="tests/models -k fold" selects some
	$(PYTEST) --numprocesses 3 -m 'not exhaustive' $(PYTEST_ARGS)

test-all: $(STAMP)  ## and the exhaustive tests: every model of the zoo, large detectors, older instruction sets
	$(PYTEST) $(PYTEST_ARGS)

lint: $(STAMP)  ## format, style and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

real: $(STAMP)  ## the real workloads, end to end, resumable; GEMEL_DATA names the folder of the footage
	$(BIN)/python -m benchmarks.real.real $(REAL_ARGS)

fuzz: $(STAMP)  ## damaged files of every kind for MINUTES on all cores; findings in out/fuzz; FUZZ_SEED=1 repeats
	FUZZ_MINUTES=$(MINUTES) FUZZ_OUT=$(OUT)/fuzz $(PYTEST) --numprocesses auto --dist load tests/hostile/fuzz.py $(PYTEST_ARGS)

faults: $(STAMP)  ## every fault a box must withstand (an hour, resumable); records the results
	$(BIN)/python -m tests.faults.measure --out $(OUT)/faults --record $(FAULTS_ARGS)

gpu:  ## checks on a GPU, ten minutes a run; GPU_ARGS="--device cpu --small" rehearses them
	$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m benchmarks.gpu.gpu $(GPU_ARGS)

venv: $(STAMP)

# Installed once, and again when the requirements change. An existing environment is completed.
$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || { PYTHON=$(PYTHON) .ci/system-packages && $(PYTHON) -m venv $(VENV); }
	$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed")'
	$(BIN)/python -m pip install --quiet $$($(BIN)/python $(CONSTRAINTS)) --editable '.[dev]'
	@touch $@
