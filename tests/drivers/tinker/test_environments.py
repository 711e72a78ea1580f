"""Environments of tinker-cookbook's kind, by hand: turns, rewards of the group, and whatever goes wrong in them."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from fake_tinker import Cloud, ModelInput
from tinker_toys import decode

from rollalloc import recipes
from rollalloc.core.events import NoScores
from rollalloc.drivers.tinker import Environments, Remote, ServiceFailed, remote_engine
from rollalloc.drivers.tinker.trajectories import NOTHING, Trajectory, pack, unpack


class Env:
    """Two turns; the second observation goes on from the first, or begins anew. Right if the second action is 1."""

    def __init__(self, number, anew=False):
        self.number, self.anew, self.turns = number, anew, 0

    async def initial_observation(self):
        self.seen = [7, 8 + self.number]
        return ModelInput(self.seen), [0]

    async def step(self, action, *, extra=None):
        assert extra["stop_reason"] in ("stop", "length")
        self.turns += 1
        self.seen = [6, 8 + self.number] if self.anew else [*self.seen, *action, 5, 8 + self.number]
        right = float(action[:1] == [1])
        return SimpleNamespace(
            reward=right * (self.turns == 2),
            episode_done=self.turns == 2,
            next_observation=ModelInput(self.seen),
            next_stop_condition=[0],
            metrics={"correct": right},
            logs={},
        )


class Builder:
    def __init__(self, number, made=2, env=Env, **given):
        self.number, self.made, self.env, self.given, self.cleaned = number, made, env, given, 0

    async def make_envs(self):
        return [self.env(self.number, **self.given) for _ in range(self.made)]

    async def compute_group_rewards(self, trajectories, envs):
        assert len(trajectories) == len(envs)
        assert all(len(each.transitions) == 2 and each.final_ob is not None for each in trajectories)
        return [(0.25, {}) for _ in trajectories]

    async def cleanup(self):
        self.cleaned += 1


def environments(builders, **given):
    return Environments(builders, [f"env/{n}" for n in range(len(builders))], decode=decode, **given)


@pytest.mark.parametrize("anew", [False, True])
def test_turns_become_what_is_trained_on(by_hand, trainer_of, anew):
    cloud, builders = Cloud(), [Builder(n, anew=anew) for n in range(4)]
    trainer = trainer_of(cloud=cloud, rollouts=64, episodes=environments(builders, metric="correct"))
    held = {}
    update = trainer.updater.update

    def watched(batch, generations, **kwargs):
        held.update(generations)
        return update(batch, generations, **kwargs)

    trainer.updater.update = watched
    trainer.run()
    assert trainer.allocator.accounts()["failed"] == 0
    for trajectory in held.values():
        assert len(trajectory.pieces) == (2 if anew else 1)
        whole = trajectory.pieces[0]
        assert whole.tokens[0] == 7
        assert (whole.logprobs[whole.sampled] < 0).all()
        read = [token for token, sampled in zip(whole.tokens, whole.sampled, strict=True) if not sampled]
        assert read == ([7, read[1]] if anew else [7, read[1], 5, read[1]])
    assert trainer.allocator.tokens_paid == trainer.service.usage.sampled
    assert sum(builder.cleaned for builder in builders) == 16  # once an order, of which a call makes too few


def test_selection_looks_at_the_metric_and_training_at_the_reward(by_hand, trainer_of):
    lines = []
    trainer_of(
        rollouts=64, episodes=environments([Builder(n) for n in range(4)], metric="correct"), listener=lines.append
    ).run()
    batch = next(line for line in lines if line["kind"] == "batch")
    assert batch["reward_mean"] == pytest.approx(batch["metric_mean"] + 0.25)


class Failing(Env):
    def __init__(self, number, how):
        super().__init__(number)
        self.how = how

    async def initial_observation(self):
        if self.how == "too long":
            return SimpleNamespace(reward=0.0)
        self.seen = [7, 8]
        if self.how == "picture":
            return SimpleNamespace(to_ints=lambda: 1 / 0), None
        return ModelInput([] if self.how == "empty" else self.seen), None

    async def step(self, action, *, extra=None):
        if self.how == "raises":
            raise RuntimeError("boom")
        if self.how == "hangs":
            await asyncio.sleep(60)
        result = await super().step(action, extra=extra)
        result.reward = {"nan": float("nan"), "text": "much"}.get(self.how, result.reward)
        result.metrics = {} if self.how == "no metric" else {"correct": 1.0}
        result.episode_done = result.episode_done and self.how != "endless"
        return result


FAILING = {
    "too long": "the first observation is too long",
    "picture": "an observation must consist of tokens, ZeroDivisionError: division by zero",
    "empty": "an observation has no tokens",
    "raises": "the environment failed, RuntimeError: boom",
    "hangs": "the environment failed, TimeoutError: ",
    "nan": "the reward or the metric is not a number within ±1e+30",
    "text": "the reward or the metric is not a number, TypeError",
    "no metric": "the environment has no metric 'correct'; it has []",
}


@pytest.mark.parametrize("how", FAILING)
def test_what_fails_in_an_environment_has_no_score(by_hand, trainer_of, how):
    builder = Builder(0, made=4, env=Failing, how=how)
    episodes = environments([builder, Builder(1), Builder(2), Builder(3)], metric="correct")
    trainer = trainer_of(rollouts=16, episodes=episodes, remote=Remote(request_seconds=0.3))
    trainer.run()
    [(reason, count)] = trainer.engine.outcomes.unscored.items()
    assert reason.startswith(FAILING[how])
    assert count == 4
    assert trainer.allocator.accounts()["failed"] == 4
    assert builder.cleaned == 1


class Blocking(Env):
    """Waits without `await`, so that nothing else is played meanwhile."""

    released = threading.Event()

    async def step(self, action, *, extra=None):
        self.released.wait()
        return await super().step(action, extra=extra)


@pytest.mark.parametrize("where", ["training", "evaluation"])
def test_an_environment_that_holds_up_all_others_ends_the_run(by_hand, trainer_of, monkeypatch, where):
    monkeypatch.setattr(Blocking, "released", threading.Event())
    monkeypatch.setattr(remote_engine, "CLOSING_S", 0.1)
    blocked, fine = environments([Builder(0, env=Blocking)]), environments([Builder(0)])
    given = {"episodes": blocked} if where == "training" else {"episodes": fine, "heldout": blocked}
    trainer = trainer_of(recipes.grpo(groups=1, n=4), 16, remote=Remote(request_seconds=0.3), **given)
    try:
        with pytest.raises(ServiceFailed, match=r"has blocked the event loop for more than 0\.3 s"):
            trainer.run()
    finally:
        Blocking.released.set()


def test_an_endless_episode_is_cut_off(by_hand, trainer_of):
    builder = SimpleNamespace(make_envs=Builder(0, made=4, env=Failing, how="endless").make_envs)
    lines = []
    trainer = trainer_of(
        recipes.grpo(groups=1, n=4), 8, episodes=environments([builder], max_turns=3), listener=lines.append
    )
    trainer.run()
    batch = next(line for line in lines if line["kind"] == "batch")
    assert batch["truncated"] == 1.0
    assert trainer.allocator.accounts()["failed"] == 0


def test_keys_must_tell_builders_apart():
    with pytest.raises(ValueError, match="a unique key for each"):
        Environments([1, 2], ["a", "a"])
    with pytest.raises(ValueError, match="a unique key for each"):
        Environments([], [])


@pytest.mark.parametrize("made", [0, None])
def test_a_builder_that_makes_nothing_fails_its_order(by_hand, trainer_of, made):
    trainer = trainer_of(recipes.grpo(groups=1, n=4), 16, episodes=environments([Builder(0, made=made)]))
    with pytest.raises(NoScores, match="make_envs failed"):
        trainer.run()


def test_rollouts_survive_a_checkpoint():
    one = NOTHING.then([1, 2]).then([3, 4], [-0.5, 0.0]).then([5])
    trajectories = [Trajectory(3, (one, NOTHING.then([9])), True), Trajectory(4, (one,), False)]
    for before, after in zip(trajectories, unpack(*pack(trajectories)), strict=True):
        assert (before.rollout, before.truncated) == (after.rollout, after.truncated)
        for piece, again in zip(before.pieces, after.pieces, strict=True):
            assert piece.tokens == again.tokens
            assert np.array_equal(piece.logprobs, again.logprobs, equal_nan=True)
            assert np.array_equal(piece.sampled, again.sampled)
    assert trajectories[0].length == 2
    assert trajectories[0].generation().tokens == (3, 4)
    assert unpack(*pack([])) == []
