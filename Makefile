# `make demo` shows a director at work, `make test` tests it; `make help` lists the rest.

SHELL := /bin/sh
export PATH := $(PATH):$(HOME)/.cargo/bin:/usr/local/cargo/bin:/usr/sbin:/sbin
export CARGO_TERM_COLOR ?= auto

CARGO ?= cargo
# A target without std.
BARE ?= x86_64-unknown-none
NIGHTLY ?= cargo +nightly
FUZZ_TARGETS := pipeline operations rules sync_decode peer_decode replies
FUZZ_SECONDS ?= 20
HOLD ?=
METHODS ?= nat,dr,tun
# Cargo with clippy as the compiler of the workspace's crates, as `cargo clippy` calls it: one pass builds and lints them, and the
# dependencies are compiled once.
LINTED := RUSTC_WORKSPACE_WRAPPER=clippy-driver CLIPPY_ARGS=-D__CLIPPY_HACKERY__warnings__CLIPPY_HACKERY__ $(CARGO)
# The tests with full sizes compute for minutes: they are compiled with optimisation, which halves their time.
FULL_SIZES := --config 'profile.dev.package.lvs-testbed.opt-level=1'
# Tests to run: words of their names, separated by commas. Empty: all tests.
ONLY ?=

DENY ?= $(CARGO) deny
# Directory of the release artefacts.
DIST = "$(TARGET)/dist"
TARGET := $${CARGO_TARGET_DIR:-$(CURDIR)/target}
RUN_TESTS = "$(TARGET)/debug/lvs-testbed" tests $(if $(ONLY),--only $(ONLY)) "$(TARGET)/tests.json"

.PHONY: help demo demo-cluster test test-all test-rest test-release programs check lint format prose docs book test-tutorial deny unit e2e no-cc alone no-std bpf bpf-check \
	msrv semver fuzz sync-with-kernel test-kubernetes report report-agrees package image crates sbom artefacts release repository test-packages build setup clean

help: ## list the targets
	@sed -n 's/^\([a-z0-9-]*\):.*## /  make \1\t/p' $(firstword $(MAKEFILE_LIST)) | expand -t 18

demo: ## client, director, four web servers: NAT, direct routing, tunnelling (HOLD=1 leaves it running, METHODS=nat,dr,tun)
	@tools/setup demo
	@echo "building the programs: some minutes the first time"
	@$(CARGO) build --release --quiet --bins -p lvs-dataplane -p lvsadm -p lvsd -p lvs-testbed
	@target/release/lvs-testbed demo --methods $(METHODS) $(if $(HOLD),--hold)

demo-cluster: ## two directors with keepalived under load: one dies, comes back, is taken out of service (FORWARD=nat|dr|tun, DIRECTOR=haproxy)
	@tools/setup demo-cluster
	@echo "building the programs: some minutes the first time"
	@$(CARGO) build --release --quiet --bins -p lvs-dataplane -p lvsadm -p lvsd -p lvs-testbed
	@target/release/lvs-testbed cluster --live --director $(or $(DIRECTOR),lvs) --forward $(or $(FORWARD),nat)

test: ## formatting, clippy, unit, property, recorded-kernel and end-to-end tests, with few packages (ONLY=word,word)
	@tools/setup test
	@$(if $(ONLY),true,$(MAKE) --no-print-directory format no-cc prose)
	@$(call build_tests,--exclude lvs-bench)
	@$(if $(ONLY),true,$(LINTED) test --locked --quiet --workspace --exclude lvs-bench --doc)
	@$(RUN_TESTS)
	@echo "make test: passed; 'make test-rest' runs what it leaves out: the tests above, full sizes, without the fast path, benches, docs, book, licences, BPF object"

test-all: test test-rest ## make test, then make test-rest

test-rest: ## the tests that make test leaves out: third-party programs, full sizes, without the fast path, benches, docs, book, licences, BPF object
	@tools/setup
	@$(MAKE) --no-print-directory format no-cc prose docs bpf-check alone no-std msrv
	@$(call build_tests,--all-targets $(FULL_SIZES))
	@$(RUN_TESTS) --rest
	@$(MAKE) --no-print-directory test-forwarding
	@tools/try-tutorial
	$(LINTED) test --locked --workspace $(FULL_SIZES) --bench core -- 'step|filter|opens'
	@$(MAKE) --no-print-directory book deny

