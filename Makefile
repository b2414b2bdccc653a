# make demo: sets the machine up, makes a chain, serves it and boots a guest on it.
# make test: sets the machine up and runs every check that CI runs. Clippy compiles the examples; they are
# not built as well.

SOAK_SECONDS ?= 3600
FUZZ_SECONDS ?= 60
CRASH_STATES ?= 1000000
CRASH_SEED ?= 1
CRASH_FILES_STATES ?= 2000

export PATH := $(PATH):$(HOME)/.cargo/bin
DENY := target/tools/bin/cargo-deny

.PHONY: setup build test demo soak crash crash-files fuzz bench papers papers-quick clean

setup:
	@scripts/setup

build: setup
	cargo build --locked --release --workspace

test: setup $(DENY)
	cargo fmt --all --check
	cargo clippy --locked --workspace --all-targets -- -D warnings
	$(DENY) --locked check --hide-inclusion-graph bans licenses sources
	RUSTDOCFLAGS='-D warnings' cargo doc --locked --workspace --no-deps
	cargo test --locked --workspace --tests
	cargo test --locked --workspace --doc

demo: setup
	@scripts/demo

# The random comparison with QEMU, for SOAK_SECONDS.
soak: setup
	ISOBATH_DIFF_SECONDS=$(SOAK_SECONDS) cargo test --locked --release -p isobath-disk --test opposite_qemu -- --nocapture

# The crash simulator, in every mode: small histories with every crash there is, then random ones
# until CRASH_STATES states have passed.
crash: setup
	cargo run --locked --release -p isobath-crash --bin isobath-crash -- --exhaustive
	cargo run --locked --release -p isobath-crash --bin isobath-crash -- --states $(CRASH_STATES) --seed $(CRASH_SEED)

# Crashes of a server on real files: CRASH_FILES_STATES states of each workload in every mode.
crash-files: setup
	cargo run --locked --release -p isobath-crash --bin isobath-crash-files -- --states $(CRASH_FILES_STATES) --seed $(CRASH_SEED)

# Each fuzz target, for FUZZ_SECONDS.
fuzz:
	FUZZ_SECONDS=$(FUZZ_SECONDS) scripts/fuzz

# With the simulated disk of `serve --slow-disk`.
bench: setup
	cargo build --locked --release --workspace --features isobath-cli/slow-disk
	bench/run

# The papers' figures, measured again: bench/papers --help tells more. PAPERS names experiments, all by default. The
# quick profile tries them out: what it measures means nothing, so it needs no optimised build.
papers: setup
	scripts/setup-papers
	cargo build --locked --release -p isobath-testkit --example boot
	cargo build --locked --release --features isobath-cli/slow-disk -p isobath-cli -p isobath-crash
	bench/papers $(PAPERS)

papers-quick: setup
	scripts/setup-papers
	cargo build --locked --release -p isobath-testkit --example boot
	cargo build --locked --features isobath-cli/slow-disk -p isobath-cli -p isobath-crash
	ISOBATH=$${CARGO_TARGET_DIR:-target}/debug/isobath bench/papers --quick $(PAPERS)

clean:
	cargo clean
	rm -rf fuzz/target bench/results

# Compiled here, without optimisation: it takes less than a minute, and runs for a second.
$(DENY):
	cargo install --locked --quiet --debug --version 0.20.2 --root target/tools cargo-deny
