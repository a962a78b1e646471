# Targets of DLion: `make help` lists them.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := api operator worker cli tests tools benchmarks docs/conf.py
READY := $(VENV)/.ready
SITE := $(BIN)/sphinx-build -q -W --keep-going -E -b html docs build/docs

.PHONY: help setup quickstart picture check check-docs check-files check-texts check-types check-types-of-tests docs test unit local cluster slow causes testbed-setup measure paper paper-reduced paper-bytes scale fuzz mutate generate dist bundle format lock clean

help: ## List every target
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) ## Create .venv with everything in the lock (hashes are checked)

$(READY): requirements.lock requirements-uv.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "DLion needs Python 3.11 or newer: set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --require-hashes -r requirements-uv.lock
	$(BIN)/uv pip sync --quiet --compile-bytecode --python $(BIN)/python --require-hashes requirements.lock
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation -e .
	$(BIN)/python -c 'import dlion_core.codecs'  # compiles its kernels
	@touch $(READY)

quickstart: setup ## Train the main example on this machine, with and without an exchange
	@out=runs/quickstart-$$(date +%Y%m%d-%H%M%S) && set -e && \
	echo "1 of 2: the sites exchange gradients" && \
	$(BIN)/dlion run examples/digits.yaml --environment quickstart --out $$out/adaptive && \
	echo "2 of 2: the same job without an exchange" && \
	$(BIN)/dlion run examples/digits.yaml --environment quickstart --set exchange.policy=none --out $$out/none && \
	$(BIN)/dlion report $$out/adaptive $$out/none --out $$out/report.html && \
	echo "The page above, for a browser, compares both runs. Next: docs/tutorial.md"

picture: setup ## Draw the pictures of README and docs from the newest quick start (screenshots with chromium)
	@out=$$(ls -d runs/quickstart-* | tail -1) && mkdir -p docs/images && \
	$(BIN)/dlion report $$out/adaptive $$out/none --label "adaptive" --label "no exchange" \
	  --title "digits: two sites, each with half of the classes" --out $$out/report.html \
	  --picture docs/images/quickstart.svg && \
	$(BIN)/python tools/report_screenshots.py $$out/report.html --out docs/images

check: setup ## Check before a commit: format, lint, types, architecture, generated files
	@$(MAKE) --no-print-directory -j 2 -O check-docs check-files check-texts check-types check-types-of-tests  # long ones first

check-docs:
	$(SITE)

check-types:
	$(BIN)/mypy

check-types-of-tests:
	$(BIN)/mypy --config-file tests/mypy.ini tests/local tests/cluster tests/simulated benchmarks

check-texts:
	$(BIN)/codespell $(SOURCES) crds docs examples environments helm *.md
	$(BIN)/python tools/check_language.py

check-files:
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/lint-imports
	$(BIN)/deptry .
	$(BIN)/python tools/generate_wire.py --check
	$(BIN)/python tools/generate_crd.py --check
	$(BIN)/python tools/generate_manifest_reference.py --check
	$(BIN)/python tools/generate_command_reference.py --check
	$(BIN)/python tools/generate_dashboards.py --check
	$(BIN)/python tools/generate_chart_readme.py --check
	$(BIN)/python tools/check_architecture.py

docs: setup ## Build the documentation site, build/docs/index.html; broken links are errors
	$(SITE)
	@echo "build/docs/index.html"

# The fuzz tests are one file, which at the end would run alone on one core.
unit: setup ## Fast tests, three processes for two cores as some wait: unit, property with a quarter of the examples, contract, fuzz
	DLION_TEST_EXAMPLES=0.25 $(BIN)/pytest -n $$((($$(nproc) * 3 + 1) / 2)) --dist loadfile --no-loadscope-reorder \
	  tests/fuzz tests/property tests/unit tests/contract

simulated: setup ## Whole jobs in virtual time: no machine is too busy for them
	$(BIN)/pytest --timeout=900 tests/simulated

local: setup ## Tests with real processes on this machine (as root also namespaces and quotas)
	$(BIN)/pytest tests/local

cluster: testbed-setup ## Tests on real Kubernetes clusters, brought up on this machine (root)
	DLION_REQUIRE_TESTBED=1 $(BIN)/pytest tests/chart tests/cluster

