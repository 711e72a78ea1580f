"""examples/other_trainers: the loops run, those for a trainer against stand-ins with the signatures of what they import."""

import asyncio
import importlib
import json
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rollalloc import Budget, recipes

FOLDER = Path(__file__).parents[1] / "examples" / "other_trainers"
FILES = ("for_areal.py", "for_art.py", "for_molt.py", "for_prime_rl.py", "for_slime.py", "loops.py")


@pytest.fixture
def page(monkeypatch) -> dict[str, Any]:
    """What the examples define."""
    monkeypatch.syspath_prepend(str(FOLDER))
    assert sorted(file.name for file in FOLDER.glob("*.py")) == list(FILES)
    names = [file.removesuffix(".py") for file in FILES]
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    return {key: value for name in names for key, value in vars(importlib.import_module(name)).items()}


@pytest.fixture
def module(monkeypatch) -> Callable[..., None]:
    """Make a module with these names importable."""

    def make(name, **names):
        made = ModuleType(name)
        vars(made).update(names)
        monkeypatch.setitem(sys.modules, name, made)

    return make


@pytest.mark.parametrize("name", ["dapo", "pilot_commit", "pods", "racing", "reinforce"])
def test_the_plain_loop_makes_batches_until_the_budget_is_spent(page, name):
    recipe = {
        "dapo": recipes.dapo(groups=4, n=4, gen_groups=8),
        "pilot_commit": recipes.pilot_commit(groups=2, n_pilot=4, n_commit=4, gen_groups=8),
        "pods": recipes.pods(groups=4, n=6, m=4),
        "racing": recipes.racing(groups=4, sizes_S=(2, 4), gen_groups=8),
        "reinforce": recipes.reinforce(groups=8),
    }[name]
    batches = page["Batches"](replace(recipe, budget=Budget(run_rollouts=300)), 20)
    asked = 0

    def roll_out(orders):
        nonlocal asked
        asked += sum(n for _, n in orders)
        return [
            [None if (prompt, at) == (3, 0) else (float((prompt + at) % 3 == 0), 5, (prompt, at)) for at in range(n)]
            for prompt, n in orders
        ]

    made = 0
    while (rows := batches.next(roll_out)) is not None:
        made += 1
        assert all(payload[0] == row.prompt for row, payload in rows)
    accounts = batches.allocator.accounts()
    assert made > 3
    assert sum(accounts.values()) == asked <= 300
    assert accounts["trained"] > 0
    assert accounts["open"] == 0


def test_slimes_function_returns_rows_with_their_advantages(page, module):
    class Sample(SimpleNamespace):
        def get_reward_value(self, args):
            return self.reward

    async def generate_and_rm_group(args, group, sampling_params, evaluation=False):
        for at, sample in enumerate(group):
            sample.reward, sample.response_length = float((sample.index + at) % 2), 7
        return group

    for name in ("slime", "slime.rollout", "slime.utils"):
        module(name)
    module("slime.rollout.base_types", RolloutFnTrainOutput=SimpleNamespace)
    module(
        "slime.rollout.sglang_rollout",
        GenerateState=lambda args: SimpleNamespace(sampling_params={}),
        eval_rollout=None,
        generate_and_rm_group=generate_and_rm_group,
    )
    module("slime.utils.async_utils", run=asyncio.run)

    class Source:
        def __len__(self):
            return 9

        def get_samples(self, count):
            return [[Sample(index=4 * n + at, reward=None, rollout_id=None) for at in range(4)] for n in range(count)]

    args = SimpleNamespace(rollout_batch_size=2, n_samples_per_prompt=4)
    for rollout_id in range(3):
        output = page["generate_rollout"](args, rollout_id, Source())
        samples = [sample for group in output.samples for sample in group]
        assert len(samples) == 8
        assert len({sample.rollout_id for sample in samples}) == 8
        assert sum(sample.reward for sample in samples) == pytest.approx(0, abs=1e-6)
        assert {abs(sample.reward) for sample in samples} != {0.0}


