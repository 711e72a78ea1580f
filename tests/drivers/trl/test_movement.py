"""How far the policy has moved, by log-probabilities that are made up: which tokens count, and which need a pass."""

# pyright: reportArgumentType=false
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from rollalloc.core.events import Batch, Row
from rollalloc.drivers.trl import movement
from rollalloc.drivers.trl.movement import Movement, moved_share
from rollalloc.drivers.trl.rollout import Rollout
from rollalloc.generate.sampler import Generation


def rollout(number, logprobs, own=None):
    sampled = np.array(logprobs, np.float32)
    tokens = tuple(range(len(logprobs)))
    return Rollout(
        prompt=0, prompt_tokens=(number,), made=Generation(number, tokens, sampled, truncated=False), own=own
    )


class MadeUp:
    """A generator whose model now gives each rollout these log-probabilities, by the rollout's number."""

    gives_the_policys = True

    def __init__(self, processes=1, **now):
        self.now = {int(name[1:]): np.array(values, np.float32) for name, values in now.items()}
        self.passed = []
        averaged = SimpleNamespace(sampling=nullcontext)
        self.trainer = SimpleNamespace(accelerator=SimpleNamespace(num_processes=processes), averaged=averaged)

    def logprobs(self, pairs):
        self.passed += [prompt[0] for prompt, _ in pairs]
        return [self.now[prompt[0]] for prompt, _ in pairs]


def test_the_moved_share_is_of_all_tokens_but_those_of_tools():
    """Of 3 + 1 tokens of the model, two have moved, up and down; the tool's, by far the most, does not count."""
    generate = MadeUp(r0=[-1.0, -0.7, -1.3, -9.0], r1=[-1.2])
    rollouts = [rollout(0, [-1.0] * 4, own=(True, True, True, False)), rollout(1, [-1.0])]
    assert moved_share(generate, rollouts) == 2 / 4


def test_every_process_is_told_the_share_that_the_first_has(monkeypatch):
    """Processes may round differently at the limits, and their cores would then train on different rows."""

    def broadcast(found):
        found[0] = 0.125

    monkeypatch.setattr(movement, "broadcast_object_list", broadcast)
    rollouts = [rollout(0, [-1.0, -1.0])]
    assert moved_share(MadeUp(processes=2, r0=[-1.0, -0.7]), rollouts) == 0.125
    assert moved_share(MadeUp(r0=[-1.0, -0.7]), rollouts) == 0.5


@pytest.mark.parametrize(("version", "passed"), [(3, [0]), (2, [0, 0])])
def test_new_rows_need_no_pass_before_an_update_beside_rows_that_are_replayed(version, passed):
    """Row 0 is new, row 1 replayed; only if a new row is of older weights, its log-probabilities before are asked for."""
    rows = (Row(0, 0, 0, 1.0, 1.0, version), Row(1, 0, 1, 1.0, 1.0, 0, replays=1))
    generate = MadeUp(r0=[-1.1, -0.9])
    moves = Movement(generate)
    moves.begin(Batch(rows, 3), [rollout(0, [-1.0, -1.0]), rollout(1, [-1.0])])
    moved = moves.end()
    assert generate.passed == passed
    expected = np.mean([np.exp(0.1) - 0.1 - 1, np.exp(-0.1) + 0.1 - 1])
    assert moved == pytest.approx(expected if version == 3 else 0.0, rel=1e-5)
