"""Check that the work of a decision does not grow with the number of prompts."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from rollalloc.core.allocator import Allocator
from rollalloc.core.prompts import PromptTable
from rollalloc.core.recipe import Recipe
from rollalloc.testing.audit import expect
from rollalloc.testing.feeder import AuditedRun
from rollalloc.testing.world import World

_LARGE = 1 << 17  # minimum number of prompts in the large data set, so that a scan of all prompts is obvious
_LARGEST = 1 << 20
_DECISIONS = 4  # number of decisions to measure, after the first one


def check_work(
    recipe: Recipe, allocator: type[Allocator], world: World, few: int, table: Callable[[int], PromptTable]
) -> None:
    """Check law 11: with many prompts, a decision reads no more entries and takes no more memory than with few prompts.

    The first decision of a run is not counted, because it may sort or shuffle all prompts once. Memory is measured too,
    because the count of entries misses some work, such as a Python list of all prompts.
    """
    entries_few, bytes_few = _most_work(AuditedRun(recipe, table(few), world, allocator=allocator))
    many = max(_LARGE, min(8 * bytes_few, _LARGEST))
    entries, allocated = _most_work(AuditedRun(recipe, table(many), world, allocator=allocator))
    for what, more, less in (("entries looked at", entries, entries_few), ("bytes allocated", allocated, bytes_few)):
        expect(11, more < 2 * less + many // 2, f"{what} for a decision: {more} of {many} prompts, {less} of {few}")


def _most_work(run: AuditedRun) -> tuple[int, int]:
    """The largest number of per-prompt entries that a decision reads, and of bytes that a decision allocates."""
    most_entries = most_bytes = 0
    steps = run.synchronous(_DECISIONS + 1)
    next(steps)
    _count_from_now(run.allocator, len(run.allocator.table))
    tracemalloc.start()
    try:
        for _ in range(_DECISIONS):
            Counted.entries = 0
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            if next(steps, None) is None:
                break
            most_entries = max(most_entries, Counted.entries)
            most_bytes = max(most_bytes, tracemalloc.get_traced_memory()[1] - before)
    finally:
        tracemalloc.stop()
    return most_entries, most_bytes


class Counted(np.ndarray):
    """An array that counts accesses to its entries.

    Indexing counts the selected entries. Most other operations count all entries.
    """

    entries = 0

    def __array_ufunc__(self, ufunc: np.ufunc, method: Any, *inputs: Any, out: Any = (), **kwargs: Any) -> Any:
        Counted.entries += max(np.size(value) for value in (*inputs, *out))
        if out:
            kwargs["out"] = tuple(map(_bare, out))
        made = getattr(ufunc, method)(*map(_bare, inputs), **kwargs)
        return made.view(Counted) if isinstance(made, np.ndarray) else made  # count accesses to computed arrays too

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        Counted.entries += self.size
        return super().__array_function__(func, types, args, kwargs)

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, slice):  # a slice creates a view and reads no entry
            Counted.entries += np.size(key)
        return super().__getitem__(key)


def _bare(value: Any) -> Any:
    return value.view(np.ndarray) if isinstance(value, Counted) else value


def _counting(name: str) -> Any:
    method = getattr(np.ndarray, name)

    def count(self: Counted, *args: Any, **kwargs: Any) -> Any:
        Counted.entries += self.size
        return method(self, *args, **kwargs)

    return count


for _name in (
    "__iter__", "argmax", "argmin", "argpartition", "argsort", "astype", "copy", "cumsum", "fill", "nonzero", "partition",
    "put", "repeat", "searchsorted", "sort", "take", "tobytes", "tolist",
):  # fmt: skip
    setattr(Counted, _name, _counting(_name))


def _count_from_now(value: Any, prompts: int) -> None:
    """Find each array of the allocator with one entry per prompt, and replace it by an array that counts accesses."""
    seen, todo = set[int](), [value]
    while todo:
        holder: Any = todo.pop()
        if id(holder) in seen:
            continue
        seen.add(id(holder))
        items = holder if isinstance(holder, dict) else getattr(holder, "__dict__", {})
        for name, held in list(cast("dict[str, Any]", items).items()):
            if isinstance(held, np.ndarray) and prompts in held.shape:
                items[name] = cast("NDArray[Any]", held).view(Counted)
            elif isinstance(held, dict) or type(held).__module__.startswith("rollalloc."):
                todo.append(held)