def test_in_arts_loop_each_group_is_trained_with_its_advantages(page, module):
    """ART subtracts the mean reward of a group: nothing, as these advantages have mean 0."""
    module("art", TrajectoryGroup=lambda trajectories: SimpleNamespace(trajectories=trajectories))
    seen, played = [], 0

    class Backend:
        async def train(self, model, trajectory_groups, *, learning_rate=5e-6, normalize_advantages=True):
            assert not normalize_advantages
            seen.append([[each.reward for each in group.trajectories] for group in trajectory_groups])

    async def roll_out(model, prompt):
        nonlocal played
        played += 1
        if played % 50 == 0:
            raise TimeoutError
        return SimpleNamespace(reward=float(played % 3 == 0)), 5

    recipe = replace(recipes.dapo(groups=3, n=4, gen_groups=6), budget=Budget(run_rollouts=200))
    accounts = asyncio.run(page["train"](Backend(), "model", recipe, list("abcdefghi"), roll_out))
    assert accounts["failed"] == played // 50
    assert accounts["trained"] == sum(len(group) for groups in seen for group in groups) > 0
    for groups in seen:
        assert len(groups) <= 3  # fewer where the budget ends
        for rewards in groups:
            assert sum(rewards) == pytest.approx(0, abs=1e-6)
            assert any(rewards)


RECIPE = recipes.streamed(recipes.dapo(groups=4, n=4, gen_groups=16, surplus="carry"), staleness=8)


def rewards_of(prompt: int, source: random.Random, n: int = 4) -> list[float]:
    return [float(source.random() < (prompt % 5) / 4) for _ in range(n)]


def test_groups_are_admitted_where_their_rewards_differ(page):
    groups, source, running, verdicts = page["Groups"](RECIPE, 40), random.Random(0), [], []
    for _ in range(400):
        while len(running) < 16:
            prompt, n = groups.next()
            assert n == 4
            assert prompt not in running
            running.append(prompt)
        prompt = running.pop(source.randrange(16))
        rewards = rewards_of(prompt, source)
        verdicts.append((groups.end(prompt, rewards), len(set(rewards)) > 1))
    assert all(admitted == differ for admitted, differ in verdicts)
    assert len(set(verdicts)) == 2
    assert groups.allocator.accounts()["trained"] > 200


def test_groups_that_the_trainer_lost_count_as_failed(page):
    groups = page["Groups"](RECIPE, 40)
    drawn = [groups.next()[0] for _ in range(17)]
    assert groups.allocator.accounts()["failed"] == 4
    assert not groups.end(drawn[0], [1.0, 0.0, 1.0, 0.0])
    resumed = page["Groups"](RECIPE, 40)
    resumed.load_state_dict(json.loads(json.dumps(groups.state_dict())))
    assert resumed.allocator.accounts()["failed"] == 4 * 17
    assert resumed.next()[1] == 4


def test_prime_rls_curriculum_follows_the_recipe(page, module):
    class TaskSampler:
        pass

    class AdmissionGate:
        pass

    class Curriculum:
        """As prime-rl's, it observes a group and then asks the gates."""

        sampler: Any
        gates: dict[str, Any]

        def __init__(self, config, tasks):
            raise AssertionError("replaced")

        def on_result(self, group):
            self.sampler.observe(group)
            return all(gate.admit(group) for gate in self.gates.values())

    curriculum = {"TaskSampler": TaskSampler, "AdmissionGate": AdmissionGate, "Curriculum": Curriculum}
    module("prime_rl")
    module("prime_rl.orchestrator", curriculum=SimpleNamespace(**curriculum))
    page["use_recipe"](RECIPE)
    tasks = [SimpleNamespace(key=f"task {number}", number=number) for number in range(40)]
    made, source, verdicts = Curriculum(None, tasks), random.Random(0), set()

    def episode(task, reward):
        trace = SimpleNamespace(agent=SimpleNamespace(trainable=True), has_error=reward is None, reward=reward)
        return SimpleNamespace(task=task, traces=[trace])

    for step in range(100):
        task = next(made.sampler)
        rewards = [*rewards_of(task.number, source, 3), None if step % 10 == 0 else 0.0]
        differ = len(set(rewards) - {None}) > 1
        admitted = made.on_result([episode(task, reward) for reward in rewards])
        assert differ or not admitted
        verdicts.add(admitted)
    assert verdicts == {True, False}
    again = Curriculum(None, tasks)
    again.sampler.load_state_dict(made.sampler.state_dict())
    assert again.sampler.groups.allocator.accounts() == made.sampler.groups.allocator.accounts()
    assert next(again.sampler).key == next(made.sampler).key


