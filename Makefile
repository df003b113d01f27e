# make demo   train the bundled model for some minutes and show what it learned; make demo MINUTES=3
# make test   lint, types and the tests: what a change in grpo/ or rewards/ can break
# make proof  benchmarks, rates, faults, other machines, half an hour; make proof PARTS="race leaks"
# make TORCH_INDEX=URL demo        with another build of torch, from the index that torch's site names for it
# make TORCH=torch==2.11.0 test    with another version

PYTHON ?= python3
TORCH ?= $(shell grep '^torch==' constraints.txt)
TORCH_INDEX ?=
MINUTES ?=
PARTS ?=
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

.PHONY: demo test proof clean

demo: .venv/installed
	$(BIN)/python scripts/demo.py $(if $(MINUTES),--minutes $(MINUTES))

test: .venv/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest --numprocesses=auto --maxprocesses=8

proof: .venv/installed-test
	$(BIN)/python scripts/proof.py $(if $(PARTS),--only $(PARTS))

.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed; name one with: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv .venv
	@echo "installing into .venv (torch may take a while)"
	$(PIP) install $(TORCH) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	grep -v '^torch==' constraints.txt > .venv/constraints.txt
	$(PIP) install -c .venv/constraints.txt -e .
	@if nvidia-smi > /dev/null 2>&1 && ! $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then \
		echo "WARNING: there is an NVIDIA card, but this torch does not see it."; \
		echo "         Choose a build for your driver: make clean; make TORCH_INDEX=URL demo (docs/installing.md)"; \
	fi
	@touch $@

.venv/installed-test: .venv/installed
	$(PIP) install -c .venv/constraints.txt -e '.[test]'
	@touch $@

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
