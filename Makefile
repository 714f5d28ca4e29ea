# Every target but help and clean sets up first: a virtual environment with pinned packages, and the
# compiled extension. In an environment that is already prepared, and without any download:
#   make test PYTHON=python3 VENV=
PYTHON ?= python3
VENV ?= .venv

ifeq ($(strip $(VENV)),)
  RUN := $(PYTHON)
  CLANG_FORMAT := clang-format
else
  RUN := $(VENV)/bin/python
  CLANG_FORMAT := $(VENV)/bin/clang-format
  PACKAGES := $(VENV)/.packages
  COMMAND := $(VENV)/bin/transformer-kernels
endif

# One process a core, where pytest-xdist is installed.
PYTEST = $(RUN) -m pytest $$($(RUN) -c 'import xdist' 2>/dev/null && printf '%s %s' -n auto)

.DEFAULT_GOAL := help
.PHONY: help demo test oldest bench gpu lint build extension clean

help:
	@echo "make demo    tables, pictures and a small trained generator, in build/demo"
	@echo "make test    the tests"
	@echo "make oldest  the Triton kernels, compiled by the oldest Triton that is supported"
	@echo "make bench   the benchmarks"
	@echo "make gpu     on a CUDA device: build, GPU tests, compute-sanitizer, benchmark; OUT=DIR"
	@echo "make lint    ruff, mypy and clang-format"
	@echo "make build   the environment and the compiled extension"
	@echo "make clean   remove what was built; $(VENV) stays"
	@echo "Options: PYTHON=$(PYTHON), VENV=$(VENV) (empty: use PYTHON as it is, without downloads)"

demo: build
	$(RUN) -m transformer_kernels demo --out build/demo

test: build
	$(PYTEST) tests

# Beside the environment: GPUs live with older versions than the tests are run with.
oldest: build build/oldest
	PYTHONPATH=build/oldest $(PYTEST) tests/triton/test_compilation.py

bench: build
	$(RUN) -m pytest benchmarks

# Ten minutes at most. Logs and rows go to OUT, which is benchmarks/results/<device> unless given.
OUT ?=
gpu: $(PACKAGES)
	@$(RUN) -m benchmarks.gpu $(if $(OUT),--out "$(OUT)")

lint: build
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check
	$(RUN) -m mypy
	find csrc tests -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' | xargs $(CLANG_FORMAT) --dry-run --Werror

build: extension $(COMMAND)

# ninja knows what is out of date; when nothing is, this takes a second.
extension: $(PACKAGES)
	@echo "== the compiled extension"
	@$(RUN) setup.py --quiet build_ext --inplace

# --without-pip, because a system's Python may lack ensurepip; its own pip fills the environment.
$(VENV)/.packages: requirements/dev.txt
	@echo "== $(VENV), with the packages of requirements/dev.txt"
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit( \
	  f"Python 3.11 or later is needed, and this is {sys.version}: make PYTHON=python3.12")'
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv --without-pip $(VENV)
	$(PYTHON) -m pip --python $(VENV)/bin/python install --requirement requirements/dev.txt
	@touch $@

build/oldest: requirements/oldest.txt
	@echo "== $@, with the packages of $<"
	@rm -rf $@
	$(PYTHON) -m pip install --no-deps --target $@ --requirement $<
	@touch $@

# An editable install, for `transformer-kernels` and for imports from other folders.
$(VENV)/bin/transformer-kernels: pyproject.toml | extension
	@echo "== transformer_kernels, editable, in $(VENV)"
	@$(PYTHON) -m pip --python $(VENV)/bin/python install --quiet --no-build-isolation --no-deps \
	  --editable .
	@touch $@

clean:
	rm -rf build dist transformer_kernels.egg-info transformer_kernels/_C*.so
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find transformer_kernels tests benchmarks -name __pycache__ -type d -exec rm -rf {} +
