# All targets except help and clean first set up a virtual environment with pinned packages
# (requirements/) and the compiled extension. To use an existing environment without downloads:
#   make test PYTHON=python3 VENV=
PYTHON ?= python3
VENV ?= .venv

# Builds CUDA kernels for the GPUs that torch finds, and none without a GPU. Without this setting a
# default list of chips is built, which takes up to 13 minutes. See building/chips.py.
export TORCH_CUDA_ARCH_LIST ?= native

ifeq ($(strip $(VENV)),)
  RUN := $(PYTHON)
  CLANG_FORMAT := clang-format
  packages =
else
  RUN := $(VENV)/bin/python
  CLANG_FORMAT := $(VENV)/bin/clang-format
  # Stamp file: requirements/$(1).txt is installed.
  packages = $(VENV)/.$(1)
  COMMAND := $(VENV)/bin/transformer-kernels
endif

# One process per core if pytest-xdist is installed.
PYTEST = $(RUN) -m pytest $$($(RUN) -c 'import xdist' 2>/dev/null && printf '%s ' -n auto --dist worksteal)

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-rest durations fuzz oldest hub test-hub bench gpu gpu-grid gpu-tune \
  lint docs build extension emulator wheel test-wheel clean

help:
	@echo "make demo      tables, pictures and a small trained GPT-2, in build/demo"
	@echo "make test      a sample of the tests with every backend and option, in a few minutes"
	@echo "make test-all  all tests; SHARE=2/8: of those beyond make test, an eighth"
	@echo "make durations  tests/durations.json, which holds make test to its budget"
	@echo "make fuzz      random calls; SECONDS=60 SEED=1 ONLY=cpu, SANITIZE=1"
	@echo "make bench     the benchmarks"
	@echo "make hub       kernels for HuggingFace's library \`kernels\`, in build/hub"
	@echo "make gpu       on a CUDA device: build, GPU tests, benchmarks; OUT=DIR; WITH=rehearse on"
	@echo "               a CPU, \"built\" without the build, \"sanitizer\" with compute-sanitizer"
	@echo "make gpu-grid  on a CUDA device: the benchmark suite gpu to its end, recorded"
	@echo "make gpu-tune  on a CUDA device: tiles of the kernels against the present ones, in turns;"
	@echo "               ONLY=NAMES, OUT=DIR"
	@echo "make wheel     the wheel, for every Python, and the source archive, in dist"
	@echo "make test-wheel  the tests of \`make test\` with the wheel and $(PYTHON), in a fresh"
	@echo "               environment; TORCH=2.11.0 with that torch instead of the newest"
	@echo "make docs      the site, in build/site"
	@echo "make lint      ruff, mypy, clang-format and lengths of functions"
	@echo "make build     the environment and the compiled extension"
	@echo "make clean     remove what was built; $(VENV) stays"
	@echo "Options: PYTHON=$(PYTHON), VENV=$(VENV) (empty: use PYTHON as it is, without downloads),"
	@echo "TORCH_CUDA_ARCH_LIST=$(TORCH_CUDA_ARCH_LIST) (\"8.0;9.0+PTX\", native or none)"

demo: build
	$(RUN) -m transformer_kernels demo --out build/demo

# The quick tier: see tests/support/tiers.py. HOLD=1 also fails where it takes longer than tests/budget.toml
# allows.
HOLD ?=
test: $(call packages,test) build emulator
	$(PYTEST) tests --tier quick $(if $(HOLD),--hold-elapsed)

test-all: test test-rest

# The tests that `make test` leaves out. SHARE=2/8 runs an eighth of them: see tests/support/shares.py.
SHARE ?=
share = $(if $(SHARE),--share $(SHARE))
test-rest: $(call packages,test-all) build emulator oldest test-hub
	$(PYTEST) tests --tier rest $(share)
	$(MAKE) fuzz SEED=1

# Writes tests/durations.json: of the quick tier and new tests, or with TIER=rest of all others.
TIER ?= new
durations: $(call packages,test) build emulator
	$(PYTEST) tests --tier $(TIER) --record-durations

# Random calls. SANITIZE=1 builds the extension with AddressSanitizer and UBSan, in build/sanitized.
SECONDS ?= 60
fuzz: $(call packages,test) build
	$(RUN) -m tests.fuzz --seconds $(SECONDS) $(if $(SEED),--seed $(SEED)) \
	  $(if $(ONLY),--only $(ONLY)) $(if $(SANITIZE),--sanitize)

