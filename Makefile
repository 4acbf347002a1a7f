# `make demo` and `make test` set everything up in .venv; nothing else is touched.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO := demo-run
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test suite test-long test-random test-gpu check format docs setup release clean

demo: $(VENV)/.ready
	$(BIN)/flatout demo --out $(DEMO)
	@echo '(first: . $(BIN)/activate)'

# mypy has one process, so the suite begins beside it
test: $(VENV)/.ready
	$(MAKE) --no-print-directory -j 2 check suite

suite: $(VENV)/.ready
	$(BIN)/python -m pytest -n 2 --dist worksteal

# what takes longer than a change should wait: the fuzz, every architecture, every planted bug
test-long: $(VENV)/.ready
	$(BIN)/python -m pytest -n 2 --dist worksteal -m exhaustive

# in another order each time; SEED=... repeats the one that the command shows
test-random: SEED ?= $(shell date +%s)
test-random: $(VENV)/.ready
	$(BIN)/python -m pytest -n 2 --dist worksteal -p randomly --randomly-seed=$(SEED)

test-gpu: $(VENV)/.ready-gpu
	$(BIN)/python benchmarks/gpu_suite.py

check: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy flatout $(filter-out %/names/hypersloth.py %/example_training_config.py,$(wildcard migrate/flatout_migrate/*.py migrate/flatout_migrate/*/*.py))

format: $(VENV)/.ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# the documentation site of all versions that were built here, in build/site
docs: $(VENV)/.ready
	$(BIN)/python docs/reference/generate.py
	$(BIN)/zensical build --strict
	$(BIN)/python docs/reference/versions.py build/docs build/site

setup: $(VENV)/.ready

# sdists and wheels of this commit, checked, in dist/; it uploads nothing
release:
	@$(PYTHON) make_release.py

$(VENV)/.ready: pyproject.toml migrate/pyproject.toml constraints.txt make_venv.py
	@$(PYTHON) make_venv.py $(VENV) dev
	@touch $@

$(VENV)/.ready-gpu: $(VENV)/.ready
	@$(PYTHON) make_venv.py $(VENV) gpu
	@touch $@

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache $(DEMO) demo-images demo-rl build dist
