"""Every recipe through the conformance kit."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from math import isnan
from pathlib import Path

import numpy as np
import pytest
from cases import RECIPES, TABLES, TRACED

from rollalloc import PromptTable
from rollalloc.core.rule import Drawn, PromptRule
from rollalloc.rules import advantages, prompts
from rollalloc.testing import check_recipe, trace

ROOT = Path(__file__).parents[2]


# One of each kind in short runs; the tier `e2e` has all of them in longer runs under another seed.
RUNS = [*((name, 0) for name in TRACED), *(pytest.param(name, 1, marks=pytest.mark.e2e) for name in RECIPES)]


@pytest.mark.parametrize(("name", "seed"), RUNS)
def test_every_law_holds(name, seed):
    check_recipe(RECIPES[name], table=TABLES.get(name, PromptTable.of), seeds=(seed,), batches=6 if seed else 3)


def test_a_table_of_another_size_than_asked_for_is_refused():
    with pytest.raises(ValueError, match="table must make a data set of 4100 prompts, got 7"):
        check_recipe(RECIPES["grpo"], table=lambda prompts: PromptTable(7))


def test_law_6_actions_are_the_same_under_any_hash_seed():
    """And in every process: nothing depends on the order of a set, an address, or the clock."""
    code = (
        f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r})\n"
        "from cases import RECIPES, TRACED\n"
        "from rollalloc.testing import trace\n"
        "print([trace(RECIPES[name], 64, 3) for name in TRACED])"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "4242")
    }
    assert digests == {f"{[trace(RECIPES[name], 64, 3) for name in TRACED]}\n"}


def test_the_prompt_rule_of_the_documentation_keeps_every_law():
    (code,) = re.findall(r"```python\n(@dataclass.*?)```", (ROOT / "CONTRIBUTING.md").read_text("utf-8"), re.DOTALL)
    names = {
        "dataclass": dataclass,
        "np": np,
        "isnan": isnan,
        "Drawn": Drawn,
        "PromptRule": PromptRule,
        "some_free": prompts.some_free,
    }
    exec(code, names)
    rule = names["LastVisit"]()
    check_recipe(replace(RECIPES["grpo"], prompts=rule, advantage=advantages.AgainstBaseline()), seeds=(0,))


def test_another_seed_gives_other_actions():
    assert len({trace(RECIPES["grpo"], 64, seed) for seed in range(4)}) == 4
