"""Word problems in the style of GSM8K, from templates such as "Anna has 5 apples and gets 3 more"."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rollalloc.tasks.files import Problem

_NAMES = (
    *("Anna", "Ben", "Carla", "David", "Emma", "Felix", "Grace", "Henry", "Ida", "Jack"),
    *("Kate", "Liam", "Maria", "Noah", "Olga", "Paul", "Rosa", "Sam", "Tara", "Will"),
)
_THINGS = (
    *("apples", "balls", "books", "cards", "coins", "cookies", "eggs", "flowers"),
    *("marbles", "oranges", "pens", "pencils", "shells", "stamps", "stickers"),
)
_BOXES = ("bags", "baskets", "boxes", "jars")
_DRAWS = 50  # number of draws per problem after which the templates count as used up

Draw = Callable[[int, int], int]  # draws a whole number, ends included
Story = Callable[[Draw, str, str, str, str], tuple[str, int]]


def _gets(draw: Draw, who: str, other: str, things: str, boxes: str) -> tuple[str, int]:
    had, more = draw(2, 20), draw(2, 20)
    return f"{who} has {had} {things} and gets {more} more. How many {things} does {who} have now?", had + more


def _gives(draw: Draw, who: str, other: str, things: str, boxes: str) -> tuple[str, int]:
    had = draw(6, 30)
    given = draw(2, had - 1)
    return (
        f"{who} has {had} {things} and gives {given} of them to {other}. How many {things} does {who} have left?",
        had - given,
    )


def _packs(draw: Draw, who: str, other: str, things: str, boxes: str) -> tuple[str, int]:
    count, each = draw(2, 9), draw(2, 9)
    return (
        f"{who} has {count} {boxes} with {each} {things} in each. How many {things} does {who} have?",
        count * each,
    )


def _shares(draw: Draw, who: str, other: str, things: str, boxes: str) -> tuple[str, int]:
    among, each = draw(2, 9), draw(2, 9)
    return (
        f"{who} puts {among * each} {things} into {among} {boxes}, the same number in each. How many {things} are in one?",
        each,
    )


def _pays(draw: Draw, who: str, other: str, things: str, boxes: str) -> tuple[str, int]:
    count, each = draw(2, 9), draw(2, 9)
    paid = count * each + draw(1, 20)
    said = f"{who} buys {count} {things} for {each} dollars each and pays with {paid} dollars."
    return f"{said} How many dollars does {who} get back?", paid - count * each


def _loses(draw: Draw, who: str, other: str, things: str, boxes: str) -> tuple[str, int]:
    had, more = draw(2, 20), draw(2, 20)
    lost = draw(1, had + more - 1)
    said = f"{who} has {had} {things}. {other} gives {who} {more} more, and then {who} loses {lost}."
    return f"{said} How many {things} does {who} have now?", had + more - lost


STORIES: tuple[Story, ...] = (_gets, _gives, _packs, _shares, _pays, _loses)


def problems(rng: np.random.Generator, count: int, taken: set[str]) -> list[Problem]:
    """Draw different problems that are not in `taken`, uniformly over templates, and add them to it.

    Raises:
        ValueError: too few are found.
    """
    found: list[Problem] = []
    for _ in range(_DRAWS * count):
        if len(found) == count:
            return found
        who, other = rng.choice(_NAMES, 2, replace=False)
        story = STORIES[int(rng.integers(len(STORIES)))]
        text, answer = story(
            lambda low, high: int(rng.integers(low, high + 1)), who, other, rng.choice(_THINGS), rng.choice(_BOXES)
        )
        if text not in taken:
            taken.add(text)
            found.append(Problem(text, str(answer), {"number": True}))
    if len(found) == count:
        return found
    raise ValueError(f"expected {count} more different word problems, found {len(found)}; ask for fewer")
