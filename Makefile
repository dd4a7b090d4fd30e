# Every target works alone on a fresh clone: it makes .venv, installs deepmrf and runs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PYTEST_WORKERS ?= 2
# Threads that spin while they wait take the core that another test worker needs.
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: help demo test check bench notebooks docs faults clean

help:  ## show the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/'

$(BIN)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

demo: $(BIN)/installed  ## segment a cat and an astronaut, layer by layer, or IMAGE=yours.jpg: demo-out/index.html
	$(BIN)/python demo.py $(if $(IMAGE),"$(IMAGE)")

test: $(BIN)/installed  ## run the whole test suite
	$(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist worksteal

check: $(BIN)/installed  ## lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(BIN)/installed  ## measure every layer beside its peers (compiles pydensecrf2 for comparison: needs a C++ compiler)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[bench]'
	$(BIN)/deepmrf bench

notebooks: $(BIN)/installed  ## run examples/*.ipynb and write their outputs into them
	$(BIN)/python examples/notebooks.py

$(VENV)-docs/installed: docs/requirements.txt constraints.txt
	$(PYTHON) -m venv $(VENV)-docs
	$(VENV)-docs/bin/pip install --quiet -c constraints.txt -r docs/requirements.txt
	touch $@

docs: $(VENV)-docs/installed  ## build the site: build/site/index.html; broken links and images are errors
	$(PYTHON) docs/site.py build/docs
	NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/mkdocs build

faults: $(BIN)/installed  ## damage files, kill processes, fill disks: a table of what deepmrf makes of it, in some minutes
	$(BIN)/python tests/faults

clean:  ## remove the virtual environment and what was built
	rm -rf $(VENV) $(VENV)-docs dist build demo-out .pytest_cache .mypy_cache .ruff_cache .hypothesis
