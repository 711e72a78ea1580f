"""What holds for every recipe on every cluster: nothing is lost, time and GPUs add up, a seed decides everything."""

# pyright: reportAttributeAccessIssue=false

from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import FREE, Given

from rollalloc import Budget, recipes
from rollalloc.core.allocator import Allocator
from rollalloc.core.events import Cancelled, Done
from rollalloc.rules.prompts import AsOffered
from rollalloc_lab.simulate.cluster import Cluster, Scenario
from rollalloc_lab.simulate.cost import Costs, Latency
from rollalloc_lab.simulate.simulation import Simulation, simulate
from rollalloc_lab.simulate.workload import Fitted, Lengths, Success


class Watched(Allocator):
    """Keeps books of its own of what was ordered, and how each ended."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.ordered, self.ended, self.stop, self.most = set(), {}, set(), 0
        self.spans = []

    def ask(self, capacity=None):
        actions = super().ask(capacity)
        new = [rollout for order in actions.generate for rollout in order.rollouts]
        assert not self.ordered & set(new)
        self.ordered.update(new)
        self.stop.update(actions.cancel)
        return actions

    def tell(self, events):
        events = list(events)
        for event in events:
            if isinstance(event, (Done, Cancelled)):
                assert event.rollout in self.ordered
                assert event.rollout not in self.ended
                self.ended[event.rollout] = event
            if isinstance(event, Cancelled):
                assert event.rollout in self.stop
            if isinstance(event, Done):
                self.spans.append((event.version, event.last_version))
        super().tell(events)


RECIPES = {
    "grpo": recipes.grpo(4, 3),
    "reinforce with replay": recipes.reinforce(8, baseline="running", replay=4),
    "foresight": recipes.foresight(8),
    "dapo": recipes.dapo(3, 4, 9),
    "dapo carried": recipes.dapo(3, 4, 9, surplus="carry"),
    "pilot_commit": recipes.pilot_commit(3, 2, 2, 9),
    "pods": recipes.pods(3, 6, 3),
    "racing": recipes.racing(3, (2, 4, 8), 6),
    **{f"darts {tail}": recipes.darts(3, 3, 1, tail=tail) for tail in ("exact", "sampled", "none")},
    "dapo + darts": recipes.mix(recipes.dapo(3, 4, 9), recipes.darts(3, 3, 1, tail="sampled")),
}


@st.composite
def scenarios(draw):
    schedule, share = draw(st.sampled_from(["sync", "async"])), draw(st.integers(1, 3))
    slots = draw(st.integers(1, 9))
    cluster = Cluster(
        gpus=draw(st.integers(share + 1, 12)),
        gpus_per_replica=share,
        slots=slots,
        schedule=schedule,
        trainer_share=draw(st.floats(0.05, 0.95)),
        overlap=draw(st.booleans()),
    )
    costs = Costs(**{name: draw(st.sampled_from([0.0, 0.01, 3.0])) for name in asdict(FREE)})
    seconds = draw(st.lists(st.floats(0.001, 2.0), min_size=2, max_size=2))
    lengths = Lengths(median=20.0, within=draw(st.floats(0.0, 1.5)), runaway=draw(st.floats(0, 0.2)), limit=200)
    success = Success(hopeless=0.2, solved=0.2)
    return Scenario(
        cluster=cluster,
        costs=costs,
        latency=Latency((1, slots + 1), tuple(seconds)),
        workload=Fitted(prompts=draw(st.integers(20, 60)), lengths=lengths, success=success),
        prompt_tokens=draw(st.sampled_from([0, 7])),
        batches=2,
        warmup=draw(st.integers(0, 2)),
    )


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(sorted(RECIPES)), scenarios(), st.integers(0, 5), st.sampled_from([None, 0, 2]))
def test_every_rollout_ends_once_and_time_times_gpus_is_what_was_used(name, scenario, seed, staleness):
    simulation = Simulation(RECIPES[name], scenario, seed, max_staleness=staleness, allocator=Watched)
    result = simulation.run()
    allocator, fleet = simulation.allocator, simulation.fleet
    running = set(fleet.place)
    assert allocator.ordered == allocator.ended.keys() | running | simulation.queued
    assert not allocator.ended.keys() & (running | simulation.queued)
    if scenario.cluster.schedule == "sync":
        assert not running | simulation.queued
    assert len(allocator.ordered) == allocator.paid
    assert allocator.tokens_paid == sum(event.tokens for event in allocator.ended.values())
    assert simulation.stopped == sum(isinstance(event, Cancelled) for event in allocator.ended.values())
    assert fleet.free == fleet.slots - len(running)
    for at, replica in enumerate(fleet.replicas):
        assert replica.rollouts == sum(placed.at == at for placed in fleet.place.values()) <= scenario.cluster.slots
    assert all(0 <= began <= ended for began, ended in allocator.spans)
    assert sum(result.gpu_seconds.values()) == pytest.approx(result.seconds * result.gpus)
    assert all(spent >= -1e-9 * result.seconds for spent in result.gpu_seconds.values())
    assert sum(result.batch_seconds) == pytest.approx(result.seconds)
    assert 0 <= result.tail <= 1
    assert 0 <= result.busy_slots <= 1 + 1e-9
    assert result.why is None
    # What only the last batches' rollouts made of it lies within what was paid since the beginning.
    assert set(simulation.made) >= running


@settings(max_examples=15, deadline=None)
@given(st.sampled_from(sorted(RECIPES)), scenarios())
def test_a_seed_decides_everything(name, scenario):
    assert simulate(RECIPES[name], scenario, 3) == simulate(RECIPES[name], scenario, 3)


def test_another_seed_is_another_run():
    scenario = Scenario(cluster=Cluster(gpus=2), batches=2, warmup=0)
    assert simulate(RECIPES["grpo"], scenario, 0).seconds != simulate(RECIPES["grpo"], scenario, 1).seconds


def test_a_recipe_meets_the_same_rollouts_on_every_cluster():
    scenarios = [Scenario(cluster=Cluster(gpus=gpus), batches=3) for gpus in (2, 8, 16)]
    results = [simulate(RECIPES["grpo"], scenario, 0) for scenario in scenarios]
    assert len({result.tokens for result in results}) == 1
    assert results[0].seconds > results[1].seconds > results[2].seconds


def test_new_weights_come_while_rollouts_run_and_only_where_one_is_made_while_another_trains():
    costs = replace(FREE, train=0.002)
    spans = {}
    for schedule in ("sync", "async"):
        scenario = Scenario(cluster=Cluster(gpus=4, slots=4, schedule=schedule), costs=costs, batches=6)
        simulation = Simulation(RECIPES["grpo"], scenario, 0, max_staleness=None, allocator=Watched)
        simulation.run()
        spans[schedule] = {last - first for first, last in simulation.allocator.spans}
    assert spans == {"sync": {0}, "async": {0, 1}}


def test_a_recipe_that_ends_says_why():
    short = replace(RECIPES["grpo"], budget=Budget(run_rollouts=24))
    scenario = Scenario(cluster=Cluster(gpus=2), batches=8, warmup=1)
    result = simulate(short, scenario, 0)
    assert result.batches == 1
    assert "24" in str(result.why)
    with pytest.raises(RuntimeError, match=r"ended after 2 batches, 2 of which are warm-up: .*; give it more prompts"):
        simulate(short, replace(scenario, warmup=2), 0)


def test_what_cannot_be_simulated_is_refused():
    scenario = Scenario(cluster=Cluster(gpus=2))
    with pytest.raises(ValueError, match="gets its prompts from a framework's data loader"):
        simulate(replace(RECIPES["grpo"], prompts=AsOffered()), scenario, 0)
    with pytest.raises(ValueError, match="staleness must be a whole number of at least 0"):
        simulate(RECIPES["grpo"], scenario, 0, max_staleness=-1)
    with pytest.raises(ValueError, match="200 groups per batch but there are only 64 prompts"):
        simulate(recipes.grpo(200, 4), replace(scenario, workload=Given([1])), 0)
