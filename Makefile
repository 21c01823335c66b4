# make reproduce [TIER=smoke|gpu|gpu2]   the whole pipeline, ends with the path of the report
# make test                              the test suite
# make lint                              ruff, snakefmt, snakemake --lint
# Each makes .venv from the pins in envs/ first, and again when they change.
PYTHON ?= python3
TIER ?= smoke
VENV ?= .venv
CORES ?= all

BIN := $(VENV)/bin
ifeq ($(TIER),smoke)
PINS := envs/cpu.txt
else
PINS := envs/gpu.txt envs/gpu-tlx.txt
endif
# The name says which pins are installed: changing the tier installs the other set.
STAMP := $(VENV)/.installed-$(firstword $(basename $(notdir $(PINS))))
REPORT := results/$(TIER)/paper/report.pdf

.PHONY: help reproduce test lint venv
.DEFAULT_GOAL := help

help:
	@sed -n '1,4s/^# //p' Makefile

reproduce: $(STAMP)
	$(BIN)/snakemake --workflow-profile profiles/$(TIER) --cores $(CORES)
	@echo "The report is $(REPORT)"

test: $(STAMP)
	$(BIN)/python -m pytest

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/snakefmt --check Snakefile workflow
	$(BIN)/snakemake --lint

venv: $(STAMP)

$(STAMP): $(PINS) $(wildcard envs/fbgemm_gpu_cpu/pyproject.toml)
	@case "$(TIER)" in smoke|gpu|gpu2) ;; *) \
	  echo "error: TIER '$(TIER)' is unknown; allowed: smoke, gpu, gpu2" >&2; exit 2;; esac
	@if [ "$(TIER)" != smoke ] && ! nvidia-smi -L 2>/dev/null | grep -q .; then \
	  echo "error: TIER=$(TIER) needs an NVIDIA GPU with its driver, and nvidia-smi finds none; TIER=smoke runs without" >&2; \
	  exit 1; fi
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if v in ((3, 11), (3, 12)) else \
	  "error: $(PYTHON) is Python %d.%d; allowed: 3.11, 3.12, as in make PYTHON=python3.11" % v)'
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -r $(firstword $(PINS))
	$(if $(word 2,$(PINS)),$(BIN)/python -m pip install --quiet --no-deps -r $(word 2,$(PINS)))
	@touch $@
