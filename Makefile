# Every target makes what it needs on first use; after that it starts at once.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: quickstart test coverage lint format docs bench results soak package clean

quickstart: .venv/installed
	$(BIN)/constrainx quickstart

test: .venv/dev
	$(BIN)/pytest -n auto $(ARGS)

coverage: .venv/dev
	$(BIN)/pytest -n auto --cov --cov-report=term $(ARGS)

lint: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: .venv/docs
	$(BIN)/mkdocs build --strict

bench: .venv/dev
	$(BIN)/python -m benchmarks $(ARGS)

# The tables and pictures of docs/recipes; about an hour on two cores.
results: .venv/dev
	$(BIN)/python docs/results/make.py

# The table of killed and resumed runs in docs/training.md; about an hour on two cores.
soak: .venv/dev
	$(BIN)/python docs/results/soak.py $(ARGS)

# What is released, tried as a user would: in an environment that has nothing else.
package: .venv/bin/python
	rm -rf dist .venv-package
	$(BIN)/pip install --quiet --disable-pip-version-check build twine
	$(BIN)/python -m build --outdir dist
	$(BIN)/twine check --strict dist/*
	$(PYTHON) -m venv .venv-package
	.venv-package/bin/pip install --quiet --disable-pip-version-check dist/*.whl
	cd dist && ../.venv-package/bin/constrainx quickstart --epochs 3 --out quickstart

clean:
	rm -rf .venv .venv-package dist site results runs .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage*

.venv/bin/python:
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "constrainx needs Python 3.11 or newer: make PYTHON=python3.11"'
	$(PYTHON) -m venv .venv

.venv/installed: .venv/bin/python pyproject.toml
	$(BIN)/pip install --quiet --disable-pip-version-check --editable .
	touch $@

.venv/dev: .venv/bin/python pyproject.toml
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@ .venv/installed

.venv/docs: .venv/bin/python pyproject.toml
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[docs]'
	touch $@ .venv/installed
