"""Public data sets of mathematics: their names on the hub, their columns, their conversion to verl, and filters."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from math import isfinite
from reprlib import repr as short
from typing import Any, Literal

from rollalloc.data.prompts import is_placeholder
from rollalloc.rewards.extract import boxed
from rollalloc.rewards.spelling import choice_of_truth

INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."

TAGS = (
    "Solve the problem of the user. First think: work it out step by step, check your steps, and stop as soon as you are "
    "sure, because your answer must not be long. Then give the final answer alone. Write both in this form:\n"
    "<think>\nyour reasoning\n</think>\n<answer>\nyour answer\n</answer>"
)
"""The system message that asks for tags, in our words; PODS's asks for the same."""

SAMPLES = "__rollout_n__"  # verl's column with the number of answers to sample for a validation prompt

Row = Mapping[str, Any]
Ask = Literal["box", "tags"]


class NoAnswer(ValueError):
    """A row has no final answer, so its rollouts could not be scored."""


@dataclass(frozen=True, slots=True)
class PublicProblem:
    """A problem from a row of a public set.

    Attributes:
        index: identifies the problem within its set. None: the row's number is used.
        question: text of the question, without instructions.
        answer: the final answer alone, without the solution.
        about: further fields of verl's `extra_info`, for example `prior`.
        prompt: the messages, if the set has its own.
    """

    index: int | str | None
    question: str
    answer: str
    about: Mapping[str, Any]
    prompt: tuple[Mapping[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class PublicSplit:
    """One split of a public set. It becomes one file.

    Attributes:
        name: name of the file.
        hub: name of the data set on the Hugging Face hub; also verl's `data_source`.
        split: name of the split on the hub.
        use: "train" or "evaluation". Filters are applied only to "train".
        read: converts a row to a problem.
        config: configuration of the data set on the hub.
        samples: number of answers per question in an evaluation. A number above 1 is written to the column `SAMPLES`,
            because verl's `val_kwargs.n` is the same for all sets. The name of such a split ends in "x" and this number.
        own_prompts: True: the problems have prompts of their own.
    """

    name: str
    hub: str
    split: str
    use: Literal["train", "evaluation"]
    read: Callable[[Row], PublicProblem]
    config: str | None = None
    samples: int = 1
    own_prompts: bool = False

    @property
    def original(self) -> str:
        """The name of the split without its number of samples."""
        return self.name.removesuffix(f"x{self.samples}")


def to_verl(part: PublicSplit, number: int, problem: PublicProblem, ask: Ask = "box") -> dict[str, Any]:
    """A problem as a row in verl's schema.

    Args:
        part: the split of the problem.
        number: number of the row, from 0. It becomes the index of a problem that has no index.
        problem: the problem.
        ask: what the prompt asks for: the final answer in a box, or the reasoning and the answer in tags. A problem with a
            prompt of its own keeps it.

    Raises:
        NoAnswer: the answer is a placeholder.
    """
    if is_placeholder(problem.answer):
        raise NoAnswer(f"the answer is {problem.answer!r}, a placeholder")
    system, instruction = (TAGS, "") if ask == "tags" else ("", f" {INSTRUCTION}")
    prompt = problem.prompt or (
        {"role": "system", "content": system},
        {"role": "user", "content": problem.question + instruction},
    )
    index = number if problem.index is None else problem.index
    samples = {SAMPLES: part.samples} if part.samples > 1 else {}
    return samples | {
        "data_source": part.hub,
        "prompt": [dict(message) for message in prompt],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": problem.answer},
        # The index is text in every set, so that the files of all sets have the same schema.
        "extra_info": {"split": part.split, "index": str(index), **problem.about},
    }


# ------------------------------------------------------------------------------------------------------------- columns


def _deepmath(row: Row) -> PublicProblem:
    about = {"rating": f"{float(row['difficulty'])}/9.0"} if row.get("difficulty") is not None else {}
    return PublicProblem(row.get("original_index"), _text(row, "question"), _answer(row, "final_answer"), about)


def _polaris(row: Row) -> PublicProblem:
    rate = row.get("difficulty")
    return PublicProblem(
        None, _text(row, "problem"), _answer(row, "answer"), {} if rate is None else _pass_rate(str(rate))
    )


def _dapo(row: Row) -> PublicProblem:
    """DAPO's rows are in verl's schema already. The instruction in their prompts is kept."""
    prompt = tuple(row["prompt"])
    answer = _answer(row["reward_model"], "ground_truth")
    return PublicProblem(row["extra_info"]["index"], prompt[-1]["content"], answer, {}, prompt)


def _gsm8k(row: Row) -> PublicProblem:
    _, marker, answer = _answer(row, "answer").rpartition("####")
    if not marker:
        raise NoAnswer("the solution has no ####")
    return PublicProblem(None, _text(row, "question"), answer.strip().replace(",", ""), {})


def _math(row: Row) -> PublicProblem:
    """The answer is the content of the last box of the solution."""
    answer = boxed(_answer(row, "solution"))
    if not answer:
        raise NoAnswer("the solution has no closed box")
    return PublicProblem(None, _text(row, "problem"), answer, {})


def _columns(question: str, *answers: str, index: str | None = None) -> Callable[[Row], PublicProblem]:
    """Return a function that converts a row. The answer is in the first column of `answers` that has a value."""

    def read(row: Row) -> PublicProblem:
        answer = next((name for name in answers if row.get(name) is not None), answers[0])
        return PublicProblem(None if index is None else row.get(index), _text(row, question), _answer(row, answer), {})

    return read


def _text(row: Row, column: str) -> str:
    value = row[column]
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{column} must be text, got {short(value)}")
    return value.strip()


def _answer(row: Row, column: str) -> str:
    """The value of a column as text. If the value is a list of answers, the first answer."""
    value = row[column]
    if isinstance(value, (list, tuple)):
        value = value[0] if value else None
    if value is None or str(value).strip().lower() in ("", "nan"):
        raise NoAnswer(f"{column} is empty")
    if isinstance(value, float) and not isfinite(value):
        raise NoAnswer(f"{column} is {value}")
    if not isinstance(value, (str, int, float, Decimal)) or isinstance(value, bool):
        raise ValueError(f"{column} must be text or a number, got {short(value)}")
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value).strip()


def _pass_rate(text: str) -> dict[str, Any]:
    """The fields `pass_rate` and `prior`, from a share of solved attempts such as "3/8"."""
    right, _, attempts = text.partition("/")
    rate = float(right) / float(attempts or 1)
    if not 0 <= rate <= 1:
        raise ValueError(f"difficulty must be a pass rate such as 3/8, got {text!r}")
    return {"pass_rate": text, "prior": rate}


_MATH = ("answer", "expected_answer")  # copies of the same set have different names for this column

_ONCE: Mapping[str, tuple[PublicSplit, ...]] = {
    "deepmath": (PublicSplit("deepmath", "zwhe99/DeepMath-103K", "train", "train", _deepmath),),
    "polaris": (PublicSplit("polaris", "POLARIS-Project/Polaris-Dataset-53K", "train", "train", _polaris),),
    "deepscaler": (
        PublicSplit(
            "deepscaler",
            "agentica-org/DeepScaleR-Preview-Dataset",
            "train",
            "train",
            _columns("problem", "answer"),
        ),
    ),
    "dapo17k": (PublicSplit("dapo17k", "BytedTsinghua-SIA/DAPO-Math-17k", "train", "train", _dapo, own_prompts=True),),
    "gsm8k": (
        PublicSplit("gsm8k_train", "openai/gsm8k", "train", "train", _gsm8k, "main"),
        PublicSplit("gsm8k_test", "openai/gsm8k", "test", "evaluation", _gsm8k, "main"),
    ),
    "math": (PublicSplit("math_train", "DigitalLearningGmbH/MATH-lighteval", "train", "train", _math, "default"),),
    "math500": (PublicSplit("math500", "HuggingFaceH4/MATH-500", "test", "evaluation", _columns("problem", *_MATH)),),
    "aime24": (
        PublicSplit(
            "aime24", "HuggingFaceH4/aime_2024", "train", "evaluation", _columns("problem", *_MATH, index="id")
        ),
    ),
    "aime25": (PublicSplit("aime25", "math-ai/aime25", "test", "evaluation", _columns("problem", *_MATH, index="id")),),
    "amc23": (PublicSplit("amc23", "math-ai/amc23", "test", "evaluation", _columns("question", *_MATH, index="id")),),
    "minerva": (PublicSplit("minerva", "math-ai/minervamath", "test", "evaluation", _columns("question", *_MATH)),),
    "olympiadbench": (
        PublicSplit(
            "olympiadbench", "math-ai/olympiadbench", "test", "evaluation", _columns("question", "final_answer")
        ),
    ),
}
_SAMPLES = 32  # DAPO and Pilot-Commit evaluate small sets with 32 answers per question
SETS: Mapping[str, tuple[PublicSplit, ...]] = {
    **_ONCE,
    **{
        f"{name}x{_SAMPLES}": tuple(
            replace(part, name=f"{part.name}x{_SAMPLES}", samples=_SAMPLES) for part in _ONCE[name]
        )
        for name in ("aime24", "aime25", "amc23")
    },
}


# ------------------------------------------------------------------------------------------------------------- filters

_WRAPPED = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|operatorname|boxed|fbox)\s*\{([^{}]*)\}")
_LETTER = re.compile(r"[A-Ea-e]|\([A-Ea-e]\)")  # an answer to a multiple-choice question
_OF_TWO = frozenset(
    (
        *("yes", "no", "true", "false", "correct", "incorrect", "possible", "impossible", "even", "odd"),
        *("convergent", "divergent", "converges", "diverges", "always", "never"),
    )
)


def can_be_guessed(answer: str) -> bool:
    r"""Whether an answer is one of two words, such as yes and no, or a letter of multiple choice, such as (B) or (B) 12.

    A rollout that guesses such an answer is right with a probability of 1/2 to 1/5, whatever its reasoning. So these
    questions keep a large variance of rewards for a long time, and methods that select by variance prefer them.

    Args:
        answer: the answer in the data set. LaTeX such as `\\text{Yes}` and a final period are ignored.
    """
    plain = _WRAPPED.sub(r"\1", answer).replace("$", "").strip().rstrip(".").strip()
    is_letter = _LETTER.fullmatch(plain) is not None or (choice_of_truth(answer) or "Z") <= "E"
    return is_letter or plain.lower() in _OF_TWO


FILTERS: Mapping[str, Callable[[str], bool]] = {"guessable": can_be_guessed}
"""Filters by the name in `rollalloc data prepare --filter`. A question is left out if the filter is True for its answer."""