# Tests that see whether the kernel forwards established connections.
FORWARDING := e2e::beyond,e2e::failure,e2e::filters,e2e::ftp,e2e::fullnat,e2e::host::,e2e::ipv6,e2e::killed,e2e::marks,e2e::methods
FORWARDING := $(FORWARDING),e2e::networks,e2e::pmtu,e2e::sync::,e2e::tun_backend,e2e::workers

.PHONY: test-forwarding
# The kernel fast path is off.
test-forwarding:
	LVS_FAST_PATH=off $(RUN_TESTS) --rest --only "$(FORWARDING)"

test-release: programs ## the same forwarding tests, with the programs as they are installed
	@tools/setup
	@$(call build_tests,--exclude lvs-bench)
	@LVS_BIN_DIR="$(TARGET)/release" $(MAKE) --no-print-directory test-forwarding

.PHONY: run-tests
run-tests:
	@$(RUN_TESTS)

# One build for the tests and the programs that they start; cargo's messages name the executables.
define build_tests
mkdir -p "$(TARGET)" && \
$(LINTED) test --locked --workspace $(1) --no-run --message-format=json-render-diagnostics >"$(TARGET)/tests.json"
endef

check: format no-cc prose unit ## formatting, clippy and the tests that need no network namespace

unit: ## unit, property and recorded-kernel tests
	@$(call build_tests,--exclude lvs-bench --exclude lvs-testbed)
	$(LINTED) test --locked --workspace --exclude lvs-bench --exclude lvs-testbed

e2e: ## the tests in network namespaces (LVS_FAST_PATH=off: the dataplane forwards all packets)
	@$(call build_tests,--exclude lvs-bench)
	@$(MAKE) --no-print-directory ONLY=$(or $(ONLY),e2e::) run-tests

lint: format no-cc prose ## formatting, clippy for all targets, prose, and that no dependency compiles C
	$(CARGO) clippy --locked --workspace --all-targets -- -D warnings

format:
	$(CARGO) fmt --all --check
	@# The fuzz targets are a workspace of their own, with a lock file of its own.
	cd fuzz && $(CARGO) metadata --locked --format-version 1 >/dev/null

prose: ## count hard-to-read prose in pages, comments, messages and test names; fail above the ceilings of tools/prose
	@$(LINTED) run --locked --quiet -p lvs-prose

docs:
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --locked --workspace --no-deps --quiet

book: ## the pages of docs/ as a book with a search, in target/book; every link of the book is checked
	@mdbook --version >/dev/null 2>&1 || $(CARGO) install --locked --debug mdbook
	@tools/book

test-tutorial: ## the blocks of docs/first-director.md as printed, in network namespaces; needs root and built programs
	@tools/try-tutorial

BPF := crates/lvs-dataplane/bpf
BPF_PROGRAMS := fast local
CLANG ?= clang
# The BPF programs. -g0 and the strip keep names and paths of this machine out of the objects.
define compile_bpf
for name in $(BPF_PROGRAMS); do \
	$(CLANG) -O2 -g0 -Wall -Wextra -Werror -target bpf -mcpu=v3 -I/usr/include/$$(uname -m)-linux-gnu -c $(BPF)/$$name.bpf.c -o $(1)/$$name.bpf.o && \
	llvm-strip -x $(1)/$$name.bpf.o || exit 1; \
done
endef

bpf: ## compile the BPF programs; their objects are committed and built into the dataplane
	@tools/setup bpf
	$(call compile_bpf,$(BPF))

# Another version of clang compiles other objects; the message then names both versions.
bpf-check: ## compile them anew and compare with what is committed
	@tools/setup bpf
	@mkdir -p target
	$(call compile_bpf,target)
	@for name in $(BPF_PROGRAMS); do cmp target/$$name.bpf.o $(BPF)/$$name.bpf.o || { \
		echo "make bpf-check: the object is not that of the source (it was made by clang 14; this is $$($(CLANG) --version | head -n 1)): make bpf" >&2; exit 1; }; done

# cargo-deny is compiled once, without optimisation, in a third of the time. Known vulnerabilities are in a database on the
# Internet; without access to it, the target checks only licences, duplicates and sources.
deny: ## licences, duplicates, sources and known vulnerabilities of the dependencies
	@$(DENY) --version >/dev/null 2>&1 || $(CARGO) install --locked --debug cargo-deny
	$(DENY) --locked check licenses bans sources
	@if $(DENY) --locked fetch db >/dev/null 2>&1; then \
		set -x; $(DENY) --locked check --disable-fetch advisories; \
	else \
		echo "make deny: the database of advisories cannot be fetched: dependencies were NOT checked for known vulnerabilities" >&2; \
	fi

