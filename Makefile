# fedsim: `make demo` and `make test` need nothing before them but Python 3.11+, venv and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DEV_INSTALLED := $(VENV)/.installed-dev
# What an installed wheel is tested with: `constraints-oldest.txt`, or nothing for the newest.
PINS ?= constraints.txt
PIP := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
export FLWR_TELEMETRY_ENABLED = 0
export FLWR_DISABLE_UPDATE_CHECK = 1
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: generate help install demo test test-slow test-wheel test-gpu test-flwr-latest lint lock bench docs clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(INSTALLED): pyproject.toml constraints.txt
	@echo "Setting up $(VENV), once: about 3.2 GB to fetch and 6 GB on disk, most of it torch for"
	@echo "CUDA; two to ten minutes. README.md says how to have torch for CPUs alone: 0.4 GB."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -e '.[all]'
	@touch $@

$(DEV_INSTALLED): $(INSTALLED)
	@echo "Adding the developers' tools to $(VENV): some hundred MB."
	$(PIP) --quiet 'pip>=25.1'  # the first to know dependency groups
	$(PIP) -e '.[all]' --group dev
	@touch $@

install: $(INSTALLED)  ## make .venv once, with what a user needs

demo: $(INSTALLED)  ## train the demo: private federated learning on real digits, under a minute
	$(BIN)/fedsim run experiments/demo.toml --out runs/demo --overwrite

test: $(DEV_INSTALLED)  ## run the tests, on two cores
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-slow: $(DEV_INSTALLED)  ## run what the fast run leaves out: whole federations, audits of planted bugs, most cases
	$(BIN)/python -m pytest -m slow

test-wheel:  ## build the wheel, and run the demo and the fast tests from it alone (PINS=constraints-oldest.txt)
	rm -rf build/wheel && mkdir -p build/wheel/checkout
	$(PYTHON) -m venv build/wheel/venv
	build/wheel/venv/bin/pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir build/wheel .
	build/wheel/venv/bin/pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
	build/wheel/venv/bin/pip install --quiet --disable-pip-version-check $(addprefix -c ,$(PINS)) "$$(ls build/wheel/*.whl)[all]" --group dev
	git archive HEAD | tar -x -C build/wheel/checkout --exclude=fedsim
	cd build/wheel/checkout && ../venv/bin/fedsim run experiments/demo.toml --out runs/demo
	cd build/wheel/checkout && PATH="$(CURDIR)/build/wheel/venv/bin:$$PATH" ../venv/bin/python -m pytest -n 2 --dist worksteal $(addprefix --ignore tests/,test_house.py test_documents.py test_site.py test_doctests.py integration/test_mutations.py)

test-gpu: $(DEV_INSTALLED)  ## run the tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu tests/training tests/integration

test-flwr-latest:  ## run the plug-in's tests with the newest Flower, in an environment of its own
	@test -x .venv-latest/bin/python || $(PYTHON) -m venv .venv-latest
	.venv-latest/bin/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
	.venv-latest/bin/python -m pip install --quiet --disable-pip-version-check --upgrade 'flwr[simulation]' -e '.[all]' --group dev
	.venv-latest/bin/python -m pytest tests/federation tests/deploy tests/integration/test_plugin.py
	.venv-latest/bin/python -m pytest -m slow $(addprefix tests/integration/test_,intruder.py secrets.py federation_faults.py)

generate: $(INSTALLED)  ## write what follows from the code: pyproject.toml's defaults, the reference of settings
	$(BIN)/python docs/generate.py

lint: $(DEV_INSTALLED)  ## ruff, mypy --strict and the import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

lock: $(DEV_INSTALLED)  ## rewrite requirements.lock: what the image installs, with hashes
	printf 'hatchling>=1.25\n' | $(BIN)/uv pip compile pyproject.toml - --constraint constraints.txt --generate-hashes \
	  --python-version 3.11 --no-annotate --no-header --quiet --output-file requirements.lock

docs: $(DEV_INSTALLED)  ## build the documentation's site: build/site/index.html
	$(PIP) --quiet --group docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

bench: $(DEV_INSTALLED)  ## speed and memory beside plain loops, with what is aimed at (ten minutes, all cores free)
	$(BIN)/python -m benchmarks.local
	$(BIN)/python -m benchmarks.convolutions
	$(BIN)/python -m benchmarks.ordinary_models
	$(BIN)/python -m benchmarks.noise
	$(BIN)/python -m benchmarks.example_privacy
	$(BIN)/python -m benchmarks.workers
	$(BIN)/python -m benchmarks.sweeps --times 1
	$(BIN)/python -m benchmarks.population
	$(BIN)/python -m benchmarks.cluster
	$(BIN)/python -m benchmarks.federation

clean:  ## remove the environment, caches and runs
	rm -rf $(VENV) build/wheel runs .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
