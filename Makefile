# Needs make and Python (3.11; any from 3.10 works). Everything else goes into .venv.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Two test processes on two cores: torch's own threads would only get in their way. A file's tests share trainings, so
# they stay together, and files run in their order: else those of a few long launches would come last and end alone.
WORKERS ?= auto
export OMP_NUM_THREADS ?= 1
# Compiled modules are kept: else every process of the tests compiles what it imports.
unexport PYTHONDONTWRITEBYTECODE

MATRIX_PYTHONS ?= python3.10 python3.12
MATRIX_TORCHES ?= 2.4.1 2.13.0 newest

PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help install demo demo-variants demo-mmengine test test-all test-slow fidelity lint docs format bench bench-published bench-sharded recorded gpu-measure gpu-compare test-matrix messages known known-page reference clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 24

$(STAMP): pyproject.toml constraints.txt vram_guard/__init__.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt -e . --group dev
	@touch $@

install: $(STAMP) ## make .venv and install the package with all its tools

demo: $(STAMP) ## train a small super-resolution model under a budget that its batch does not fit
	OMP_NUM_THREADS=$$(getconf _NPROCESSORS_ONLN) $(BIN)/python examples/lightning_superres/train.py --out demo-out

demo-variants: $(STAMP) ## choose the largest of four networks that fits a budget, and train it
	OMP_NUM_THREADS=$$(getconf _NPROCESSORS_ONLN) $(BIN)/python examples/variants_convlstm/train.py

demo-mmengine: $(STAMP) ## compare batch sizes and precisions of an MMEngine config, then train one under a budget
	cd examples/mmengine_bev && export PYTHONPATH=. OMP_NUM_THREADS=$$(getconf _NPROCESSORS_ONLN) && \
	../../$(BIN)/vram-guard mmengine compare configs/lift_splat_128x352_scenes.py --gpu "RTX 2060" \
		--batch-size 4 8 --precision 32-true 16-mixed && \
	../../$(BIN)/python tools/train.py configs/lift_splat_small_scenes.py --work-dir ../../demo-out/mmengine_bev \
		--cfg-options vram_guard.gpu="RTX 2060" vram_guard.budget=64MiB train_cfg.max_iters=100 train_cfg.val_interval=50

test: $(STAMP) ## the tests that take minutes: the code by itself, each framework once for real, the rules of this repository
	$(PYTEST) tests/tour tests/unit tests/repository

test-all: test test-slow ## every test

test-slow: $(STAMP) ## those that `make test` leaves out: plans, trainings, launches, the table of fidelity, pages and examples
	$(PYTEST) tests/fidelity tests/launch tests/train tests/plan tests/pages

fidelity: $(STAMP) ## the table of trainings with and without the guard: CASES="lightning loss" chooses some
	PYTHONPATH=.:integrations $(BIN)/python -m tests.fidelity $(CASES)

lint: $(STAMP) ## ruff, ruff format, mypy strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(STAMP) ## build the documentation as a site into build/site; a warning is an error
	$(BIN)/mkdocs build --strict

format: $(STAMP) ## let ruff put the format right
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

bench: $(STAMP) ## time a trace of three models and a plan, and ask other estimators beside ours: error and seconds
	PYTHONPATH=.:integrations $(BIN)/python -m benchmarks speed
	PYTHONPATH=.:integrations $(BIN)/python -m benchmarks peers

gpu-measure: $(STAMP) ## train the suite on the NVIDIA GPU of this machine and record what it took
	PYTHONPATH=.:integrations $(BIN)/python -m benchmarks gpu-measure

gpu-compare: $(STAMP) ## predict without a GPU what was recorded on one; replay the allocator histories
	PYTHONPATH=.:integrations $(BIN)/python -m benchmarks gpu-compare

# The published runs had other releases: transformers 4.51.3 lies beside the installed one; torchvision and timm come with
# a CUDA build of torch (some GB), so they get an environment of their own.
PUBLISHED := .venv-published

bench-published: $(STAMP) ## predict what others measured and published, beside their tools; writes docs/lab/accuracy.md
	$(BIN)/python -m pip install --quiet -c constraints.txt -e . --group bench
	test -d $(PUBLISHED)/transformers-4.51.3 || $(BIN)/python -m pip install --quiet --no-deps \
		--target $(PUBLISHED)/transformers-4.51.3 -r benchmarks/published/transformers-4.51.3.txt
	test -d $(PUBLISHED)/torchvision || { $(PYTHON) -m venv $(PUBLISHED)/torchvision && \
		$(PUBLISHED)/torchvision/bin/python -m pip install --quiet torch torchvision timm rich nvidia-ml-py; }
	PYTHONPATH=.:integrations $(BIN)/python -m benchmarks published --libraries $(PUBLISHED) --json bench-published.json

bench-sharded: $(STAMP) ## predict what others measured on several GPUs; writes docs/lab/sharded.md
	PYTHONPATH=.:integrations $(BIN)/python -m benchmarks sharded --json bench-sharded.json

recorded: $(STAMP) ## replay and predict what others recorded of the allocator on GPUs; writes docs/lab/recorded.md
	PYTHONPATH=.:integrations $(BIN)/python -m benchmarks recorded

test-matrix: ## run the test suite on other Pythons and other releases of torch
	tests/matrix.sh "$(MATRIX_PYTHONS)" "$(MATRIX_TORCHES)"

messages: $(STAMP) ## bring the translations up to date with the code and compile them
	$(BIN)/python tools/messages.py

known: $(STAMP) ## trace the published architectures again, whose timelines the package brings along (hours)
	$(BIN)/python tools/known_timelines.py

known-page: $(STAMP) ## write build/calculator.html, the page that answers for these architectures in a browser; `make docs` does too
	$(BIN)/python tools/known_page.py

reference: $(STAMP) ## write the pages of commands, settings, Python names and operators from the code
	PYTHONPATH=.:integrations $(BIN)/python tools/reference.py

clean: ## remove what these targets made
	rm -rf $(VENV) .matrix build dist demo-out bench-out bench-published.json .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