# Compiles the Triton kernels with the oldest supported Triton, in a separate folder: many GPU
# machines have older versions than the test environment. Chips of NVIDIA only, one for each core.
oldest: $(call packages,test) build build/oldest
	PYTHONPATH=build/oldest $(PYTEST) tests/kernels/triton/test_compilation.py -k "option and not gfx9"

# Kernels for HuggingFace's library `kernels`; see building/hub.py.
hub: $(call packages,demo) build
	@$(RUN) -m building.hub

# Their tests, with the packages that load them in a separate folder: transformers accepts one minor
# version of `kernels` only.
test-hub: $(call packages,test-all) hub build/hub_packages
	PYTHONPATH=build/hub_packages $(PYTEST) tests/integrations/hub $(share)

bench: $(call packages,test) build
	$(RUN) -m pytest benchmarks

# Ten minutes at most. Logs and rows are written to OUT, by default benchmarks/results/<device>.
OUT ?=
WITH ?=
gpu: $(call packages,test)
	@$(RUN) -m benchmarks.runner.gpu $(if $(OUT),--out "$(OUT)") $(WITH:%=--%)

gpu-grid: $(call packages,test) build
	$(RUN) -m benchmarks gpu --record -W default --time-limit inf

# See docs/hopper.md, section 8.
gpu-tune: $(call packages,test) build
	@$(RUN) -m benchmarks.tuning cuda $(if $(ONLY),--only $(ONLY)) $(if $(OUT),--out "$(OUT)")

# CUDA kernels as TORCH_CUDA_ARCH_LIST says: docs/install.md.
wheel: $(call packages,wheel) build
	@$(RUN) -m building.wheel

# Needs no environment: building/wheel_tests.py sets up its own, in build/wheel_tests.
TORCH ?=
test-wheel: wheel
	$(PYTHON) -m building.wheel_tests --torch "$(TORCH)"

lint: $(call packages,lint) build
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check
	$(RUN) -m mypy
	$(RUN) -m building.function_lengths
	find csrc tests benchmarks -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' | xargs $(CLANG_FORMAT) --dry-run --Werror

# Strict: broken links and public names without a reference fail.
docs: $(call packages,docs)
	@NO_MKDOCS_2_WARNING=1 $(RUN) -m building.site

build: extension $(COMMAND)

# ninja rebuilds only outdated objects; without any, this takes a second.
extension: $(call packages,demo)
	@echo "== the compiled extension"
	@$(RUN) setup.py --quiet build_ext --inplace

# The CUDA kernels for the CPU: see docs/emulator.md.
emulator: extension
	@$(RUN) -m tests.support.emulator

# pip compiles bytecode in one process; compileall uses all cores. Errors are ignored, because some
# packages contain templates that do not compile.
$(VENV)/.%: requirements/%.txt requirements/versions.txt | $(VENV)/bin/python
	@echo "== packages of $<, into $(VENV)"
	@$(PYTHON) -m pip --python $(VENV)/bin/python install -qq --no-compile --requirement $<
	@$(RUN) -m compileall -qq -j 0 $(VENV)/lib >/dev/null || true
	@touch $@

# --without-pip, because a system's Python may lack ensurepip. Its own pip installs the packages.
$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit( \
	  f"Python 3.11 or later is needed, and this is {sys.version}: make PYTHON=python3.12")'
	@$(PYTHON) -m venv --without-pip $(VENV)

build/oldest: requirements/oldest.txt
build/hub_packages: requirements/hub.txt
build/oldest build/hub_packages:
	@echo "== packages of $<, into $@"
	@rm -rf $@
	@$(PYTHON) -m pip install -qq --no-deps --target $@ --requirement $<
	@touch $@

# An editable install, for `transformer-kernels` and for imports from other folders.
$(VENV)/bin/transformer-kernels: pyproject.toml | extension
	@echo "== transformer_kernels, editable, into $(VENV)"
	@$(PYTHON) -m pip --python $(VENV)/bin/python install -qq --no-build-isolation --no-deps \
	  --editable .
	@touch $@

clean:
	rm -rf build dist transformer_kernels.egg-info transformer_kernels/_C*.so
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find transformer_kernels tests benchmarks -name __pycache__ -type d -exec rm -rf {} +
