# `make` alone lists the targets. Those that need an environment make it first (.ci/setup).

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
export PYTHON

BIN := .venv/bin
# Spark finds Java, and its workers the same Python, whatever the PATH says.
WITH_JAVA = JAVA_HOME="$$(cat .venv/java-home)" PYSPARK_PYTHON="$(CURDIR)/$(BIN)/python"

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z][a-z0-9-]*:.*## / { printf "make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: setup
setup: ## Make .venv ready (the targets below do it by themselves)
	@.ci/setup

.PHONY: run
run: setup ## See it work: a year of flights, ingested, checked, corrected, watched and asked about
	@$(WITH_JAVA) $(BIN)/python -m ontologia_dagster.demo run

.PHONY: run-s3
run-s3: setup ## The same on a local S3 server (SeaweedFS, on loopback)
	@$(WITH_JAVA) $(BIN)/python -m ontologia_dagster.demo run --s3

.PHONY: ui
ui: setup ## Open it in Dagster's UI, http://127.0.0.1:3000 (ARGS="--port 3001" for another port)
	@$(WITH_JAVA) $(BIN)/python -m ontologia_dagster.demo ui $(ARGS)

.PHONY: ui-s3
ui-s3: setup ## The same with what `make run-s3` has stored
	@$(WITH_JAVA) $(BIN)/python -m ontologia_dagster.demo ui --s3 $(ARGS)

.PHONY: example
example: setup ## A smaller start: a first ontology, in plain Python without Spark and Dagster
	@$(BIN)/python docs/examples/first_ontology.py

.PHONY: test
test: lint ## Everything that must pass: lint, then all tests (ARGS="-k commit" picks some)
	CHROMIUM="$$(.ci/chromium)" $(WITH_JAVA) $(BIN)/pytest -n 2 $(ARGS)

.PHONY: test-s3a
test-s3a: setup ## Spark's own reader on S3: downloads hadoop-aws (600 MB, kept), not part of test
	$(WITH_JAVA) ONTOLOGIA_S3A_PACKAGES=org.apache.hadoop:hadoop-aws:3.5.0 \
		$(BIN)/pytest tests/spark/test_s3a.py $(ARGS)

.PHONY: lint
lint: setup ## Style, formatting, types, and who imports whom
	@$(MAKE) --no-print-directory --jobs=2 lint-types lint-style

.PHONY: lint-types
lint-types:
	$(BIN)/mypy

.PHONY: lint-style
lint-style:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

.PHONY: format
format: setup ## Let ruff put formatting and imports right
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

.PHONY: docs
docs: setup ## Build the documentation as a site, into build/site; a warning is an error
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "Open build/site/index.html; for its search: $(BIN)/python -m http.server -d build/site -b 127.0.0.1"

.PHONY: bench
bench: setup ## Measure against peers (ARGS are passed on; QUICK=1: all of it small, in minutes)
	$(WITH_JAVA) QUICK="$(QUICK)" $(BIN)/python -m benchmarks $(ARGS)

.PHONY: soak
soak: setup ## All kinds of work at once under faults and kills, for MINUTES (10); all must be accounted for
	$(BIN)/python -m benchmarks.soak --minutes $(or $(MINUTES),10) $(ARGS)

.PHONY: model
model: setup ## Check the models of docs/model with Alloy (minutes; needs Maven the first time)
	@$(WITH_JAVA) .ci/model

.PHONY: lock
lock: ## Write requirements.lock anew after a change to pyproject.toml (ARGS=--upgrade for all)
	.ci/lock $(ARGS)

.PHONY: clean
clean: ## Remove the environment, caches and build output (no ontology data)
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
