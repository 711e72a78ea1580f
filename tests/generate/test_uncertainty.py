"""How uncertain a rollout was, by the log-probabilities of its tokens."""

import numpy as np
import pytest

from rollalloc import Allocator, recipes
from rollalloc.core.events import Done
from rollalloc.generate.outcomes import RolloutResult, tell, uncertainty_of
from rollalloc.rewards.function import Scored


@pytest.mark.parametrize(
    ("probabilities", "found"),
    [
        ([], 0.0),
        ([1.0], 0.0),
        ([1.00001], 0.0),  # its logarithm was rounded to more than 0
        ([0.5, 1.0, 0.25], 0.25 + 0.5625),
        ([1e-30], 1.0),
    ],
)
def test_uncertainty_by_hand(probabilities, found):
    assert uncertainty_of(np.log(np.array(probabilities, np.float32))) == pytest.approx(found)


@pytest.mark.parametrize("logprobs", [[-0.5, np.nan], [-np.inf], [0.5]])
def test_an_impossible_log_probability_gives_no_uncertainty(logprobs):
    assert uncertainty_of(np.array(logprobs, np.float32)) is None


def test_the_core_keeps_the_uncertainty_of_a_rollout():
    """One of two rollouts is known; a state has both, and what is not known stays so."""
    allocator = Allocator(recipes.grpo(1, 3), 1, seed=0)
    first, second, _ = allocator.ask().generate[0].rollouts
    known = RolloutResult(rollout=first, outcome=Scored(1.0, 1.0), tokens=4, version=0, uncertainty=1.5)
    unknown = RolloutResult(rollout=second, outcome=Scored(0.0, 0.0), tokens=4, version=0)
    tell(allocator, [known, unknown])
    again = Allocator(recipes.grpo(1, 3), 1, seed=0)
    again.load_state_dict(allocator.state_dict())
    (group,) = again._run.flight.groups.values()
    assert group.done == [Done(first, 1.0, 1.0, 4, 0, 0, uncertainty=1.5), Done(second, 0.0, 0.0, 4, 0, 0)]
    assert np.isnan(group.view.uncertainties_G).tolist() == [False, True]
