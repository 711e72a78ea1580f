"""Rewards: what their safety costs against a bare loop over math-verify, and what hostile samples do to the others.

The first part times the same checks twice in one run: math-verify in this process's main thread, as its documentation
calls it, and `WorkerScorer` with one worker, its start included and nothing remembered. The second part counts; its limits
are short, 2 s within math-verify and 5 s for a worker, so that it takes two minutes at most: 50 hostile answers among
1,000. The third counts as well, of 10,000 samples of a reward a tenth of which fork, leave threads, close files, change
the process or end it (`hostile_functions.py`); with one worker, then with four. `raises` takes the CPU time of a reward
that raises at a share of its samples, with the workers as they are and with a new worker after each error.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import random
import resource
import signal
import socket
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from bars import Bars, with_smallest
from hostile_functions import HOSTILE, ORDINARY, OVERDUE
from rollalloc.rewards import _crew
from rollalloc.rewards._channel import Answer
from rollalloc.rewards._surroundings import Surroundings
from rollalloc.rewards.function import RewardFunction, Sample, Scored, Unscored, load_reward, score_sample
from rollalloc.rewards.scorers import WorkerScorer

RAISING = {
    "text": """
def score(*, data_source, solution_str, ground_truth, extra_info):
    if ground_truth == "raise":
        raise ValueError(f"cannot read {solution_str[-20:]!r}")
    return float(ground_truth in solution_str)
""",
    "math-verify": """
from rollalloc.rewards.math import compute_score

def score(**sample):
    if sample["ground_truth"] == "raise":
        raise ValueError(f"cannot read {sample['solution_str'][-20:]!r}")
    return compute_score(**sample)
