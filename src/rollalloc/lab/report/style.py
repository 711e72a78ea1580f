"""Colours for light and dark pages, and plain words for causes, shared by all views."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rollalloc.files.text import one_line


@dataclass(frozen=True, slots=True)
class Colour:
    """A colour and the name of its CSS variable. Figures and PNGs use `light`; dark pages use `dark`."""

    name: str
    light: str
    dark: str


GROUND = Colour("ground", "#ffffff", "#14171b")
INK = Colour("ink", "#1b1f24", "#e8eaed")
MUTED = Colour("muted", "#5b636d", "#a3abb5")
RULE = Colour("rule", "#d9dde2", "#353b43")
# Okabe and Ito's hues, which readers with colour blindness, and readers of grey prints, can distinguish. On dark pages they
# are lighter.
GREEN = Colour("green", "#009e73", "#1cc195")
ORANGE = Colour("orange", "#e69f00", "#e8a61a")
BLUE = Colour("blue", "#0072b2", "#4a9fe0")
RED = Colour("red", "#d55e00", "#f0813a")
PURPLE = Colour("purple", "#cc79a7", "#d990b8")
SKY = Colour("sky", "#56b4e9", "#8fd0f5")
YELLOW = Colour("yellow", "#f0e442", "#f0e442")
GREY = Colour("grey", "#a9b0b8", "#6d757f")
DIM = Colour("dim", "#dfe3e7", "#3a414a")

COLOURS = (GROUND, INK, MUTED, RULE, GREEN, ORANGE, BLUE, RED, PURPLE, SKY, YELLOW, GREY, DIM)
METHODS = (INK, BLUE, RED, GREEN, PURPLE, ORANGE, SKY, GREY)  # the baseline is drawn in the colour `INK`


@dataclass(frozen=True, slots=True)
class Kind:
    """A cause under which rollouts are counted: its text for legends, its text for sentences, and its colour."""

    words: str
    means: str
    colour: Colour


CAUSES: Mapping[str, Kind] = {
    "trained": Kind(
        "trained on",
        "in a group whose rewards differed; or by itself, against a baseline that the sentence on the method names",
        GREEN,
    ),
    "zero_variance": Kind(
        "all alike", "every rollout of the group had the same reward, so there was nothing to learn", ORANGE
    ),
    "out_of_band": Kind("too easy or hard", "a few first rollouts showed that more would teach little", YELLOW),
    "unselected": Kind("not selected", "scored, but the method trains on a part of each group only", PURPLE),
    "surplus": Kind("surplus", "generated beyond what the batch needed, and thrown away", RED),
    "stale": Kind("too old", "made by weights too many updates ago to be trained on", SKY),
    "cancelled": Kind("stopped early", "stopped while it was being generated", BLUE),
    "failed": Kind("not scored", "generation or scoring failed", MUTED),
    "open": Kind("still open", "running, or waiting for the rest of its group or batch", GREY),
}


def cause(name: str) -> Kind:
    """The kind of a cause. It also works for causes that only newer versions know."""
    return CAUSES.get(name) or Kind(one_line(name.replace("_", " "), 24), "", GREY)


def by_cause(accounts: Mapping[str, float]) -> list[tuple[Kind, float]]:
    """Rollouts by cause, without zeros, in the order that every view uses."""
    return [(cause(name), accounts[name]) for name in in_order(accounts) if accounts[name]]


def in_order(causes: Iterable[str]) -> list[str]:
    """The different causes, in the order that every view uses. Unknown causes come last."""
    present = dict.fromkeys(causes)
    return [name for name in CAUSES if name in present] + [name for name in present if name not in CAUSES]
