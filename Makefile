# Every target first brings .venv to what requirements.lock says; nothing but Python, pip and make
# is needed for that.

SHELL := /bin/sh
VENV := .venv
RUN := $(VENV)/bin/python
JOBS ?= 2  # processes that run tests
BENCHMARKS ?= attention indexer experts loss
BENCH ?=  # more arguments of `python -m tests.bench`, as in BENCH="--tokens 4096"
# XLA takes hundreds of megabytes for each step on a CPU and gives them back; with huge pages that is
# a third less processor time (docs/log.md, 2026-11-30).
export GLIBC_TUNABLES := glibc.malloc.hugetlb=1
SUPPORTED := import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 12))

.PHONY: setup pretrain posttrain test test-all lint bench

# A pyenv shim may exist and still refuse to run, so each candidate is tried out. The copy of the lock
# inside .venv says what is installed.
setup:
	@set -e; \
	if cmp -s requirements.lock $(VENV)/requirements.lock && $(RUN) -c '$(SUPPORTED)' 2>/dev/null; \
	then exit 0; fi; \
	if ! $(RUN) -c '$(SUPPORTED)' 2>/dev/null; then \
	  set -- python3.12 python3.13 "$$(pyenv which python 2>/dev/null)" \
	    "$$("$$HOME/.pyenv/bin/pyenv" which python 2>/dev/null)"; \
	  if [ -n "$$PYTHON" ]; then set -- "$$PYTHON"; fi; \
	  found=""; \
	  for candidate in "$$@"; do \
	    if "$$candidate" -c '$(SUPPORTED)' >/dev/null 2>&1; then found="$$candidate"; break; fi; \
	  done; \
	  if [ -z "$$found" ]; then \
	    echo "No Python of version 3.12 or newer that can make a virtual environment was found:" \
	      "install one or name it, as in PYTHON=/path/to/python make test." >&2; \
	    exit 2; \
	  fi; \
	  echo "Making $(VENV) with $$("$$found" -c 'import sys; print("Python", *sys.version.split()[:1])')."; \
	  "$$found" -m venv --clear $(VENV); \
	fi; \
	rm -f $(VENV)/requirements.lock; \
	echo "Installing requirements.lock into $(VENV); the first time takes a minute or two."; \
	$(RUN) -m pip install -qq --disable-pip-version-check -r requirements.lock; \
	cp requirements.lock $(VENV)/requirements.lock

pretrain: setup
	@$(RUN) -m train prepare --source python-stdlib --tokenizer train:1024 --slots 256 --out .data/tiny
	@$(RUN) -m train pretrain --config configs/tiny.py --workdir runs/tiny

# Both parts go on where they were; folders under .data and runs that are there are used again.
posttrain: setup
	@$(RUN) -m train prepare --source python-stdlib --tokenizer train:1024 --chat-tokens --slots 256 \
	  --out .data/tiny_text
	@$(RUN) -m train prepare --format chat --source tools:0 --tokenizer .data/tiny_text/tokenizer.json \
	  --slots 1024 --decoder-slots 768 --window 32 --out .data/tiny_tools
	@$(RUN) -m train pretrain --config configs/tiny.py --workdir runs/tiny_text \
	  --config.data.paths=.data/tiny_text --config.total_steps=100
	@$(RUN) -m train sft --config configs/sft.py:tiny --workdir runs/tiny_tools --init runs/tiny_text

test: setup
	@$(RUN) -m pytest -n $(JOBS) --dist loadfile -m "not slow"

test-all: setup
	@$(RUN) -m pytest -n $(JOBS) --dist loadfile

lint: setup
	@failed=0; \
	$(RUN) -m ruff check . || failed=1; \
	$(RUN) -m ruff format --check . || failed=1; \
	$(RUN) -m pyright || failed=1; \
	exit $$failed

bench: setup
	@failed=0; \
	for name in $(BENCHMARKS); do \
	  $(RUN) -m tests.bench $$name --json runs/bench-$$name.json $(BENCH) || failed=1; \
	done; \
	exit $$failed
