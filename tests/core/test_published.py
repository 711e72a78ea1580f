"""Published methods by hand: what a recipe orders and credits, rollout by rollout."""

import pytest

from rollalloc import recipes


def advantages_of(driver):
    return [row.advantage for row in driver.until_batch().batch.rows]


def test_dr_grpo_by_hand(drive):
    """A group of half the spread has half the advantages, where GRPO has the same."""
    for right in (1.0, 0.5):
        driver = drive(recipes.dr_grpo(1, 4), 1, {0: [right, 0.0, 0.0, 0.0]})
        assert advantages_of(driver) == pytest.approx([0.75 * right, *[-0.25 * right] * 3])


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


def test_reinforce_ada_by_hand(drive):
    """Balanced, 2 of each: prompt 0 has them in the first round, prompt 1 in the second, prompt 2 never."""
    rewards = {0: [1.0, 0.0, 1.0, 0.0], 1: [0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0], 2: [1.0]}
    driver = drive(recipes.reinforce_ada(3, 4, round_n=4, rounds=3), 3, rewards)
    rows = driver.until_batch().batch.rows
    orders = [(order.prompt, len(order.rollouts)) for actions in driver.log for order in actions.generate]
    assert sorted(orders) == [(0, 4), (1, 4), (1, 4), (2, 4), (2, 4), (2, 4)]
    credits = {prompt: sorted(row.advantage for row in rows if row.prompt == prompt) for prompt in range(3)}
    assert credits[0] == pytest.approx([-0.5, -0.5, 0.5, 0.5])
    assert credits[1] == pytest.approx([-0.375, -0.375, 0.625, 0.625])  # against all eight, three right
    assert credits[2] == [0, 0, 0, 0]
    assert driver.allocator.accounts()["unselected"] == 4 + 8


def test_knapsack_by_hand(drive):
    """The second visit of a solved prompt has two rollouts, what it leaves goes to the contested one; 16 a batch in all."""
    driver = drive(recipes.knapsack(4, 4, most=9), 4, {0: [1.0], 1: [1.0, 0.0, 0.0, 0.0], 2: [1.0], 3: [1.0]})
    for expected in ({0: 4, 1: 4, 2: 4, 3: 4}, {0: 3, 1: 9, 2: 2, 3: 2}):
        begun = len(driver.log)
        rows = driver.until_batch().batch.rows
        orders = {order.prompt: len(order.rollouts) for actions in driver.log[begun:] for order in actions.generate}
        assert sorted(orders.values()) == sorted(expected.values())
        assert orders[1] == expected[1]
        assert len(rows) == 16
        driver.update()


def test_vcrl_by_hand(drive):
    """Of 4 rollouts 2 are right in prompts 0 and 1, 1 in prompt 2, none or all in the others."""
    rewards = {0: [1, 1, 0, 0], 1: [0, 1, 0, 1], 2: [0, 0, 0, 1], 3: [1], 4: [0], 5: [0], 6: [0], 7: [1]}
    driver = drive(recipes.vcrl(2, 4, kappa=0.8, kappa_first=0.5, first=3), 8, rewards)
    trained = []
    for _ in range(12):
        trained.append({row.prompt for row in driver.until_batch().batch.rows})
        driver.update()
    assert set().union(*trained[:3]) == {0, 1, 2}  # 3/4 is enough at first
    assert all(batch == {0, 1} for batch in trained[3:])


def test_cgrpo_by_hand(drive):
    """At first any success stops a prompt; then one that comes later than four of five did gets all eight rollouts."""
    rewards = {prompt: [1.0, 0.0] for prompt in range(8)} | {0: [0.0, 0.0, 0.0, 1.0, *[0.0] * 4], 1: [0.0]}
    driver = drive(recipes.cgrpo(10, (2, 4, 8), delta=0.2), 10, rewards)
    for expected in ({0: 4, 1: 8}, {0: 8, 1: 8}):
        begun = len(driver.log)
        rows = driver.until_batch().batch.rows
        ordered = dict.fromkeys(range(10), 0)
        for actions in driver.log[begun:]:
            for order in actions.generate:
                ordered[order.prompt] += len(order.rollouts)
        assert ordered == dict.fromkeys(range(10), 2) | expected
        assert len(rows) == sum(ordered.values())
        driver.update()


PILOTS = {"groups": 2, "n_pilot": 2, "n_commit": 2, "gen_groups": 6}


def orders_of(driver):
    """Pilots and commits of each round, as numbers of prompts; 0 and 0 where a batch was handed out."""
    return [
        tuple(sum(order.stage == stage for order in actions.generate) for stage in (0, 1)) for actions in driver.log
    ]


@pytest.mark.parametrize(
    ("pilots", "rounds"),
    [
        # All six pass in each round, and two go on, however many wait.
        ("every_round", [(6, 0), (6, 2), (0, 0), (6, 2), (0, 0), (6, 2), (0, 0), (6, 2), (0, 0), (6, 2), (0, 0)]),
        # Six passed: as many as this batch, the next and the one after that need.
        ("as_needed", [(6, 0), (0, 2), (0, 0), (0, 2), (0, 0), (6, 2), (0, 0), (0, 2), (0, 0), (0, 2), (0, 0)]),
    ],
)
def test_pilot_commit_draws_new_pilots_in_every_round_as_published_or_as_they_are_needed(drive, pilots, rounds):
    driver = drive(recipes.pilot_commit(**PILOTS, pilots=pilots), 99)
    for _ in range(5):
        driver.until_batch()
        driver.update()
    assert orders_of(driver) == rounds


def test_n_effective_by_hand(drive):
    """All six pilots say the rate; one right and one wrong of them are trained on, and advantages are of those rows."""
    recipe = recipes.pilot_commit(2, 6, 2, 2, n_effective=2)
    driver = drive(recipe, 2, {0: [0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0], 1: [0.0] * 5 + [1.0] * 3})
    rows = driver.until_batch().batch.rows
    kept = {prompt: [(row.rollout, row.advantage) for row in rows if row.prompt == prompt] for prompt in range(2)}
    for prompt, places, credits in ((0, [0, 4], [-1, 3, -1, -1]), (1, [0, 5], [-3, 1, 1, 1])):
        pilots = next(order.rollouts for order in driver.log[0].generate if order.prompt == prompt)
        commits = next(order.rollouts for order in driver.log[1].generate if order.prompt == prompt)
        assert [rollout for rollout, _ in kept[prompt]] == [*(pilots[place] for place in places), *commits]
        assert [advantage for _, advantage in kept[prompt]] == pytest.approx(
            [each / 3**0.5 for each in credits], abs=1e-4
        )
    driver.update()
    driver.ask()  # the pilots that were not trained on are released with the others
    accounts = driver.allocator.accounts()
    assert (accounts["trained"], accounts["unselected"]) == (8, 8)
