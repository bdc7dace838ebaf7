# Two commands on a fresh machine: `make demo` runs the main job, `make test` the tests.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
EXTRAS ?= dev,ucx-cu12

.PHONY: install python check test test-all demo bench scale soak fuzz world world-planted clean

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'
	touch $@

install: $(VENV)/.installed

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: install
	$(BIN)/pytest -q -m "not slow"

test-all: install
	$(BIN)/pytest -q

demo: install
	$(BIN)/p2pckpt demo $(ARGS)

bench: install
	$(BIN)/python -m tests.bench $(if $(JSON),--json $(JSON)) $(if $(SCALE),--scale $(SCALE))

# 125 and 1,250 agents' own commit code against a real etcd of three; JSON=FILE
scale: install
	$(BIN)/python -m tests.bench.scale $(if $(JSON),--json $(JSON)) $(ARGS)

soak: install
	$(BIN)/python -m tests.soak $(ARGS)

# Bent input at every door, a minute each; ARGS="--target config --seconds 600"
fuzz: install
	$(BIN)/python -m tests.fuzz $(ARGS)

# Ten minutes of worlds on two cores; SEEDS=FIRST:END, MINUTES=, JSON=FILE; SEED=S replays one.
world: install
ifdef SEED
	$(BIN)/p2pckpt simulate world --seed $(SEED)
else
	$(BIN)/p2pckpt simulate campaign --seeds $(or $(SEEDS),1:) --minutes $(or $(MINUTES),10) $(if $(JSON),--json $(JSON))
endif

# Are the checkers able to fail? Each planted bug must be found.
world-planted: install
	$(BIN)/python -m tests.planted $(if $(JSON),--json $(JSON)) $(ARGS)

python:
	@echo $(PYTHON)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
