# `make demo` and `make test` need only Python >= 3.11 and a C++ compiler: they set up .venv on the first call.
#   PYTHON=/path/to/python   the interpreter to build .venv with (default: the first suitable one on PATH)
#   TORCH=2.14.1             another PyTorch, in an environment of its own, .venv-2.14.1 (default: the newest in RANGE)
#   VENV=/path/to/venv       another place for the environment
#   DEMO="--only llama"      arguments of the demo; TESTS="tests/test_models.py -x" those of pytest
#   GPU_PYTHON=python3       `make gpu` uses an interpreter that has PyTorch with CUDA, Triton and pytest, and no .venv
#   OUT=build/results        where `make gpu` puts its results; BENCH="--minutes 5" arguments of its benchmark
#   PARTS="tests figures"    what `make gpu` runs: tests, figures (of docs/performance.md and docs/performance/), foreign, host
#   FOREIGN="--minutes 8"    arguments of benchmarks.foreign
#   RANKS="--how ddp fsdp"   arguments of benchmarks.distributed, which `make gpus` runs on all GPUs of a machine
#   DECODING="--batch 8"     arguments of benchmarks.tensor_parallel, which it runs next
# pip's own settings (PIP_INDEX_URL, PIP_FIND_LINKS, ...) are respected; a torch of RANGE already in VENV is kept.

RANGE := torch>=2.11,<2.16
TORCH ?=
VENV ?= .venv$(if $(TORCH),-$(TORCH))
DEMO ?=
TESTS ?=
GPU_PYTHON ?= python3
OUT ?= build/results
BENCH ?=
PARTS ?= tests figures
FOREIGN ?=
RANKS ?=
DECODING ?=
PY := $(VENV)/bin/python
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PYTHONDONTWRITEBYTECODE :=  # many tests start processes of their own, each of which would compile PyTorch again

.PHONY: demo test test-all environment gpu gpus check docs clean

demo: $(VENV)/.bench
	$(PY) -m benchmarks.demo $(DEMO)

# Two processes: each mostly waits for compilers. Who has done its half of the tests takes from the other's.
# Of products of dimensions it runs covering combinations (tests/selection.py); `make test-all` runs all of them.
# build/durations.xml keeps the time that each test took.
test: $(VENV)/.test
	$(PY) -m pytest -n 2 --dist worksteal --junit-xml=build/durations$(if $(TORCH),-$(TORCH)).xml $(TESTS)

test-all: override TESTS += --full
test-all: test

# What `make test` installs, and no more.
environment: $(VENV)/.test

# Each part runs also when one before it fails.
gpu:
	@$(GPU_PYTHON) -c 'import fusion_backend.patterns' 2>/dev/null || \
	  $(GPU_PYTHON) -m pip install -q --no-deps --no-build-isolation -e .
	@status=0; for part in $(PARTS); do case $$part in \
	  tests) $(GPU_PYTHON) -m pytest -m gpu tests/gpu --full -q ;; \
	  figures) $(GPU_PYTHON) -m benchmarks.reproduce $(BENCH) --out $(OUT) ;; \
	  foreign) $(GPU_PYTHON) -m benchmarks.foreign $(FOREIGN) --add --out $(OUT)/foreign.json ;; \
	  host) $(GPU_PYTHON) -m benchmarks.host --out $(OUT)/host.json ;; \
	  *) echo "PARTS has tests, figures, foreign and host, not $$part"; false ;; \
	esac || status=1; done; exit $$status

# Several GPUs: training spread over them and decoding divided over them, under plain Inductor and under fusion.
gpus:
	@$(GPU_PYTHON) -c 'import fusion_backend.patterns' 2>/dev/null || \
	  $(GPU_PYTHON) -m pip install -q --no-deps --no-build-isolation -e .
	@status=0; \
	$(GPU_PYTHON) -m benchmarks.distributed $(RANKS) --out $(OUT)/ranks.json || status=1; \
	$(GPU_PYTHON) -m benchmarks.tensor_parallel $(DECODING) --out $(OUT)/tensor-parallel.json || status=1; \
	exit $$status

# Before every commit: form, lint, types, then the CPU tests. .pre-commit-config.yaml has the same commands.
check: $(VENV)/.check
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(PY) -m pytest -n 2 --dist worksteal $(TESTS)

docs: $(VENV)/.bench
	$(PY) -m fusion_backend catalogue > docs/catalogue.md
	$(PY) -m tests.doc_tables
	$(PY) -m benchmarks.readme
	$(PY) -m benchmarks.page $(patsubst %.html,%.json,$(wildcard benchmarks/results/*.html))

clean:
	rm -rf .venv .venv-* $(VENV) build *.egg-info .pytest_cache .ruff_cache .mypy_cache

# One stamp a set of extras. The environment is made once; a changed pyproject.toml only reinstalls.
# The project goes in editable: from the checkout, only then is patterns/ importable as fusion_backend.patterns.
$(VENV)/.bench: EXTRAS = bench
$(VENV)/.test: EXTRAS = test,bench
$(VENV)/.check: EXTRAS = test,bench,dev
$(VENV)/.bench $(VENV)/.test $(VENV)/.check: pyproject.toml | $(PY)
	@echo "installing fusion-backend[$(EXTRAS)] into $(VENV) (the first time this downloads PyTorch)"
	$(PY) -m pip install --no-compile -e '.[$(EXTRAS)]' '$(if $(TORCH),torch==$(TORCH),$(RANGE))'
	@touch $@

# Python.h is needed by what Inductor and Triton compile, ensurepip by venv: an interpreter without them is passed over.
SUITABLE := import ensurepip, os, sys, sysconfig; \
  sys.exit(sys.version_info < (3, 11) or not os.path.exists(sysconfig.get_path("include") + "/Python.h"))

$(PY):
	@for python in "$(PYTHON)" python3 python3.11 python3.12 python3.13 python3.14; do \
	  if [ -n "$$python" ] && "$$python" -c '$(SUITABLE)' 2>/dev/null; then \
	    echo "making $(VENV) with $$python ($$("$$python" --version))"; exec "$$python" -m venv "$(VENV)"; \
	  elif [ -n "$$python" ] && [ "$$python" = "$(PYTHON)" ]; then break; fi; \
	done; \
	echo "No suitable Python$(if $(PYTHON), at $(PYTHON)). Needed: >= 3.11 with venv and C headers" \
	  "(on Debian and Ubuntu: apt install python3-venv python3-dev). Then: make PYTHON=/path/to/python ..." >&2; exit 2
