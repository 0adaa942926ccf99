# Every target is short enough to read. What is installed stands in .venv; after that nothing needs the network.

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
export OMP_NUM_THREADS = 1
TORCH := 2.13.0 # pinned and first: any other range may bring gigabytes of CUDA libraries

.PHONY: try test full trl wheel lint docs site bench clean

try: .venv/.train  ## the whole journey on this CPU, from a plan to a trained adapter, in minutes
	rm -rf build/first-steps
	$(BIN)/foretune quickstart build/first-steps

test: lint  ## everything that must hold, without the network once .venv is there
	$(BIN)/pytest -n 2 -q -m "not full and not gpu and not trl and not network"

full: lint .venv/.smollm2  ## the same with the full counts and a real small model
	$(BIN)/pytest -n 2 -q -m "not gpu and not trl and not network"

trl: .venv/.dev  ## the trace of SFTTrainer against TRL itself, which is fetched
	$(PIP) trl==1.16.0
	$(BIN)/pytest -q -m trl tests/runtime/test_trl_truth.py tests/foreign/test_trl_truth.py

wheel: .venv/.dev  ## a recipe in an empty environment that its own train.sh sets up, which fetches libraries
	$(BIN)/pytest -q -m network tests/recipe/test_wheel.py

lint: .venv/.dev
	$(BIN)/ruff check --quiet
	$(BIN)/ruff format --check --quiet
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache > .venv/lint.log || { cat .venv/lint.log; exit 1; }
	$(BIN)/deptry src > .venv/lint.log 2>&1 || { cat .venv/lint.log; exit 1; }
	$(BIN)/python scripts/docs.py --check
	$(BIN)/python scripts/site.py > .venv/lint.log 2>&1 || { cat .venv/lint.log; exit 1; }

docs: .venv/.dev  ## regenerate docs/ and what the commands in all pages answer
	$(BIN)/python scripts/docs.py

site: .venv/.docs  ## the pages of docs/ as a site in build/site, strictly
	$(BIN)/python scripts/site.py

bench: .venv/.bench  ## figures that depend on the machine, beside published estimators
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/estimates.py

clean:
	rm -rf .venv build .mypy_cache .ruff_cache .pytest_cache .hypothesis

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/.train: .venv/bin/python pyproject.toml
	$(PIP) torch==$(TORCH)
	$(PIP) -e '.[train]'
	touch $@

.venv/.bench: .venv/bin/python pyproject.toml
	$(PIP) -e '.[bench]'
	touch $@

.venv/.dev: .venv/bin/python pyproject.toml
	$(PIP) torch==$(TORCH)
	$(PIP) -e '.[dev,docs,train]'
	touch .venv/.docs .venv/.train $@

.venv/.docs: .venv/bin/python pyproject.toml
	$(PIP) -e '.[docs]'
	touch $@

.venv/.smollm2: .venv/.dev tests/smollm2.py # 93 MB, once per machine
	$(BIN)/python tests/smollm2.py
	touch $@
