# All targets create the environment when it is missing. Variables: VENV (environment), PYTHON (interpreter that
# makes it), JOBS (processes that run tests), ARTIFACT (folder to use), ARGS (passed on), BUILDER (of TensorRT plans),
# PEERS_VENV (environments of bench-peers), GPU_VENV and GPU_EXTRAS (environment of gpu-check and what is in it).
VENV ?= .venv
PEERS_VENV ?= .venv-peers
GPU_VENV ?= .venv-gpu
GPU_EXTRAS ?= gpu,$(or $(BUILDER),tensorrt-rtx)
PYTHON ?= python3
ARTIFACT ?= artifacts/smollm2-135m
JOBS ?= 2
OUT ?= artifacts/$(patsubst %.gguf,%,$(notdir $(MODEL:/=)))
PROMPT ?= Summarise in one sentence: The library will be closed on Monday and Tuesday because the heating has to be repaired. \
  Books that are due on these days can be returned on Wednesday without a fine.
EXPORT_FOR_tensorrt = --dialect tensorrt $(if $(PRECISION),,--precision fp16)
BUILT_BY = $(if $(BUILDER),--builder $(BUILDER))
PLAN_FOR_tensorrt = $(RUN)/specrt plan $(BUILT_BY)
GPU_CHECK := ort-fp16 trt-fp32 trt-fp32-plan trt-fp16-top-k trt-fp16-top-k-plan
GPU_CHECK_ort-fp16 = --precision fp16 --head none
GPU_CHECK_trt-fp32 = --dialect tensorrt
GPU_CHECK_trt-fp16-top-k = --dialect tensorrt --precision fp16 --output top-k
READY := $(VENV)/.specrt-ready
RUN := $(VENV)/bin
PEERS_READY := $(PEERS_VENV)/specrt/.specrt-ready
GPU_READY := $(GPU_VENV)/.specrt-ready

.DEFAULT_GOAL := help
.PHONY: help demo test lint export generate bench bench-peers gpu-check gpu-check-run check clean

help: ## Show this list.
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 22

$(READY): pyproject.toml constraints.txt
	test -x $(RUN)/python || $(PYTHON) -m venv $(VENV)
	$(RUN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[cpu,bench,metrics,export,test,lint]'
	@touch $@

artifacts/smollm2-135m/manifest.json: | $(READY)
	@$(RUN)/specrt export smollm2-135m --out $(@D)

demo: artifacts/smollm2-135m/manifest.json ## Export SmolLM2-135M (once) and generate an answer with speculation.
	@$(RUN)/specrt generate artifacts/smollm2-135m "$(PROMPT)" --max-tokens 160

test: $(READY) ## Run the tests. ARGS="-m 'not slow'" leaves out those that export the real model.
	$(RUN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

lint: $(READY) ## Check style and types.
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy

export: $(READY) ## Export MODEL=... [TARGET=tensorrt] [DRAFT=...] [PROFILE=...] [PRECISION=...] [CAPACITY=...] [OUT=...].
	@test -n "$(MODEL)" || { echo "error: give MODEL=..., a built-in name, hub id, directory or .gguf file" >&2; exit 1; }
	@$(RUN)/specrt export "$(MODEL)" --out "$(OUT)" $(if $(DRAFT),--draft "$(DRAFT)") $(if $(PROFILE),--profile "$(PROFILE)") \
	  $(if $(PRECISION),--precision $(PRECISION)) $(if $(CAPACITY),--capacity $(CAPACITY)) $(EXPORT_FOR_$(TARGET)) $(ARGS)
	$(if $(PLAN_FOR_$(TARGET)),@$(PLAN_FOR_$(TARGET)) "$(OUT)")

generate: $(READY) ## Generate from PROMPT="..." with ARTIFACT=... .
	@$(RUN)/specrt generate "$(ARTIFACT)" "$(PROMPT)" $(ARGS)

bench: $(READY) ## Compare plain and speculative decoding of ARTIFACT=... .
	@$(RUN)/specrt bench "$(ARTIFACT)" $(ARGS)

$(PEERS_READY): pyproject.toml constraints.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[peers]'
	@touch $@

bench-peers: $(PEERS_READY) ## Compare with other libraries, each in its own environment (docs/peers.md).
	@$(<D)/bin/python -m benchmarks.peers --envs $(PEERS_VENV) $(ARGS)

gpu-check: $(READY) ## Run the default model on this machine's GPU and compare with the CPU (docs/gpu.md).
	@$(RUN)/python -m benchmarks.gpu_check --probe && $(MAKE) --no-print-directory gpu-check-run || test $$? -eq 3

$(GPU_READY): pyproject.toml constraints.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[$(GPU_EXTRAS)]'
	@touch $@

artifacts/gpu-check/%/manifest.json: | $(READY)
	@$(RUN)/specrt export smollm2-135m $(GPU_CHECK_$*) -o $(@D)

artifacts/gpu-check/%-plan/manifest.json: | artifacts/gpu-check/%/manifest.json $(GPU_READY)
	-@$(GPU_VENV)/bin/specrt plan artifacts/gpu-check/$* -o $(@D) --with-decode $(BUILT_BY) $(ARGS)

gpu-check-run: artifacts/smollm2-135m/manifest.json $(GPU_CHECK:%=artifacts/gpu-check/%/manifest.json) $(GPU_READY)
	@$(GPU_VENV)/bin/python -m benchmarks.gpu_check artifacts/smollm2-135m $(GPU_CHECK:%=artifacts/gpu-check/%)

check: $(READY) ## Verify ARTIFACT=... on this machine.
	@$(RUN)/specrt check "$(ARTIFACT)" $(ARGS)

clean: ## Remove the environments and build leftovers; artifacts stay.
	rm -rf $(VENV) $(PEERS_VENV) $(GPU_VENV) dist .mypy_cache .ruff_cache .pytest_cache
