# The two commands are `make demo` and `make test`; each sets up what it needs first (scripts/bootstrap.sh).
# OPTIONS=... goes to scripts/build_image.py (make images, make figures).
# SOL_VENV=DIR puts the virtual environment elsewhere, SOL_PYTHON=PYTHON builds it with another Python.

SHELL := /bin/bash
VENV := $(or $(SOL_VENV),.venv)
PYTHON := $(VENV)/bin/python

# Every check runs, whatever the ones before it found.
LINT = $(PYTHON) -m ruff check . || status=1; \
	$(PYTHON) -m ruff format --check . || status=1; \
	$(PYTHON) -m mypy || status=1

.DEFAULT_GOAL := help
.PHONY: help demo test test-fast test-images lint setup images figures clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: setup ## run the CPU target: dense and full optimisation, gated, recorded, signed and verified
	@$(VENV)/bin/sol benchmark cpu --arm dense --arm fullopt

test: setup ## lint, types and every test; those of the images build in a real Docker engine, which they start
	@status=0; $(LINT); $(PYTHON) -m pytest || status=1; exit $$status

test-fast: setup ## the same without the image tests
	@echo "not run here: the image tests, which build in a real Docker engine (make test-images, or make test)"
	@status=0; $(LINT); $(PYTHON) -m pytest -m "not docker" || status=1; exit $$status

test-images: setup ## the image tests alone: build, start and compare
	@$(PYTHON) -m pytest -m docker

lint: setup ## ruff and mypy
	@status=0; $(LINT); exit $$status

setup: ## ffmpeg and the virtual environment, as far as they are missing
	@scripts/bootstrap.sh

images: ## sol-cpu and sol-verify, in the Docker engine that `docker` talks to
	@scripts/build_image.py cpu verify $(OPTIONS)

figures: ## what these two images weigh, and how long a build and a start take
	@scripts/image_figures.sh $(OPTIONS)

clean: ## remove the virtual environment and the caches; runs/ stays
	rm -rf $(VENV) $(VENV).lock build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