""",
}
_GROUP = 8  # answers to one question, in `forks`
KILL, SPIN = "\x07kill the worker", "\x07hold the interpreter"


def reward(**sample: Any) -> float:
    """math-verify under a short limit, in a process that some answers kill or hold up for ever."""
    if KILL in sample["solution_str"]:
        os.kill(os.getpid(), signal.SIGKILL)
    if SPIN in sample["solution_str"]:
        return 9**9**9**9
    return _patient()(**sample)


@cache
def _patient() -> Any:
    from rollalloc.rewards.math import MathVerify

    return MathVerify(timeout_s=2)


def _integer(draw: random.Random) -> tuple[str, str, str]:
    number = draw.randrange(-999, 99_999)
    return str(number), f"{number:,}", str(number + 1)


def _fraction(draw: random.Random) -> tuple[str, str, str]:
    above, below = draw.randrange(1, 999), draw.randrange(2, 99)
    return rf"\frac{{{above}}}{{{below}}}", f"{2 * above}/{2 * below}", rf"\frac{{{above + 1}}}{{{below}}}"


def _root(draw: random.Random) -> tuple[str, str, str]:
    factor, inside = draw.randrange(2, 30), draw.choice([2, 3, 5, 6, 7])
    return rf"{factor}\sqrt{{{inside}}}", rf"\sqrt{{{factor**2 * inside}}}", rf"{factor + 1}\sqrt{{{inside}}}"


def _square(draw: random.Random) -> tuple[str, str, str]:
    shift = draw.randrange(1, 99)
    return f"(x+{shift})^2", f"x^2+{2 * shift}x+{shift**2}", f"x^2+{shift}x+{shift**2}"


def _pair(draw: random.Random) -> tuple[str, str, str]:
    first, second = draw.randrange(-99, 99), draw.randrange(100, 999)
    return rf"\{{{first}, {second}\}}", rf"\{{{second}, {first}\}}", rf"\{{{second}, {first + 1}\}}"


def ordinary(count: int, seed: int) -> list[tuple[Sample, bool]]:
    """Checks of five kinds in turn, half of them right, each with whether it is."""
    draw = random.Random(seed)
    kinds: Sequence[Callable[[random.Random], tuple[str, str, str]]] = (_integer, _fraction, _root, _square, _pair)
    checks: list[tuple[Sample, bool]] = []
    for index in range(count):
        truth, right, wrong = kinds[index % len(kinds)](draw)
        is_right = draw.random() < 0.5
        text = f"We solve for it step by step. {'So it goes. ' * 30}Hence \\boxed{{{right if is_right else wrong}}}."
        checks.append((Sample("math", text, truth, {"index": index}, name=f"ordinary/{index}"), is_right))
    return checks


def hostile(repeats: int = 2**30) -> list[Sample]:
    """50 answers of ten kinds that hang, kill, flood or confuse. The longest repeats a letter so many times."""
    kinds = {
        "exponent tower": [r"\boxed{9^{9^{9^{9}}}}", "9**9**9**9", r"\boxed{2^{3^{4^{5^{6}}}}}"],
        "huge factorial": [r"\boxed{(10^{9})!}", r"\boxed{99999999!}"],
        "long product": [r"\boxed{\prod_{i=1}^{1000000} (x+i)}", r"\boxed{\int_0^1 x^{x^{x^{x}}} dx}"],
        "gigabyte repeat": ["x" * repeats],
        "megabyte repeat": [r"\boxed{" + "1+" * 400_000 + "1}", "$" * 900_000],
        "deep braces": [r"\boxed{" + "{" * 10_000 + "1" + "}" * 10_000 + "}", r"\boxed{" * 50_000],
        "deep fractions": [r"\boxed{" + r"\frac{1}{" * 3_000 + "1" + "}" * 3_000 + "}"],
        "null bytes": ["\0" * 1000 + r"\boxed{\0}", "\0"],
        "broken UTF-8": [b"\xff\xfe\\boxed{\xed\xa0\x80".decode("utf-8", "surrogateescape") + "}", "\ud800\udfff"],
        "lost worker": [KILL, SPIN],
    }
    return [
        Sample("math", texts[index % len(texts)], "4", {"index": index}, name=f"{kind}/{index}")
        for kind, texts in kinds.items()
        for index in range(5)
    ]


def time_bare(samples: Sequence[Sample]) -> tuple[float, list[bool]]:
    from math_verify import parse, verify

    start = time.perf_counter()
    answers = [verify(parse(f"\\boxed{{{sample.ground_truth}}}"), parse(sample.completion)) for sample in samples]
    return time.perf_counter() - start, answers


def time_workers(samples: Sequence[Sample], workers: int) -> tuple[float, list[bool]]:
    start = time.perf_counter()
    with WorkerScorer("rollalloc.rewards.math:compute_score", workers=workers) as scorer:
        outcomes = scorer.score(samples)
    seconds = time.perf_counter() - start
    return seconds, [isinstance(outcome, Scored) and outcome.metric == 1.0 for outcome in outcomes]


def measure_speed(count: int, repeats: int, bars: Bars) -> None:
    checks = ordinary(count, seed=0)
    samples, truth = [sample for sample, _ in checks], [is_right for _, is_right in checks]
    time_bare(samples[:20])  # imports
    ratios: list[float] = []
    for _ in range(repeats):
        bare_s, bare_answers = time_bare(samples)
        worker_s, worker_answers = time_workers(samples, workers=1)
        ratios.append(worker_s / bare_s)
        agreeing = sum(bare == ours for bare, ours in zip(bare_answers, worker_answers, strict=True))
        wrong = sum(ours != is_right for ours, is_right in zip(worker_answers, truth, strict=True))
        print(f"{count} checks: bare {bare_s:.2f} s, one worker {worker_s:.2f} s, ratio {ratios[-1]:.2f}; ", end="")
        print(f"{agreeing} agree, {wrong} scored against the truth")
    ratio = statistics.median(ratios)
    print(f"median ratio {ratio:.2f}, {bars.at_most('scoring by one worker', ratio, 2)}")


def measure_hostile(workers: int, bars: Bars, *, smallest: bool) -> None:
    checks = ordinary(10 if smallest else 950, seed=1)
    truth = {sample.name: float(is_right) for sample, is_right in checks}
    quick = ("null bytes/0", "lost worker/0")
    bad = [each for each in hostile(1) if each.name in quick] if smallest else hostile()
    samples = [sample for sample, _ in checks] + bad
    random.Random(2).shuffle(samples)
    start = time.perf_counter()
    with WorkerScorer(f"{Path(__file__).resolve()}:reward", workers=workers, limit_s=5) as scorer:
        outcomes = scorer.score(samples)
        report = scorer.report()
    seconds = time.perf_counter() - start
    misjudged = 0
    fates: Counter[tuple[str, str]] = Counter()
    for sample, outcome in zip(samples, outcomes, strict=True):
        if sample.name in truth:
            misjudged += outcome != Scored(truth[sample.name], truth[sample.name])
        else:
            fate = f"scored {outcome.metric:g}" if isinstance(outcome, Scored) else outcome.reason[:60]
            fates[sample.name.partition("/")[0], fate] += 1
    print(f"{len(samples)} answers, {sum(fates.values())} hostile, {workers} workers: {seconds:.0f} s")
    held = bars.at_most("ordinary answers misjudged beside hostile ones", misjudged, 0)
    print(f"ordinary answers misjudged or unscored: {misjudged}, {held}")
    for (kind, fate), number in fates.items():
        print(f"  {kind}: {number} × {fate}")
    print(f"workers lost: {len(report['lost'])}, slowest: {[entry['name'] for entry in report['slowest'][:3]]}")
    here, children = (
        resource.getrusage(who).ru_maxrss / 2**20 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    print(
        f"peak memory: this process {here:.2f} GiB, of which 1 is the gigabyte repeat; largest worker {children:.2f} GiB"
    )


def mixed(count: int, seed: int) -> list[Sample]:
    """Ordinary samples, each with a number of its own, and a hostile one for every nine; those that hang are fewer."""
    draw = random.Random(seed)
    kinds = [name for name in HOSTILE if name not in OVERDUE]
    samples: list[Sample] = []
    for index in range(count):
        if index % 10 == 9:
            kind = draw.choice(kinds if index % 100 != 99 else OVERDUE)
            samples.append(Sample("hostile", kind, "", {"index": index}, name=f"{kind}/{index}"))
        else:
            kind = list(ORDINARY)[index % len(ORDINARY)]
            samples.append(Sample("ordinary", kind, str(index / 8), {"index": index}, name=f"{kind}/{index}"))
    draw.shuffle(samples)
    return samples


def expected(sample: Sample) -> Scored:
    """Of an ordinary one."""
    number = float(sample.ground_truth)
    return Scored(number, 1.0 if sample.completion == "relative" else number)


def measure_hostile_functions(count: int, workers: int, bars: Bars) -> None:
    samples = mixed(count, seed=3)
    path = f"{Path(__file__).with_name('hostile_functions.py')}:reward"
    start = time.perf_counter()
    with WorkerScorer(path, workers=workers, limit_s=3, memory_gb=0.5) as scorer:
        outcomes = scorer.score(samples)
        report = scorer.report()
    seconds = time.perf_counter() - start
    pairs = list(zip(samples, outcomes, strict=True))
    ours = [(sample, outcome) for sample, outcome in pairs if sample.data_source == "ordinary"]
    unscored = [(sample, outcome) for sample, outcome in ours if not isinstance(outcome, Scored)]
    wrong = [
        (sample, outcome) for sample, outcome in ours if isinstance(outcome, Scored) and outcome != expected(sample)
    ]
    kinds = {sample.completion for sample, _ in pairs if sample.data_source == "hostile"}
    print(
        f"{count} samples, {count - len(ours)} of them of {len(kinds)} hostile kinds, {workers} workers: {seconds:.0f} s"
    )
    held = bars.at_most("ordinary samples wrong or unscored beside hostile functions", len(wrong) + len(unscored), 0)
    print(
        f"ordinary ones: {len(wrong)} wrong, {len(unscored)} unscored, {held}; answers discarded: {report['discarded']}"
    )
    for sample, outcome in [*wrong, *unscored][:20]:
        print(f"  {sample.name}: {outcome}, expected {expected(sample)}")
    fates = Counter(
        (sample.completion, f"scored {outcome.metric:g}" if isinstance(outcome, Scored) else outcome.reason[:60])
        for sample, outcome in pairs
        if sample.data_source == "hostile"
    )
    for (kind, fate), number in sorted(fates.items()):
        print(f"  {kind}: {number} × {fate}")


class _Replaced(_crew.WorkerHandle):
    """A worker that is replaced when a sample raised."""

    def next_answer(self) -> tuple[_crew.Task, Answer, float] | None:
        if (answered := super().next_answer()) is None:
            return None
        task, answer, seconds = answered
        raised = isinstance(answer.outcome, Unscored) and answer.outcome.raised
        return task, replace(answer, fit=answer.fit and not raised), seconds


def _believed(*_: object) -> bool:
    """No error is doubted, so that no sample needs two new workers."""
    return False


def measure_raises(count: int, *, smallest: bool) -> None:
    """CPU time a sample, workers' starts included, of a reward that raises a different message at a share of its samples."""
    for name, function in list(RAISING.items())[: 1 if smallest else None]:
        with TemporaryDirectory() as folder:
            file = Path(folder, "raising.py")
            file.write_text(function)
            for share in (1.0,) if smallest else (0.0, 0.01, 0.1, 1.0):
                kept = _time_raises(file, share, count)
                most = max(1, min(count, round(12 / share))) if share else count  # a start takes up to a second
                with (
                    patch.object(_crew, "WorkerHandle", _Replaced),
                    patch.object(_crew._TrustedErrors, "doubts", _believed),
                ):
                    replaced = _time_raises(file, share, most)
                print(f"{name}, {share:.0%} raise: {kept:.3f} ms a sample of {count}; ", end="")
                print(f"a new worker after each error: {replaced:.3f} ms a sample of {most}", flush=True)


