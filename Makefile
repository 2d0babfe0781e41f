# make loop    the whole loop on SmolLM2-135M-Instruct, from an empty checkout
# make test    the suite
# make soak    thousands of requests through releases and kills, then 30 times kill -9 at random while loops run;
#              KILLS and SEED choose others (an hour)
# make down    stop what was started
VARIANT ?= cpu
PYTHON ?= $(shell for p in python3.11 python3.12 python3; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
INSTALLED := $(VENV)/installed-$(VARIANT)
LOCKSTEP := $(VENV)/bin/lockstep

.PHONY: help install up loop down test soak lint

help:
	@sed -n 's/^# //p' Makefile

install: $(INSTALLED)

$(INSTALLED): infra/locks/$(VARIANT).txt infra/locks/install.py pyproject.toml
	@test -n "$(PYTHON)" || { echo "Lockstep needs Python 3.11 or 3.12: install one, or name it with PYTHON=" >&2; exit 1; }
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python infra/locks/install.py $(VARIANT)
	@touch $@

up: $(INSTALLED)
	$(LOCKSTEP) up

loop: up
	$(LOCKSTEP) loop --preset smol

down:
	@if test -x $(LOCKSTEP); then $(LOCKSTEP) down; else echo "nothing to stop: nothing is installed here"; fi

test: $(INSTALLED)
	$(VENV)/bin/python -m pytest

soak: $(INSTALLED)
	$(VENV)/bin/python -m pytest -q -s tests/soak/soak_release.py
	$(VENV)/bin/python tests/soak/soak_kills.py --kills $(or $(KILLS),30) --seed $(or $(SEED),1)

lint: $(INSTALLED)
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
