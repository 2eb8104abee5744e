# Needs only Python >= 3.11 and make: every target sets up what it uses.
VENV ?= .venv
PY := $(VENV)/$(if $(filter Windows_NT,$(OS)),Scripts/python.exe,bin/python)
# PYTHON=/path/to/python chooses the interpreter for a new environment.
CANDIDATES := $(or $(PYTHON),python3.13 python3.12 python3.11 python3)
# command:package pairs that some tests use
TOOLS := strace:strace faketime:faketime jq:jq chromium:chromium
# tests that need nothing of POSIX, nor PostgreSQL
PORTABLE := $(addprefix tests/,$(addsuffix .py,test_architecture test_ids test_telemetry format/test_layout \
    history/test_append storage/sqlite/test_wal))
ARGS ?=
# What failed is run once more, alone. If it passes then, the first output is still there to look into.
AGAIN = echo "==> pytest: what failed, once more, one by one" && $(PY) -m pytest --last-failed --last-failed-no-failures none $(ARGS)
# QUICK= makes `make check` run the slow tests, too
QUICK ?= --quick

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo check test portable lint format docs screenshots bench torture pregel tools clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.installed-base ## an agent is killed and continues, with real output
	@$(PY) -m holdfast demo

check: lint ## lint, types and the quick tests (two minutes): the inner loop
	@echo "==> pytest"
	@$(PY) -m pytest -n logical --dist worksteal $(QUICK) --ignore tests/faults --ignore tests/web/browser $(ARGS)

test: lint tools ## lint, types and every test (ARGS="-k name" narrows it)
	@echo "==> pytest"
	@$(PY) -m pytest -n logical --dist worksteal --durations 5 $(ARGS) || { [ $$? = 1 ] && $(AGAIN); }

portable: $(VENV)/.installed-dev ## the few tests that also run on Windows
	@$(PY) -m pytest -n 2 $(PORTABLE) $(ARGS)

lint: $(VENV)/.installed-dev ## ruff and mypy
	@echo "==> ruff check"
	@$(PY) -m ruff check
	@echo "==> ruff format --check"
	@$(PY) -m ruff format --check
	@echo "==> mypy"
	@$(PY) -m mypy

format: $(VENV)/.installed-dev ## format the code and fix what ruff can fix
	@$(PY) -m ruff check --fix-only
	@$(PY) -m ruff format

docs: $(VENV)/.installed-dev ## make what the pages show of the project, and build them
	@$(PY) -m docs.making
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict
	@echo "build/docs/index.html"

screenshots: $(VENV)/.installed-dev tools ## take the pictures of the viewer again
	@$(PY) -m docs.making.screens

bench: $(VENV)/.installed-bench tools ## measure against the peer (ARGS are passed on)
	@$(PY) -m bench $(ARGS)

torture: $(VENV)/.installed-dev tools ## every test with its long campaigns (hours)
	@$(PY) -m pytest --torture --timeout 0 -n logical --dist worksteal --durations 20 $(ARGS)

pregel: ## LangGraph's own tests with our saver (TESTS=folder of its sdist), in an environment of their own
	@$(MAKE) -s VENV=build/pregel build/pregel/.installed-langgraph
	@build/pregel/bin/python -m pip install -qq langgraph-checkpoint-postgres langgraph-checkpoint-sqlite \
	    'psycopg[binary,pool]' pycryptodome pytest pytest-mock pytest-xdist redis syrupy
	@build/pregel/bin/python tests/adapters/pregel.py $(TESTS) $(ARGS)

clean: ## remove the environment, caches and builds
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(PY):
	@for python in $(CANDIDATES); do \
	    if $$python -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	        echo "==> $(VENV): $$($$python -V)"; \
	        exec $$python -m venv --clear $(VENV); \
	    fi; \
	done; \
	echo "holdfast needs Python 3.11 or newer with venv (on Debian: python3-venv); tried: $(CANDIDATES)" >&2; \
	echo "hint: make PYTHON=/path/to/python" >&2; \
	exit 1

$(VENV)/.installed-%: pyproject.toml $(PY)
	@echo "==> pip install $(if $(filter base,$*),holdfast,'holdfast[$*]')"
	@$(PY) -m pip install -qq --editable '.$(if $(filter base,$*),,[$*])'
	@touch $@

# Missing tools are installed where that is permitted; elsewhere their tests are skipped.
tools:
	@missing=; packages=; \
	for pair in $(TOOLS); do \
	    command -v "$${pair%%:*}" >/dev/null || { missing="$$missing $${pair%%:*}"; packages="$$packages $${pair##*:}"; }; \
	done; \
	[ -n "$$missing" ] || exit 0; \
	if [ "$$(id -u)" = 0 ]; then sudo=; else sudo="sudo -n"; fi; \
	if command -v apt-get >/dev/null && $$sudo true 2>/dev/null; then \
	    echo "==> apt-get install$$packages"; \
	    $$sudo apt-get -qq update >/dev/null 2>&1; \
	    $$sudo env DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends $$packages >/dev/null 2>&1 \
	        && exit 0; \
	fi; \
	echo "notice: could not install$$missing: the tests that need them will be skipped"; \
	echo "hint: on Debian, as root: apt-get install$$packages"