EXAMPLES ?= 1
slow: testbed-setup ## Slow tests: all examples of properties and a million hostile inputs (EXAMPLES=10 for ten times as many), lost workers, a dead node, a silent watch, an expired token, exposures of two sites, Flux, Argo CD, Kueue, variants of local runs (root)
	tools/testbed-setup chromium qemu-user-static  # for the report's page and images of arm64
	tools/testbed build-flux
	tools/testbed build-argo-cd
	tools/testbed build-kueue
	EXAMPLES=$(EXAMPLES) tools/test-slow

causes: testbed-setup ## Inject twenty causes of slowness and failure, and print the command and the sentence that report each (root)
	DLION_REQUIRE_TESTBED=1 $(BIN)/pytest -s -m slow tests/cluster/test_injected_causes.py

testbed-setup: setup ## Install and build what the test clusters need (root; minutes the first time)
	tools/testbed-setup

test: check ## Everything that must pass before a change lands
	@if [ "$$(id -u)" = 0 ]; then $(MAKE) testbed-setup; fi  # without root the cluster tests are skipped
	$(BIN)/python -m compileall -q api operator worker cli  # once, not in each process
	tools/test-all

measure: setup ## Compare shares, links, the cost of the exchange and of kills with their bars (root, a quiet machine)
	$(BIN)/pytest -m measured -s tests/local/test_measured_bars.py

DATA ?= ../shared/data
paper: setup ## Simulate the published evaluations again (takes days; resumes after an interruption) and regenerate their page
	$(BIN)/python benchmarks/paper/run.py --data $(DATA) --page docs

paper-reduced: setup ## The same with a small network and links slowed to match (resumes after an interruption), on a separate page
	$(BIN)/python benchmarks/paper/run.py --data $(DATA) --reduced --page docs

paper-bytes: setup ## Compare the bytes and accuracy of adaptive with a ring all-reduce (resumes after an interruption)
	$(BIN)/python benchmarks/paper/bytes_sent.py --data $(DATA)

RUNS ?= 5
scale: testbed-setup ## A thousand jobs of five workers each at one operator, RUNS=5 times (root, a quiet machine; resumes after an interruption; BASELINE=COMMIT for before and after)
	$(BIN)/python benchmarks/scale.py --runs $(RUNS) $(if $(BASELINE),--baseline $(BASELINE)) --picture docs/images/scale.svg

fuzz: setup ## A million hostile frames, and a million other inputs: payloads, documents, files
	$(BIN)/python -m pytest tests/fuzz --fuzz-count=1000000 --timeout=7200

mutate: setup ## Plant faults, one at a time, in a copy of the code: tests must notice (ONLY="NAME" for one)
	$(BIN)/python tools/mutate.py -j 2 $(if $(ONLY),--only "$(ONLY)")

generate: setup ## Regenerate files: wire format, CRD, reference pages, dashboards
	$(BIN)/python tools/generate_wire.py
	$(BIN)/python tools/generate_crd.py
	$(BIN)/python tools/generate_manifest_reference.py
	$(BIN)/python tools/generate_command_reference.py
	$(BIN)/python tools/generate_dashboards.py
	$(BIN)/python tools/generate_chart_readme.py

dist: setup ## Build the wheel: dist/dlion-VERSION-py3-none-any.whl
	rm -rf build  # it would keep removed modules
	$(BIN)/uv build --quiet --wheel --no-build-isolation --out-dir dist .
	@ls dist/*.whl

bundle: setup ## Build dist/dlion-bundle-VERSION-ARCH.tar, for sites without network (PLATFORM=linux/arm64, BASE=IMAGE@DIGEST, BUILDER=docker)
	@PYTHONPATH=tools $(BIN)/python -m bundle $(if $(PLATFORM),--platform "$(PLATFORM)") $(if $(BASE),--base "$(BASE)") \
	  $(if $(BUILDER),--builder "$(BUILDER)")

format: setup ## Format the sources
	$(BIN)/ruff check --fix-only --quiet $(SOURCES)
	$(BIN)/ruff format --quiet $(SOURCES)

lock: setup ## Resolve the dependencies again (no addresses in the lock)
	$(BIN)/uv pip compile pyproject.toml --all-extras --generate-hashes --universal --python-version 3.11 \
	  --no-emit-index-url --no-emit-find-links --no-header --upgrade -o requirements.lock
	echo "tensorflow[and-cuda]>=2.21" | $(BIN)/uv pip compile - --constraint requirements.lock --generate-hashes \
	  --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
	  --no-emit-index-url --no-emit-find-links --no-header --upgrade -o requirements-gpu.lock

clean: ## Remove what these targets create, except results in runs/
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
