"""A trainer over the service by hand; under the SDK's own types as well, where it is installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rollalloc import Budget, recipes
from rollalloc.data.prompts import EncodedPrompts, PromptSet
from rollalloc.drivers.tinker import Remote, Rewarded, Service, TinkerTrainer
from rollalloc.generate.sampling import Sampling
from rollalloc.rewards.scorers import InlineScorer
from rollalloc.train.settings import Settings

sys.path.insert(0, str(Path(__file__).parent))
import fake_tinker
from fake_tinker import Client, Cloud

MODEL = "some/model"


@pytest.fixture(params=["by hand", "installed"])
def sdk(request, monkeypatch):
    """Which types the service speaks in."""
    if request.param == "installed":
        pytest.importorskip("tinker")
    else:
        monkeypatch.setattr(fake_tinker, "IS_INSTALLED", False)
        monkeypatch.setitem(sys.modules, "tinker", fake_tinker.module())
    return request.param


@pytest.fixture
def by_hand(monkeypatch):
    monkeypatch.setattr(fake_tinker, "IS_INSTALLED", False)
    monkeypatch.setitem(sys.modules, "tinker", fake_tinker.module())


def decode(tokens):
    return "".join(" abcde"[token] for token in tokens)


def first_is(*, solution_str, ground_truth, **_):
    """Right where the first letter is the one."""
    return float(solution_str[:1] == ground_truth)


def prompts_of(count):
    return EncodedPrompts(
        PromptSet(
            keys=tuple(f"toy/{n}" for n in range(count)),
            sources=("toy",) * count,
            prompts=tuple(map(str, range(count))),
            ground_truths=tuple("abcde"[n % 5] for n in range(count)),
            extra_infos=({},) * count,
        ),
        tuple((7, 8 + n) for n in range(count)),
    )


def rewarded(count=8, reward=first_is):
    return Rewarded(prompts_of(count), InlineScorer(reward), decode)


def within(recipe, rollouts):
    from dataclasses import replace

    return replace(recipe, budget=Budget(run_rollouts=rollouts))


@pytest.fixture
def trainer_of():
    """Make a trainer; its service is `cloud`, in which all that outlives a process is."""

    def make(
        recipe=None, rollouts=160, *, cloud=None, remote=None, episodes=None, heldout=None, folder=None, listener=None,
        prices=None, **settings,
    ):  # fmt: skip
        recipe = recipes.grpo(groups=4, n=4) if recipe is None else recipe
        client = Client(Cloud() if cloud is None else cloud)
        given = {"sampling": Sampling(max_new_tokens=3), "learning_rate": 4.0, "checkpoint_minutes": None} | settings
        return TinkerTrainer(
            Service(MODEL, Remote() if remote is None else remote, 0, client=client),
            within(recipe, rollouts),
            rewarded() if episodes is None else episodes,
            Settings(**given),
            heldout=heldout,
            prices=prices,
            folder=folder,
            listener=listener,
        )

    return make