def _time_raises(file: Path, share: float, count: int) -> float:
    """Milliseconds of CPU time a sample, of this process and of the workers."""
    samples = [
        replace(sample, ground_truth="raise" if share and index % round(1 / share) == 0 else sample.ground_truth)
        for index, (sample, _) in enumerate(ordinary(count, seed=4))
    ]
    start = _cpu_ms()
    with WorkerScorer(f"{file}:score") as scorer:
        scorer.score(samples)
        raised = sum(scorer.report()["unscored"].values())
    assert raised == sum(sample.ground_truth == "raise" for sample in samples)
    return (_cpu_ms() - start) / count


def measure_forks(pairs: int, checks: int) -> None:
    """CPU time of a sample in a process that is kept, as workers do, and in a child forked for it, in alternation.

    Samples come in groups of 8 to a ground truth, as in training.
    The kept process puts its surroundings back after each sample. The child sends its outcome and exits; nothing else is
    done for it, so that what is printed of it is the least that it costs.
    """
    paths = (
        "rollalloc.rewards.math:compute_score",
        "rollalloc.rewards.answers:exact",
        "rollalloc.rewards.answers:numeric",
    )
    for path in paths:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as executor:
            kept, forked = executor.submit(_measure_forks_of, path, pairs, checks).result()
        ratio = statistics.median(each / other for each, other in zip(kept, forked, strict=True))
        medians = f"kept {statistics.median(kept):.2f} ms, forked {statistics.median(forked):.2f} ms a sample"
        print(f"{path}: {medians}; forked runs at {ratio:.3f} of the kept process's speed ({pairs} pairs of {checks})")


