# make demo   sets up .venv, trains a tiny transformer under each recipe and shows what each paid
# make test   sets up .venv and runs the tests
# make check  lint, types and the fast tests; make bench  speed; make clean  removes .venv and runs/demo

PYTHON ?= python3
PIP    := .venv/bin/python -m pip install --quiet --disable-pip-version-check
TORCH  ?= torch==2.13.0
JOBS   ?= 2

.PHONY: demo test check bench clean

# torch first and by itself, so that what needs it takes this one. Where pip would fetch the build with several GB of CUDA,
# TORCH="torch==2.13.0 --index-url <address of PyTorch's CPU wheels, from its install page>" takes the one without.
.venv/ready: pyproject.toml
	$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v < (3, 13) else f"rollalloc is tested on Python 3.11 and 3.12, this is {v[0]}.{v[1]}: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv .venv
	$(PIP) $(TORCH)
	$(PIP) --editable '.[dev]'
	touch .venv/ready

demo: .venv/ready
	.venv/bin/rollalloc compare --task skills --pool late --recipes grpo,dapo,dapo_carry=dapo,pilot_commit \
		--set dapo_carry.surplus=carry --seeds 0,1,2,3,4 --out runs/demo

test: .venv/ready
	.venv/bin/python -m pytest -n $(JOBS) -m "not slow"

check: .venv/ready
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/pyright
	.venv/bin/python -m pytest -n $(JOBS) -m "not slow and not learning"

bench: .venv/ready
	.venv/bin/python benchmarks/core.py
	.venv/bin/python benchmarks/sampler.py
	.venv/bin/python benchmarks/rewards.py speed
	.venv/bin/python benchmarks/rewards.py hostile

clean:
	rm -rf .venv runs/demo
