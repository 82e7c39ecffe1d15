# make demo: train on real text, on two CPU processes.   make test: lint, types and tests.   make test-sim: see below.
# Both make .venv where it is absent; a fresh machine needs Python 3.11, pip and gcc.
PYTHON ?= python3.11
BIN := .venv/bin
WORKERS ?= 2
DEMO ?=

.PHONY: demo test lint types tests test-sim install clean

demo: install
	$(BIN)/python examples/demo.py $(DEMO)

test: install lint types tests

lint:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types:
	$(BIN)/pyright

tests:
	$(BIN)/pytest -n $(WORKERS) --dist loadfile --ignore-glob='*/test_sim*'

# The simulated accelerator: needs g++ and Python.h as well, and compiles for a minute or two the first time on a machine.
test-sim: install
	$(BIN)/pytest -n $(WORKERS) --dist loadfile tests/test_sim*.py

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf .venv runs datasets .pytest_cache .ruff_cache
