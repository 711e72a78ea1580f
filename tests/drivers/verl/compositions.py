"""Configurations that verl composes, which takes it most of a second: each is composed once, for all tests."""

from copy import deepcopy
from functools import cache
from typing import Any

from rollalloc.drivers.verl import check

_once = cache(check.composed)


def composed(words: list[str]) -> Any:
    """A configuration of its own for who asks, since some complete it in place."""
    return deepcopy(_once(tuple(words)))
