# make install      set up .venv
# make quickstart   set up .venv and run both stages on this machine
# make check        set up .venv and run the linter, the type checker and the fast tests: minutes
# make test         set up .venv and .venv-engines (vLLM for CPUs and DeepSpeed, 3.5 GB) and run the linter, the type
#                   checker and all tests: test-core, then test-engines
# make test-verl    the same for the verl integration, in .venv-verl (2 GB): verl needs an older transformers
# make test-newest  the tests that need no engine, in .venv-newest, with the newest versions that our bounds admit
# make docs         build the site in build/site
# make tutorial     run examples/tutorial.py as a notebook, in about five minutes, for the site
# make gpu          on a CUDA machine with torch, triton and pytest: is it right, and how fast. PART=1, 2 or 3 runs a
#                   third of it, 180 s; DRY_RUN=1 says what it would run. Results go to $OUT, or to bench/results
# make gpu-wheels   for a CUDA machine without a network: wheels of what steps and peers need beside torch, and the
#                   compiled kernels, which make gpu takes from build/. GPU_PYTHON=3.12 is that machine's Python;
#                   kernels need a PYTHON like it, with the same Triton
# The first four do all the set-up and repeat none of it while pyproject.toml, setup.py and csrc/ stay as they are.
# They need Python >= 3.10 (PYTHON=python3.12 chooses one), a C++ compiler and make. Options for pip go in PIP_ARGS.
# They install the versions of constraints/tested.txt; CONSTRAINTS= leaves that open. The package index has torch for
# CUDA alone: its builds for CPUs are at TORCH_CPU_INDEX, which is asked first on a machine without an NVIDIA driver
# if it answers within three seconds, and on any machine where the index has no build that fits.

PYTHON ?= python3
VENV ?= .venv
ENGINES_VENV ?= .venv-engines
VERL_VENV ?= .venv-verl
NEWEST_VENV ?= .venv-newest
PIP_ARGS ?=
CONSTRAINTS ?= constraints/tested.txt
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
NVIDIA_DRIVER ?= $(wildcard /dev/nvidiactl /dev/dxg)
BIN := $(VENV)/bin
TESTED := $(addprefix -c ,$(CONSTRAINTS))

# $(call pip_install,FOLDER,ARGUMENTS) installs into that environment, with TORCH_CPU_INDEX as said above.
PIP = $1/bin/python -m pip --disable-pip-version-check
PIP_INSTALL = $(call PIP,$1) install -q $(PIP_ARGS)
CPU_INDEX_ANSWERS := $(PYTHON) -c "import os, threading, urllib.request as url; \
	threading.Timer(3, os._exit, [1]).start(); url.urlopen('$(TORCH_CPU_INDEX)/torch/'); os._exit(0)" 2>/dev/null
define pip_install
index=; if [ -z "$(NVIDIA_DRIVER)" ] && $(CPU_INDEX_ANSWERS); then index="--extra-index-url $(TORCH_CPU_INDEX)"; fi; \
echo $1: pip install $$index $2; \
$(PIP_INSTALL) $$index $2 \
	|| { [ -z "$$index" ] && $(CPU_INDEX_ANSWERS) && echo again with $(TORCH_CPU_INDEX) && $(PIP_INSTALL) --extra-index-url $(TORCH_CPU_INDEX) $2; } \
	|| { echo "error: not installed, as pip says above. If it found no torch for CPUs: $(TORCH_CPU_INDEX) has none" \
	"that fits or does not answer; TORCH_CPU_INDEX=ADDRESS names another index" >&2; exit 1; }
endef
BUILT := ls smopd/_C*.so >/dev/null 2>&1 || echo "smopd._C was not built (pip -v says why): the reference serves"
SOURCES := pyproject.toml setup.py $(CONSTRAINTS) $(shell find csrc -type f)
.DEFAULT_GOAL := help

