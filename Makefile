# make demo | test | test-all | lint | docs | compare | real | fuzz | faults | gpu | image | sbom | lock. The first call creates .venv with PYTHON (3.10 or newer).
PYTHON ?= $(firstword $(foreach name,python3.12 python3.11 python3.13 python3.10 python3,$(if $(shell $(name) --version 2>/dev/null),$(name))))
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
OUT ?= out
ARCH ?= $(shell uname -m)
MINUTES ?= 10
# constraints.txt has versions and hashes for Python 3.11 and newer; on 3.10 pip resolves.
IS_LOCKED := -c 'import sys; sys.exit(sys.version_info < (3, 11))'
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadscope --no-loadscope-reorder

.PHONY: demo test test-all lint docs compare real fuzz faults gpu image venv sbom lock

demo: $(STAMP)  ## render clips, train, merge, run the box, write the report: about five minutes
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

docs: $(OUT)/docs-venv/.installed  ## the site of docs/, with its search: out/site/index.html
	NO_MKDOCS_2_WARNING=1 $(OUT)/docs-venv/bin/mkdocs build --quiet --clean

$(OUT)/docs-venv/.installed: docs/requirements.txt
	$(PYTHON) -m venv $(OUT)/docs-venv
	$(OUT)/docs-venv/bin/python -m pip install --quiet --require-hashes --requirement $<
	@touch $@

real: $(STAMP)  ## the real workloads, end to end, resumable; GEMEL_DATA names the folder of the footage
	$(BIN)/python -m benchmarks.real.real $(REAL_ARGS)

compare: $(STAMP)  ## the same files several ways, resumable by row; COMPARE_ARGS="--quick" without merges
	$(BIN)/python -m benchmarks.compare.compare $(COMPARE_ARGS)
	$(BIN)/python -m benchmarks.results

fuzz: $(STAMP)  ## files written to hurt, then damaged ones of every kind for MINUTES; findings in out/fuzz; FUZZ_SEED=1 repeats
	FUZZ_MINUTES=$(MINUTES) FUZZ_OUT=$(OUT)/fuzz $(PYTEST) --numprocesses auto --dist load tests/hostile \
		tests/hostile/fuzz.py $(PYTEST_ARGS)

faults: $(STAMP)  ## every fault a box must withstand (an hour, resumable); records the results
	$(BIN)/python -m tests.faults.measure --out $(OUT)/faults --record $(FAULTS_ARGS)

gpu:  ## checks on a GPU, ten minutes a run; GPU_ARGS="--device cpu --small" rehearses them
	$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m benchmarks.gpu.gpu $(GPU_ARGS)

image: $(STAMP)  ## the root file system of a box without a daemon, as root: ARCH=x86_64|aarch64, in out/image-ARCH
	@mkdir -p $(OUT)
	PYTHON=$(BIN)/python docker/root.sh $(ARCH) $(OUT)/image-$(ARCH)

venv: $(STAMP)

sbom: $(STAMP)  ## all that is installed, with versions and licences, as CycloneDX: out/sbom.json
	@mkdir -p $(OUT)
	$(BIN)/cyclonedx-py environment --pyproject pyproject.toml --output-file $(OUT)/sbom.json $(BIN)/python

lock: $(STAMP)  ## resolve constraints.txt, docs/ and docker/requirements.txt anew, with the hash of every file
	$(BIN)/uv pip compile pyproject.toml --extra dev --universal --python-version 3.11 --generate-hashes \
		--no-annotate --quiet --custom-compile-command "make lock" --output-file constraints.txt
	$(BIN)/uv pip compile pyproject.toml --extra docs --universal --python-version 3.11 --generate-hashes --no-annotate \
		--quiet --constraint constraints.txt --custom-compile-command "make lock" --output-file docs/requirements.txt
	$(BIN)/uv pip compile pyproject.toml docker/build.in --extra zmq --python-platform linux --python-version 3.11 \
		--generate-hashes --no-annotate --quiet --constraint constraints.txt --custom-compile-command "make lock" \
		--output-file docker/requirements.txt

# Installed once, and again when the requirements change. An existing environment is completed.
$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || { PYTHON=$(PYTHON) .ci/system-packages && $(PYTHON) -m venv $(VENV); }
	$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed")'
	if $(BIN)/python $(IS_LOCKED); then \
		$(BIN)/python -m pip install --quiet --require-hashes --requirement constraints.txt && \
		$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .; \
	else $(BIN)/python -m pip install --quiet --editable '.[dev]'; fi
	@touch $@
