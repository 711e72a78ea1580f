"""Every override of verl that a page shows within a sentence or a table, or a configuration in a comment, can be given.

tests/shown has the commands in blocks. Here, each override must fit the configuration of a command: one of recipes/verl, or
verl's own with a recipe. Hydra parses it; then its key must be there or, with `+`, not yet, and our own keys are read.
"""

import re
import shlex
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="verl's environment: make verl-test")

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf, open_dict

from rollalloc.drivers.verl.check import composed
from rollalloc.drivers.verl.settings import read_settings

pytestmark = pytest.mark.verl
ROOT = Path(__file__).parents[3]
RECIPES = ROOT / "recipes" / "verl"
PAGES = ["README.md", *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md"))), "recipes/verl/README.md"]
FILES = [str(path.relative_to(ROOT)) for path in sorted(RECIPES.rglob("*.yaml")) if path.name != "released.yaml"]
OURS = "trainer.v1.rollalloc."
PARTS = ("actor_rollout_ref.", "algorithm.", "critic.", "data.", "reward.", "row.", "trainer.")
EXAMPLE = "rollalloc.recipes:grpo"  # for the placeholder of a recipe of one's own
WORD = re.compile(r"(\+{0,2})([\w.]+)=([^\s()]+)")
# Commands whose configurations an override may be for; verl's own with each of these recipes.
ROWS = [
    ("deepmath_1.5b", "method=pilot_commit"),
    ("deepmath_1.5b", "method=pods"),
    ("darts_deepmath_7b", "method=stream"),
]
ROWS += [("darts_deepmath_7b", "method=streamdapo"), ("pods_gsm8k", "arm=pods")]
STOCK = ("pilot_commit", "pods", "darts", "dapo", "foresight", "grpo")


def overrides_in(text: str) -> list[str]:
    """The words of a piece of code, if all are overrides of verl.

    As docs/verl.md says, `+...` stands for our section, and `recipe=` for its key.
    """
    try:
        words = shlex.split(text.replace("+...", f"+{OURS}"))
    except ValueError:
        return []
    words = [f"+{OURS}{word}" if word.startswith("recipe=") else word for word in words]
    found = [WORD.fullmatch(word) for word in words]
    keys = [each[2] for each in found if each]
    return words if words and all(found) and any(key.startswith(PARTS) for key in keys) else []


def shown_in(name: str) -> Iterator[tuple[int, list[str]]]:
    """Each group of overrides outside of code blocks, or in a comment of a configuration, with its line."""
    text = (ROOT / name).read_text("utf-8")
    if name.endswith(".yaml"):
        for number, line in enumerate(text.splitlines(), 1):
            words = [word.rstrip(".,;:") for word in line.partition("# ")[2].split() if "=" in word]
            if overrides := [word for word in words if overrides_in(word)]:
                yield number, overrides
        return
    blank = re.sub(
        r"^( *)(`{3,}).*?^\1\2", lambda block: "\n" * block[0].count("\n"), text, flags=re.DOTALL | re.MULTILINE
    )
    for code in re.finditer(r"`([^`]+)`", blank):
        if overrides := overrides_in(code[1].replace("\n", " ")):
            yield blank.count("\n", 0, code.start()) + 1, overrides


@pytest.fixture(scope="module")
def configurations():
    """What verl composes for the commands."""
    rows = [composed([f"--config-path={RECIPES}", f"--config-name={row}", choice]) for row, choice in ROWS]
    plain = composed(["trainer.v1.trainer_mode=rollalloc", "actor_rollout_ref.rollout.n=8"])
    return [*rows, *(_with(plain, f"+{OURS}recipe={recipe}") for recipe in STOCK)]


def _with(config, *words):
    """The configuration with these overrides.

    Raises:
        KeyError: a key is not there, or with "+", it is there already.
    """
    config = deepcopy(config)
    for override in OverridesParser.create().parse_overrides(list(words)):
        key, absent = override.key_or_group, object()
        if "." not in key:  # a choice such as method=grpo
            assert (RECIPES / key / f"{override.value()}.yaml").is_file(), f"{key}={override.value()}"
            continue
        there = OmegaConf.select(config, key, default=absent) is not absent
        if not override.is_force_add() and there == override.is_add() and not (there and key == f"{OURS}recipe"):
            raise KeyError(f"{key} is {'there already: without +' if there else 'not there: with +'}")
        with open_dict(config):
            OmegaConf.update(config, key, override.value(), force_add=True)
    return config


def misfit(configurations, words) -> str:
    """Why the overrides can be given to none of the commands; "" if one takes them."""
    words = [word.replace("=FILE", f"={ROOT / 'README.md'}").replace("module:object", EXAMPLE) for word in words]
    reasons = {}
    for config in configurations:
        try:
            _take(_with(config, *words), {word.partition("=")[0].lstrip("+") for word in words})
        except (KeyError, ValueError) as error:
            reasons[str(error)] = None
        else:
            return ""
    return "; ".join(reasons)


def _take(config, keys):
    """Read our section if one of the keys is in it. Keys that are not given are left out if the recipe is another one."""
    own = {key.removeprefix(OURS) for key in keys if key.startswith(OURS)}
    section = OmegaConf.to_container(config.trainer.v1.get("rollalloc"), resolve=True)
    if "recipe" in own:
        section = {name: value for name, value in section.items() if name in own}
    if own:
        read_settings(section, config.data.train_batch_size, config.actor_rollout_ref.rollout.n)


@pytest.mark.parametrize("name", [*PAGES, *FILES])
def test_each_override_in_prose_fits_a_command(name, configurations):
    for line, words in shown_in(name):
        assert not misfit(configurations, words), f"{name}:{line}: {' '.join(words)}"


def test_overrides_are_found_where_they_stand():
    found = {name: [*shown_in(name)] for name in (*PAGES, *FILES)}
    assert sum(map(len, found.values())) > 45
    assert ["algorithm.rollout_correction.rollout_is=null", f"+{OURS}rollout_correction=false"] in [
        words for _, words in found["recipes/verl/README.md"]
    ]
    assert any(f"+{OURS}rollout_correction=false" in words for _, words in found["recipes/verl/base.yaml"])


@pytest.mark.parametrize(
    "text",
    [
        f"{OURS}rollout_correction=false",  # without +
        "+trainer.total_epochs=3",  # there already
        "data.train_batch_sise=3",
        f"+{OURS}n_comit=3",
        f"+{OURS}recipe=pilot_comit",
        f"+{OURS}recipe=pods +{OURS}n_pilot=4",
    ],
)
def test_an_override_that_is_wrong_is_found(text, configurations):
    words = overrides_in(text)
    assert words
    assert misfit(configurations, words)