def _measure_forks_of(path: str, pairs: int, checks: int) -> tuple[list[float], list[float]]:
    """Milliseconds of CPU time a sample, kept and forked, of each pair."""
    function, surroundings = load_reward(path), Surroundings()
    for sample, _ in ordinary(100, seed=9):  # fills the parser's caches
        score_sample(function, sample)
    gc.collect()
    gc.freeze()  # so that a child's collector copies no page
    kept: list[float] = []
    forked: list[float] = []
    for pair in range(pairs):
        truths = [sample for sample, _ in ordinary(checks // _GROUP, seed=pair)]
        samples = [
            replace(sample, completion=f"Try {i}. {sample.completion}") for sample in truths for i in range(_GROUP)
        ]
        start = _cpu_ms()
        for sample in samples:
            score_sample(function, sample)
            surroundings.restore()
        middle = _cpu_ms()
        for sample in samples:
            _score_in_child(function, sample)
        kept.append((middle - start) / checks)
        forked.append((_cpu_ms() - middle) / checks)
    return kept, forked


def _score_in_child(function: RewardFunction, sample: Sample) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        child = os.fork()
        if child == 0:
            theirs.sendall(repr(score_sample(function, sample)).encode())
            os._exit(0)
        ours.recv(65_536)
        os.waitpid(child, 0)


def _cpu_ms() -> float:
    """Of this process and of its children that have ended."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return 1000 * sum(usage.ru_utime + usage.ru_stime for usage in usages)


def main() -> None:
    parser = with_smallest(argparse.ArgumentParser(description=__doc__))
    parser.add_argument("part", choices=["speed", "forks", "raises", "hostile", "hostile_functions"])
    parser.add_argument("--checks", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--workers", type=int, nargs="+", help="default: 2, and for hostile_functions 1 and 4")
    given = parser.parse_args()
    if given.smallest:
        given.checks, given.repeats, given.samples, given.workers = 8, 1, 10, [1]
    bars = Bars(judged=not given.smallest)
    if given.part == "speed":
        measure_speed(given.checks, given.repeats, bars)
    elif given.part == "forks":
        measure_forks(given.repeats, given.checks)
    elif given.part == "raises":
        measure_raises(given.checks, smallest=given.smallest)
    elif given.part == "hostile":
        for workers in given.workers or [2]:
            measure_hostile(workers, bars, smallest=given.smallest)
    else:
        for workers in given.workers or [1, 4]:
            measure_hostile_functions(given.samples, workers, bars)
    bars.end()


if __name__ == "__main__":
    main()
