"""The watch on diversity: whether accuracy is bought with what the policy could still do in several attempts."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, sqrt

from rollalloc.train.evaluation import Evaluation

_MUCH = 0.02  # of pass@k, beyond what sampling explains
_ERRORS = 2.0  # standard errors that sampling explains
_HALF = 0.5  # of the share of differing right pairs that the first evaluation found

Watched = Mapping[str, float]  # what was found so far; see `narrowed`


def narrowed(watched: Watched, found: Evaluation, prompts: int) -> tuple[str | None, dict[str, float]]:
    """Whether a policy has become narrower while it became no worse, in words, and what to hold the next one against.

        pass@k falls by more than 0.02 + 2·√(b(1 − b)/prompts) below its highest b, at no lower accuracy
        the share of differing right pairs falls below half of what it was at first, at no lower accuracy

    Where pass@k is exact there is no error to allow for. Entropy is not judged: it falls in every run that learns.

    Args:
        watched: as the evaluation before left it; empty before the first.
        found: by this evaluation.
        prompts: held out.
    """
    breadth, accuracy, after = found.breadth, found.accuracy, dict(watched)
    if breadth is None or accuracy is None:
        return None, after
    said: list[str] = []
    highest = watched.get("pass_at_k", -inf)  # a metric may be any number, of any sign
    error = sqrt(highest * (1 - highest) / prompts) if found.standard_error != 0 and 0 < highest < 1 else 0.0
    allowed = _MUCH + _ERRORS * error
    if breadth.pass_at_k >= highest:
        after |= {"pass_at_k": breadth.pass_at_k, "accuracy": accuracy}
    elif highest - breadth.pass_at_k > allowed and accuracy >= watched["accuracy"]:
        said.append(
            f"pass@{breadth.k} fell from {highest:.3f} to {breadth.pass_at_k:.3f} while accuracy went from "
            f"{watched['accuracy']:.3f} to {accuracy:.3f}"
        )
    if (differ := breadth.right_pairs_differ) is not None:
        first = watched.get("right_pairs_differ")
        if first is None:
            after |= {"right_pairs_differ": differ, "accuracy_at_first": accuracy}
        elif differ < _HALF * first and accuracy >= watched.get("accuracy_at_first", -inf):
            said.append(f"two right answers to a prompt differ in {differ:.2f} of cases, at first in {first:.2f}")
    return "; ".join(said) or None, after