def test_areals_workflow_rolls_out_the_recipes_prompts(page, module):
    module("areal")
    module("areal.api", RolloutWorkflow=object)
    module("areal.utils")
    module("areal.utils.data", concat_padded_tensors=list)

    class Inner:
        async def arun_episode(self, engine, data):
            reward = next(rewards)
            return None if reward is None else {"rewards": reward, "prompt": data}

    workflow = page["recipe_workflow"]()(Inner(), [f"prompt {number}" for number in range(40)], RECIPE)

    def episode(*given):
        nonlocal rewards
        rewards = iter(given)
        return asyncio.run(workflow.arun_episode("engine", "AReaL's own"))

    rewards = iter(())
    group = episode(1.0, 0.0, 1.0, 0.0)
    assert [row["rewards"] for row in group] == [1.0, 0.0, 1.0, 0.0]
    assert {row["prompt"] for row in group} < {f"prompt {number}" for number in range(40)}
    assert episode(1.0, 1.0, 1.0, 1.0) is None
    assert episode(None, None, None, None) is None
    assert workflow.groups.allocator.accounts()["failed"] == 4


def test_molts_sampler_draws_and_keeps_what_the_recipe_says(page, module):
    class SamplesGenerator:
        """Sends prompts out, and gives the samples of a group that ended back, as Molt's does with Ray."""

        def __init__(self, strategy, prompts_dataloader, eval_dataloader, tokenizer, agent_runners):
            self.prompts_dataloader, self.sent = prompts_dataloader, 0

        def _dispatch_to_agent_runners(self, prompts, labels, *, images=None, tools=None, **generate_kwargs):
            self.sent += len(prompts)
            return [f"reference {self.sent - at}" for at in range(len(prompts))]

        def _filter_group(self, finished_rollout, dynamic_filtering, drop_counts, score_stats=None, **generate_kwargs):
            assert not dynamic_filtering
            return finished[finished_rollout]

    names = ("molt", "molt.trainer", "molt.trainer.rollout")
    for name in names:
        module(name)
    module("molt.trainer.rollout.samples_generator", SamplesGenerator=SamplesGenerator)
    numbers = range(40)
    loader = [(None, [f"p{n}" for n in numbers], [f"l{n}" for n in numbers], [None] * 40, [None] * 40)]
    sampler = page["recipe_samples"](RECIPE)(None, loader, [], None, [])
    drawing, finished = iter(sampler.prompts_dataloader), {}

    def group(*scores):
        _, [prompt], [label], images, tools = next(drawing)
        assert prompt[1:] == label[1:]
        [reference] = sampler._dispatch_to_agent_runners([prompt], [label], images=images, tools=tools)
        finished[reference] = [
            SimpleNamespace(rollout_ids=[at], scores=[SimpleNamespace(item=lambda score=score: score)])
            for at, score in enumerate(scores)
        ]
        return sampler._filter_group(reference, True, {}, n_samples_per_prompt=4)

    assert len(group(1.0, 0.0, 1.0, 0.0)) == 4
    assert group(1.0, 1.0, 1.0, 1.0) == []
    assert group() == []  # Molt dropped it
    assert sampler.groups.allocator.accounts()["failed"] == 4
    [evaluated] = sampler._dispatch_to_agent_runners(["held out"], ["label"])
    finished[evaluated] = ["sample"]
    assert sampler._filter_group(evaluated, False, {}) == ["sample"]
