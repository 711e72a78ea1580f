"""Published methods by hand: what a recipe orders and credits, rollout by rollout."""

import pytest

from rollalloc import recipes


def advantages_of(driver):
    return [row.advantage for row in driver.until_batch().batch.rows]


def test_dr_grpo_by_hand(drive):
    """1, 0, 0, 0 less 1/4 each; a group of half the spread has half the advantages, where GRPO has the same."""
    driver = drive(recipes.dr_grpo(1, 4), 1, {0: [1.0, 0.0, 0.0, 0.0]})
    assert advantages_of(driver) == pytest.approx([0.75, -0.25, -0.25, -0.25])
    driver = drive(recipes.dr_grpo(1, 4), 1, {0: [0.5, 0.0, 0.0, 0.0]})
    assert advantages_of(driver) == pytest.approx([0.375, -0.125, -0.125, -0.125])
    with pytest.raises(ValueError, match=r"n must be a whole number of at least 2 .a rollout alone is its own mean"):
        recipes.dr_grpo(1, 1)


def test_mopps_by_hand(drive):
    """Prompts that are sure to be solved, or to fail, are hardly drawn any more; the one between is, batch after batch."""
    driver = drive(recipes.mopps(1, 8, decay=1.0), 3, {0: [1.0], 1: [0.0]})
    drawn = []
    for _ in range(13):
        drawn.append(driver.until_batch().batch.rows[0].prompt)
        driver.update()
    assert drawn[3:].count(2) >= 8


def test_greso_by_hand(drive):
    """Of twelve prompts only four teach: the batches that follow pay for fewer of the others than DAPO's do."""
    rewards = {prompt: [1.0] if prompt < 4 else [0.0] for prompt in range(8)}
    paid = {}
    for recipe in (recipes.greso(2, 4, 6), recipes.dapo(2, 4, 6)):
        driver = drive(recipe, 12, rewards)
        for _ in range(40):
            rows = driver.until_batch().batch.rows
            assert {row.prompt for row in rows} <= {8, 9, 10, 11}
            assert len(rows) == 8
            driver.update()
        paid[recipe.prompts] = driver.allocator.paid
    greso, dapo = paid.values()
    assert greso < 0.7 * dapo
