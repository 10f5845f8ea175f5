# `make demo` shows a director at work, `make test` proves everything; `make help` lists the rest.

SHELL := /bin/sh
export PATH := $(PATH):$(HOME)/.cargo/bin:/usr/local/cargo/bin:/usr/sbin:/sbin
export CARGO_TERM_COLOR ?= auto

CARGO ?= cargo
# End-to-end tests of one file share the machine with each other only as far as two cores allow.
E2E_THREADS ?= 2
# What the tests with the real programs in namespaces are in. Some of lvs-dataplane's need root as well.
E2E := lvs-testbed lvs-examples
HOLD ?=
METHODS ?= nat,dr,tun

.PHONY: help demo test check lint docs unit no-std e2e build setup clean

help: ## list the targets
	@sed -n 's/^\([a-z0-9-]*\):.*## /  make \1\t/p' $(firstword $(MAKEFILE_LIST)) | expand -t 18

demo: ## client, director, four web servers: NAT, direct routing, tunnelling (HOLD=1 leaves it running, METHODS=nat,dr,tun)
	@tools/setup demo
	@$(CARGO) build --release --quiet --bins -p lvs-dataplane -p lvsadm -p lvsd -p lvs-testbed
	@target/release/lvs-testbed demo --methods $(METHODS) $(if $(HOLD),--hold)

test: ## everything: formatting, clippy, docs, unit, property, vector and end-to-end tests
	@tools/setup
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory docs
	@$(MAKE) --no-print-directory no-std
	@$(MAKE) --no-print-directory unit
	@$(MAKE) --no-print-directory e2e
	@echo "make test: all passed"

check: lint unit ## what to run before a commit: lint and the quick tests

lint:
	$(CARGO) fmt --all --check
	$(CARGO) clippy --locked --workspace --all-targets -- -D warnings

docs:
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --locked --workspace --no-deps --quiet

no-std: ## lvs-core without std
	$(CARGO) build --locked -p lvs-core --no-default-features

unit: ## all other tests; those of lvs-dataplane need root
	$(CARGO) test --locked --workspace $(addprefix --exclude ,$(E2E))
	$(CARGO) test --locked -p lvs-testbed --lib

e2e: ## the tests in network namespaces, with the optimised programs
	$(CARGO) build --locked --release --workspace --bins
	RUST_BACKTRACE=0 $(CARGO) test --locked --release $(addprefix -p ,$(E2E)) --tests -- --test-threads=$(E2E_THREADS)

build: ## the programs, optimised
	$(CARGO) build --release --workspace --bins

setup: ## install what building and testing need
	@tools/setup

clean: ## remove what was built
	$(CARGO) clean
