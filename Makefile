# Every target is short enough to read. What is installed stands in .venv; after that nothing needs the network.

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
export OMP_NUM_THREADS = 1
TORCH := 2.13.0 # pinned and first: any other range may bring gigabytes of CUDA libraries

.PHONY: try test full trl lint docs bench clean

try: .venv/.core  ## the main job on an embedded default, in seconds
	$(BIN)/foretune estimate --model Qwen/Qwen2.5-7B --method qlora --gpu "RTX 3060 12GB" --offline

test: lint  ## everything that must hold, without the network once .venv is there
	$(BIN)/pytest -n 2 -q -m "not full and not gpu and not trl"

full: lint .venv/.smollm2  ## the same with the full counts and a real small model
	$(BIN)/pytest -n 2 -q -m "not gpu and not trl"

trl: .venv/.dev  ## the trace of SFTTrainer against TRL itself, which is fetched
	$(PIP) trl==1.16.0
	$(BIN)/pytest -q -m trl tests/runtime/test_trl_truth.py tests/foreign/test_trl_truth.py

lint: .venv/.dev
	$(BIN)/ruff check --quiet
	$(BIN)/ruff format --check --quiet
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache > .venv/lint.log || { cat .venv/lint.log; exit 1; }
	$(BIN)/deptry src > .venv/lint.log 2>&1 || { cat .venv/lint.log; exit 1; }
	$(BIN)/python scripts/docs.py --check

docs: .venv/.dev  ## regenerate docs/ and the answers in README
	$(BIN)/python scripts/docs.py

bench: .venv/.bench  ## figures that depend on the machine, beside published estimators
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/estimates.py

clean:
	rm -rf .venv build .mypy_cache .ruff_cache .pytest_cache .hypothesis

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/.core: .venv/bin/python pyproject.toml
	$(PIP) -e .
	touch $@

.venv/.bench: .venv/bin/python pyproject.toml
	$(PIP) -e '.[bench]'
	touch $@

.venv/.dev: .venv/bin/python pyproject.toml
	$(PIP) torch==$(TORCH)
	$(PIP) -e '.[dev,train]'
	touch .venv/.core $@

.venv/.smollm2: .venv/.dev tests/smollm2.py # 93 MB, once per machine
	$(BIN)/python tests/smollm2.py
	touch $@