# The tool is built once. Programs without a library have no API that it compares.
semver: ## changes of the public APIs since the last release that need a higher version (BASE=tag or commit)
	@base=$(or $(BASE),$$(git describe --tags --abbrev=0 --match 'v*' 2>/dev/null)); \
	[ -n "$$base" ] || { echo "make semver: no tag v* yet, nothing to compare with: BASE=commit"; exit 0; }; \
	$(CARGO) semver-checks --version >/dev/null 2>&1 || $(CARGO) install --locked --debug cargo-semver-checks || exit 1; \
	set -x; $(CARGO) semver-checks --workspace $(UNPUBLISHED) --baseline-rev "$$base"

# A crate that compiles C needs one of these build dependencies; rustc's own linker driver is not among them.
no-cc: ## the programs, TLS included, need no C compiler
	@found=$$($(CARGO) tree --locked -p lvsd -p lvsadm -p lvs-dataplane -e normal,build --prefix none | grep -E '^(cc|cmake|bindgen|nasm-rs|pkg-config) ' | sort -u); \
	if [ -n "$$found" ]; then echo "make no-cc: these compile C: $$found" >&2; exit 1; fi

alone: ## each published crate by itself, with its own features, as `cargo install` and an embedder build it
	@for package in lvs-sys lvs-core lvs-packet lvs-api lvs-process lvs-proxy lvsadm lvs-dataplane lvsd; do (set -x; $(CARGO) check --locked -p $$package) || exit 1; done

no-std: ## lvs-core without std, and for a machine without an operating system
	$(CARGO) check --locked -p lvs-core --no-default-features
	@if rustc --print target-libdir --target $(BARE) 2>/dev/null | xargs -r test -d || rustup target add $(BARE); then \
		set -x; $(CARGO) check --locked -p lvs-core --no-default-features --target $(BARE) && \
		$(CARGO) check --locked -p lvs-core --features ipvsadm --target $(BARE); \
	else \
		echo "make no-std: the target $(BARE) cannot be installed: built for this host only"; \
	fi

# Clippy refuses what the standard library of that version lacks; a dependency says itself what it needs.
msrv: ## no dependency needs a newer Rust than Cargo.toml promises
	@promised=$$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml); \
	newest=$$($(CARGO) metadata --locked --format-version 1 | tr ',' '\n' | sed -n 's/^"rust_version":"\([0-9.]*\)".*/\1/p' | sort -V | tail -n 1); \
	[ "$$(printf '%s\n' "$$promised" "$$newest" | sort -V | tail -n 1)" = "$$promised" ] || [ "$$newest" = "$$promised.0" ] || { \
		echo "make msrv: a dependency needs Rust $$newest, Cargo.toml promises $$promised" >&2; exit 1; }

fuzz: ## run each fuzz target for FUZZ_SECONDS; needs a nightly compiler and cargo-fuzz
	@$(NIGHTLY) fuzz --version >/dev/null 2>&1 || { echo "install them with: rustup toolchain install nightly && cargo install --locked cargo-fuzz" >&2; exit 1; }
	cd fuzz && $(NIGHTLY) fuzz build --fuzz-dir .
	@for target in $(FUZZ_TARGETS); do \
		mkdir -p fuzz/corpus/$$target && \
		(cd fuzz && set -x && $(NIGHTLY) fuzz run --fuzz-dir . $$target corpus/$$target seeds/$$target -- \
			-max_total_time=$(FUZZ_SECONDS) -timeout=60 -rss_limit_mb=4096 -print_final_stats=1 -verbosity=0) || exit 1; \
	done

# The programs that are installed, optimised.
programs:
	$(CARGO) build --locked --release --bins -p lvs-dataplane -p lvsadm -p lvsd -p lvs-testbed

