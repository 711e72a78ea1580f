"""The tests that compare arithmetic, under other arithmetic than this processor's: `make test-arithmetic`.

python tools/arithmetic.py [NAME ...]   under these of `KINDS`, or under several at once, `plain+rounding`; none: each
python tools/arithmetic.py --tests ...  these tests instead of those listed here

A kind that computes here what the processor does anyway is said and left out.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

# What tells PyTorch (and MKL and oneDNN in it) and NumPy (and OpenBLAS) to do without newer instructions, and a processor
# that nobody has: see tests/rounding/sitecustomize.py.
KINDS: dict[str, dict[str, str]] = {
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "OPENBLAS_CORETYPE": "Haswell",
        "NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL AVX512_SPR",
    },
    "plain": {
        "ATEN_CPU_CAPABILITY": "default",
        "MKL_CBWR": "COMPATIBLE",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "OPENBLAS_CORETYPE": "Nehalem",
        "NPY_DISABLE_CPU_FEATURES": "X86_V3 X86_V4 AVX512_ICL AVX512_SPR",
    },
    "rounding": {"PYTHONPATH": str(ROOT / "tests" / "rounding")},
}

# Tests that compute the same in two ways, or sample from weights that were trained. Whatever compares a run with the same
# run again needs no other processor: it is the same arithmetic on each.
TESTS: dict[str, str] = {
    "tests/engines/test_trl_agreement.py": "our loss and gradient beside TRL's",
    "tests/engines/test_update.py": "a gradient in one pass and in several",
    "tests/engines/test_likelihood.py": "rows padded and alone, prompts shared and not",
    "tests/engines/test_attention.py": "attention by two kernels",
    "tests/engines/test_sampler.py": "rollouts in waves of any width, cached and by a forward pass",
    "tests/engines/test_native.py": "log-probabilities when sampled and when trained; budgets of tokens per pass",
    "tests/engines/streaming/test_exactness.py": "rollouts in waves and as they come",
    "tests/engines/streaming/test_backends.py": "rollouts in any company",
    "tests/drivers/trl/test_trainer.py": "TRL's trainer beside ours, batches in parts",
    "tests/drivers/trl/test_hook.py": "both ways into TRL",
    "tests/drivers/trl/test_generation.py": "rows padded and alone",
    "tests/drivers/trl/test_processes.py::test_two_processes_decide_as_one_and_take_its_gradients": "one process, two",
    "tests/drivers/trl_async/test_parts.py": "a tree of samples and each alone",
    "tests/predict": "fits by BLAS, and what follows from them",
    "tests/conformance/test_golden.py": "digests of decisions, which were made on another processor",
}

PROBE = """
import hashlib, numpy, torch
x = torch.from_numpy(numpy.random.default_rng(0).standard_normal((37, 64))).float()
layer = torch.nn.Linear(64, 50)
with torch.no_grad():
    layer.weight.copy_(x[:, :50].T @ x), layer.bias.zero_()
    made = {
        "matrix product": x @ x.T, "linear layer": layer(x), "softmax": x.log_softmax(-1), "exp": x.exp(), "sum": x.sum(0),
        "gelu": torch.nn.functional.gelu(x), "numpy matmul": torch.from_numpy(x.numpy() @ x.numpy().T),
        "numpy exp": torch.from_numpy(numpy.exp(x.numpy())),
    }
print("\\n".join(f"{name}:{hashlib.sha256(value.numpy().tobytes()).hexdigest()}" for name, value in made.items()))
"""


def environment(kind: str) -> dict[str, str]:
    """This process's, with those variables; a path is put before its own."""
    changes = {name: value for each in kind.split("+") if each for name, value in KINDS[each].items()}
    if "PYTHONPATH" in changes and (own := os.environ.get("PYTHONPATH")):
        changes["PYTHONPATH"] += os.pathsep + own
    return os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"} | changes


def probed(kind: str) -> dict[str, str]:
    """A digest of each of some results."""
    command = [sys.executable, "-c", PROBE]
    done = subprocess.run(command, env=environment(kind), capture_output=True, text=True, check=True)
    return dict(line.split(":") for line in done.stdout.split("\n") if line)


def main(*given: str) -> int:
    """Run the tests under each kind; 0 where all pass and at least one kind computes otherwise."""
    names, marker, tests = given, "", tuple(TESTS)
    if "--tests" in given:
        at = given.index("--tests")
        names, marker, tests = given[:at], "--tests", given[at + 1 :]
    if unknown := {each for name in names for each in name.split("+")} - KINDS.keys() or (marker and not tests):
        print(f"expected names among {', '.join(KINDS)}, and tests after --tests, got {unknown or 'none'}")
        return 2
    own, tried, failed = probed(""), 0, []
    for kind in names or KINDS:
        other = [name for name, digest in probed(kind).items() if digest != own[name]]
        if not other:
            print(f"{kind}: computes as this processor does anyway; left out", flush=True)
            continue
        print(f"{kind}: other results of {', '.join(other)}", flush=True)
        tried += 1
        command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", *tests]
        if subprocess.run(command, cwd=ROOT, env=environment(kind), check=False).returncode:
            failed.append(kind)
    print(
        f"{tried - len(failed)} of {tried} kinds of arithmetic passed"
        + (f", not {', '.join(failed)}" if failed else "")
    )
    return int(bool(failed) or not tried)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
