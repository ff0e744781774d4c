# Every target sets up what it needs in .venv, once. PYTHON: any Python 3.11 or newer. PIP_FLAGS: for instance
#   make demo PIP_FLAGS='--extra-index-url https://download.pytorch.org/whl/cpu'
# where the plain index serves only the CUDA build of torch.
PYTHON ?= python3
PIP_FLAGS ?=
PYTEST_FLAGS ?=
# So many tests run at once: of those with ranks each would use three quarters of two cores.
TEST_PROCESSES ?= 2
IN_PARALLEL = -n $(TEST_PROCESSES) --dist worksteal
DEMO_FLAGS ?=
EXAMPLE_FLAGS ?=
N ?= 100
SEED ?= 0
MATRIX ?= 2.11.0 2.15.0
# The Triton that a torch was released with.
TRITON_2.11.0 := triton==3.6.0
TRITON_2.15.0 := triton
# What depends on torch itself: ranks, kernels, and all that it keeps private.
MATRIX_TESTS := tests/dist $(patsubst %,tests/graph/test_%.py,kernels compat interpreter plan_cache bench_compile)

EXAMPLES := $(patsubst examples/%.py,example-%,$(filter-out examples/common.py,$(wildcard examples/*.py)))

BIN := .venv/bin
INSTALLED := .venv/.installed
DOCS_INSTALLED := .venv/.docs-installed
MATRIX_RUNS := $(MATRIX:%=matrix-%)

# Two ranks share a small machine: one compute thread each.
export OMP_NUM_THREADS ?= 1

.PHONY: help demo examples $(EXAMPLES) check test mutants fuzz fuzz-readers gpu-test lint types docs pictures bench bench-gpu matrix clean $(MATRIX_RUNS)

help:
	@echo 'make demo    train a small language model on 2 ranks: eager FSDP2 and graphshard side by side'
	@echo 'make examples  the scripts of examples/ on 2 ranks: plain FSDP2, accelerate, Fabric, Lightning, torchtitan'
	@echo 'make check   lint, types, and the tests that need no other rank'
	@echo 'make test    run the tests'
	@echo 'make mutants deliberate breaks, each of which a test has to notice'
	@echo 'make fuzz    $(N) random training jobs from SEED=$(SEED), compared with eager FSDP2 bit for bit'
	@echo 'make fuzz-readers  $(N) hostile inputs from SEED=$(SEED) for each reader of files and messages'
	@echo 'make gpu-test  the tests that need a CUDA GPU, with $(PYTHON) as it is: it has torch, triton and pytest'
	@echo 'make lint    ruff: rules and format; import-linter: the order of rooms'
	@echo 'make types   mypy --strict'
	@echo 'make docs    the site, in build/docs; every warning, dead link and message without an explanation is an error'
	@echo 'make pictures  the pictures of the site, from steps of the demo'"'"'s model'
	@echo 'make bench   host overhead, cost of choosing programs, the first step by phase, training steps, schedules on paper'
	@echo 'make bench-gpu  copies and overlap on one CUDA GPU, with $(PYTHON), too: every claim in one table, nine minutes'
	@echo 'make matrix  the tests that depend on torch on torch $(MATRIX), each in a .venv-VERSION of its own'

demo: $(INSTALLED)
	$(BIN)/python -m torch.distributed.run --standalone --nproc-per-node 2 -m graphshard.demo $(DEMO_FLAGS)

examples: $(EXAMPLES)

$(EXAMPLES): example-%: $(INSTALLED)
	@echo '=== $* ==='
	$(BIN)/python -m torch.distributed.run --standalone --nproc-per-node 2 examples/$*.py $(EXAMPLE_FLAGS)

check: lint types
	$(BIN)/python -m pytest tests/graph tests/kernels $(IN_PARALLEL) $(PYTEST_FLAGS)

test: $(INSTALLED)
	$(BIN)/python -m pytest tests $(IN_PARALLEL) $(PYTEST_FLAGS)

mutants: $(INSTALLED)
	$(BIN)/python -m tests.mutations

fuzz: $(INSTALLED)
	$(BIN)/python -m tests.fuzz --cases $(N) --seed $(SEED)

fuzz-readers: $(INSTALLED)
	PYTHONPATH=tests/graph $(BIN)/python -m tests.fuzz.readers --inputs $(N) --seed $(SEED)

# gpu-test and bench-gpu, not in .venv: a CUDA build of torch is there already, or there is nothing to run.
gpu-test:
	PYTHONPATH=. $(PYTHON) -m pytest tests/gpu $(PYTEST_FLAGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo --no-cache

types: $(INSTALLED)
	$(BIN)/mypy

docs: $(DOCS_INSTALLED)
	$(BIN)/python -m docs.tools.troubleshooting --check
	$(BIN)/python -m sphinx --builder html --fail-on-warning --keep-going --fresh-env --quiet docs build/docs
	@echo 'build/docs/index.html'

pictures: $(INSTALLED)
	$(BIN)/python -m torch.distributed.run --standalone --nproc-per-node 2 -m docs.tools.pictures docs/pictures

bench: $(INSTALLED)
	$(BIN)/python -m bench.overhead
	$(BIN)/python -m bench.dispatch
	$(BIN)/python -m bench.compile
	$(BIN)/python -m bench.step
	$(BIN)/python -m bench.schedule

bench-gpu:
	$(PYTHON) -m bench.gpu

# MATRIX_PYTHON_2_11_0=/path/to/python runs that version's tests with an interpreter that has it and the extra "test".
matrix: $(MATRIX_RUNS)

matrix_python = $(MATRIX_PYTHON_$(subst .,_,$(1)))

.SECONDEXPANSION:
$(MATRIX_RUNS): matrix-%: $$(if $$(call matrix_python,$$*),,.venv-$$*/.installed)
	@echo '=== torch $* ==='
	PYTHONPATH=. $(or $(call matrix_python,$*),.venv-$*/bin/python) -m pytest $(MATRIX_TESTS) $(IN_PARALLEL) $(PYTEST_FLAGS)

define CREATE
@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("graphshard needs Python 3.11 or newer; \
this is " + sys.version.split()[0] + ". Choose one: make PYTHON=/path/to/python3.11 ...")'
$(PYTHON) -m venv $(@D)
endef

$(INSTALLED): pyproject.toml constraints.txt
	$(CREATE)
	$(@D)/bin/python -m pip install $(PIP_FLAGS) --constraint constraints.txt --editable '.[test,dev,examples]'
	$(@D)/bin/python -m pip install $(PIP_FLAGS) --constraint constraints.txt --no-deps torchtitan
	@touch $@

$(DOCS_INSTALLED): $(INSTALLED)
	$(BIN)/python -m pip install $(PIP_FLAGS) --constraint constraints.txt --editable '.[docs]'
	@touch $@

$(MATRIX:%=.venv-%/.installed): .venv-%/.installed: pyproject.toml
	$(CREATE)
	$(@D)/bin/python -m pip install $(PIP_FLAGS) 'torch==$*' $(TRITON_$*) --editable '.[test]'
	@touch $@

clean:
	rm -rf .venv $(MATRIX:%=.venv-%) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
