# PG selects PostgreSQL majors, e.g. `make test PG=17` or `make test-regress PG="17 18"`.
# tools/postgres provides each of them. Nothing installed on the machine is changed, except by `make
# install`.

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all test-unit test-regress test-recovery test-upgrade \
	powercut inject schedules patroni models properties hostile builds hosts aarch64 prove install bench claims lint tidy fuzz deb deb-fips test-fips sbom book image official-image cnpg-image image-test docker-demo

help: ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo '  PG="15 18"          selects PostgreSQL majors (15, 16, 17, 18, 19)'

setup: ## install what building and testing needs (says what and why)
	@tools/setup $(PG)

demo: ## a throw-away cluster that shows what pagevault does
	@tools/demo $(or $(PG),15)

test: ## all tests on the first PG, on the others what differs by major; PG defaults to "15 16 17 18 19"
	@tools/test $(or $(PG),15 16 17 18 19)

test-all: ## everything on each PG (default all), PostgreSQL's own suites and upgrades too: hours
	@tools/test-all $(or $(PG),15 16 17 18 19)

test-unit: ## only the tests that need no server
	@tools/test

test-regress: ## PostgreSQL's own regression suite with everything encrypted; PG defaults to "17 18"
	@tools/test-regress $(or $(PG),17 18)

test-recovery: ## PostgreSQL's own TAP suites with everything encrypted; PG defaults to "17 18"
	@tools/test-recovery $(or $(PG),17 18)

test-upgrade: ## pg_upgrade of encrypted clusters, each pair of majors; PAIRS="15-18 17-18" selects
	@tools/test-upgrade $(PAIRS)

powercut: ## simulated power cuts, all scenarios, IMAGES (60) of each; PG defaults to 15
	@tools/powercut $(or $(IMAGES),60) $(or $(PG),15)

inject: ## errors of the operating system, injected at every call: EACH (3) calls of a place; PG defaults to 15
	@tools/inject $(or $(EACH),3) $(or $(PG),15)

schedules: ## random schedules against a model: COUNT=1000 OPERATIONS=30 SEED=n, or FILE=schedule; SHRINK=n
	@COUNT='$(COUNT)' OPERATIONS='$(OPERATIONS)' SEED='$(SEED)' FILE='$(FILE)' SHRINK='$(SHRINK)' \
		tools/schedules $(or $(PG),15)

patroni: ## three nodes under Patroni that fail, with keys that change: MINUTES=60 SEED=n; PG=15 only
	@MINUTES='$(MINUTES)' SEED='$(SEED)' tools/patroni $(or $(PG),15)

install: ## build and install into PostgreSQL PG, or into the server of PG_CONFIG=/path/to/pg_config
	@tools/install $(or $(PG),15) $(PG_CONFIG)

bench: ## what encryption costs beside stock PostgreSQL: the quick form, some minutes
	@tools/bench $(or $(PG),15)

claims: ## what is in plaintext on disk after statements that encryption can miss, beside stock PostgreSQL
	@tools/bench $(or $(PG),15) claims

lint: ## formatting, clippy, tidy, documentation, dependency policy
	@tools/lint $(or $(PG),15)

tidy: ## what formatting and clippy do not see (CONTRIBUTING.md, "Tidy")
	@cargo xtask tidy

fuzz: ## every reader of foreign bytes for FUZZ_SECONDS (30) with cargo-fuzz; needs nightly Rust
	@tools/fuzz $(or $(FUZZ_SECONDS),30)

models: ## every order of events in the key protocol and in shared memory: the long form, minutes
	@tools/models

properties: ## property tests with CASES (20000) new random cases each; SEED=n repeats a run
	@tools/properties $(or $(CASES),20000) $(SEED)

hostile: ## builds of PostgreSQL with assertions and sanitizers, valgrind; PART="aio settings" selects
	@set -e; for pg in $(or $(PG),18); do tools/test-hostile $$pg $(PART); done

builds: ## other people's builds of PostgreSQL, and other compilers (docs/compatibility.md); BUILD=name selects
	@tools/builds $(BUILD)

hosts: ## other Debians with their servers and extensions; SUITE="bookworm trixie sid experimental" selects
	@set -e; for suite in $(or $(SUITE),bookworm trixie sid experimental); do tools/host $$suite; done

aarch64: ## pagevault for aarch64, emulated; PART="workspace crates servers regress" selects
	@tools/aarch64 $(PART)

prove: models properties ## models, properties, power cuts, injected errors, random schedules, Patroni, hostile builds in their long forms: hours
	@tools/powercut $(or $(IMAGES),200) $(or $(PG),15 18)
	@tools/inject $(or $(EACH),3) $(or $(PG),15 18)
	@set -e; for pg in $(or $(PG),15 18); do tools/schedules $$pg; done
	@tools/patroni 15
	@tools/test-hostile 18

deb: ## Debian packages postgresql-PG-pagevault in target/deb
	@set -e; for pg in $(or $(PG),15); do tools/deb $$pg; done

deb-fips: ## the same with a validated cryptographic module: postgresql-PG-pagevault-fips (docs/fips.md)
	@set -e; for pg in $(or $(PG),15); do PAGEVAULT_FIPS=1 tools/deb $$pg; done

test-fips: ## builds with a validated cryptographic module, and their data in ordinary servers; PG defaults to 15
	@set -e; for pg in $(or $(PG),15); do tools/test-fips $$pg; done

book: ## the documentation as a website in target/book, all links followed; LINKS=all follows those to other sites
	@LINKS='$(LINKS)' tools/book

sbom: ## what the packages are made of, as CycloneDX
	@tools/sbom

image: ## the container image pagevault:PG; IMAGE_ARGS go to docker build
	@set -e; for pg in $(or $(PG),17); do tools/image $$pg $(IMAGE_ARGS); done

official-image: ## the same on top of the official postgres image: pagevault-official:PG
	@set -e; for pg in $(or $(PG),17); do tools/image $$pg official $(IMAGE_ARGS); done

cnpg-image: ## the image that CloudNativePG mounts; PG=18 or newer
	@set -e; for pg in $(or $(PG),18); do tools/cnpg-image $$pg $(IMAGE_ARGS); done

image-test: ## tests of that image
	@PAGEVAULT_IMAGE=$${PAGEVAULT_IMAGE:-pagevault:$(or $(PG),17)} \
		cargo test --locked -p pagevault-tests --test image

docker-demo: ## PostgreSQL in a container with its master key in a Vault beside it, step by step
	@tools/docker-demo $(or $(PG),17)