# Tests on real data take it from SMOPD_DATA, and are skipped without it.
ifneq ($(wildcard ../shared/data/.),)
export SMOPD_DATA ?= $(abspath ../shared/data)
endif

.PHONY: help docs tutorial install quickstart check test test-fast test-core test-engines test-verl test-newest lint style types gpu gpu-wheels clean

help:
	@sed -n '/^$$/q;s/^# \{0,1\}//p' Makefile

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch comes first and the build is not isolated: smopd._C is compiled against the very torch that it will run with.
$(VENV)/.torch: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	@$(call pip_install,$(VENV),$(TESTED) "setuptools>=77" wheel torch)
	@touch $@

$(VENV)/.installed: $(SOURCES) $(VENV)/.torch
	$(call PIP_INSTALL,$(VENV)) $(TESTED) --no-build-isolation -e ".[train]"
	@$(BUILT)
	@touch $@

# bfcl-eval has BFCL's data and checker; what it depends on are clients of model services, which these do not need.
define install_tests
	$(PIP_INSTALL) $2 --no-build-isolation -e ".[test]"
	$(PIP_INSTALL) $2 --no-deps bfcl-eval
endef

$(VENV)/.installed-test: $(SOURCES) $(VENV)/.torch
	$(call install_tests,$(VENV),$(TESTED))
	@$(BUILT)
	@touch $@ $(VENV)/.installed

install: $(VENV)/.installed
	@echo "to activate: . $(VENV)/bin/activate"

quickstart: $(VENV)/.installed
	$(BIN)/python -m smopd.train

check: lint test-fast

# pip waits for the network and the disk: what only the engines need is installed while the core is tested.
test: style
	$(MAKE) --jobs=3 types test-core $(ENGINES_VENV)/.installed
	$(MAKE) test-engines

lint: style types

style: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-test
	$(BIN)/mypy

# A process a core and one more, as some tests wait, a thread each; a file in one of them, files in the order of
# tests/conftest.py.
WORKERS ?= $(shell $(PYTHON) -c "import os; print((os.cpu_count() or 1) + 1)")
pytest = OMP_NUM_THREADS=1 $1/bin/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=20 $2
ENGINES := $(shell find tests -name 'test_*vllm*.py' -o -name 'test_*deepspeed*.py') tests/smopd/run/test_engines.py
WITHOUT_ENGINES := $(addprefix --ignore=,$(ENGINES))

docs: $(VENV)/.installed
	$(call PIP_INSTALL,$(VENV)) zensical
	$(BIN)/python docs/site.py
	$(BIN)/zensical build -f mkdocs.yml

tutorial: $(VENV)/.installed
	$(call PIP_INSTALL,$(VENV)) jupytext nbconvert ipykernel matplotlib
	mkdir -p build/tutorial
	$(BIN)/jupytext --to ipynb --execute --run-path . -o build/tutorial/tutorial.ipynb examples/tutorial.py
	$(BIN)/jupyter-nbconvert --to markdown build/tutorial/tutorial.ipynb

test-fast: $(VENV)/.installed-test
	$(call pytest,$(VENV),-m "not slow" $(WITHOUT_ENGINES))

test-core: $(VENV)/.installed-test
	$(call pytest,$(VENV),$(WITHOUT_ENGINES))

# An environment over .venv, which stays as it is: the core is tested without the engines. torchvision and its like
# come with vLLM as CUDA builds, and break transformers where torch is a CPU build.
SITE := import sysconfig; print(sysconfig.get_path("purelib"))

$(ENGINES_VENV)/.installed: pyproject.toml $(CONSTRAINTS) | $(VENV)/.installed-test
	$(PYTHON) -m venv $(ENGINES_VENV)
	echo "import site; site.addsitedir('$$($(BIN)/python -c '$(SITE)')')" \
		> "$$($(ENGINES_VENV)/bin/python -c '$(SITE)')/over.pth"
	@$(call pip_install,$(ENGINES_VENV),$(TESTED) "smopd[test-engines]")
	$(call PIP,$(ENGINES_VENV)) uninstall -q -y torchvision torchaudio torchcodec
	@touch $@

