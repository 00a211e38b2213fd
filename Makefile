PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet

.PHONY: help run test test-sweep test-rl test-browser test-extras lint typecheck format bench clean

help:  ## what each target does
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

# One stamp a set of extras: with an unchanged pyproject.toml nothing is installed again.
$(VENV)/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -e .
	touch $@

$(VENV)/.installed-test: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -e '.[test]'
	touch $@ $(VENV)/.installed

$(VENV)/.installed-lint: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -e '.[test,lint]'
	touch $@ $(VENV)/.installed $(VENV)/.installed-test

run: $(VENV)/.installed  ## replay the bundled workload under every policy, print the table, write out/compare/report.md
	$(BIN)/rlhfless compare out=out/compare

test: $(VENV)/.installed-test  ## the whole test suite
	$(BIN)/python -m pytest -n auto $(PYTEST_ARGS)

# What needs more than `make test` installs. Of torch, a version that has a build for the CPU.
$(VENV)/.installed-extras: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch==2.13.0
	$(PIP) -e '.[test,sweep,ray,rl,browser]'
	touch $@ $(VENV)/.installed $(VENV)/.installed-test

test-sweep: $(VENV)/.installed-extras  ## sweeps through joblib, submitit and a local Ray cluster, and the Optuna search
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m slow tests/test_sweep.py

test-rl: $(VENV)/.installed-extras  ## training with Stable-Baselines3
	$(BIN)/python -m pytest $(PYTEST_ARGS) -k ppo tests/test_learner.py

test-browser: $(VENV)/.installed-extras  ## the HTML report in headless Chromium (Debian: apt-get install chromium)
	$(BIN)/python -m pytest $(PYTEST_ARGS) tests/test_browser.py

test-extras: test-sweep test-rl test-browser  ## all three

lint: $(VENV)/.installed-lint typecheck  ## ruff, mypy on the built package, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

# Type checkers do not follow the folder map of an editable install: check the package as it is built.
typecheck: $(VENV)/.installed-lint
	rm -rf build
	$(PIP) --no-deps --target build/typecheck .
	MYPYPATH=build/typecheck $(BIN)/mypy --config-file pyproject.toml -p rlhfless.traces -p rlhfless.models \
		-p rlhfless.policies -p rlhfless.solver -p rlhfless.scripts

format: $(VENV)/.installed-lint  ## let ruff rewrite the layout
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.installed-test  ## how fast the replay and the planning are
	$(BIN)/python tests/bench_replay.py
	$(BIN)/python tests/bench_planning.py
	$(BIN)/python tests/bench_solver.py

clean:  ## remove everything that was made here
	rm -rf $(VENV) build dist out outputs multirun *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
