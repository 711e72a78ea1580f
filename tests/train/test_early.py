"""Rows that are passed before their batch is there: the gradient is the plain way's, and nothing wrong is ever used."""

from __future__ import annotations

import os
import random
import signal
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from arithmetic import assert_same_gradients, gradients_of, tokens_by_key
from rollalloc import recipes
from rollalloc.core.events import Batch, Row
from rollalloc.core.rule import RowRule, RowTraits
from rollalloc.generate.sampler import Generation
from rollalloc.generate.sampling import Sampling
from rollalloc.generate.stream.settings import Streaming
from rollalloc.runs.metrics import paths, undeclared
from rollalloc.train.native import Stopped
from rollalloc.train.objective import Loss
from rollalloc.train.settings import Settings
from rollalloc.train.update import Updater
from tiny_policy import weights

SETTINGS = Settings(
    sampling=Sampling(8), max_grad_norm=1e9, adaptive_clip=None, averaging=0, learning_rate=1e-4, engine="async"
)
OVERLAP = {"engine": "async", "streaming": Streaming(), "sampling": Sampling(8)}
COUNTED = ("early_rows", "early_discarded")


@pytest.fixture
def updater_of(policy_of, prompts_of):
    """(**changes of the settings) → an updater of a policy that has moved away from its reference."""

    def made(**changes):
        updater = Updater(policy_of(), prompts_of(30).tokens, replace(SETTINGS, **changes))
        with torch.no_grad():
            updater.policy.model.lm_head.weight.mul_(0.9)
        return updater

    return made


def batch_of(rows, version=5, seed=0):
    """Rows of (length, advantage, age), two a group; (batch, generations)."""
    rng = np.random.default_rng(seed)
    made = {
        at: Generation(
            at,
            tuple(rng.integers(2, 13, length).tolist()),
            (-2.4 + 0.3 * rng.standard_normal(length)).astype(np.float32),
            False,
        )
        for at, (length, _, _) in enumerate(rows)
    }
    given = [
        Row(at, at, at // 2, advantage, 1.0 + at % 3, version - age) for at, (_, advantage, age) in enumerate(rows)
    ]
    return Batch(tuple(given), version), made


def gradient(updater):
    return [
        {name: each.grad.clone() for name, each in updater.policy.model.named_parameters() if each.grad is not None}
    ]


ROWS = st.lists(
    st.tuples(st.integers(1, 8), st.sampled_from([0.0, -1.5, 0.5, 1.0]), st.integers(0, 2)), min_size=2, max_size=12
)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "dr_grpo"])
@pytest.mark.parametrize(("precision", "kl"), [("fp32", 0.0), ("fp32", 0.2), ("bf16", 0.0)])
@pytest.mark.parametrize("steps", [1, 2])
def test_the_same_gradient_whatever_was_passed_early(updater_of, aggregation, kl, steps, precision):
    """In every step; rows are old and new, passed in any order, some of them, more than one pass or none at a time."""
    how = {"loss": Loss(aggregation=aggregation, kl=kl), "optimizer_steps_per_batch": steps, "precision": precision}

    compared: list[bool] = []

    @settings(max_examples=5, deadline=None)
    @given(ROWS, st.integers(0, 10**6), st.sampled_from([10, 40, 10_000]))
    def law(rows, seed, tokens_per_forward):
        batch, generations = batch_of(rows)
        plain = updater_of(**how)
        with gradients_of(plain.model) as plain_steps:
            expected = plain.update(batch, generations, measure_kl=True)
        early = updater_of(**how, tokens_per_forward=tokens_per_forward)
        draw = random.Random(seed)
        waiting = draw.sample(batch.rows, draw.randint(0, len(batch.rows)))
        given_early = [row for row in waiting if steps == 1 and (row.advantage or kl)]
        while waiting:
            some = [waiting.pop() for _ in range(draw.randint(1, len(waiting)))]
            while early.ahead(some, 5, generations) and draw.random() < 0.8:
                pass
        while early.ahead((), 5, generations):
            pass
        with gradients_of(early.model) as early_steps:
            found = early.update(batch, generations, measure_kl=True)
        assert [found.pop(name) for name in COUNTED] == [len(given_early), 0]
        assert [expected.pop(name) for name in COUNTED] == [0, 0]
        tolerance = {"abs": 1e-4, "rel": 1e-3} if precision == "fp32" else {"abs": 2e-2, "rel": 2e-2}
        assert found == pytest.approx(expected, **tolerance)
        if any(
            gradient.any() for step in plain_steps for gradient in step.values()
        ):  # not all rows without one, or clipped
            assert_same_gradients(plain_steps, early_steps, 1e-3 if precision == "fp32" else 0.05)
            compared.append(True)

    law()
    assert compared


