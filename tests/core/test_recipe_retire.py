"""Prompts whose recorded success rate has reached a level are not drawn again, or after some epochs."""

import json
from itertools import pairwise

import pytest

from rollalloc import Allocator, MetricError, Retire, recipes
from rollalloc.core.events import Done
from rollalloc.core.prompts import NEVER, NEXT_EPOCH, NOW, Epochs, Record
from rollalloc.named import RECIPES, make_recipe, name_of, parameters_of


def record(attempts, failures):
    return Record(attempts=attempts, recent_attempts=attempts, recent_failures=failures)


@pytest.mark.parametrize(
    ("attempts", "failures", "otherwise", "until"),
    [
        (8, 0, NEXT_EPOCH, Epochs(4)),
        (7, 0, NEXT_EPOCH, NEXT_EPOCH),  # too few
        (20, 2, NEXT_EPOCH, Epochs(4)),  # exactly the level
        (20, 2.1, NEXT_EPOCH, NEXT_EPOCH),
        (8, 0, NOW, Epochs(4)),
        (8, 0, 3, Epochs(4)),  # a judge that waits for a version
        (8, 8, 3, 3),
        (8, 0, Epochs(6), Epochs(6)),  # what the judge says is longer
        (8, 0, NEVER, NEVER),
    ],
)
def test_a_prompt_is_retired_by_its_record(attempts, failures, otherwise, until):
    assert Retire(level=0.9, epochs=4).until(record(attempts, failures), otherwise) == until


def test_never_is_longer_than_any_number_of_epochs():
    assert Retire().until(record(8, 0), Epochs(6)) == NEVER


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"level": 0.0}, r"level must be a success rate in \(0, 1\], got 0.0"),
        ({"level": 1.5}, "level must be a success rate"),
        ({"epochs": 0}, r"epochs must be .* at least 1 \(None: a retired prompt is never tried again\), got 0"),
        ({"least": 0}, "least must be a whole number of at least 1"),
    ],
)
def test_a_number_out_of_range_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        Retire(**given)


def drawn_of(driver, batches):
    """The prompts of each batch."""
    made = []
    for _ in range(batches):
        batch = driver.until_batch().batch
        made.append(sorted({row.prompt for row in batch.rows}))
        driver.update()
    return made


SOLVED = {0: [1.0], 1: [1.0]}  # prompts 2 and 3 are half right


def test_solved_prompts_are_drawn_until_their_record_is_long_enough_and_no_more(drive):
    """Four rollouts a visit and 8 attempts: two visits. The others are drawn on, each once an epoch."""
    driver = drive(recipes.grpo(2, 4).replace(retire=Retire()), prompts=4, rewards=SOLVED)
    made = drawn_of(driver, 10)
    assert [sum(prompt in batch for batch in made) for prompt in range(4)] == [2, 2, 8, 8]
    assert driver.allocator.prompt_counts()["evicted"] == 2


def test_retired_prompts_are_tried_again_after_their_epochs(drive):
    driver = drive(recipes.grpo(2, 4).replace(retire=Retire(epochs=3)), prompts=4, rewards=SOLVED)
    epochs = {prompt: set() for prompt in range(4)}
    for _ in range(30):
        batch = driver.until_batch().batch
        for row in batch.rows:
            epochs[row.prompt].add(driver.allocator.epoch)
        driver.update()
    for prompt in (0, 1):
        visits = sorted(epochs[prompt])
        assert len(visits) > 4
        assert [after - before for before, after in pairwise(visits)] == [1] + [3] * (len(visits) - 2)
    assert driver.allocator.prompt_counts()["revived"] > 0


def test_a_prompt_that_is_solved_no_more_comes_back_for_good(drive):
    """Right for two visits, then wrong half of the time: after its trial it is drawn as the other one is."""
    rewards = {0: [1.0] * 8 + [0.0, 1.0] * 100}
    driver = drive(recipes.grpo(1, 4).replace(retire=Retire(epochs=2)), prompts=2, rewards=rewards)
    made = drawn_of(driver, 30)
    assert 9 <= sum(batch == [0] for batch in made[10:]) <= 11


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_takes_retire_by_name(name):
    assert {"retire_at", "retire_for"} <= {*parameters_of(name)}
    given = {"n_pilot": 4} if "+" in name else {}
    made = make_recipe(name, given | {"retire_at": 0.8, "retire_for": 5})
    assert made == make_recipe(name, given).replace(retire=Retire(level=0.8, epochs=5))
    assert make_recipe(name, given).retire is None
    assert name_of(made.description) == name_of(make_recipe(name, given).description)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"retire_for": 4}, "retire_for=4 needs retire_at"),
        ({"retire_at": "most"}, r"retire_at must be a success rate in \(0, 1\], got 'most'"),
        ({"retire_at": 90}, "retire_at=90, retire_for=None: level must be a success rate"),
        ({"retire_at": 0.9, "retire_for": 0.5}, "retire_for=0.5: epochs must be a whole number"),
    ],
)
def test_common_parameters_that_make_no_sense_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        make_recipe("grpo", given)


def test_metrics_must_be_success_rates():
    allocator = Allocator(recipes.grpo(1, 2).replace(retire=Retire()), 4, 0)
    [order] = allocator.ask().generate
    with pytest.raises(MetricError, match=r"Retire\(level=0.9.* reads the metric as a success rate"):
        allocator.tell([Done(order.rollouts[0], 5.0, 5.0, 1, 0)])


def test_a_run_whose_prompts_are_all_retired_ends_and_says_what_to_change(drive):
    driver = drive(recipes.grpo(2, 4).replace(retire=Retire()), prompts=4, default=(1.0,))
    end = driver.until_end()
    assert end.startswith("prompts: none of 4 may be drawn")
    assert "4 are retired or evicted, because their success rate has reached 0.9" in end
    assert driver.allocator.paid == 4 * 2 * 4


def test_a_retired_prompt_stays_retired_after_a_load(drive):
    recipe = recipes.grpo(2, 4).replace(retire=Retire())
    driver, copy = (drive(recipe, prompts=4, rewards=SOLVED) for _ in range(2))
    drawn_of(driver, 5)
    copy.allocator.load_state_dict(json.loads(json.dumps(driver.allocator.state_dict())))
    copy.seen = dict(driver.seen)
    assert drawn_of(copy, 5) == drawn_of(driver, 5)


def test_mix_takes_retire_from_either_recipe():
    retired = recipes.dapo(4, 4, 12).replace(retire=Retire())
    for pair in ((retired, recipes.pods(4, 4, 2)), (recipes.pods(4, 4, 2), retired)):
        assert recipes.mix(*pair).retire == Retire()
