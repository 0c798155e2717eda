# make demo and make test do everything on a machine that has python3 (3.11 or newer) and make.

# The newest of these that works. PYTHON=/path/to/python make demo takes another.
PYTHON ?= python3.13 python3.12 python3
# make check tests on a second interpreter too, one that gets the other version of jax and may lie
# anywhere, and compares with PyTorch on a third.
SECOND_PYTHON ?= $$($$(sh .ci/find_python $(PYTHON)) -c \
	'import sys; print("3.11" if sys.version_info >= (3, 12) else "3.13 3.12")')
TORCH_PYTHON ?= 3.11
# Further options of pytest: PYTEST_ARGS="-k tree -x" make test.
PYTEST_ARGS ?=
# GSM8K's train.jsonl, which make train-pocket mixes in where it is given.
GSM8K_TRAIN ?=

# $(call pocket,FAMILY) names a family's pocket target and its head.
pocket = --target=checkpoints/pocket-$(1) --draft=checkpoints/pocket-$(1)-eagle3
DEMO_FLAGS = --prompts=checkpoints/demo_prompts.jsonl --max_new_tokens=64 --dtype=float32

# $(call environment,FOLDER,INTERPRETERS,REQUIREMENTS) makes FOLDER hold the requirements.
environment = @python=$$(sh .ci/find_python $(2)) && sh .ci/make_venv $(1) "$$python" $(3)
test_requirements = requirements.txt tests/requirements.txt
# $(call compiler,FOLDER) adds what compiles kernels for GPUs that are not there.
compiler = @sh .ci/add_cuda_compiler $(1)
# Each test is of one of three kinds: fast, "slow and not torch", torch.
fast = not slow and not torch
# Most of the time goes to XLA, which compiles on one core: several files are tested at once. A file
# stays in one process, because its tests share what they compiled. In the order of their names:
# by their numbers of tests, the few long ones would come last and run alone.
parallel = -n auto --maxprocesses=4 --dist=loadfile --no-loadscope-reorder

.PHONY: help demo test check check-slow check-torch check-second train-pocket clean
.NOTPARALLEL:

help:  ## say what there is to make
	@sed -n 's/^\([a-z-]*\):.*##/make \1:/p' Makefile

demo:  ## decode with both pocket models, method beside method (at most 3 minutes)
	$(call environment,.venv,$(PYTHON),requirements.txt)
	.venv/bin/python -m experiments.generate $(call pocket,qwen3-moe) $(DEMO_FLAGS) \
		--selectors=autoregressive,native,acceptmoe,moe_spec --output_dir=runs/demo/qwen3-moe
	.venv/bin/python -m experiments.generate $(call pocket,gpt-oss) $(DEMO_FLAGS) \
		--selectors=autoregressive,native,acceptmoe --output_dir=runs/demo/gpt-oss

test:  ## all tests but the slow ones (at most 15 minutes)
	$(call environment,.venv,$(PYTHON),$(test_requirements))
	$(call compiler,.venv)
	.venv/bin/python -m pytest -m "$(fast)" $(parallel) $(PYTEST_ARGS)

check: check-slow check-torch check-second  ## what is slow, in three parts (at most 45 minutes)

check-slow:  ## the tests marked slow
	$(call environment,.venv,$(PYTHON),$(test_requirements))
	$(call compiler,.venv)
	.venv/bin/python -m pytest -m "slow and not torch" $(parallel) $(PYTEST_ARGS)

# These two compare numbers on the CPU, whatever the machine has.
check-torch check-second: export CUDA = 0

# On Linux the index's own torch is a CUDA build of several gigabytes; PIP_EXTRA_INDEX_URL or
# PIP_FIND_LINKS can tell pip of a place with CPU builds.
check-torch:  ## the live comparison with PyTorch and openai-harmony
	$(call environment,.venv-torch,$(TORCH_PYTHON),$(test_requirements) tests/requirements-torch.txt)
	.venv-torch/bin/python -m pytest -m torch $(PYTEST_ARGS)

check-second:  ## the tests of make test on a second interpreter, and the slow ones of Mosaic
	$(call environment,.venv-second,$(SECOND_PYTHON),$(test_requirements))
	$(call compiler,.venv-second)
	.venv-second/bin/python -m pytest -m "$(fast)" $(parallel) $(PYTEST_ARGS)
# With an older jax there are none of these (5).
	.venv-second/bin/python -m pytest -m slow $(parallel) tests/test_*_mosaic.py $(PYTEST_ARGS) || [ $$? = 5 ]

# Goes on where it was when it is interrupted; make clean starts it over.
train-pocket: train = $(if $(GSM8K_TRAIN),--gsm8k_train=$(GSM8K_TRAIN))
# Huge pages: on Linux the experts of a training step run faster with them.
train-pocket: export GLIBC_TUNABLES = glibc.malloc.hugetlb=1
train-pocket:  ## train the pocket checkpoints again, in place (about 3 hours)
	$(call environment,.venv,$(PYTHON),requirements.txt)
	$(call train_family,qwen3-moe,qwen3_moe,1300000)
	$(call train_family,gpt-oss,gpt_oss,800000)

# $(call train_family,FOLDER,FAMILY,TOKENS_OF_THE_HEAD) trains a target, its head and its commitment table.
define train_family
	.venv/bin/python -m experiments.train_target --family=$(2) \
		--output_dir=checkpoints/pocket-$(1) --work_dir=runs/train-$(1) $(train)
	.venv/bin/python -m experiments.train_head --target=checkpoints/pocket-$(1) \
		--output_dir=checkpoints/pocket-$(1)-eagle3 --work_dir=runs/train-$(1)-head --tokens=$(3) $(train)
	.venv/bin/python -m experiments.calibrate $(call pocket,$(1)) \
		--pocket_prompts=400 --dtype=float32
endef

clean:  ## remove the environments and what was run
	rm -rf .venv .venv-* runs .pytest_cache .ruff_cache
