# Every target installs what it needs first; a second call installs nothing.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/installed
# one process more than cores, as some tests wait for other programs
WORKERS := $(shell $(PYTHON) -c "import os; print((os.cpu_count() or 1) + 1)")
# bytecode is kept even where the shell forbids it: each process that a test starts would compile all files again
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 4 --dist worksteal

.PHONY: install demo test pytest test-full test-all test-containers lint bench docs site clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e '.[text,adapters,dev]'
	$(BIN)/python -m compileall -qq -j 0 .venv/lib || true  # pip would compile on one core; some files are templates
	touch $(STAMP)

demo: install
	$(BIN)/fedgauge run simulations/quickstart.toml

# mypy works beside the tests, which wait for other programs at times
test: install
	+$(MAKE) -j2 lint pytest

pytest: install
	$(PYTEST)

# what `make test` leaves out: each two values of products of components, and faults of whole deployments, which wait the most
test-full: install
	$(PYTEST) -n $$(($(WORKERS) + 1)) -m full

test-all: test test-full

# the containers of docs/deploy.md with an engine of their own; as root, where apt is; 77: it cannot be done here
test-containers:
	bash tests/load/containers.sh

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: install
	$(BIN)/python -m fedgauge.simulations.benchmarks.engine

# the tables in docs/ that are written from the code and from the kept figures
docs: install
	$(BIN)/python -m docs.generate

# the documentation as a site in site/, with its notebooks executed; a broken link or anchor ends it
site: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf .venv build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
