# make demo: train on real text, on two CPU processes.   make test: lint, types and tests.   make test-sim, test-xla,
# test-tpu, test-kernels, test-ray: see below.
# Both make .venv where it is absent; a fresh machine needs Python 3.11, pip and gcc.
PYTHON ?= python3.11
BIN := .venv/bin
TORCHTPU := .venv-torchtpu/bin
WORKERS ?= 2
DEMO ?=

.PHONY: demo test lint types tests test-kernels test-sim test-xla test-tpu sample-xla sample-tpu test-ray toy parity faults kernels certify mutants certify-all install clean

demo: install
	$(BIN)/python examples/demo.py $(DEMO)

test: install lint types tests

lint:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types:
	$(BIN)/pyright

tests:
	$(BIN)/pytest -n $(WORKERS) --dist loadfile --ignore-glob='*/test_sim*' -m "not full"

# Every kernel interpreted, and compiled ahead of time for every chip; make test does the first and samples the second.
test-kernels: install
	$(BIN)/python -m pytest -n $(WORKERS) tests/kernels

# docs/kernels.md: what every kernel takes on every chip.
kernels: install
	$(BIN)/python -m tests.kernels

# The simulated accelerator: needs g++ and Python.h as well, and compiles for a minute or two the first time on a machine.
test-sim: install
	$(BIN)/pytest -n $(WORKERS) --dist loadfile tests/test_sim*.py -m "not full"

# docs/parity.md: what every layout does to the numbers. Rows that this machine cannot run keep their last figures.
parity: install
	$(BIN)/python -m tests.parity

# docs/faults.md: what becomes of a run when something goes wrong in it.
faults: install
	$(BIN)/python -m tests.faults

# The CPU backend at every level that one machine can show; the report goes to docs/evidence.
certify: install
	rm -rf docs/evidence/cpu
	$(BIN)/accelbridge conform certify --backend cpu --level core,train,fp8,offload --out docs/evidence/cpu
	$(BIN)/accelbridge conform verify docs/evidence/cpu

# The conformance suite's self-proof: every test against every defect that it must see.
mutants: install
	$(BIN)/accelbridge conform mutants --jobs $(WORKERS) --out docs/evidence/mutants.md

# A vendor outside the core: both wheels, in an environment and a folder that hold nothing else, certified at core.
toy: install
	PYTHON=$(PYTHON) examples/certify-toy.sh

# Everything in full.
certify-all: test test-kernels test-sim test-xla test-tpu test-ray parity faults certify mutants
	$(BIN)/pytest -m full

# The XLA backend on virtual CPU devices, and the core under the oldest torch that it supports; an environment of its own.
# Steps are compiled for TPUs that are not here by the compiler in .venv-tpu (accelbridge estimate --compile-for).
test-xla: .venv-xla/installed .venv-tpu/installed
	ACCELBRIDGE_TPU_COMPILER_PYTHON=$(CURDIR)/.venv-tpu/bin/python .venv-xla/bin/python -m pytest backends/xla/tests
	.venv-xla/bin/python -m pytest -n $(WORKERS) --dist loadfile --ignore-glob='*/test_sim*' -m "not full"

# What .ci/run takes of test-xla: facts, what is refused, what a step does.
sample-xla: .venv-xla/installed
	.venv-xla/bin/python -m pytest $(patsubst %,backends/xla/tests/test_%.py,facts watch traps)

# The same of test-tpu: facts, and one process that trains; not in .ci/run yet.
sample-tpu: .venv-torchtpu/installed
	TORCH_DEVICE_BACKEND_AUTOLOAD=0 $(TORCHTPU)/python -m pytest -k "torchtpu_facts or one_process" backends/xla/tests/test_torchtpu*.py

.venv-xla/installed: pyproject.toml constraints-xla.txt
	test -x .venv-xla/bin/python || $(PYTHON) -m venv .venv-xla
	.venv-xla/bin/pip install --quiet --disable-pip-version-check -c constraints-xla.txt -e ".[dev,xla]"
	touch $@

# TorchTPU on this machine's CPU, by XLA's CPU client as a PJRT plugin, in an environment of its own. libtpu is not in it:
# torch_tpu comes without what it asks for, and must not be loaded by `import torch`, which without libtpu ends the process.
HOSTED := absl-py frozendict immutabledict portpicker pyzmq tensorboard
test-tpu: .venv-torchtpu/installed
	TORCH_DEVICE_BACKEND_AUTOLOAD=0 $(TORCHTPU)/python -m pytest backends/xla/tests/test_torchtpu*.py

.venv-torchtpu/installed: pyproject.toml constraints-torchtpu.txt
	test -x $(TORCHTPU)/python || $(PYTHON) -m venv .venv-torchtpu
	$(TORCHTPU)/pip install --quiet --disable-pip-version-check -c constraints-torchtpu.txt --no-deps torch_tpu xla-cpu-pjrt
	$(TORCHTPU)/pip install --quiet --disable-pip-version-check -c constraints-torchtpu.txt -e ".[dev]" $(HOSTED)
	touch $@

# libtpu, whose compiler needs no TPU; asked in a process of its own, since it comes with jax and not with torch_xla.
.venv-tpu/installed: constraints-tpu.txt
	test -x .venv-tpu/bin/python || $(PYTHON) -m venv .venv-tpu
	.venv-tpu/bin/pip install --quiet --disable-pip-version-check -r constraints-tpu.txt
	touch $@

# Real Ray on this machine, in an environment of its own.
test-ray: .venv-ray/installed
	.venv-ray/bin/python -m pytest tests/test_ray.py

.venv-ray/installed: pyproject.toml constraints.txt
	test -x .venv-ray/bin/python || $(PYTHON) -m venv .venv-ray
	.venv-ray/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,ray]"
	touch $@

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf .venv .venv-xla .venv-tpu .venv-torchtpu .venv-ray runs datasets .pytest_cache .ruff_cache
