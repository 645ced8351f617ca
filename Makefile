# Leaky Gradients. Beside each target stands its plain-Python form, for machines without make.
PYTHON ?= python3.11
PROFILE ?= quick
P ?=
VENV := .venv
BIN := $(VENV)/bin
RUN := $(BIN)/python -m fl_privacy_lib

.DEFAULT_GOAL := help
.PHONY: help setup book run lab params record test test-long lint bench gpu-check serve summary times clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | awk -F'\t' '{printf "  make %-9s %s\n", $$1, $$2}'

SMALL := $(strip $(foreach v,nb p profile,$(if $(filter command,$(origin $v)),$v)))
$(if $(SMALL),$(error write NB, P and PROFILE in capitals, not $(SMALL)))
# a word without P="..." would be dropped in silence
STRAY := $(strip $(foreach v,$(filter-out NB PROFILE P PYTHON,$(.VARIABLES)),$(if $(filter command,$(origin $v)),$v=$($v))))
$(if $(STRAY),$(error write parameters inside P, not beside it: P="$(STRAY)"))

OF_A_CHAPTER := run params lab record
$(if $(word 2,$(NB)),$(error one chapter at a time: NB=$(firstword $(NB))))
$(if $(strip $(PROFILE)),,$(error PROFILE is empty: leave it out, or give smoke, quick or full))
ifeq ($(origin PROFILE),command line)
$(foreach goal,$(filter params lab,$(MAKECMDGOALS)),$(error make $(goal) has no profile: leave PROFILE out))
endif
ifndef NB
$(foreach goal,$(filter $(OF_A_CHAPTER),$(MAKECMDGOALS)),$(error name a chapter, for example make $(goal) NB=01))
else ifeq ($(origin NB),command line)
$(foreach goal,$(filter-out $(OF_A_CHAPTER),$(MAKECMDGOALS)),$(error make $(goal) takes no chapter: leave NB out (make help lists what there is)))
endif

setup: $(VENV)/.ready ## create .venv and install everything (once; 8 GB of disk, 1 to 5 minutes)

$(VENV)/.ready: requirements.lock pyproject.toml
	@[ ! -L $(VENV) ] || { echo "error: $(VENV) is a link, and setting up here would change the folder behind it: remove the link, and make setup." >&2; exit 2; }
	@command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) is not there: install Python 3.11, or name it with PYTHON=..." >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { echo "error: $(PYTHON) is not Python 3.11, which tensorflow-privacy needs: name one with PYTHON=..." >&2; exit 2; }
	@free=$$(df -Pk . | awk 'NR==2 {print int($$4/1048576)}'); [ $$free -ge 9 ] || [ -d $(VENV)/lib ] || { echo "error: $$free GB are free here, the environment needs 9 GB: free some space." >&2; exit 2; }
	@echo "· setting up .venv: 8 GB of disk, 1 to 5 minutes, mostly download $$([ -f _build/setup_seconds ] && echo "(last time $$(cat _build/setup_seconds) s)")"
	@start=$$(date +%s); [ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV); \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv && \
	$(BIN)/uv pip install --quiet --python $(BIN)/python -r requirements.lock && \
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --editable . && \
	mkdir -p _build && echo $$(( $$(date +%s) - start )) > _build/setup_seconds && touch $@ && \
	echo "· .venv is ready ($$(cat _build/setup_seconds) s)"

book: setup ## execute every chapter and build the book [PROFILE=quick P="dataset=digits"]
	@$(RUN) book --profile $(PROFILE) $(P)

run: setup ## execute one chapter: NB=01 P="dataset=mnist noise_scale=1e-2" [PROFILE=quick]
	@$(RUN) run $(NB) --profile $(PROFILE) $(P)

params: setup ## list a chapter's parameters: NB=01
	@$(RUN) params $(NB) $(P)

lab: setup ## open a copy of a chapter of your own, in runs/, in JupyterLab: NB=05
	@$(RUN) lab $(NB)

record: setup ## record what a chapter's records lack into results/measured: NB=01 [PROFILE=full]
	@$(RUN) record $(NB) --profile $(if $(filter command line,$(origin PROFILE)),$(PROFILE),full) $(P)

TESTS := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test: setup ## run the tests (10 minutes)
	@$(TESTS) -m "not long and not cuda"

test-long: setup ## run the long tests: the built book in a browser, attacks, machines (20 to 30 minutes)
	@$(TESTS) -m "long and not cuda"

lint: setup ## ruff and mypy
	@$(BIN)/ruff check . && $(BIN)/mypy

bench: setup ## measure engines and attacks into results/measured/*performance.csv and print ratios (10 minutes)
	@OMP_NUM_THREADS=1 $(BIN)/python -m tools.bench
	@OMP_NUM_THREADS=1 $(BIN)/python -m tools.bench_attacks

gpu-check: ## on a CUDA machine: its tests, a point of every chapter, the bench, the saturation curve [PYTHON=.venv/bin/python]
	@$(PYTHON) -m tools.gpu_check

serve: setup ## serve the built book on this machine
	@$(RUN) serve

summary: setup ## write the claims summary into README.md
	@$(BIN)/python -m tools.summary

times: setup ## measure each chapter's run time into results/measured/run_times.csv
	@$(BIN)/python -m tools.run_times

clean: ## delete what was built, and the finished points of interrupted runs (not .venv, runs/ or the records)
	@rm -rf _build .pytest_cache .mypy_cache .ruff_cache .hypothesis
