# Two commands for a newcomer: `make demo` and `make test`. Both set everything up by themselves.
PYTHON ?= python3
# Another torch than the pinned one: make test TORCH=2.11.0
TORCH ?= $(shell sed -n 's/^torch==//p' requirements-dev.txt)
OLDEST := $(shell sed -n 's/^torch==//p' requirements-oldest.txt)
VENV := .venv
OLD := .venv-oldest
EMPTY := .venv-wheel
DOCS := .venv-docs
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-torch-$(TORCH)
# Tests start many processes, which all would compile the package and its tests anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo docs selftest test test-oldest coverage test-slow test-gpu test-browser mutants hostile compare wheel lint format clean

demo: $(STAMP)
	$(BIN)/mesh-attention demo --output demo-output

# Every method and kernel against float64, in seconds.
selftest: $(STAMP)
	$(BIN)/mesh-attention selftest

# Three workers: each starts processes for ranks of its own; four took 556 s on two cores, three 500 s.
test: $(STAMP)
	$(BIN)/python -m pytest -n 3 --dist worksteal

# Hugging Face's libraries and torch as old as they may be, in an environment of their own.
test-oldest:
	$(MAKE) $(OLD)/.installed-torch-$(OLDEST) VENV=$(OLD) TORCH=$(OLDEST)
	$(OLD)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-oldest.txt
	$(OLD)/bin/python -m pytest -n 3 --dist worksteal tests/huggingface tests/examples

# The tests of `make test`, a fifth slower: SlipCover writes which lines ran, and then says which did not and
# whether they are too many.
coverage: $(STAMP)
	$(BIN)/python -m slipcover --json --out coverage.json -m pytest -n 3 --dist worksteal
	$(BIN)/python -m slipcover --merge coverage.json --out /dev/null --skip-covered --fail-under 89

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow

# On a machine with a CUDA device and its own torch, pytest and pytest-xdist: no virtual environment.
test-gpu:
	PYTHONPATH=src $(PYTHON) -m pytest -m gpu -n 8 --dist loadgroup --durations 20

# With Chromium and its driver (Debian: apt-get install chromium chromium-driver): clicks on the page.
test-browser: $(STAMP)
	$(BIN)/python -m pytest -m browser

# The site, in an environment of its own, without torch: pages, reference, links and anchors.
docs: $(DOCS)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict --quiet
	$(DOCS)/bin/python docs/check_site.py site

$(DOCS)/.installed: requirements-docs.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-docs.txt
	touch $@

# Are the tests sharp? 300 small changes of the code, one at a time: about an hour on two cores.
mutants: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-mutation.txt
	$(BIN)/python tests/mutation/run.py

# Wrong use, damaged plans and random cases, each against an oracle of its own, by seed: an hour, or
# make hostile SECONDS=300 SEED=2. Exit status 1 where something is wrong.
SECONDS ?= 3600
SEED ?= 1
hostile: $(STAMP)
	$(BIN)/python tests/hostile/run.py --seed $(SEED) --seconds $(SECONDS) --json hostile.json

# Ours beside its peers: minutes on a machine with a GPU, over gloo elsewhere (as root over shaped links, MBIT=200).
compare: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps ring-flash-attn==0.1.8 yunchang==0.6.4
	$(BIN)/python benchmarks/against_peers.py $(if $(shell command -v nvidia-smi),,--gloo) $(if $(MBIT),--mbit $(MBIT)) --json peers.json

# What is published: built, checked, and run from an environment that has nothing else.
wheel: $(STAMP)
	rm -rf dist $(EMPTY)
	$(BIN)/python -m build --no-isolation
	$(BIN)/python -m twine check --strict dist/*
	$(PYTHON) -m venv $(EMPTY)
	$(EMPTY)/bin/python -m pip install --quiet --disable-pip-version-check torch==$(TORCH) dist/*.whl
	cd / && $(CURDIR)/$(EMPTY)/bin/mesh-attention selftest

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(STAMP): requirements-dev.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	rm -f $(VENV)/.installed*
	sed 's/^torch==.*/torch==$(TORCH)/' requirements-dev.txt > $(VENV)/requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r $(VENV)/requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps -e .
	touch $@

clean:
	rm -rf $(VENV) $(OLD) $(EMPTY) $(DOCS) dist site demo-output coverage.json hostile.json peers.json .mypy_cache .ruff_cache .pytest_cache
