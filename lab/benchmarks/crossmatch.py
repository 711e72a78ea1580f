r"""Whether `rewards.math` tells right answers from near misses, for every ground truth of a set.

python lab/benchmarks/crossmatch.py FILE...

Each ground truth is written in five spellings, which must be right: in a box, as another author would write it, in a box of
another kind, as a decimal (numbers only), and in a sentence without a box. And it is changed into five near misses, which
must be wrong: the first digit (or the letter of a choice), the sign, what ends it, a fraction upside down, and the next
ground truth of the set. A file is one that `rollalloc data prepare` writes, or JSON: a list of texts. What is not as it
should be is printed to the standard error.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from decimal import Context
from pathlib import Path

import pyarrow.parquet

from rollalloc.rewards.function import Outcome, Sample, Scored, load_reward, score_sample
from rollalloc.rewards.notation import as_number
from rollalloc.rewards.spelling import choice_of_truth, is_text, plain

_FRACTION = re.compile(r"\\[dt]?frac\{([^{}]+)\}\{([^{}]+)\}")
_RELATION = re.compile(
    r"[=<>,:]|\\(?:pm|mp|leq?|geq?|in|cup|cap|text|mbox|begin|fbox|infty|emptyset)(?![a-zA-Z])|^[(\[\\]\{?$"
)


def ground_truths(file: Path) -> list[str]:
    """Of a file of prompts in verl's schema, or of a list of texts."""
    if file.suffix == ".json":
        return [str(text) for text in json.loads(file.read_text())]
    rows = pyarrow.parquet.read_table(file, columns=["reward_model"]).column("reward_model").to_pylist()
    return [str(row["ground_truth"]) for row in rows]


# ------------------------------------------------------------------------------------------------------------ spellings


def as_decimal(truth: str) -> str | None:
    """A number's decimal in a box, with at most 12 significant digits; None if it is no number."""
    number = as_number(truth)
    if number is None:
        return None
    value = number.value if len(str(number.value)) <= 12 else +Context(prec=12).create_decimal(number.value)
    return f"\\boxed{{{value:f}{'%' if number.percent else ''}}}"


def respelled(truth: str) -> str:
    """The same answer as another author would write it."""
    text = truth.strip().strip("$")
    for pattern, spelling in (
        (r"\\[dtc]?frac(?![a-zA-Z])", r"\\dfrac"),
        (r"([0-9])[eE]([-+]?[0-9]+)$", r"\1 \\times 10^{\2}"),
        (r"(?<![0-9.{])([0-9]{1,3})([0-9]{3})(?![0-9])", r"\1{,}\2"),
        (r"\\(?:left|right)(?![a-zA-Z])", ""),
        (r"([,=+])(?! ?[0-9]{3})(?=[^{}\\]*$)", r"\1\\, "),
        (r"\((?=[^{}\\]*$)", "( "),
        (r"^[A-Za-z][a-z ]{3,}$", r"\\text{\g<0>}"),
        (r"\^\\circ", r"^{\\circ}"),
    ):
        text = re.sub(pattern, spelling, text)
    return f"\\boxed {{ {text}. }}"


SPELLINGS: dict[str, Callable[[str], str | None]] = {
    "in a box": lambda truth: f"So it is \\boxed{{{truth}}}.",
    "respelled": respelled,
    "in another box": lambda truth: f"It is not \\boxed{{7}}, but \\fbox{{${truth.strip('$')}$}}, by 3 steps.",
    "as a decimal": as_decimal,
    "in a sentence": lambda truth: f"We checked it. The answer is {truth}. That is all.",
}

# ---------------------------------------------------------------------------------------------------------- near misses


def other_digit(truth: str) -> str | None:
    """With another first digit; of a multiple choice, with another letter."""
    if letter := choice_of_truth(truth):
        return f"({chr((ord(letter) - ord('A') + 1) % 26 + ord('A'))})"
    changed = re.sub(r"[0-9]", lambda match: str(int(match[0]) % 9 + 1), truth, count=1)
    return changed if changed != truth else None


def other_sign(truth: str) -> str | None:
    """With another sign; None for zero, and for what is neither a number nor a formula without relations."""
    number = as_number(truth)
    if (number is not None and number.value == 0) or is_text(plain(truth)) or _RELATION.search(truth):
        return None
    return truth.lstrip()[1:] if truth.lstrip().startswith("-") else f"-{truth}"


def cut_short(truth: str) -> str | None:
    """Without its last member, word or digit; None for a multiple choice, of which only the letter counts."""
    if choice_of_truth(truth) or "." in truth:
        return None
    for pattern in (r",[^,(){}\[\]]+(?=[)}\]\\]*$)", r"(?<=[a-z]) [a-z]+$", r"(?<=[1-9])[0-9](?=$)(?<!\.[0-9])"):
        if match := re.search(pattern, truth):
            return truth[: match.start()] + truth[match.end() :]
    return None


def upside_down(truth: str) -> str | None:
    """With its first fraction upside down; one over a whole number."""
    if match := _FRACTION.search(truth):
        above, below = match.groups()
        return truth[: match.start()] + rf"\frac{{{below}}}{{{above}}}" + truth[match.end() :]
    return rf"\frac{{1}}{{{truth}}}" if re.fullmatch(r"-?[0-9]+", truth) and abs(int(truth)) > 1 else None


NEAR_MISSES: dict[str, Callable[[str], str | None]] = {
    "other digit": other_digit,
    "other sign": other_sign,
    "cut short": cut_short,
    "upside down": upside_down,
}


def next_ones(truths: Sequence[str]) -> Callable[[str], str | None]:
    """The next ground truth of the set."""
    return dict(zip(truths, [*truths[1:], *truths[:1]], strict=True)).get


# ------------------------------------------------------------------------------------------------------------ the table


def measure(files: Sequence[Path]) -> None:
    """Prints a table of the shares of ground truths that are scored right, and what is not as it should be."""
    check = load_reward("rollalloc.rewards.math:compute_score")
    print("| set | ground truths |", " | ".join([*SPELLINGS, *NEAR_MISSES, "the next one's"]), "|")
    for file in files:
        truths = [truth.strip() for truth in ground_truths(file)]
        distinct, times = list(dict.fromkeys(truths)), Counter(truths)
        forms = SPELLINGS | {
            name: lambda truth, change=change: None if (near := change(truth)) is None else f"\\boxed{{{near}}}"
            for name, change in {**NEAR_MISSES, "the next one's": next_ones(distinct)}.items()
        }
        shares: list[str] = []
        for form, spell in forms.items():
            outcomes = {truth: _outcome(check, text, truth) for truth in distinct if (text := spell(truth))}
            right = {truth for truth, outcome in outcomes.items() if outcome == Scored(1.0, 1.0)}
            shares.append(f"{sum(times[truth] for truth in right)} of {sum(times[truth] for truth in outcomes)}")
            for truth, outcome in outcomes.items():
                if (truth in right) != (form in SPELLINGS):
                    print(f"  {form}: {truth!r} as {spell(truth)!r}: {outcome}", file=sys.stderr, flush=True)
        print(f"| {file.stem} | {len(truths)} |", " | ".join(shares), "|", flush=True)


def _outcome(check: Callable[..., object], text: str, truth: str) -> Outcome:
    return score_sample(check, Sample("math", text, truth, {}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    measure(parser.parse_args().files)
