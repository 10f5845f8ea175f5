# `make demo` shows a director at work, `make test` proves everything; `make help` lists the rest.

SHELL := /bin/sh
export PATH := $(PATH):$(HOME)/.cargo/bin:/usr/local/cargo/bin:/usr/sbin:/sbin
export CARGO_TERM_COLOR ?= auto

CARGO ?= cargo
# End-to-end tests that run at a time: most of them wait for a clock more than for a processor.
E2E_THREADS ?= 5
# A target that has no std at all.
BARE ?= x86_64-unknown-none
NIGHTLY ?= cargo +nightly
FUZZ_TARGETS := pipeline operations rules sync_decode peer_decode replies
FUZZ_SECONDS ?= 20
HOLD ?=
METHODS ?= nat,dr,tun

DENY ?= $(CARGO) deny

.PHONY: programs sync-with-kernel report-agrees bpf bpf-check bpf-check-if-possible deny-if-possible package twins help demo demo-cluster test check lint docs deny no-cc unit no-std e2e fuzz fuzz-if-possible build report setup clean

help: ## list the targets
	@sed -n 's/^\([a-z0-9-]*\):.*## /  make \1\t/p' $(firstword $(MAKEFILE_LIST)) | expand -t 18

demo: ## client, director, four web servers: NAT, direct routing, tunnelling (HOLD=1 leaves it running, METHODS=nat,dr,tun)
	@tools/setup demo
	@$(CARGO) build --release --quiet --bins -p lvs-dataplane -p lvsadm -p lvsd -p lvs-testbed
	@target/release/lvs-testbed demo --methods $(METHODS) $(if $(HOLD),--hold)

demo-cluster: ## two directors with keepalived under load: one dies, comes back, is taken out of service (FORWARD=nat|dr|tun, DIRECTOR=haproxy)
	@tools/setup demo-cluster
	@$(CARGO) build --release --quiet --bins -p lvs-dataplane -p lvsadm -p lvsd -p lvs-testbed
	@target/release/lvs-testbed cluster --live --director $(or $(DIRECTOR),lvs) --forward $(or $(FORWARD),nat)

test: ## everything: formatting, clippy, docs, unit, property, vector and end-to-end tests
	@tools/setup
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory docs
	@$(MAKE) --no-print-directory deny-if-possible
	@$(MAKE) --no-print-directory no-cc
	@$(MAKE) --no-print-directory bpf-check-if-possible
	@$(MAKE) --no-print-directory no-std
	@# Tests wait much of the time: the programs of those that follow are built meanwhile.
	@$(CARGO) test --locked --workspace --no-run
	@log=$$(mktemp); $(MAKE) --no-print-directory programs >$$log 2>&1 & built=$$!; \
	$(MAKE) --no-print-directory unit; tested=$$?; \
	wait $$built || { cat $$log; tested=1; }; rm -f $$log; exit $$tested
	@$(MAKE) --no-print-directory e2e
	@$(MAKE) --no-print-directory fuzz-if-possible
	@echo "make test: all passed"

check: lint unit ## what to run before a commit: lint and the quick tests

lint:
	$(CARGO) fmt --all --check
	$(CARGO) clippy --locked --workspace --all-targets -- -D warnings
	@# The fuzz targets are a workspace of their own, with a lock file of its own.
	cd fuzz && $(CARGO) metadata --locked --format-version 1 >/dev/null

docs:
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --locked --workspace --no-deps --quiet

