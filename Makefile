# Two commands: `make demo` and `make test`. Each sets up everything it needs; a second run does no work twice.
# `make test-all` adds the slow tests; `make test SLOW=kernels` those of a folder.
PYTHON ?= python3
OUT ?= bench/results  # of `make gpu`, which adds a folder named after the device
STEPS ?=  # of `make gpu`; all by default
SECONDS ?= 570# of `make gpu`
GPU_OPTIONS ?=
KIT ?= build/gpu-kit
GPU_PYTHON ?= 3.12
REHEARSED_TORCH ?= 2.13.0# PyPI's 2.11 is for CUDA
SLOW ?=  # folders whose slow tests `make test` runs too
TORCHES ?= 2.11.0 2.13.0# of `make wheel-check`, with CHECKS as further arguments of pytest
VENV := .venv
PTXAS := build/ptxas/nvidia/cu13/bin/ptxas
BIN := $(VENV)/bin
# Python compiles what it imports, which is little of what pip would compile.
PIP := $(BIN)/pip install -qq --disable-pip-version-check --no-compile
SOURCES := $(shell find csrc -name '*.cpp' -o -name '*.cu' -o -name '*.h') setup.py pyproject.toml

# The repository's root must not be importable: its folders `kernels` and `bench` would shadow other packages.
export PYTHONSAFEPATH := 1

# Bytecode is kept whatever the environment says: the tests start hundreds of processes.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo check test test-all sanitize mutants soak lint gate tables compared docs wheel wheel-check gpu gpu-kit gpu-rehearsal clean

demo: $(if $(wildcard $(VENV)/built),$(VENV)/built,$(VENV)/trains)
	$(BIN)/python examples/demo.py $(if $(ALL),--all)

# Within 90 seconds: lint of what changed and the tests that concern it. SINCE=main for what differs from another commit.
check: $(VENV)/built
	$(BIN)/python tests/check.py $(SINCE)

# One worker a core; the tests of a file share what they set up.
test: $(VENV)/built
	$(BIN)/pytest -m "not gpu" --numprocesses auto --dist loadfile --no-loadscope-reorder --slow $(SLOW)

test-all:
	$(MAKE) test SLOW=all

# A thousand rounds of random calls, delays and deaths; `make test` runs fifteen.
soak: $(VENV)/built
	WEFT_SOAK_ROUNDS=1000 $(BIN)/pytest --timeout 3600 tests/comm/test_soak.py

# The shared-memory engine without Python, under the address, undefined-behaviour and thread sanitizers.
# WEFT_SANITIZE_ROUNDS=10 takes ten times as long; WEFT_SANITIZE_SEED=n starts at the seed that a fault names.
sanitize:
	$(MAKE) --no-print-directory -j2 -f tests/engine/Makefile
	build/sanitize/processes/driver
	build/sanitize/threads/driver

# The faults of tests/mutants.toml, one at a time: tests must notice at least 95% of them. An hour of two cores.
mutants: $(VENV)/built
	$(BIN)/python tests/mutants.py

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell -D- -D docs/site/words.txt .
	! git grep -nEi '\b(of which|such as are)\b' -- ':!Makefile'
	$(BIN)/mypy

# The machine code of every kernel variant, or of those of OPS: ten minutes of two cores.
gate: $(VENV)/built $(PTXAS)
	env -u TRITON_INTERPRET WEFT_HOPPER_PTXAS=$(abspath $(PTXAS)) $(BIN)/python tests/gate/gate.py $(OPS)

# The assembler of sm_90: CUDA's own wheel, without what it depends on.
$(PTXAS):
	$(BIN)/pip install -qq --disable-pip-version-check --no-deps --target build/ptxas nvidia-cuda-nvcc==13.5.37

# The measured tables of README.md and docs/, from the results that are committed.
tables: $(VENV)/built
	$(BIN)/python -m weft.bench.tables .

# Other libraries' parallel training beside one process, and docs/compared.md from the results: more than an hour.
compared: $(VENV)/built build/deepspeed/deepspeed build/megatron/megatron build/torchtitan/torchtitan
	rm -f bench/results/compared.json
	PYTHONPATH=tests/helpers $(BIN)/python tests/helpers/compared_libraries.py --json bench/results/compared.json
	$(BIN)/python -m weft.bench.tables .

# Without their dependencies, which requirements-dev.txt has but for those named here, and without operators in CUDA.
ALONE := $(BIN)/pip install -qq --disable-pip-version-check --no-deps

build/deepspeed/deepspeed:
	DS_BUILD_OPS=0 $(ALONE) --no-build-isolation \
	  --target build/deepspeed deepspeed==0.19.8 py-cpuinfo==9.0.0 hjson==3.1.0 msgpack==1.2.4 einops==0.8.2

build/megatron/megatron:
	$(ALONE) --ignore-requires-python --target build/megatron megatron-core==0.19.2

build/torchtitan/torchtitan:
	$(ALONE) --target build/torchtitan torchtitan==0.3.0 \
	  docstring_parser==0.18.0 spmd_types==0.2.3 torch_checkpointing==0.1.1 torchdata==0.11.0 typeguard==4.6.1 tyro==1.0.17

# The site: build/site/index.html opens without a network.
docs: $(VENV)/built
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