def test_what_is_passed_early_is_not_passed_again(updater_of):
    batch, generations = batch_of([(3, 1.0, 0), (4, -1.0, 0), (5, 0.5, 1), (2, 0.0, 0)])
    updater, rows = updater_of(), []
    updater.policy.model.lm_head.register_forward_hook(lambda head, inputs, output: rows.append(len(output)))
    assert updater.ahead(batch.rows[:2], 5, generations)
    assert not updater.ahead(batch.rows[:2], 5, generations)
    assert updater.begun() == {0}
    assert sum(rows) == 2
    updater.update(batch, generations)
    assert sum(rows) == 3
    assert updater.begun() == set()


def test_of_several_steps_only_what_no_sampler_gave_is_looked_up_early(updater_of):
    batch, generations = batch_of([(3, 1.0, 0), (4, -1.0, 1), (5, 0.5, 1), (2, 0.0, 0)])
    updater = updater_of(optimizer_steps_per_batch=2)
    before = [each.grad for each in updater.policy.model.parameters()]
    assert not updater.ahead(batch.rows[:1], 5, generations)
    assert updater.ahead(batch.rows[:2], 5, generations)
    assert not updater.ahead(batch.rows[:2], 5, generations)
    assert before == [each.grad for each in updater.policy.model.parameters()]  # None


@pytest.mark.parametrize("changed", ["advantage", "weight", "gone", "version"])
def test_what_the_batch_does_not_have_is_discarded_and_counted(updater_of, changed):
    batch, generations = batch_of([(3, 1.0, 0), (4, -1.0, 0), (5, 0.5, 0), (2, 1.0, 0)])
    first, *rest = batch.rows
    rows = {
        "advantage": (first._replace(advantage=0.5), *rest),
        "weight": (first._replace(weight=3.0), *rest),
        "gone": tuple(rest),
        "version": batch.rows,
    }[changed]
    other = replace(batch, rows=rows, version=6 if changed == "version" else 5)
    plain, early = updater_of(), updater_of()
    expected = plain.update(other, generations)
    assert early.ahead(batch.rows[:3], 5, generations)
    found = early.update(other, generations)
    assert found == expected | {"early_discarded": 3}
    assert torch.equal(weights(early), weights(plain))


def test_of_a_batch_that_never_comes_nothing_is_left(updater_of):
    """Neither in the weights and what is saved beside them, nor in the next batch, which is of other weights."""
    batch, generations = batch_of([(3, 1.0, 0), (4, -1.0, 0), (5, 0.5, 0), (2, 1.0, 0)])
    never, those = batch_of([(6, 1.0, 0), (7, -1.0, 0)], version=4, seed=1)
    plain, early = updater_of(), updater_of()
    before = weights(early)
    assert early.ahead(never.rows, 4, those)
    assert torch.equal(weights(early), before)
    assert not early.optimizer.state
    assert early.steps == 0
    assert early.ahead(batch.rows[:2], 5, generations)
    assert early.begun() == {0}
    with gradients_of(plain.model) as expected, gradients_of(early.model) as found:
        plain.update(batch, generations)
        assert early.update(batch, generations)["early_rows"] == 2
    assert_same_gradients(expected, found)


# The whole engine, with a process that generates


def run(trainer):
    """The lines of a run's batches."""
    lines = []
    trainer.listener = lines.append
    trainer.run()
    return [line for line in lines if line["kind"] == "batch"]