# A process a core, as each imports vLLM.
test-engines: $(ENGINES_VENV)/.installed
	$(call pytest,$(ENGINES_VENV),$(ENGINES) -n logical)

$(NEWEST_VENV)/.installed: $(SOURCES)
	$(PYTHON) -m venv $(NEWEST_VENV)
	@$(call pip_install,$(NEWEST_VENV),"setuptools>=77" wheel torch)
	$(call install_tests,$(NEWEST_VENV))
	@$(BUILT)
	@touch $@

test-newest: $(NEWEST_VENV)/.installed
	$(call pytest,$(NEWEST_VENV),$(WITHOUT_ENGINES))

# smopd without the extra train: verl caps transformers below the version that smopd's own trainer needs.
$(VERL_VENV)/.installed: $(SOURCES)
	$(PYTHON) -m venv $(VERL_VENV)
	@$(call pip_install,$(VERL_VENV),"setuptools>=77" wheel torch==2.13.0)
	$(call PIP_INSTALL,$(VERL_VENV)) verl==0.9.1 cachetools TransferQueue uvicorn fastapi tensordict==0.10.0 \
		transformers==5.10.4 pytest packaging
	$(call PIP_INSTALL,$(VERL_VENV)) --no-build-isolation -e .
	@$(BUILT)
	@touch $@

# verl's own tests of what is replaced: of VERL_SOURCE, a checkout of verl 0.9.1, or else of its sdist, which has
# some of them. Without either those are skipped, and say so.
VERL_SDIST := $(VERL_VENV)/verl-0.9.1
VERL_SOURCE ?= $(VERL_SDIST)

$(VERL_SDIST): | $(VERL_VENV)/.installed
	-$(call PIP,$(VERL_VENV)) download -q $(PIP_ARGS) --no-deps --no-build-isolation --no-binary verl -d $(VERL_VENV) verl==0.9.1
	-tar xzf $@.tar.gz -C $(VERL_VENV)

test-verl: $(VERL_VENV)/.installed $(VERL_SOURCE)
	OMP_NUM_THREADS=1 VERL_SOURCE=$(abspath $(VERL_SOURCE)) \
		$(VERL_VENV)/bin/python -m pytest -rs tests/integrations/test_verl*.py

GPU_PYTHON ?= 3.12
GPU_SM ?= sm_90
GPU_WHEELS := annotated-types cut-cross-entropy datasets dill docstring-parser liger-kernel multiprocess platformdirs \
	pooch pydantic pydantic-core trl typeguard typing-inspection tyro

gpu-wheels:
	$(PYTHON) -m pip download -q --no-deps --only-binary=:all: --python-version $(GPU_PYTHON) --implementation cp \
		$(patsubst %,--platform manylinux_%_x86_64,2_28 2_27 2_17) $(TESTED) -d build/wheels $(GPU_WHEELS)
	@if $(PYTHON) -c 'import sys, triton; sys.exit(f"{sys.version_info[0]}.{sys.version_info[1]}" != "$(GPU_PYTHON)")' 2>/dev/null; \
	then TRITON_CACHE_DIR=$(CURDIR)/build/triton $(PYTHON) -m tests.kernels.offline --all --only $(GPU_SM); \
	else echo "no kernels: PYTHON is no Python $(GPU_PYTHON) with torch and that machine's Triton"; fi

gpu:
	failed=0; for part in $(or $(PART),1 2 3); do PYTHON=$(PYTHON) bench/gpu/run.sh $$part || failed=1; done; exit $$failed

clean:
	rm -rf $(VENV) $(ENGINES_VENV) $(VERL_VENV) $(NEWEST_VENV) build dist *.egg-info smopd/_C*.so .pytest_cache .ruff_cache .mypy_cache .hypothesis
