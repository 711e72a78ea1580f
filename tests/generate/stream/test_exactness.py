"""The engine in waves and the asynchronous one train on the same rows, tokens and gradients, where no clock decides.

The two sample in batches of different shapes, whose arithmetic rounds differently. So `tokens_by_key` makes the tokens here,
from the number of the rollout and not from the weights; `test_backends` has what the model samples.
"""

import pytest

from arithmetic import assert_same_gradients, gradients_of, tokens_by_key
from rollalloc import Limit, recipes
from rollalloc.models.settings import Lora, Sampling, Streaming

# The asynchronous engine, which waits for its rollouts before each update instead of going on over it.
IN_PROCESS = {"engine": "async", "streaming": Streaming(overlap=False)}

# Recipes whose batches do not depend on which rollout finished first.
TIMELESS = {
    "grpo": recipes.grpo(4, 4),
    "reinforce": recipes.reinforce(8, replay=4),
    "pods": recipes.pods(4, 6, 3),
    "darts": recipes.darts(4, 2, 1),
    "darts, sampled": recipes.darts(4, 2, 1, tail="sampled"),
    "darts, none": recipes.darts(4, 2, 1, tail="none"),
    "foresight": recipes.foresight(8, exponent=None),
}
LIMITED = recipes.reinforce(16).replace(limit=Limit(share=0.05, every=2, last=16))


def trained(trainer):
    """Runs the trainer; its batches, each row with its tokens."""
    batches, update = [], trainer.updater.update

    def updating(batch, generations, **how):
        batches.append([(row, generations[row.rollout].tokens) for row in batch.rows])
        return update(batch, generations, **how)

    trainer.updater.update = updating
    with tokens_by_key():
        trainer.run()
    return batches


def assert_same_batches(expected, made):
    """The same rows of the same tokens; advantages are equal but for the rounding of the sampler's log-probabilities."""

    def decided(batches):
        return [[(row._replace(advantage=0.0), tokens) for row, tokens in batch] for batch in batches]

    def advantages(batches):
        return [row.advantage for batch in batches for row, _ in batch]

    assert decided(made) == decided(expected)
    assert advantages(made) == pytest.approx(advantages(expected), rel=1e-4)


@pytest.mark.parametrize("name", TIMELESS)
def test_both_engines_make_the_same_batches(trainer_of, name):
    changes = {"max_batches": 4, "sampling": Sampling(8)}
    waves = trainer_of(TIMELESS[name], **changes)
    streams = trainer_of(TIMELESS[name], **changes, **IN_PROCESS)
    with gradients_of(waves.updater.model) as expected, gradients_of(streams.updater.model) as taken:
        assert_same_batches(trained(waves), trained(streams))
    assert_same_gradients(expected, taken)
    assert waves.allocator.accounts() == streams.allocator.accounts()


@pytest.mark.parametrize("engine", [{}, IN_PROCESS], ids=["sync", "async"])
def test_rollouts_are_stopped_at_the_limit_of_their_order(trainer_of, engine):
    """Some batches have a limit that stops rollouts, and each that is stopped has exactly so many tokens."""
    trainer = trainer_of(LIMITED, max_batches=10, sampling=Sampling(8), **engine)
    limit_of, results = {}, []
    submit, poll = trainer.engine.submit, trainer.engine.poll

    def submitting(orders):
        limit_of.update({rollout: order.limit for order in orders for rollout in order.rollouts})
        submit(orders)

    def polling(*, wait=True):
        ended = poll(wait=wait)
        results.extend(ended)
        return ended

    trainer.engine.submit, trainer.engine.poll = submitting, polling
    trainer.run()
    limited = [result for result in results if limit_of[result.rollout] is not None]
    stopped = [result for result in limited if result.truncated]
    assert len(stopped) < len(limited) < len(results)
    assert all(result.tokens == limit_of[result.rollout] for result in stopped)
    assert all(result.tokens <= limit_of[result.rollout] for result in limited)
    assert any(result.tokens < 8 for result in stopped)


def test_both_engines_stop_at_the_same_limits(trainer_of):
    changes = {"max_batches": 10, "sampling": Sampling(8)}
    waves, streams = trainer_of(LIMITED, **changes), trainer_of(LIMITED, **changes, **IN_PROCESS)
    assert_same_batches(trained(waves), trained(streams))
    assert waves.allocator.state_dict()["right_lengths"] == streams.allocator.state_dict()["right_lengths"] != []
    assert waves.allocator.limit is not None


def test_both_engines_make_the_same_batches_with_adapters_and_after_a_resume(trainer_of, policy_of, tmp_path):
    """The engine generates with the adapters added to the model's weights; after a resume, with the checkpoint's."""

    def trainer(folder=None, batches=4, **how):
        policy = policy_of().with_lora(Lora(2), seed=0)
        return trainer_of(
            TIMELESS["grpo"],
            policy=policy,
            max_batches=batches,
            sampling=Sampling(8),
            folder=folder,
            learning_rate=0.05,
            **how,
        )

    waves, streams = trainer(), trainer(tmp_path / "run", 2, **IN_PROCESS)
    expected, begun = trained(waves), trained(streams)
    resumed = trainer(tmp_path / "run", **IN_PROCESS)
    assert resumed.resume() == 2
    assert begun + trained(resumed) == expected
    assert {row.version for batch in expected for row, _ in batch} == {0, 1, 2, 3}
    assert resumed.policy.adapter is not None


@pytest.mark.parametrize("rows", [1, 5])
def test_both_engines_make_the_same_batches_in_few_slots(trainer_of, rows):
    waves = trainer_of(TIMELESS["grpo"], max_batches=2, sampling=Sampling(8))
    streams = trainer_of(TIMELESS["grpo"], max_batches=2, sampling=Sampling(8, max_rows=rows), **IN_PROCESS)
    assert trained(waves) == trained(streams)