twins: ## 1,000,000 frames, and all recordings, through the packet path with and without the programs of the path in the kernel
	LVS_TWINS_FRAMES=250000 $(CARGO) test --locked --release -p lvs-testbed --test e2e in_kernel_twins:: -- --nocapture
	$(CARGO) run --locked --release -p lvs-testbed -- conformance --in-kernel \
		$(foreach kind,schedulers persistence tcpstates stats proc sync,crates/lvs-core/tests/golden/$(kind)/*) \
		$(foreach kind,packets ftp differential,crates/lvs-testbed/golden/$(kind)/*)

BPF := crates/lvs-dataplane/bpf
CLANG ?= clang
# The programs of the path in the kernel. -g0 and the strip keep names and paths of this machine out of the object.
define compile_bpf
$(CLANG) -O2 -g0 -Wall -Wextra -Werror -target bpf -mcpu=v3 -I/usr/include/$$(uname -m)-linux-gnu -c $(BPF)/fast.bpf.c -o $(1)
llvm-strip -x $(1)
endef

bpf: ## compile the programs of the path in the kernel; their object is committed and built into the engine
	@tools/setup bpf
	$(call compile_bpf,$(BPF)/fast.bpf.o)

# Another clang makes another object: then the versions tell.
bpf-check: ## compile them anew and compare with what is committed
	@tools/setup bpf
	$(call compile_bpf,target/fast.bpf.o)
	@cmp target/fast.bpf.o $(BPF)/fast.bpf.o || { \
		echo "make bpf-check: the object is not that of the source (it was made by clang 14; this is $$($(CLANG) --version | head -n 1)): make bpf" >&2; exit 1; }

# The bytes depend on the compiler: Debian 12 has the one that made them.
bpf-check-if-possible:
	@tools/setup bpf >/dev/null 2>&1 || true
	@if $(CLANG) --version 2>/dev/null | grep -q 'version 14\.' && command -v llvm-strip >/dev/null; then \
		$(MAKE) --no-print-directory bpf-check; \
	else \
		echo "make test: no clang 14: the object of the path in the kernel was not compared with its source"; \
	fi

# It takes four minutes to build, once. Licences, duplicates and sources are in the lock file; known holes are in a database on
# the Internet, and where that is not to be had they were not looked for.
deny: ## licences, duplicates, sources and known holes of what the programs are made of
	@$(DENY) --version >/dev/null 2>&1 || $(CARGO) install --locked cargo-deny
	$(DENY) --locked check licenses bans sources
	@if $(DENY) --locked fetch db >/dev/null 2>&1; then \
		set -x; $(DENY) --locked check --disable-fetch advisories; \
	else \
		echo "make deny: the database of advisories cannot be fetched here: known holes were NOT looked for" >&2; \
	fi

deny-if-possible:
	@if $(DENY) --version >/dev/null 2>&1; then \
		$(MAKE) --no-print-directory deny; \
	else \
		echo "make test: no cargo-deny: licences and sources were not looked at (make deny installs it)"; \
	fi

# What compiles C asks for a compiler by these names; rustc's own linker driver is not among them.
no-cc: ## the programs, TLS included, without a C compiler
	@found=$$($(CARGO) tree --locked -p lvsd -p lvsadm -p lvs-dataplane -e normal,build --prefix none | grep -E '^(cc|cmake|bindgen|nasm-rs|pkg-config) ' | sort -u); \
	if [ -n "$$found" ]; then echo "make no-cc: these compile C: $$found" >&2; exit 1; fi
	@# Each by itself, as `cargo install` builds it: together they have the features of all.
	@for package in lvsd lvsadm lvs-dataplane; do \
		(set -x; CC=/bin/false CXX=/bin/false CMAKE=/bin/false $(CARGO) check --locked -p $$package) || exit 1; \
	done

no-std: ## lvs-core without std, and for a machine without an operating system
	$(CARGO) build --locked -p lvs-core --no-default-features
	@if rustc --print target-libdir --target $(BARE) 2>/dev/null | xargs -r test -d || rustup target add $(BARE); then \
		set -x; $(CARGO) build --locked -p lvs-core --no-default-features --target $(BARE) && \
		$(CARGO) build --locked -p lvs-core --features ipvsadm --target $(BARE); \
	else \
		echo "make no-std: no compiler for $(BARE) is to be had here: built for this host only"; \
	fi

fuzz: ## run each fuzz target for FUZZ_SECONDS; needs a nightly compiler and cargo-fuzz
	@$(NIGHTLY) fuzz --version >/dev/null 2>&1 || { echo "install them with: rustup toolchain install nightly && cargo install --locked cargo-fuzz" >&2; exit 1; }
	cd fuzz && $(NIGHTLY) fuzz build --fuzz-dir .
	@for target in $(FUZZ_TARGETS); do \
		mkdir -p fuzz/corpus/$$target && \
		(cd fuzz && set -x && $(NIGHTLY) fuzz run --fuzz-dir . $$target corpus/$$target seeds/$$target -- \
			-max_total_time=$(FUZZ_SECONDS) -timeout=60 -rss_limit_mb=4096 -print_final_stats=1 -verbosity=0) || exit 1; \
	done

# Without a nightly compiler the targets run as tests with random bytes (lvs-testbed/tests/e2e/fuzz.rs), and that has to do.
fuzz-if-possible:
	@if $(NIGHTLY) fuzz --version >/dev/null 2>&1; then \
		$(MAKE) --no-print-directory fuzz; \
	else \
		echo "make test: no nightly compiler with cargo-fuzz: the fuzz targets ran as tests only"; \
	fi

# All of the workspace each time, because what is left out takes its features along, and what others share is then built again.
unit: ## all other tests; those of lvs-dataplane need root
	$(CARGO) test --locked --workspace
	@# Once each, so that they are known to run.
	$(CARGO) test --locked --workspace --bench core -- 'step|filter|opens'

# Those that are installed, optimised; what tries them out need not be.
programs:
	$(CARGO) build --locked --release --bins -p lvs-dataplane -p lvsadm -p lvsd -p lvs-testbed

e2e: programs ## the tests in network namespaces, with the optimised programs (LVS_IN_KERNEL=off: with all packets forwarded by the engine)
	LVS_BIN_DIR="$${CARGO_TARGET_DIR:-$(CURDIR)/target}/release" RUST_BACKTRACE=0 \
		$(CARGO) test --locked --workspace --test e2e --test embed_dataplane -- --test-threads=$(E2E_THREADS)

sync-with-kernel: programs ## 500 downloads go from the kernel's IPVS to this director and back (LVS_UML=COMMAND boots that kernel; see the test)
	@test -n "$(LVS_UML)" || { echo "make sync-with-kernel: LVS_UML names no command that boots a kernel with IPVS: crates/lvs-testbed/tests/e2e/sync_with_kernel.rs" >&2; exit 2; }
	LVS_UML="$(LVS_UML)" LVS_BIN_DIR="$${CARGO_TARGET_DIR:-$(CURDIR)/target}/release" \
		$(CARGO) test --locked --workspace --test e2e sync_with_kernel -- --ignored --nocapture

report: ## repeat published LVS experiments on this machine, into target/report (needs root; REPORT_OPTIONS=--quick)
	tools/setup bench
	$(CARGO) build --locked --release -p lvs-bench -p lvs-dataplane -p lvsadm -p lvsd -p lvs-testbed
	target/release/lvs-bench report $(REPORT_OPTIONS)

report-agrees: ## two reports of this machine, one after the other, agree within their spread (REPORT_OPTIONS=--quick)
	$(MAKE) report REPORT_OPTIONS='$(REPORT_OPTIONS) --out target/report-first'
	$(MAKE) report REPORT_OPTIONS='$(REPORT_OPTIONS) --out target/report-second'
	target/release/lvs-bench report compare target/report-first target/report-second

build: ## the programs, optimised
	$(CARGO) build --release --workspace --bins

setup: ## install what building and testing need
	@tools/setup

package: ## a Debian package of the programs, units, manual pages and completions, in target/debian (needs cargo-deb)
	@$(CARGO) build --release --locked --bins -p lvs-dataplane -p lvsadm -p lvsd
	@tools/package
	@$(CARGO) deb --no-build -p lvsd

clean: ## remove what was built
	$(CARGO) clean