# With every Triton kernel compiled: eleven minutes of two cores at first, seconds where no kernel has changed. auditwheel
# refuses a wheel that needs a newer C library than its tag says.
wheel: $(VENV)/built $(PTXAS)
	env -u TRITON_INTERPRET WEFT_HOPPER_PTXAS=$(abspath $(PTXAS)) $(BIN)/python -m weft.kernels.aot
	rm -rf build/wheel dist/weft-*.whl
	WEFT_GLIBC=2.28 $(BIN)/pip wheel --no-deps --wheel-dir build/wheel .
	PATH=$(abspath $(BIN)):$$PATH auditwheel repair --only-plat --plat manylinux_2_28_$$(uname -m) --wheel-dir dist build/wheel/weft-*.whl

# The wheel in dist, installed beside each of TORCHES, against the tests. PyPI's torch 2.11 is for CUDA: gigabytes, once.
wheel-check: $(TORCHES:%=wheel-check-%)

wheel-check-%: build/envs/torch-%/ready
	build/envs/torch-$*/bin/pip uninstall -qq --yes weft
	build/envs/torch-$*/bin/pip install -qq --disable-pip-version-check dist/weft-*.whl
	build/envs/torch-$*/bin/python -c "import sys, torch, weft._C as _C; print(torch.__version__, _C.__file__); assert _C.__file__.startswith(sys.prefix)"
	build/envs/torch-$*/bin/pytest -m "not gpu and not packaging" $(CHECKS)

# The set that the tests run with, but for what a torch pins itself: 2.11 triton 3.6, 2.15 triton 3.9.
.PRECIOUS: build/envs/torch-%/ready
build/envs/torch-%/ready: requirements.txt requirements-dev.txt
	$(PYTHON) -m venv build/envs/torch-$*
	grep -hEv '^(-r |(torch|triton|setuptools)==)' $^ > build/envs/torch-$*/requirements.txt
	build/envs/torch-$*/bin/pip install -qq --disable-pip-version-check -r build/envs/torch-$*/requirements.txt torch==$* '$(if $(filter 2.13.%,$*),triton<3.8,triton>=3.6)'
	touch $@

# What a machine with one Hopper GPU and no network lacks, so that nothing is built or compiled there: the extension for
# its Python, an archive of every kernel, and wheels. Take $(KIT) there with the clone.
gpu-kit: $(VENV)/built $(PTXAS)
	rm -rf $(KIT)/site
	$(PYTHON) tests/on_gpu/gpu_kit.py fetch $(KIT) --python $(GPU_PYTHON)
	env -u TRITON_INTERPRET WEFT_HOPPER_PTXAS=$(abspath $(PTXAS)) $(BIN)/python -m weft.kernels.aot \
	  --architecture sm_90 --out $(KIT)
	test -x build/kit/bin/python || PYENV_VERSION=$(GPU_PYTHON) python$(GPU_PYTHON) -m venv build/kit
	build/kit/bin/pip install -qq --disable-pip-version-check $$(grep -E '^(setuptools|pybind11|ninja)==' requirements.txt)
	WEFT_GLIBC=2.28 WEFT_CUDA_CODES=sm_90 build/kit/bin/python setup.py -q build_ext --build-lib build/kit/lib
	cp build/kit/lib/weft/_C.*.so $(KIT)

# Offline, with the python that is there: takes what is missing from $(KIT), or else builds in place, then runs the STEPS
# of tests/on_gpu/on_gpu.py for SECONDS; what came out is in $(OUT), and in one file with GPU_OPTIONS="--archive FILE".
gpu:
	$(PYTHON) tests/on_gpu/gpu_kit.py install $(KIT)
	PYTHONPATH=$(abspath src):$(abspath $(KIT))/site $(PYTHON) tests/on_gpu/on_gpu.py $(OUT) $(STEPS) --seconds $(SECONDS) \
	  $(GPU_OPTIONS)

# The same without a GPU and without a network, in a clone and in a new environment with that machine's Python and
# Triton: the first command, or STEPS=second, as far as Triton's interpreter and the stub driver run it.
REHEARSAL = $(abspath build/rehearsal)
gpu-rehearsal: gpu-kit
	rm -rf $(REHEARSAL)
	git clone -q . $(REHEARSAL)/tree
	PYENV_VERSION=$(GPU_PYTHON) python$(GPU_PYTHON) -m venv $(REHEARSAL)/venv
	$(REHEARSAL)/venv/bin/pip install -qq --disable-pip-version-check torch==$(REHEARSED_TORCH) 'numpy<2.4' pytest
	$(REHEARSAL)/venv/bin/pip install -qq --disable-pip-version-check --no-deps triton==3.6.0
	PIP_NO_INDEX=1 TRITON_INTERPRET=1 $(MAKE) -C $(REHEARSAL)/tree gpu KIT=$(abspath $(KIT)) STEPS=$(or $(STEPS),first) SECONDS=3000 \
	  PYTHON=$(REHEARSAL)/venv/bin/python OUT=$(REHEARSAL) GPU_OPTIONS="--rehearse --archive $(REHEARSAL)/results.tar.gz"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: requirements.txt requirements-dev.txt | $(BIN)/python
	$(PIP) -r requirements-dev.txt
	touch $@

$(VENV)/built: $(VENV)/installed $(SOURCES)
	$(PIP) --no-build-isolation --no-deps -e .
	touch $@

# What the demo needs. Without a GPU it leaves out the CUDA sources; the other targets compile them.
$(VENV)/trains: requirements.txt $(SOURCES) | $(BIN)/python
	$(PIP) -r requirements.txt
	$(if $(wildcard /dev/nvidia0),,WEFT_CUDA=0) $(PIP) --no-build-isolation --no-deps -e .
	touch $@

clean:
	rm -rf build dist *.egg-info $(VENV)
