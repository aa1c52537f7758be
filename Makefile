# Front end of everything: `make` lists the targets. CARGO_TARGET_DIR is respected.
CARGO ?= cargo
# The version of the toolchain and network settings stay the caller's; only the target folder is made explicit.
TARGET_DIR := $(or $(CARGO_TARGET_DIR),$(CURDIR)/target)
SKIPPED := $(TARGET_DIR)/lab/skipped
TEST_LOG := $(TARGET_DIR)/lab/test.log
# A pipe fails when any part of it does.
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
GUEST_TARGET := x86_64-unknown-linux-gnu

.DEFAULT_GOAL := help
.PHONY: help setup build agent check test test-full bench fuzz demo

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## install what the lab needs (Debian 12; packages need root)
	@tests/setup.sh $(SETUP)

build: ## build everything, the static agent for guests too
	$(CARGO) build --workspace --all-targets
	@$(MAKE) --no-print-directory agent

# A target folder of its own: its compiler flags differ, and in the common one each build would undo the other.
agent:
	RUSTFLAGS='-C target-feature=+crt-static' $(CARGO) build -p hint-agent --profile agent \
		--target $(GUEST_TARGET) --target-dir '$(TARGET_DIR)/guest'

check: ## formatting, lints, unit tests and doc tests: no root, no guests
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets -- -D warnings
	$(CARGO) test --workspace --lib --bins
	$(CARGO) test --workspace --doc

# Tests with guests need both cores, so all run one after the other; one command for the whole workspace, since another choice of
# packages means other features and a second build. The last line sums up what the test programs reported.
test: setup build ## set up, build, run the tests, list what was skipped
	@mkdir -p '$(TARGET_DIR)/lab'; rm -f '$(SKIPPED)'
	@failed=0; \
	$(CARGO) test --workspace --no-fail-fast -- --test-threads=1 $(TEST_ARGS) 2>&1 | tee '$(TEST_LOG)' || failed=1; \
	skipped=0; \
	if [ -s '$(SKIPPED)' ]; then \
		echo 'Skipped for want of a capability:'; cat '$(SKIPPED)'; skipped=$$(wc -l <'$(SKIPPED)'); \
	else echo 'No test was skipped.'; fi; \
	if [ $$failed = 1 ]; then echo 'Some tests FAILED.'; fi; \
	awk -v skipped=$$skipped '/^test result:/ { passed += $$4; failed += $$6 } \
		END { printf "%d passed, %d failed, %d skipped\n", passed - skipped, failed, skipped }' '$(TEST_LOG)'; \
	exit $$failed

test-full: TEST_ARGS := --include-ignored
test-full: SETUP := full
test-full: test ## every test, the slow ones too

bench: ## how long decisions take, in CPU time
	$(CARGO) bench -p hint-broker

# Inputs that reach something new go to the target folder; the corpus in the repository grows by hand.
RUNS ?= 1000000
FUZZED = $(TARGET_DIR)/fuzz/corpus/$(TARGET)
fuzz: ## list the fuzz targets; TARGET=NAME [RUNS=N] runs one (nightly Rust, cargo-fuzz)
ifeq ($(TARGET),)
	@for target in tests/fuzz/fuzz_targets/*.rs; do basename $$target .rs; done
else
	@mkdir -p '$(FUZZED)'
	cd tests/fuzz && CARGO_TARGET_DIR='$(TARGET_DIR)/fuzz' rustup run nightly cargo fuzz run --fuzz-dir . $(TARGET) \
		'$(FUZZED)' corpus/$(TARGET) -- -runs=$(RUNS) -max_len=4096 -timeout=10 -rss_limit_mb=1024
endif

demo: ## show on real guests what folding is worth
	@tests/setup.sh demo
	$(CARGO) build --release --workspace
	@$(MAKE) --no-print-directory agent
	'$(TARGET_DIR)/release/demo'
