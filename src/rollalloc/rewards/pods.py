"""The rewards of PODS's runs, arXiv 2504.13818: is the answer right, and does the completion have the tags?

A completion should be `<think>…</think><answer>…</answer>` (`rollalloc data prepare --ask tags`). The rewards are graded, so
that even the rollouts of a prompt that are all right, or all wrong, differ.

| name | reward | where PODS uses it |
|---|---|---|
| `eight_gpus` | accuracy + format + tags, each at most 1 | on eight GPUs |
| `one_gpu` | accuracy + 0.1 format + 0.1 tags | on one GPU, in the last version of the code |
| `one_gpu_in_format` | the same; `acc` also needs the format | with Llama |
| `one_gpu_if_wrong` | accuracy or, if the answer is wrong, 0.1 (format + tags) | with GSM8K, for the published results |
| `accuracy` | accuracy | with MATH, for the published results |

Each is a `Reward`: verl loads it by `reward.custom_reward_function.path=pkg://rollalloc.rewards.pods` and its name, TRL
takes it in `reward_funcs`, and rollalloc's trainer as `--reward rollalloc.rewards.pods:NAME`. `acc` is 1 if the answer is
right.

Answers are compared by math-verify and by checks of our own (`rollalloc.rewards.math`). PODS's code uses math-verify on
eight GPUs, and on one GPU a comparison of texts and numbers.
"""

from __future__ import annotations

import re
from typing import Any

from rollalloc.rewards import math
from rollalloc.rewards.extract import boxed
from rollalloc.rewards.frameworks import Reward
from rollalloc.rewards.scorers import WorkerScorer

_WEIGHT = 0.1  # of the format and of the tags, on one GPU
_PER_CHARACTER = 0.01  # what each character outside of the format costs
_LONGEST = 200  # characters of an answer; more is a text, which math-verify would take long to parse
_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_LINES = ("<think>\n", "\n</think>\n", "\n<answer>\n", "\n</answer>")
_AROUND = re.compile(r"\A[ \n]|[ \n]\Z")
_BETWEEN = re.compile(r"</think>[ \n]?<answer>")
_NUMBER = re.compile(r"(?<![\d\w)])-?\d+(?:,\d{3})*(?:\.\d+)?|\d+(?:,\d{3})*(?:\.\d+)?|\.\d+")
_FORMULA = re.compile(r"\$([^$\n]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)


# ---------------------------------------------------------------------------------------------------------------- parts


def one_gpu_format(text: str) -> float:
    """How well a completion keeps to `<think>…</think><answer>…</answer>`, in [0, 1].

        max(0, 1 - 0.01 · characters around it)

    Between the two parts, one space or one line break is allowed. 0 if the completion has no such parts.
    """
    start, end = text.find(_TAGS[0]), text.rfind(_TAGS[3])
    if start < 0 or _BETWEEN.search(text, start + len(_TAGS[0]), max(end, 0)) is None:
        return 0.0
    return max(0.0, 1 - _PER_CHARACTER * (len(text) - (end + len(_TAGS[3]) - start)))


def eight_gpus_format(text: str) -> float:
    """1 if a completion begins with `<think>`, and all four tags are in lines of their own, in this order; otherwise 0."""
    middle = text.find("\n</think>\n<answer>\n", len(_LINES[0]))
    return float(
        text.startswith(_LINES[0])
        and middle >= 0
        and re.search(r"\n</answer>(?:\n|\Z)", text[middle + len("\n</think>\n<answer>\n") :]) is not None
    )


def share_of_tags(text: str, tags: tuple[str, ...] = _TAGS) -> float:
    """The share of the four tags that stand exactly once in a text."""
    return sum(text.count(tag) == 1 for tag in tags) / len(tags)


def is_right(**sample: Any) -> float:
    """1 if the answer is right, as on one GPU: what the answer tags hold, the whole completion, or its last number; else 0.

    Args:
        sample: the arguments that verl passes to a reward function.
    """
    text: str = sample["solution_str"]
    numbers = _NUMBER.findall(text)
    return _any_right(sample, [text.rpartition("<answer>")[2].partition("</answer>")[0], text, *numbers[-1:]])


def is_right_in_latex(**sample: Any) -> float:
    """1 if the answer is right, as on eight GPUs: the last box or, without a box, the last formula between `$`; else 0.

    Args:
        sample: the arguments that verl passes to a reward function.
    """
    text: str = sample["solution_str"]
    formulas = [next(filter(None, match.groups())) for match in _FORMULA.finditer(text)]
    box = boxed(text)
    return _any_right(sample, formulas[-1:] if box is None else [box])


def _any_right(sample: dict[str, Any], answers: list[str]) -> float:
    """1 if one of the answers is the ground truth."""
    tried = dict.fromkeys(answer.strip() for answer in answers if answer.strip() and len(answer) <= _LONGEST)
    asked: dict[str, Any] = {name: value for name, value in sample.items() if name != "solution_str"}
    return max((math.required(solution_str=f"\\boxed{{{answer}}}", **asked) for answer in tried), default=0.0)


# -------------------------------------------------------------------------------------------------------------- rewards


def score_eight_gpus(**sample: Any) -> dict[str, float]:
    """The reward `eight_gpus`, in [0, 3]."""
    text, right = sample["solution_str"], is_right_in_latex(**sample)
    return {"score": right + eight_gpus_format(text) + share_of_tags(text, _LINES), "acc": right}


def score_one_gpu(**sample: Any) -> dict[str, float]:
    """The reward `one_gpu`, in [0, 1.2]."""
    right = is_right(**sample)
    return {"score": right + _shape(sample["solution_str"]), "acc": right}


def score_one_gpu_in_format(**sample: Any) -> dict[str, float]:
    """The reward `one_gpu_in_format`, in [0, 1.2]; `acc` is 1 if the answer is right and nothing is around the format."""
    text, result = sample["solution_str"], score_one_gpu(**sample)
    bare = _AROUND.sub("", text)  # at most one space or line break on each side
    in_format = one_gpu_format(text) > 0 and bare.startswith(_TAGS[0]) and bare.endswith(_TAGS[3])
    return {"score": result["score"], "acc": result["acc"] * in_format}


def score_one_gpu_if_wrong(**sample: Any) -> dict[str, float]:
    """The reward `one_gpu_if_wrong`, in [0, 1]."""
    right = is_right(**sample)
    return {"score": right or _shape(sample["solution_str"]), "acc": right}


def _shape(text: str) -> float:
    return _WEIGHT * one_gpu_format(text) + _WEIGHT * share_of_tags(text)


def _reward(name: str, function: str) -> Reward:
    return Reward(WorkerScorer(f"{__name__}:{function}", workers=2), name=name)


eight_gpus = _reward("eight_gpus", "score_eight_gpus")
one_gpu = _reward("one_gpu", "score_one_gpu")
one_gpu_in_format = _reward("one_gpu_in_format", "score_one_gpu_in_format")
one_gpu_if_wrong = _reward("one_gpu_if_wrong", "score_one_gpu_if_wrong")
accuracy = _reward("accuracy", "is_right")