def in_turn(trainer):
    """Let each completion be told by itself, so that there are moments between them however fast this machine is."""
    sort = trainer.roller._sort

    def sorting(ended, allocator):
        for each in ended:
            sort([each], allocator)
            for future in [future for _, future in trainer.roller._scoring]:
                future.result()
            trainer.roller._tell_scored(allocator)
            while trainer.roller.meanwhile():
                pass

    trainer.roller._sort = sorting
    return trainer


RECIPES = {
    "grpo": recipes.grpo(4, 4),
    "raft": recipes.raft(12),
    "foresight": recipes.foresight(8, exponent=None, replay=4),
    "pods": recipes.pods(4, 6, 3),
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_run_takes_the_same_steps(trainer_of, forked_generators, name):
    with tokens_by_key():
        plain = trainer_of(RECIPES[name], max_batches=3, **{**OVERLAP, "streaming": Streaming(early=False)})
        early = in_turn(trainer_of(RECIPES[name], max_batches=3, **OVERLAP))
        with gradients_of(plain.updater.model) as expected, gradients_of(early.updater.model) as found:
            without, lines = run(plain), run(early)
    assert_same_gradients(expected, found)
    assert [line["rows"] for line in lines] == [line["rows"] for line in without]
    assert sum(line["early_rows"] for line in lines) > 0
    assert sum(line["early_discarded"] for line in lines) == 0
    assert not any(name in line for line in without for name in COUNTED)
    assert not any(undeclared((name for name, _ in paths(line)), "every line", "batch") for line in lines)


@dataclass(frozen=True)
class FewerAsMoreWait(RowRule):
    """Rows of a group by how many groups wait for the batch: what is previewed is not what comes."""

    @property
    def traits(self):
        return RowTraits(rows=4)

    def __call__(self, group, view, rng):
        count = max(1, 4 - view.held_S[-1])
        return np.arange(count), np.ones(count)


def test_a_run_whose_batches_are_not_what_was_previewed(trainer_of, forked_generators):
    recipe = replace(recipes.raft(4, 4), rows=FewerAsMoreWait())
    with tokens_by_key():
        plain = trainer_of(recipe, max_batches=3, **{**OVERLAP, "streaming": Streaming(early=False)})
        early = in_turn(trainer_of(recipe, max_batches=3, **OVERLAP))
        with gradients_of(plain.updater.model) as expected, gradients_of(early.updater.model) as found:
            run(plain)
            lines = run(early)
    assert_same_gradients(expected, found)
    assert sum(line["early_discarded"] for line in lines) > 0


class Killed(BaseException):
    """As good as a kill: nothing that is written at an end is written."""


def killed():
    raise Killed


def stopped():
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(("end", "error"), [(killed, Killed), (stopped, Stopped)])
def test_a_run_that_ends_in_the_middle_of_early_work_goes_on_to_the_same_steps(
    trainer_of, forked_generators, tmp_path, end, error
):
    """Nothing of that work is saved; what goes on does not need to work early, too."""
    how = {"max_batches": 4, "checkpoint_every": 1, **OVERLAP}
    with tokens_by_key():
        whole = trainer_of(RECIPES["grpo"], **how)
        with gradients_of(whole.updater.model) as expected:
            run(whole)
        begun = in_turn(trainer_of(RECIPES["grpo"], **how, folder=tmp_path / "run"))
        ahead, passed = begun.updater.ahead, []

        def working(rows, version, generations):
            worked = ahead(rows, version, generations)
            passed.extend([version] * worked)
            if worked and passed.count(2) == 2:
                end()
            return worked

        begun.updater.ahead = working
        with gradients_of(begun.updater.model) as first, pytest.raises(error):
            run(begun)
        assert 2 <= len(first) < 4
        resumed = trainer_of(RECIPES["grpo"], **{**how, "streaming": Streaming(early=False)}, folder=tmp_path / "run")
        assert resumed.resume() == len(first)
        with gradients_of(resumed.updater.model) as rest:
            run(resumed)
    assert_same_gradients(expected, [*first, *rest])