sync-with-kernel: programs ## 500 downloads go from the kernel's IPVS to this director and back (LVS_UML=COMMAND boots that kernel; see the test)
	@test -n "$(LVS_UML)" || { echo "make sync-with-kernel: LVS_UML names no command that boots a kernel with IPVS: crates/lvs-testbed/tests/e2e/sync_with_kernel.rs" >&2; exit 2; }
	LVS_UML="$(LVS_UML)" LVS_BIN_DIR="$${CARGO_TARGET_DIR:-$(CURDIR)/target}/release" \
		$(CARGO) test --locked --workspace --test e2e sync_with_kernel -- --ignored --nocapture

KUBE = $(TARGET)/kubernetes
test-kubernetes: ## two directors serve Services of a real Kubernetes API server; kube-proxy and the tests of moby/ipvs run under lvs-run; all are built once with Go (25 minutes)
	@tools/setup kubernetes
	@test -x "$(KUBE)/kube-apiserver" -a -x "$(KUBE)/kube-proxy" -a -x "$(KUBE)/moby-ipvs-tests" || command -v go >/dev/null || { echo "make test-kubernetes: install Go 1.24 or newer, which builds the API server, kube-proxy and the tests of moby/ipvs" >&2; exit 2; }
	@mkdir -p "$(KUBE)" && cp tools/kubernetes/go.mod tools/kubernetes/go.sum "$(KUBE)"
	for i in kube-apiserver kube-proxy; do test -x "$(KUBE)/$$i" || (cd "$(KUBE)" && go build -mod=mod -o $$i k8s.io/kubernetes/cmd/$$i) || exit; done
	test -x "$(KUBE)/moby-ipvs-tests" || tools/moby-ipvs "$(KUBE)/moby-ipvs-tests"
	@$(call build_tests,--exclude lvs-bench)
	LVS_KUBE_APISERVER="$(KUBE)/kube-apiserver" LVS_KUBE_PROXY="$(KUBE)/kube-proxy" LVS_MOBY_IPVS="$(KUBE)/moby-ipvs-tests" \
		$(LINTED) test --locked --workspace --exclude lvs-bench --test e2e -- --ignored --nocapture kubernetes moby_ipvs

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

package: ## .deb, .rpm and tarball of static programs, with checksums, in target/dist (TARGETS="x86_64-unknown-linux-gnu aarch64-unknown-linux-gnu")
	@tools/setup package
	@tools/package $(TARGETS)

repository: ## a signed apt repository of these packages, in target/repository (KEY=name of a secret key of gpg)
	@tools/repository "$(KEY)"

image: ## container images of these packages, in target/dist (needs buildah)
	@tools/image

# `cargo package` takes these, too, and `cargo publish` does not.
UNPUBLISHED := --exclude lvs-testbed --exclude lvs-bench --exclude lvs-examples --exclude lvs-prose

# `cargo publish --workspace` without --dry-run publishes them, in the order of their dependencies.
crates: ## the crates as they are published, each built alone, in target/package
	$(CARGO) package --workspace $(UNPUBLISHED) --locked --no-verify
	@tools/check-crates
	@# Cargo would take the sources that an earlier trial of this version has left in its cache.
	rm -rf "$${CARGO_HOME:-$$HOME/.cargo}"/registry/src/-*/lvs*
	$(CARGO) publish --workspace --locked --dry-run

sbom: ## a list of all crates in each program (CycloneDX), in target/dist
	@tools/sbom

artefacts: package image crates sbom ## everything that a release has, with checksums, for the version in Cargo.toml
	@tools/release --notes >$(DIST)/NOTES.md
	@cd $(DIST) && rm -f SHA256SUMS && sha256sum -- * >SHA256SUMS

release: ## the commit of a release (VERSION=1.2.3) and its artefacts; what is left to do is printed
	@tools/release "$(VERSION)"
	@$(MAKE) --no-print-directory test-release artefacts
	@{ echo "lvsd $(VERSION)"; echo; cat $(DIST)/NOTES.md; echo; cat $(DIST)/SHA256SUMS; } >"$(TARGET)/tag.txt"
	@echo "next: git tag --sign --file $(TARGET)/tag.txt v$(VERSION) && git push --follow-tags; make repository KEY=..."

test-packages: ## what a stranger installs, each tried from its artefact in fresh roots (PARTS="lint deb", BEFORE=artefacts of the version before); needs root, and some minutes
	@tools/setup packages
	@tools/try-artefacts $(PARTS)
	@tools/try-package $(DIST)/lvsd_*_amd64.deb

clean: ## remove what was built
	$(CARGO) clean
