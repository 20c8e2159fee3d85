# Everything a person runs. `make` alone lists the targets.
SHELL := /bin/sh
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAGE ?=
KERNEL ?= 6.1
ARGS ?=
ARCH ?=

.PHONY: help run test test-all test-vm test-vagrant test-cluster test-big-cluster test-katalyst cluster cluster-load cluster-down check fmt setup setup-test setup-bench packages-run packages-test packages-vm packages-vagrant packages-cluster packages-image packages-image-foreign packages-bench bench image release lock reset clean

help: ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

run: setup ## start the agent and the demo, with a live view here and a page on http://127.0.0.1:9102
	@$(BIN)/dioptase demo $(ARGS)

test: setup-test $(if $(STAGE),$(if $(filter vm-%,$(STAGE)),packages-vm) $(if $(filter cluster cluster-% vm-systemd% vulnerabilities,$(STAGE)),packages-cluster packages-image) $(if $(filter vm-cluster,$(STAGE)),packages-cluster) $(if $(filter katalyst,$(STAGE)),packages-cluster) $(if $(filter vagrant,$(STAGE)),packages-vagrant),packages-vm packages-cluster packages-image) ## pass the tests; STAGE=unit runs one stage (see tests/run --list)
	@$(BIN)/python tests/run $(STAGE)

test-all: setup-test packages-vm packages-cluster packages-image packages-vagrant ## run every stage, also those that take long and rarely decide: hours
	@$(BIN)/python tests/run --all

ifeq ($(filter 6.1 6.12,$(KERNEL)),)
test-vm:
	@echo "KERNEL=$(KERNEL): there are 6.1 and 6.12" >&2; exit 2
else
test-vm: setup-test packages-vm ## pass those of them that need a kernel of their own: KERNEL=6.1 or 6.12
	@$(BIN)/python tests/run vm-$(KERNEL)
endif

test-vagrant: setup-test packages-vagrant ## `vagrant up` from a box built here, without KVM, and look at what it gives
	@$(BIN)/python tests/run vagrant

test-cluster: setup-test packages-cluster packages-image ## pass all that need a Kubernetes cluster: one made here, or that of KUBECONFIG
	@$(BIN)/python tests/run cluster cluster-long

test-big-cluster: setup-test packages-cluster packages-vm ## follow Katalyst's tutorial on a cluster in a VM with 48 CPUs; ten minutes without KVM
	@$(BIN)/python tests/run vm-cluster

test-katalyst: setup-test packages-cluster ## have the stock Katalyst agent for a peer; it is compiled here, in some minutes
	@$(BIN)/python tests/run katalyst

cluster: setup-test packages-cluster ## make a Kubernetes cluster here, in namespaces of its own; ARGS="--nodes 2"
	@$(BIN)/python -m tests.cluster up $(ARGS)

cluster-load: image ## give the image of this tree to the nodes of that cluster
	@$(BIN)/python -m tests.cluster load

cluster-down: ## remove it, and all that killed tests left of theirs; clusters of running tests stay
	@test ! -x $(BIN)/python || $(BIN)/python -m tests.cluster down

check: setup-test ## format, lint, types, import contracts and unit tests: seconds
	@$(BIN)/python tests/run format types contracts unit

fmt: setup-test ## format the code
	@$(BIN)/ruff format . && $(BIN)/ruff check --fix .

image: packages-image$(if $(ARCH),-foreign) ## build the image, without a registry or a daemon: build/dioptase.tar; ARCH=arm64 for another architecture
	@deploy/image $(if $(ARCH),--arch $(ARCH)) build/dioptase$(if $(ARCH),-$(ARCH)).tar $(ARGS)

release: setup-test packages-image ## build wheel, image and bill of materials with their checksums into build/release; docs/supply-chain.md
	@deploy/release build build/release

bench: setup-bench ## measure everything (about two hours) and write bench/results/
	@$(BIN)/python -m bench $(ARGS)

setup: $(VENV)/run.stamp ## install what running needs, once

setup-test: $(VENV)/test.stamp ## install what testing needs, once

setup-bench: setup-test packages-bench

packages-run packages-test packages-vm packages-cluster packages-vagrant packages-image packages-image-foreign packages-bench: packages-%:
	@deploy/install-packages $*

# The stamps hang on the locks, and packages that are there are not asked for: a second `make run` touches no network. python3-bpfcc is the distribution's; where it cannot
# be installed the agent measures waits in a coarser way and says so.
$(VENV)/run.stamp: requirements.lock requirements-build.lock pyproject.toml | packages-run
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing Python packages into $(VENV): about a minute, once"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock -r requirements-build.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/test.stamp: requirements-dev.lock $(VENV)/run.stamp | packages-test
	@echo "installing Python packages for tests into $(VENV): a minute or two, once"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements-dev.lock
	@touch $@

lock: ## resolve the locked versions anew
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements-uv.lock
	@$(BIN)/uv pip compile --quiet --universal --upgrade --generate-hashes --no-header pyproject.toml -o requirements.lock
	@$(BIN)/uv pip compile --quiet --universal --upgrade --generate-hashes --no-header --group dev pyproject.toml \
		-c requirements.lock -o requirements-dev.lock
	@for name in build uv; do \
		$(BIN)/uv pip compile --quiet --universal --upgrade --generate-hashes --no-header requirements-$$name.in -o requirements-$$name.lock; \
	done

reset: setup ## put every cgroup back that an agent changed, for example after kill -9
	@$(BIN)/dioptase reset $(ARGS)

clean: ## remove what was installed and built here; ~/.cache/dioptase has kernels and boxes of virtual machines, and what clusters are made of
	@rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
