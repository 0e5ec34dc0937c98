# Every command sets itself up: it needs Python 3.11 or newer, make and a package index.

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?=
WORKERS ?= 2
ARGS ?=
INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test test-fast test-rest test-kernels test-slow test-exhaustive fuzz torture check bench docs clean

help: ## Show the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-15s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo 'PYTHON=... chooses the interpreter, ARGS="..." is passed on, WORKERS=... is the number of test processes.'

demo: $(VENV)/.demo-installed ## Train a small model and write its reports, without an account or a server
	@$(BIN)/gradtrack demo $(ARGS)

test: $(VENV)/.all-installed ## Run the tests
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

# Together these two run what `make test` runs, each test once.
LEFT := (slow or exhaustive)
test-fast: $(VENV)/.all-installed ## Run the tests that start no process and take no seconds (about a minute)
	@$(BIN)/python -m pytest -m 'not (process or long) and not $(LEFT)' -n $(WORKERS) --dist worksteal $(ARGS)

test-rest: $(VENV)/.all-installed ## Run the tests that test-fast leaves out, but for the slow ones
	@$(BIN)/python -m pytest -m '(process or long) and not $(LEFT)' -n $(WORKERS) --dist loadfile $(ARGS)

# The laws on more examples are left to the other slow tests: test-rest has them on fewer.
test-kernels: $(VENV)/.all-installed ## Run the slow tests of the engines: bounds checks, machine code, many elements
	@$(BIN)/python -m pytest -m slow -k 'not more_examples' -n $(WORKERS) --dist worksteal tests/gradients $(ARGS)

# Ranks want the machine for themselves; the other tests share nothing.
# pytest ends with 5 when no test was selected.
ALONE := tests/distributed
test-slow: $(VENV)/.all-installed ## Run the slow tests: real servers under faults, browsers, distributed runs
	@$(BIN)/python -m pytest -m slow -n $(WORKERS) $(ALONE:%=--ignore %) $(ARGS) || { code=$$?; test $$code -eq 5 || exit $$code; }
	@$(BIN)/python -m pytest -m slow $(ALONE) $(ARGS) || { code=$$?; test $$code -eq 5 || exit $$code; }

EXHAUSTIVE := tests/analyzers/flow/test_loss_scale.py $(wildcard tests/faults/test_every_*.py)
test-exhaustive: $(VENV)/.all-installed ## Run for every case what the slow tests run for some (an hour and a half)
	@$(BIN)/python -m pytest -m exhaustive -n $(WORKERS) $(EXHAUSTIVE) $(ARGS)

EXAMPLES ?= 20000
fuzz: $(VENV)/.all-installed ## Read run directories with mutated files; EXAMPLES=... is their number for each file
	@GRADTRACK_FUZZ_EXAMPLES=$(EXAMPLES) $(BIN)/python -m pytest -m '' -n $(WORKERS) tests/faults/test_fuzz_readers.py $(ARGS)

SECONDS ?= 60
SEED ?= 0
torture: $(VENV)/.all-installed ## Kill and interrupt trainings and fail their disks, for SECONDS=...; SEED=... SECONDS=0 repeats one round
	@$(BIN)/python -m benchmarks.faults --seconds $(SECONDS) --seed $(SEED) $(ARGS)

check: $(VENV)/.all-installed ## Check format, lint, types, the direction of imports and the words
	@$(BIN)/ruff format --check
	@$(BIN)/ruff check
	@$(BIN)/mypy --strict gradtrack tests
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/python -m tests.words

bench: $(VENV)/.all-installed ## Run the benchmarks
	@$(BIN)/python -m benchmarks $(ARGS)

docs: $(VENV)/.docs-installed ## Build the documentation into site/, which needs no network to be read
	@$(BIN)/python -m reference
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet $(ARGS)
	@echo 'Open site/index.html. Its search works when it is served: $(BIN)/python -m http.server -d site'

clean: ## Remove the environment, caches and built files
	rm -rf $(VENV) build dist site *.egg-info
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find gradtrack tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

$(VENV)/.demo-installed: pyproject.toml constraints.txt | $(BIN)/pip
	@echo 'Installing gradtrack and what the demo needs into $(VENV) (once, takes a minute or two)'
	@$(INSTALL) -e '.[demo]'
	@touch $@

$(VENV)/.docs-installed: pyproject.toml constraints.txt | $(BIN)/pip
	@echo 'Installing gradtrack and what its documentation needs into $(VENV) (once, takes a minute or two)'
	@$(INSTALL) -e '.[docs]'
	@touch $@

$(VENV)/.all-installed: pyproject.toml constraints.txt | $(BIN)/pip
	@echo 'Installing gradtrack, every extra and the tools into $(VENV) (once, takes a few minutes)'
	@$(INSTALL) -e '.[all,dev]'
	@touch $@ $(VENV)/.demo-installed $(VENV)/.docs-installed

# The versions in constraints.txt are known to work with 3.11, so that one is asked first.
$(BIN)/pip:
	@for python in $(or $(PYTHON),python3.11 python3 python3.12 python3.13 python); do \
	    if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
	        echo "Creating $(VENV) with $$($$python --version)"; \
	        $$python -m venv --clear $(VENV) && exit 0; \
	        rm -rf $(VENV); \
	        echo "$$python cannot create $(VENV): expected the venv module. Install it (Debian: python3-venv)." >&2; \
	        exit 1; \
	    fi; \
	done; \
	echo "No usable Python in: $(or $(PYTHON),PATH). Expected 3.11 or newer. Install it, or name one: make PYTHON=..." >&2; \
	exit 1
