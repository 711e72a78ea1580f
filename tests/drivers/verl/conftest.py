"""What the driver's tests share: rounds without verl."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from made_up_crew import FakeCrew, FakeLoader, mixed

from rollalloc import Allocator
from rollalloc.drivers.verl.rounds import Rounds
from rollalloc.drivers.verl.settings import read_settings


@pytest.fixture
def make_rounds():
    def make(section, outcome=mixed, prompts=64, groups=4, n=4, **crew):
        settings = read_settings(section, groups, n)
        loader = FakeLoader(prompts, groups) if settings.loader_draws else None
        return Rounds(Allocator(settings.recipe, prompts, settings.seed), FakeCrew(outcome, **crew), loader)

    return make
