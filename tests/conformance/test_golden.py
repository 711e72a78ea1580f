"""Tests that no decision of any recipe changes by accident; `golden.py` says how the traces are made."""

import json

import golden
import pytest

from rollalloc.named import RECIPES

CASES = golden.cases()
KEPT = json.loads(golden.FILE.read_text("utf-8"))


# The recipes as their names make them; the tier `e2e` has their variants.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.e2e] * (name not in RECIPES)) for name in CASES]
)
def test_the_decisions_are_those_of_the_golden_traces(name):
    assert golden.digests(*CASES[name]) == KEPT.get(name), (
        "where that is meant: python tests/conformance/golden.py --write"
    )


def test_every_recipe_has_its_traces_and_no_trace_is_left_over():
    assert CASES.keys() == KEPT.keys()
    assert RECIPES.keys() <= CASES.keys()


def test_a_trace_sees_what_is_decided_and_not_how_it_is_worded(monkeypatch):
    """Each group of four in another order, one advantage a hundredth larger: other digests. Other words: the same."""
    recipe, table = CASES["dapo"]
    plain = golden.digests(recipe, table)
    for field, change in (("rollout", 1), ("advantage", 0.01), ("weight", 0.01), ("prompt", 1)):
        row = golden._row
        monkeypatch.setattr(
            golden, "_row", lambda r, f=field, c=change, row=row: row(r._replace(**{f: getattr(r, f) + c}))
        )
        assert all(made != plain[mode] for mode, made in golden.digests(recipe, table).items())
        monkeypatch.undo()
    monkeypatch.setattr("rollalloc.core.decisions.no_progress", lambda run: "other words")
    assert golden.digests(recipe, table) == plain
