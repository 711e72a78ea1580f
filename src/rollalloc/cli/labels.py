"""Several recipes on one command line: their labels, the parameters of each, seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollalloc.cli.options import parameters_of


def whole_numbers(option: str, text: str) -> list[int]:
    """Whole numbers between commas.

    Raises:
        ValueError: something else.
    """
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise ValueError(f"{option}: expected whole numbers separated by commas, got {text!r}; e.g. 0,1,2") from None


def named_recipes(recipes: Sequence[str]) -> dict[str, str]:
    """`LABEL=NAME` or `NAME`, as label → name.

    Raises:
        ValueError: a label that occurs twice, or that is no name of a folder.
    """
    named: dict[str, str] = {}
    for recipe in recipes:
        label, equals, name = recipe.strip().partition("=")
        if not equals:
            label, name = label.replace(":", "."), label
        if not label:
            raise ValueError(
                f"--recipes: expected NAME or LABEL=NAME between commas, got {recipe!r} in {','.join(recipes)!r}"
            )
        if "/" in label:
            raise ValueError(f"--recipes: {label!r} names a folder, which cannot hold a '/'; give another LABEL={name}")
        if label in named:
            raise ValueError(f"--recipes names {label!r} twice; give one of them a label of its own, LABEL={name}")
        named[label] = name
    return named


def by_label(parameters: Mapping[str, Any], labels: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """`label.key` → value, as label → {key: value}.

    Raises:
        ValueError: no such label.
    """
    found: dict[str, dict[str, Any]] = {label: {} for label in labels}
    for path, value in parameters.items():
        label, _, key = path.rpartition(".")
        if label not in found:
            raise ValueError(
                f"--set {path}: expected LABEL.key with one of {', '.join(labels)}; e.g. {next(iter(labels))}.groups=8"
            )
        found[label][key] = value
    return found


def matched_shapes(text: str | None, named: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """The parameters of each label under `groups=G,n=N`; none without it.

    Raises:
        ValueError: not of that form, or a recipe without a matched shape.
    """
    from rollalloc.lab.bench.methods import matched

    if text is None:
        return {label: {} for label in named}
    shape = parameters_of(text.split(","))
    if set(shape) != {"groups", "n"} or not all(type(value) is int for value in shape.values()):
        raise ValueError(f"--matched expects groups=G,n=N, got {text!r}; e.g. groups=16,n=8")
    return {label: matched(name, **shape) for label, name in named.items()}
