# make run   the main job on the built-in profile: train, judge, report
# make quick a first result in a minute: no experts, one seed, no baselines
# make test  lint, types and the whole test suite; make lint and make suite are its halves
# make campaign  the slowest tests, and an hour of kills, torn files and changed inputs (docs/trust.md); repeat it to go on
# make clients real clients and gateways in front of knobwise serve, real servers behind it (docs/routing.md); installs them
# make docs  the documentation site, in build/site
# make bench every benchmark, in docs/speed.md
# make size  files, lines and tokens by folder, and the longest functions
# Another virtual environment: make run VENV=/path/to/venv
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
# modules are compiled when they are first imported, not all of them now
PIP := --quiet --disable-pip-version-check --no-compile --constraint constraints.txt
INSTALLED := $(VENV)/.knobwise

# keep bytecode whatever the environment says: tests start hundreds of processes, each of which would compile torch
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run quick test suite lint docs bench size campaign clients clean

run: $(INSTALLED)
	$(BIN)/python -m knobwise train experiment=controller seeds=[0,1,2,3,4]

quick: $(INSTALLED)
	$(BIN)/python -m knobwise train experiment=lean seeds=[0] baselines=false

test: $(INSTALLED)-test
	$(MAKE) -j 2 suite lint

# processes of one thread each; a third works while tests of the other two wait for servers and kills
suite: export OMP_NUM_THREADS = 1
suite: export POLARS_MAX_THREADS = 1
suite: $(INSTALLED)-test
	$(BIN)/python -m pytest -n 3 --dist worksteal --durations=20 --durations-min=1

lint: $(INSTALLED)-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(INSTALLED)-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build
	@echo "page: build/site/index.html"

bench: $(INSTALLED)-test
	$(BIN)/python benchmarks/suite.py

size:
	$(PYTHON) benchmarks/size.py

campaign: $(INSTALLED)-test
	$(BIN)/python -m pytest -m campaign
	$(BIN)/python -m pytest -m hypothesis --hypothesis-profile=new-examples
	$(BIN)/python -m campaign.updates
	$(BIN)/python -m campaign.rl_libraries
	$(BIN)/python -m campaign.server
	$(BIN)/python -m campaign.hostile
	$(BIN)/python -m campaign.hostile odd
	$(BIN)/python -m campaign $(CAMPAIGN)

clients: $(INSTALLED)-test
	$(BIN)/python -m campaign.clients $(CLIENTS)

$(INSTALLED): setup.cfg constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(PIP) --editable .
	touch $@

# with everything that $(INSTALLED) has
$(INSTALLED)-test: setup.cfg constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(PIP) --editable ".[test]"
	touch $(INSTALLED) $@

$(INSTALLED)-docs: $(INSTALLED)
	$(BIN)/python -m pip install $(PIP) --editable ".[docs]"
	touch $@

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
