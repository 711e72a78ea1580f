"""The engine in waves and the asynchronous one train on the same rows, tokens and gradients, where no clock decides.

The two sample in batches of different shapes, whose arithmetic rounds differently. So `tokens_by_key` makes the tokens here,
from the number of the rollout and not from the weights; `test_backends` has what the model samples.
"""

import pytest

from arithmetic import assert_same_gradients, gradients_of, tokens_by_key
from rollalloc import recipes
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
