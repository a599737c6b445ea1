PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help

.PHONY: help
help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /|/' | awk -F'|' '{printf "  make %-12s %s\n", $$1, $$2}'

# Made again whenever the dependencies change; half-made ones are never taken for whole.
$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, $(PYTHON) is " + sys.version.split()[0])'
	@echo "Setting up $(VENV) (about 1.4 GB; two minutes with a fast network)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --upgrade "pip>=24"
	$(BIN)/python -m pip install --editable ".[dev]"
	@touch $@

.PHONY: setup
setup: $(READY)  ## make .venv with everything in it

.PHONY: train
train: $(READY)  ## train the default job: a small LongNet on the Python standard library
	$(BIN)/python train.py

.PHONY: finetune
finetune: $(READY)  ## fine-tune SmolLM2-135M for a few steps on a CPU, and let it write
	$(BIN)/python train.py experiment=finetune_smollm2_cpu
	$(BIN)/python scripts/generate.py run=runs/finetune_smollm2_cpu-dilated prompt="def read(path):" max_new_tokens=40

.PHONY: test
test: $(READY)  ## run every test that this machine can run
	$(BIN)/python -m pytest -n auto --dist worksteal

.PHONY: test-gpu
test-gpu:  ## run the GPU tests with PYTHON's own torch (no .venv is made)
	$(PYTHON) -m pytest -m gpu

.PHONY: check
check: $(READY)  ## lint and type-check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

.PHONY: format
format: $(READY)  ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: docs
docs: $(READY)  ## write docs/configuration.md from the schema and conf/
	$(BIN)/python scripts/document_config.py

.PHONY: benchmark
benchmark: $(READY)  ## time the attention backends against dense attention
	$(BIN)/python scripts/benchmark_attention.py

.PHONY: clean
clean:  ## remove .venv and caches; runs and data stay
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
