# `make` lists the targets. Everything happens in a virtual environment of its own.
VENV ?= .venv
PY    = $(VENV)/bin/python
READY = $(VENV)/.ready
# Most tests wait for processes: more workers than cores. JOBS=0: one after the other, in this process.
JOBS  ?= 3
PYTEST = PYTHONPATH=src $(PY) -W error -m pytest -q
EACH   = $(PYTEST) -n $(JOBS) --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help venv pyz run test test-fast test-engines test-39 verify-online check release bench clean

help:            ## list the targets
	@sed -n 's/^\([a-z0-9-]*\): .*## /  make \1\t/p' Makefile | expand -t 24

run: $(READY) pyz   ## serve a small model from this machine; MODEL=FILE or MODEL=hf:ORG/REPO[:FILE] for one of your own
	@$(PY) scripts/run_local.py $(if $(MODEL),--model '$(MODEL)')

test: $(READY)      ## everything this machine can test, with a real engine and a real model (brings both, once)
	@$(PY) scripts/bring.py >/dev/null
	$(EACH) -m "not online and not heavy" $(ARGS)

test-fast: $(READY) ## the tests that need no engine and take no time
	$(EACH) -m "not online and not engine and not slow and not heavy" $(ARGS)

test-engines: $(READY) ## the tests with real engines only, vLLM too: installs it (8 GB) and serves with it on the CPU
	@$(PY) scripts/bring.py >/dev/null
	$(EACH) -m "engine and not online and not heavy" $(ARGS); small=$$?; \
	$(PYTEST) -s -m "heavy and not online" $(ARGS) && exit $$small

test-39:            ## test-fast on Python 3.9
	@$(MAKE) --no-print-directory test-fast VENV=.venv-3.9 PYTHON=$$(sh scripts/python.sh 3.9)

verify-online: $(READY) ## what needs the real internet: GitHub's own answers, Hugging Face
	$(PY) scripts/verify_online.py

check: $(READY)     ## ruff and mypy (strict on the pure layers)
	$(VENV)/bin/ruff check . ; ruff=$$?; $(VENV)/bin/mypy && exit $$ruff

pyz: $(READY)       ## build llmgw.pyz and llmgw.pyz.sha256, reproducibly
	@$(PY) build_pyz.py

release: $(READY)   ## make a release in dist/: built twice and compared, checksums, manifest, notes
	@$(PY) scripts/release.py

bench: $(READY)     ## measure what has a bar
	@set -e; for bench in tests/bench/bench_*.py; do echo "== $$bench"; PYTHONPATH=src:. $(PY) $$bench; done

venv: $(READY)      ## only make the virtual environment

$(READY): pyproject.toml scripts/pins.py
	@python='$(PYTHON)'; python=$${python:-$$(sh scripts/python.sh)} && \
	echo "making $(VENV) with $$python (once)" >&2 && "$$python" -m venv --clear $(VENV) && \
	$(PY) scripts/pins.py > $(VENV)/pins.txt && \
	$(PY) -m pip install -qq --disable-pip-version-check --no-deps -r $(VENV)/pins.txt && touch $@

clean:              ## remove what was made here (the brought engine and model stay in the user's cache)
	rm -rf .venv .venv-* build dist llmgw.pyz llmgw.pyz.sha256 .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
