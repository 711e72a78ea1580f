"""A trainer over the service by hand; under the SDK's own types as well, where it is installed."""

import sys
from pathlib import Path

import pytest

from rollalloc import recipes
from rollalloc.drivers.tinker import Remote, Service, TinkerTrainer
from rollalloc.models.settings import Sampling
from rollalloc.train.config import Config

sys.path.insert(0, str(Path(__file__).parent))
import fake_tinker
from fake_tinker import Client, Cloud
from tinker_toys import rewarded, within

MODEL = "some/model"


@pytest.fixture(params=["by hand", "installed"])
def sdk(request):
    """Which types the service speaks in."""
    if request.param == "installed":
        pytest.importorskip("tinker")
    else:
        request.getfixturevalue("by_hand")


@pytest.fixture
def by_hand(monkeypatch):
    monkeypatch.setattr(fake_tinker, "IS_INSTALLED", False)
    monkeypatch.setitem(sys.modules, "tinker", fake_tinker.module())


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
            Config(**given),
            heldout=heldout,
            prices=prices,
            folder=folder,
            listener=listener,
        )

    return make
