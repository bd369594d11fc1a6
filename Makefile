# `make demo` installs everything and answers a prompt with and without drafts; `make test` runs the checks and the suite; `make help` lists all.
PYTHON ?= python3
MODEL ?= smollm2-135m
VENV ?= .venv
CASES ?= 10000
DRAFT ?= auto
# Processes of `make test-cuda`.
GPU_PROCESSES ?= 8
# Recipes read it from the environment, because it may contain quotes; empty: a built-in prompt.
PROMPT ?=
export PROMPT

bin := $(VENV)/bin
# Install torch first and by exact version: a looser requirement may bring gigabytes of CUDA libraries.
torch := $(shell grep '^torch==' constraints.txt)
build_tools := "scikit-build-core>=0.10" "nanobind>=2.4" "cmake>=3.20" ninja
native := CMakeLists.txt pyproject.toml $(wildcard csrc/*.cpp csrc/*.h)
pip := $(bin)/pip install -qq --disable-pip-version-check -c constraints.txt
install := $(pip) --no-build-isolation $(torch)
sources := src tests tools examples
# Unit tests that `make test-fast` leaves out: each file takes more than a few seconds.
left_out := train_* shipped* peers_* sampled_trees loading_memory draft_model async_llm scheduler_random suspension \
	adaptive_simulation acceptance
# On a GPU machine torch is not installed by this file: use the environment here if it exists, else $(PYTHON).
gpu_python := $(if $(wildcard $(bin)/python),$(bin)/python,$(PYTHON))

.DELETE_ON_ERROR:
.PHONY: help demo test test-fast quick-check test-slow test-endurance test-clients test-browser test-scale test-i8mm test-cuda sanitize-cuda check format docs bench wheel clean

help:
	@echo "make demo          install, build, pull $(MODEL), answer a prompt with and without drafts, compare text and speed"
	@echo "make test          the checks and the whole suite (about 20 minutes on 2 cores)"
	@echo "make test-fast     quick checks, unit tests and the main invariant (about 3 minutes)"
	@echo "make test-slow     tests with real weights, long measurements"
	@echo "make test-endurance  soak, crash and fuzz tests in their long form (hours)"
	@echo "make test-browser  the playground in Chromium (apt install chromium npm)"
	@echo "make test-scale    replicas behind Ray Serve (installs Ray)"
	@echo "make test-clients  third-party clients against the server"
	@echo "make test-i8mm     kernels of level i8mm in an emulator, on ARM (apt install qemu-user; 6 minutes)"
	@echo "make test-cuda     kernels, invariants, CUDA graphs and a soak test on a GPU"
	@echo "make sanitize-cuda the kernels of speculation and of attention under compute-sanitizer"
	@echo "make check         ruff, mypy, import-linter, file sizes, generated pages"
	@echo "make format        format the code with ruff"
	@echo "make docs          the documentation as a site in build/site"
	@echo "make bench         measure speed and kernels on this machine"
	@echo "make wheel         manylinux wheels in dist/, for aarch64 and x86_64 (needs no torch)"
	@echo "make clean         remove the environment and the build"

demo: $(VENV)/.installed
	$(bin)/outrider pull $(MODEL)
	@echo
	@$(bin)/outrider demo --model $(MODEL) --speculate $(DRAFT) $(if $(PROMPT),-- "$$PROMPT")

# The suite in two processes with one thread each, then two threads for the tests of independence from the thread count
# (but those that set their count themselves, and the kernels of the reference, which have no threads of ours).
# In order of collection the long files come first: sorted by number of tests, a long one would run alone in the end.
test: check
	$(bin)/outrider pull $(MODEL)
	OUTRIDER_THREADS=1 OMP_NUM_THREADS=1 $(bin)/python -W error::SyntaxWarning -m pytest -q --durations=20 \
		-n 2 --dist loadfile --no-loadscope-reorder
	OUTRIDER_THREADS=2 $(bin)/python -m pytest -q -k "not reference_results and not depend_on_threads" \
		tests/laws/test_batch_invariance.py tests/kernels/test_kernel_invariance.py

# Unit tests without training, shipped heads and installations, and the main invariant on the CPU backend.
test-fast: quick-check
	OUTRIDER_TEST_BACKENDS=cpu OUTRIDER_THREADS=1 OMP_NUM_THREADS=1 $(bin)/python -m pytest -q --durations=5 \
		-n 2 --dist loadfile --no-loadscope-reorder tests/laws/test_speculation.py tests/unit \
		$(foreach name,$(left_out),--ignore-glob='*/test_$(name).py')

build/axe.min.js: tools/vendor_page.py
	$(PYTHON) tools/vendor_page.py --axe $@

test-browser: $(VENV)/.developer build/axe.min.js
	$(pip) "playwright>=1.49"
	$(bin)/python -m pytest -q -m browser

test-slow: $(VENV)/.developer
	$(bin)/outrider pull $(MODEL)
	$(bin)/python -m pytest -q -m slow

test-endurance: $(VENV)/.developer
	OUTRIDER_ENDURANCE=1 $(bin)/python -m pytest -q -s tests/endurance

test-scale: $(VENV)/.developer
	$(install) -e ".[scale]"
	RAY_USAGE_STATS_ENABLED=0 $(bin)/python -m pytest -q -s -m slow tests/slow/test_scale.py

# Quantized matmuls, layers and attention at level i8mm in an emulator (about 6 minutes, half of them imports): the emulated
# processor has the instructions. Without SVE and with a simple hash for pointer authentication it is faster.
test-i8mm: $(VENV)/.developer
	@if [ "$$(uname -m)" != aarch64 ] || ! command -v qemu-aarch64 > /dev/null; then \
		echo "level i8mm was not tested: that takes an ARM machine with qemu-aarch64 (apt install qemu-user)"; \
	else OUTRIDER_THREADS=1 OMP_NUM_THREADS=1 qemu-aarch64 -cpu max,sve=off,pauth-impdef=on $(bin)/python -m pytest -q \
		-p no:cacheprovider -k "i8mm and (q4 or q5 or q6 or q8 or attend) and not threads" \
		tests/kernels/test_i8mm.py tests/kernels/test_fast_activations.py tests/kernels/test_kernel_invariance.py \
		tests/kernels/test_cases.py; fi

# Each client has its own environment under build/clients, which holds the logs too.
test-clients: $(VENV)/.developer
	$(bin)/outrider pull $(MODEL)
	$(bin)/python -m pytest -q tests/integration/test_clients*.py
	$(bin)/python tools/clients/run.py --model $(MODEL) --cases $(CASES)

# On an H200 with 16 cores most of these tests take 104 s in 15 processes. pytest-benchmark, where it is installed, warns of
# several processes, and warnings are errors.
test-cuda:
	OUTRIDER_TEST_BACKENDS=cuda OUTRIDER_THREADS=1 OMP_NUM_THREADS=1 PYTHONPATH=src $(gpu_python) -m pytest -q \
		-n $(GPU_PROCESSES) --dist loadfile -p no:benchmark \
		tests/laws tests/kernels/cuda tests/unit/test_graph_shapes.py tests/unit/test_multi_step.py tests/unit/test_models.py tests/unit/test_gguf_architectures.py
	PYTHONPATH=src $(gpu_python) -m pytest -q -m cuda tests/slow/test_cuda_soak.py
	@if command -v compute-sanitizer > /dev/null; then $(MAKE) sanitize-cuda; \
	else echo "compute-sanitizer is not on the PATH: \`make sanitize-cuda\` was left out"; fi

sanitize-cuda:
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 PYTHONPATH=src \
	compute-sanitizer --error-exitcode 1 $(gpu_python) tools/sanitize_kernels.py
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 PYTHONPATH=src OUTRIDER_TEST_BACKENDS=cuda \
	compute-sanitizer --error-exitcode 1 $(gpu_python) -m pytest -q \
	tests/kernels/cuda/test_cuda_attention.py tests/kernels/cuda/test_cuda_decode_attention.py \
	tests/kernels/cuda/test_cuda_matmul.py tests/kernels/cuda/test_cuda_e4m3.py

quick-check: $(VENV)/.developer
	$(bin)/ruff check $(sources)
	$(bin)/ruff format --check $(sources)
	$(bin)/mypy
	$(bin)/lint-imports
	$(bin)/python tools/check_sizes.py
	$(bin)/python tools/check_vocabulary.py

check: quick-check
	$(bin)/python tools/kernel_table.py --check
	$(bin)/python tools/method_table.py --check
	$(bin)/python tools/reference.py --check

format: $(VENV)/.developer
	$(bin)/ruff check --fix $(sources)
	$(bin)/ruff format $(sources)

docs: $(VENV)/.installed
	$(pip) "mkdocs-material>=9.6"
	NO_MKDOCS_2_WARNING=1 $(bin)/mkdocs build --quiet --strict
	@echo "open build/site/index.html"

bench: $(VENV)/.installed
	$(bin)/outrider pull $(MODEL)
	$(bin)/outrider bench speed --model $(MODEL)
	$(bin)/outrider bench kernels

# For each Python in PYTHONS (empty: 3.11 and 3.12 or later, if they are found) and each architecture in ARCHITECTURES
# (empty: this machine's, and the other one if its cross compiler is installed).
wheel:
	$(PYTHON) tools/build_wheels.py $(addprefix --python ,$(PYTHONS)) $(addprefix --architecture ,$(ARCHITECTURES))

clean:
	rm -rf $(VENV) build dist

# The environment: torch and the build tools, then the package. A changed kernel file only rebuilds the package.
$(VENV)/.torch: constraints.txt
	@echo "Making $(VENV) with $(torch) and the build tools ..."
	$(PYTHON) -m venv $(VENV)
	$(pip) $(torch) $(build_tools)
	@touch $@

$(VENV)/.installed: $(VENV)/.torch $(native)
	@echo "Building the kernels, installing the dependencies ..."
	$(install) -e ".[server,structured]"
	@touch $@

$(VENV)/.developer: $(VENV)/.torch $(native)
	@echo "Building the kernels, installing the dependencies of the tests ..."
	$(install) -C cmake.define.CMAKE_COMPILE_WARNING_AS_ERROR=ON -e ".[dev]"
	@touch $(VENV)/.installed $@
