"""The tests under other arithmetic than this processor's: `make test-arithmetic`.

python tools/arithmetic.py [NAME ...]   under these of `KINDS`, or under several at once, `plain+rounding`; none: each
python tools/arithmetic.py --tests ...  these tests instead of those chosen here

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

# All tests but those of folders in which none computes with weights, but for the files named here: no test hangs on a
# processor's arithmetic, nor on what a hardly trained model happens to sample by it. Of `advise` and
# `conformance`, whose tests take long, few do; a count of the products of matrices in each test said which.
WITHOUT = {"advise", "bench", "cli", "conformance", "core", "data", "experiments", "files", "processes", "recipes"}
WITHOUT |= {"report", "rewards", "rounding", "rules", "runs", "shown", "simulate", "unsloth", "verl", "waste"}
ALSO = {
    "lab/tests/bench/test_leaderboard.py",
    "lab/tests/experiments/test_released_lm.py",
    "tests/advise/test_recorded_profile.py",
    "tests/advise/test_sampled_profile.py",
    "tests/conformance/test_golden.py",  # what recipes decide by a regression
}
# And of the tier `e2e` what computes the same in two ways.
_TWO = "tests/drivers/trl/test_distributed.py"
E2E = (
    f"{_TWO}::test_two_processes_make_the_same_decisions_and_gradients_as_one",
    f"{_TWO}::test_a_sharded_model_is_trained_as_a_whole_one",
)

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


def files() -> list[str]:
    """The files of the library's tests and of the laboratory's, but those that compute nothing."""
    tests = (ROOT / "tests", ROOT / "lab" / "tests")  # by name: the environments beside them hold the tests of others
    found = {path.relative_to(ROOT) for of in tests for path in of.glob("*/**/test_*.py")}
    return sorted(str(path) for path in found if not WITHOUT & {*path.parts} or str(path) in ALSO)


def main(*given: str) -> int:
    """Run the tests under each kind; 0 where all pass and at least one kind computes otherwise."""
    names, marker, given_tests = given, "", ()
    if "--tests" in given:
        at = given.index("--tests")
        names, marker, given_tests = given[:at], "--tests", given[at + 1 :]
    runs = [(given_tests, "not slow")] if marker else [(files(), "not e2e and not slow"), (E2E, "e2e")]
    if unknown := {each for name in names for each in name.split("+")} - KINDS.keys() or (marker and not given_tests):
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
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", os.environ.get("JOBS", "2")]
        command += ["--dist", "worksteal"]
        codes = [
            subprocess.run([*command, "-m", marks, *tests], cwd=ROOT, env=environment(kind), check=False).returncode
            for tests, marks in runs
        ]
        if any(codes):
            failed.append(kind)
    print(
        f"{tried - len(failed)} of {tried} kinds of arithmetic passed"
        + (f", not {', '.join(failed)}" if failed else "")
    )
    return int(bool(failed) or not tried)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
