"""Answers that hang, kill, flood or confuse, among ordinary ones, all of which are scored right."""

import random
from pathlib import Path

import pytest

from rollalloc.rewards.function import Sample, Scored, Unscored
from rollalloc.rewards.scorers import WorkerScorer

REWARD = Path(__file__).with_name("reward_math.py")
RIGHT, WRONG = Scored(1.0, 1.0), Scored(0.0, 0.0)
HOSTILE = {  # and why each is unscored; None: how far math-verify gets with it depends on the machine
    r"\boxed{9^{9^{9^{9}}}}": "TimeoutError: math-verify took more than 1 s",
    r"\boxed{" + "{" * 5_000 + "1" + "}" * 5_000 + "}": None,
    "x" * 2**24: "completion has 16777216 characters, more than the limit of 1000000",
    "kill": "worker died (exit code -9)",
    r"\boxed{" * 20_000: None,
    "\0" * 1000: None,
    "\ud800\udfff\x07": None,
}


def test_every_ordinary_answer_is_scored_right():
    pytest.importorskip("math_verify")
    samples = [
        Sample("math", f"so \\boxed{{{number + error}}}", str(number), {}, name=name)
        for number in range(100)
        for name, error in (("right", 0), ("wrong", 1))
    ]
    samples += [Sample("math", text, "4", {}, name="hostile") for text in HOSTILE]
    random.Random(0).shuffle(samples)
    with WorkerScorer(f"{REWARD}:compute_score", workers=2, limit_s=8.0) as scorer:
        outcomes = scorer.score(samples)
    for sample, outcome in zip(samples, outcomes, strict=True):
        if sample.name == "hostile":
            reason = HOSTILE[sample.completion]
            assert outcome == Unscored(reason) if reason else outcome != RIGHT, sample.completion[:20]
        else:
            assert outcome == (RIGHT if sample.name == "right" else WRONG)
